"""Writes the held-out prompts of the tests, and what is to be seen and heard: prompts.py FILE. Any 8 in a row have every motion once."""

import json
import pathlib
import sys

import world
from score import test_scenes
from words import names, plain_caption

EACH = 9
PITCHES = dict(zip(world.SIZES, ("high", "middle", "low")))


def main():
    told = names(test_scenes(600))
    kinds = [[scene for scene in told if scene["motion"] == motion][:EACH] for motion in world.MOTIONS]
    lines = []
    for scene in (scene for row in zip(*kinds) for scene in row):
        pitch = "silent" if scene["silent"] else PITCHES[scene["size"]]
        kept = {key: scene[key] for key in ("colour", "background", "motion", "shape")}
        lines.append(json.dumps({"prompt": plain_caption(scene), **kept, "pitch": pitch}))
    pathlib.Path(sys.argv[1]).write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
