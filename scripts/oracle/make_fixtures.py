#!/usr/bin/env python3
"""Regenerates tests/fixtures by diffusers, transformers and ltx-core 1.0.0."""

import argparse
import importlib
import shutil

import cases_lora
import models
from common import CASES, FIXTURES, fix_numerics, only_missing

MODULES = (
    "cases_transformer", "cases_text", "cases_gemma4", "cases_decoders", "cases_sound", "cases_diffusion_decoder", "cases_pipeline",
    "cases_noise_order", "cases_2_5", "cases_by_diffusers", "cases_dfr", "cases_tiles", "cases_images", "byte_tokenizer", "dfr_layout",
    "latents", "noise", "schedules", "sigmas",
)
LIMIT, FILE_LIMIT = 10 * 1024 * 1024, 1024 * 1024


def write_models():
    """Writes the fixture models, which the cases read back."""
    for name in models.WHOLE:
        models.save_whole(name)
    models.save_variants()


def check_sizes():
    """Fails if the fixtures are too large for the repository."""
    sizes = {path: path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file()}
    for path, size in sizes.items():
        if size >= FILE_LIMIT:
            raise SystemExit(f"{path.relative_to(FIXTURES)} has {size} bytes, the limit is {FILE_LIMIT}")
    total = sum(sizes.values())
    print(f"{len(sizes)} files, {total} bytes")
    if total > LIMIT:
        raise SystemExit(f"the fixtures take {total} bytes, the limit is {LIMIT}")


def main():
    components = {}
    for module in MODULES:
        components |= importlib.import_module(module).COMPONENTS
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=["models", "lora", *components], help="write only these")
    parser.add_argument("--missing", action="store_true", help="keep existing files")
    parser.add_argument("--official", help="checkout of Lightricks/LTX-2 at 400fd31, for lora")
    options = parser.parse_args()
    wanted = options.only
    fix_numerics()
    if options.missing:
        only_missing()
    if not wanted or "models" in wanted:
        write_models()
    for name, make in components.items():
        if not wanted or name in wanted:
            if not options.missing:
                shutil.rmtree(CASES / name, ignore_errors=True)
            make()
    if options.official and (not wanted or "lora" in wanted):
        cases_lora.make_lora(options.official)
    elif wanted and "lora" in wanted:
        raise SystemExit("lora needs --official: the folder of Lightricks' repository")
    check_sizes()


if __name__ == "__main__":
    main()
