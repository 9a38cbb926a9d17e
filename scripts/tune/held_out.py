#!/usr/bin/env python3
"""Draws the held-out shapes and layouts that evaluate predicted times; the calibration uses none of them.

    scripts/tune/held_out.py            writes experiments/held-out-*.yml
    scripts/tune/held_out.py --check    fails if those files are not what SEED draws

Each shape is valid for the models and has between LEAST and MOST video tokens.
"""

import argparse
import pathlib
import random
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SEED = 28
# Generation, configuration, number of shapes.
GENERATIONS = [("2_0", "ltx2", 4), ("2_3", "ltx2_3", 2)]
LAYOUTS = ["cfg", "sequence", "ulysses", "ring", "tensor", "fsdp-ulysses", "before-385", "ffn-matched", "qkv-unsharded",
           "out-unsharded", "tensor-gathered-ffn", "rope-gathered"]
CASES = 8
CALIBRATED = [(768, 512, 121), (384, 256, 121)]
LEAST, MOST = 1000, 15360
TARGET = "cuda:h100:1x1x2"
# Shapes of one GPU, and the layouts of a run of full depth at the first shape of each generation.
ALONE = ("1", "cuda:h100:1x1x1", 8)
FULL = ["cfg", "sequence", "tensor"]


def tokens(width, height, frames):
    return (width // 32) * (height // 32) * ((frames - 1) // 8 + 1)


def shape(draw):
    """Draws a shape whose token count is log-uniform between the limits."""
    while True:
        width, height = (32 * draw.randint(8, 40) for _ in range(2))
        frames = 8 * draw.randint(3, 32) + 1
        wanted = draw.uniform(0, 1)
        low, high = (LEAST * (MOST / LEAST) ** part for part in (wanted * 0.95, wanted * 0.95 + 0.05))
        if low <= tokens(width, height, frames) <= high and (width, height, frames) not in CALIBRATED:
            return width, height, frames


def text(name, config, title, set_, target, shapes, layouts):
    sizes = ", ".join(f"{w}x{h}x{f}" for w, h, f in shapes)
    return f"""\
# Cases not used for calibration, drawn by `scripts/tune/held_out.py` (seed {SEED}) before any was measured.
# ltx2 experiment experiments/held-out-{name}.yml --measure -o out/held-out-{name}
title: {title}
config: {config}
set: [{", ".join(["model.weights=random", *set_, "sampler.steps=4"])}]
layers: 3
timeout: 240
targets: ["{target}"]
shapes: [{sizes}]
layouts: [{", ".join(layouts)}]
"""


def files():
    draw = random.Random(SEED)
    drawn, short = {}, ["model.blocks=12"]
    for name, config, count in GENERATIONS:
        shapes = [shape(draw) for _ in range(count)]
        layouts = ["auto", *sorted(draw.sample(LAYOUTS, CASES), key=LAYOUTS.index)]
        generation = f"LTX-{name.replace('_', '.')}"
        title = f"Held-out shapes and layouts of two GPUs, {generation}"
        drawn[name] = text(name, config, title, short, TARGET, shapes, layouts)
        title = f"A held-out shape of two GPUs, all blocks of {generation}"
        drawn[f"{name}-full"] = text(f"{name}-full", config, title, [], TARGET, shapes[:1], FULL)
    name, target, count = ALONE
    shapes = [shape(draw) for _ in range(count)]
    title = "Held-out shapes of one GPU, LTX-2.0"
    drawn[name] = text(name, "ltx2", title, short, target, shapes, ["replicated"])
    return drawn


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compares with the files that are there")
    args = parser.parse_args()
    wrong = []
    for name, drawn in files().items():
        path = ROOT / f"experiments/held-out-{name}.yml"
        if not args.check:
            path.write_text(drawn)
        elif not path.is_file() or path.read_text() != drawn:
            wrong.append(path.name)
    if wrong:
        sys.exit(f"held_out.py: not what seed {SEED} draws: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
