#!/usr/bin/env python3
"""Regenerates tests/fixtures from the reference code bases. Usage: make_fixtures.py [--only NAME ...] [--missing]
[--official FOLDER]"""

import argparse
import shutil

import cases_2_5
import cases_by_diffusers
import cases_decoders
import cases_dfr
import cases_diffusion_decoder
import cases_gemma4
import cases_images
import cases_lora
import cases_noise_order
import cases_pipeline
import cases_sound
import cases_text
import cases_tiles
import cases_transformer
import models
from common import CASES, FIXTURES, fix_numerics, only_missing

LIMIT, FILE_LIMIT = 10 * 1024 * 1024, 1024 * 1024


def write_models():
    """Every tiny model; the cases read them back from disk."""
    for name in models.WHOLE:
        models.save_whole(name)
    models.save_variants()


def check_sizes():
    """The tree is part of the repository: it has to stay small."""
    sizes = {path: path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file()}
    for path, size in sizes.items():
        if size >= FILE_LIMIT:
            raise SystemExit(f"{path.relative_to(FIXTURES)} has {size} bytes, the limit is {FILE_LIMIT}")
    total = sum(sizes.values())
    print(f"{len(sizes)} files, {total} bytes")
    if total > LIMIT:
        raise SystemExit(f"the fixtures take {total} bytes, the limit is {LIMIT}")


def main():
    """Models first, then each component's cases."""
    components = {
        **cases_transformer.COMPONENTS,
        **cases_text.COMPONENTS,
        **cases_gemma4.COMPONENTS,
        **cases_decoders.COMPONENTS,
        **cases_sound.COMPONENTS,
        **cases_diffusion_decoder.COMPONENTS,
        **cases_pipeline.COMPONENTS,
        **cases_noise_order.COMPONENTS,
        **cases_2_5.COMPONENTS,
        **cases_by_diffusers.COMPONENTS,
        **cases_dfr.COMPONENTS,
        **cases_tiles.COMPONENTS,
        **cases_images.COMPONENTS,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=["models", "lora", *components], help="rewrite these alone")
    parser.add_argument("--missing", action="store_true", help="write what is not there, keep what is")
    parser.add_argument("--official", help="Lightricks' repository at 400fd31, for lora")
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
