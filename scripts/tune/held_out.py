#!/usr/bin/env python3
"""Draws the cases that predictions are judged by: shapes and layouts that nothing was calibrated with.

    scripts/tune/held_out.py                writes experiments/held-out-*.yml
    scripts/tune/held_out.py --check        whether they are those of the seed
    scripts/tune/held_out.py --table FILE   results of them, as `ltx2 experiment` printed them, as a table of Markdown

The seed below says everything. A shape has a width, a height and frames that the models take, between the smallest and the
largest shape that they are used at, by tokens; the calibration's own shapes are none of them.
"""

import argparse
import pathlib
import random
import re
import statistics
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
    """A shape by tokens: their logarithm is even between the limits."""
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
# Cases that nothing was calibrated with, drawn by `scripts/tune/held_out.py` (seed {SEED}) before any was measured.
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
    """Experiments by name."""
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


def ranks(values):
    """Ranks from 1; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]


def spearman(one, other):
    one, other = ranks(one), ranks(other)
    mean = (len(one) + 1) / 2
    above = sum((a - mean) * (b - mean) for a, b in zip(one, other))
    spread = [sum((a - mean) ** 2 for a in values) for values in (one, other)]
    return above / (spread[0] * spread[1]) ** 0.5


def groups(printed):
    """Groups of a printed table: name, and by layout predicted and measured milliseconds."""
    found = []
    if "measured ms" not in printed:
        sys.exit("held_out.py: nothing was measured there")
    for line in printed.splitlines():
        cells = line.split()
        if re.fullmatch(r"\S+:\S+(, \S+)+", line):
            found.append((line, {}))
        elif found and len(cells) > 8 and re.fullmatch(r"[\d.]+", cells[1]):
            # Where a group has one layout it is behind none.
            at = 3 if cells[2] == "%" else 1
            found[-1][1][cells[0]] = (float(cells[at]), float(cells[at + 4]))
    return [(name, rows) for name, rows in found if rows]


def table(path):
    print("| shape | layouts | slowest / fastest | rank correlation (Spearman) | median, largest error | `layout: auto` is slower than the fastest by |")
    print("|---|---|---|---|---|---|")
    alone = []
    for name, rows in groups(pathlib.Path(path).read_text()):
        auto = rows.pop("auto", None)
        if len(rows) == 1:
            alone += rows.values()
            continue
        predicted, measured = zip(*rows.values())
        errors = [abs(p / m - 1) * 100 for p, m in rows.values()]
        slower = f"{(auto[1] / min(measured) - 1) * 100:.0f} %" if auto else ""
        print(f"| {name} | {len(rows)} | {max(measured) / min(measured):.2f} | {spearman(predicted, measured):.3f} "
              f"| {statistics.median(errors):.1f} %, {max(errors):.1f} % | {slower} |")


    if alone:
        errors = [abs(p / m - 1) * 100 for p, m in alone]
        print(f"| {len(alone)} shape{'s'[: len(alone) > 1]} | 1 | | | {statistics.median(errors):.1f} %, {max(errors):.1f} % | |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compares with the files that are there")
    parser.add_argument("--table", metavar="FILE", help="what `ltx2 experiment` printed of them")
    args = parser.parse_args()
    if args.table:
        return table(args.table)
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
