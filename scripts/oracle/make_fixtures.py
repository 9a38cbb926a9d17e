"""Regenerates tests/fixtures by diffusers, transformers and Lightricks 1.0.0; with --official, those by Lightricks 1.2.0."""

import argparse
import importlib

import official_pipelines
from common import FIXTURES, fix_numerics

# Components that read the files of others come after them. A process can import only one release of Lightricks' packages.
RELEASED = (
    "models", "cases_transformer", "cases_text", "cases_gemma4", "cases_generation", "cases_decoders", "cases_sound", "cases_diffusion_decoder",
    "cases_pipeline", "cases_noise_order", "cases_2_5", "cases_by_diffusers", "cases_dfr", "cases_tiles", "cases_images",
    "byte_tokenizer", "latents", "noise", "schedules", "sigmas", "cases_lora", "cases_official", "cases_given_video",
    "cases_upsampling",
)
CHECKOUT = (
    "cases_official", "cases_given_video", "cases_guidance_steps", "cases_references", "cases_images", "cases_lora", "ancestral",
)
LIMIT, FILE_LIMIT = 10 * 1024 * 1024, 1024 * 1024


def check_sizes():
    sizes = {path: path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file()}
    total = sum(sizes.values())
    print(f"{len(sizes)} files, {total} bytes")
    large = [str(path.relative_to(FIXTURES)) for path, size in sizes.items() if size >= FILE_LIMIT]
    if large or total > LIMIT:
        raise SystemExit(f"the limits are {FILE_LIMIT} bytes a file, {LIMIT} in all; too large: {', '.join(large) or 'the sum'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="COMPONENT", help="write only these")
    parser.add_argument("--official", metavar="FOLDER", help="a checkout of Lightricks/LTX-2 at 400fd31")
    options = parser.parse_args()
    fix_numerics()
    official_pipelines.find_packages(options.official)
    modules, table = (CHECKOUT, "CHECKOUT") if options.official else (RELEASED, "COMPONENTS")
    components = {}
    for module in modules:
        components |= getattr(importlib.import_module(module), table)
    if unknown := set(options.only or ()) - components.keys():
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(components)}")
    for name in options.only or components:
        components[name]()
    check_sizes()


if __name__ == "__main__":
    main()
