"""Writes tests/fixtures/dfr/layout.json: diffusers' canvas for each number of frames, and the tiles of two temporal rounds.

A line has: requested frames, frames of the canvas, keyframes, and per round the tiles: first latent frame, end, dropped latent
frames, first and last frame, keyframes of the previous round, keyframes to generate.
"""

import json

from diffusers.pipelines.ltx2.dfr_layout import resolve_canvas, temporal_tile_plan

from common import FIXTURES


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
    text = json.dumps(cases, separators=(",", ":")).replace("]],[", "]],\n[")
    (FIXTURES / "dfr" / "layout.json").write_text(text + "\n")


COMPONENTS = {"dfr_layout": main}
