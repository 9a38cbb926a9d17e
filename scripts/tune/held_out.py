#!/usr/bin/env python3
"""Draws the held-out shapes and layouts that evaluate predicted times; the calibration uses none of them.

    scripts/tune/held_out.py            writes experiments/held-out-*.yml
    scripts/tune/held_out.py --check    fails if those files are not what SEED draws
"""

import pathlib
import random
import sys

EXPERIMENTS = pathlib.Path(__file__).resolve().parents[2] / "experiments"
SEED = 28
# Generation, configuration, number of shapes.
GENERATIONS = [("2_0", "ltx2", 4), ("2_3", "ltx2_3", 2)]
LAYOUTS = ["cfg", "sequence", "ulysses", "ring", "tensor", "fsdp-ulysses", "before-385", "ffn-matched", "qkv-unsharded",
           "out-unsharded", "tensor-gathered-ffn", "rope-gathered"]
CASES, SHAPES_OF_ONE_GPU = 8, 8
CALIBRATED = [(768, 512, 121), (384, 256, 121)]
LEAST, MOST = 1000, 15360
ONE_GPU, TWO_GPUS = "cuda:h100:1x1x1", "cuda:h100:1x1x2"
# Layouts of a run of full depth at the first shape of each generation.
FULL = ["cfg", "sequence", "tensor"]


def shape(draw):
    """Draws a shape whose token count is log-uniform between the limits."""
    while True:
        width, height = (32 * draw.randint(8, 40) for _ in range(2))
        frames = 8 * draw.randint(3, 32) + 1
        wanted = draw.uniform(0, 1)
        low, high = (LEAST * (MOST / LEAST) ** part for part in (wanted * 0.95, wanted * 0.95 + 0.05))
        tokens = (width // 32) * (height // 32) * ((frames - 1) // 8 + 1)
        if low <= tokens <= high and (width, height, frames) not in CALIBRATED:
            return f"{width}x{height}x{frames}"


def text(name, config, title, target, shapes, layouts):
    blocks = "" if name.endswith("-full") else "model.blocks=12, "
    return f"""\
# Cases not used for calibration, drawn by `scripts/tune/held_out.py` (seed {SEED}) before any was measured.
# ltx2 experiment experiments/held-out-{name}.yml --measure -o out/held-out-{name}
title: {title}
config: {config}
set: [model.weights=random, {blocks}sampler.steps=4]
layers: 3
timeout: 240
targets: ["{target}"]
shapes: [{", ".join(shapes)}]
layouts: [{", ".join(layouts)}]
"""


def files():
    """Returns the text of each file. The order of draws matters."""
    draw, drawn = random.Random(SEED), {}
    for name, config, count in GENERATIONS:
        shapes, generation = [shape(draw) for _ in range(count)], f"LTX-{name.replace('_', '.')}"
        layouts = ["auto", *sorted(draw.sample(LAYOUTS, CASES), key=LAYOUTS.index)]
        title = f"Held-out shapes and layouts of two GPUs, {generation}"
        drawn[name] = text(name, config, title, TWO_GPUS, shapes, layouts)
        title = f"A held-out shape of two GPUs, all blocks of {generation}"
        drawn[f"{name}-full"] = text(f"{name}-full", config, title, TWO_GPUS, shapes[:1], FULL)
    shapes = [shape(draw) for _ in range(SHAPES_OF_ONE_GPU)]
    drawn["1"] = text("1", "ltx2", "Held-out shapes of one GPU, LTX-2.0", ONE_GPU, shapes, ["replicated"])
    return {EXPERIMENTS / f"held-out-{name}.yml": content for name, content in drawn.items()}


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    wrong = {path: drawn for path, drawn in files().items() if not path.is_file() or path.read_text() != drawn}
    if wrong and sys.argv[1:]:
        sys.exit(f"held_out.py: not what seed {SEED} draws: {', '.join(path.name for path in wrong)}")
    for path, drawn in wrong.items():
        path.write_text(drawn)


main()
