#!/usr/bin/env python3
"""Writes tests/fixtures/dfr/layout.json: diffusers' canvas of each number of frames, and the tiles of two temporal rounds on it.

A case is a line: frames asked for, frames of the canvas, its keyframes, and for each round a list of tiles: first latent frame, the
one behind the last, latent frames dropped, first and last frame, keyframes of the round before, keyframes that the tile generates.
"""

import json
from pathlib import Path

from diffusers.pipelines.ltx2.dfr_layout import resolve_canvas, temporal_tile_plan

OUT = Path(__file__).parents[2] / "tests/fixtures/dfr/layout.json"


def case(frames):
    canvas, _, keyframes = resolve_canvas(frames)
    rounds, size, seams = [], canvas, keyframes
    for number in (1, 2):
        size, seams = 2 * (size - 1) + 1, [2 * seam for seam in seams]
        tiles = temporal_tile_plan(seams, size, 2**number)
        rounds.append([
            [t.interval.start, t.interval.end, t.interval.left_ramp, t.pixel_start, t.pixel_end, list(t.anchors), list(t.slots)]
            for t in tiles
        ])
        seams = sorted({*seams, *(slot for t in tiles for slot in t.slots)})
    return [frames, canvas, keyframes, rounds]


def main():
    cases = [case(frames) for frames in [*range(9, 202, 8), 241, 257, 481]]
    OUT.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(cases, separators=(",", ":")).replace("]],[", "]],\n[")
    OUT.write_text(text + "\n")


if __name__ == "__main__":
    main()
