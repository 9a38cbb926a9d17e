"""Regenerates tests/fixtures by diffusers, transformers and Lightricks 1.0.0; with --official, those by Lightricks 1.2.0."""

import argparse
import importlib
import sys
from pathlib import Path
from unittest.mock import MagicMock

import common
from common import FIXTURES, fix_numerics

# Components by module, each written by the function of its name. Those that read the files of others come after them. A process
# can import only one release of Lightricks' packages.
RELEASED = {
    "models": "models", "cases_transformer": "transformer block adaln rope", "cases_text": "tokenizer text-encoder connectors",
    "cases_gemma4": "gemma4_models gemma4 bos", "cases_generation": "generation sampling",
    "cases_decoders": "filters video-decoder video-encoder audio-decoder vocoder upsampler duration-head tiled",
    "cases_sound": "mel audio-encoder given-sound", "cases_diffusion_decoder": "diffusion-decoder",
    "cases_pipeline": "guidance pipeline", "cases_2_5": "pipeline_2_5", "cases_by_diffusers": "by_diffusers",
    "cases_dfr": "dfr dfr_layout", "cases_images": "h264 image_to_video", "byte_tokenizer": "ids",
    "latents": "latents", "noise": "randn noise_order", "sigmas": "sigmas_json schedules", "cases_lora": "lora",
    "cases_official": "official", "cases_given_video": "given_video", "cases_upsampling": "upsampling",
}
CHECKOUT = {
    "cases_official": "official", "cases_given_video": "given_video", "cases_guidance_steps": "official_by_step",
    "cases_references": "reference_states references dub_it", "cases_hdr": "hdr", "cases_images": "decoded_images",
    "cases_lora": "lora", "cases_dfr": "dfr_official", "ancestral": "ancestral",
}
LIMIT, FILE_LIMIT = 10 * 1024 * 1024, 1024 * 1024


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--only", nargs="+", metavar="COMPONENT", help="write only these")
parser.add_argument("--official", metavar="FOLDER", help="a checkout of Lightricks/LTX-2 at 400fd31")
options = parser.parse_args()
fix_numerics()
# Needed only for EXR files.
sys.modules.setdefault("OpenImageIO", MagicMock())
for package in ("ltx-core", "ltx-pipelines") if options.official else ():
    source = Path(options.official).resolve() / "packages" / package / "src"
    if not source.is_dir():
        sys.exit(f"{source} is missing; give a checkout of Lightricks/LTX-2")
    sys.path.insert(0, str(source))
table = CHECKOUT if options.official else RELEASED
components = {name: module for module, names in table.items() for name in names.split()}
if unknown := set(options.only or ()) - components.keys():
    parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(components)}")
for name in options.only or components:
    common.SCRIPT = f"scripts/oracle/{components[name]}.py"
    getattr(importlib.import_module(components[name]), name.replace("-", "_"))()
sizes = {path: path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file()}
total = sum(sizes.values())
print(f"{len(sizes)} files, {total} bytes")
large = [str(path.relative_to(FIXTURES)) for path, size in sizes.items() if size >= FILE_LIMIT]
if large or total > LIMIT:
    raise SystemExit(f"the limits are {FILE_LIMIT} bytes a file, {LIMIT} in all; too large: {', '.join(large) or 'the sum'}")
