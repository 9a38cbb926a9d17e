"""Writes the held-out prompts of the tests: prompts.py FOLDER.

prompts.json: prompts with the expected contents; any eight consecutive ones have every motion once.
first.png: the first frame of a clip of the second prompt, for image_to_video.
"""

import json
import pathlib
import sys

import torch
from PIL import Image

import world
from score import test_scenes
from words import names, plain_caption

EACH = 9
PITCHES = dict(zip(world.SIZES, ("high", "middle", "low")))


def main():
    folder = pathlib.Path(sys.argv[1])
    scenes = test_scenes(600)
    told = names(scenes)
    kinds = [[i for i, scene in enumerate(told) if scene["motion"] == motion][:EACH] for motion in world.MOTIONS]
    chosen = [i for row in zip(*kinds) for i in row]
    lines = []
    for scene in (told[i] for i in chosen):
        pitch = "silent" if scene["silent"] else PITCHES[scene["size"]]
        kept = {key: scene[key] for key in ("colour", "background", "motion", "shape")}
        lines.append(json.dumps({"prompt": plain_caption(scene), **kept, "pitch": pitch}))
    (folder / "prompts.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
    first = world.render(scenes[chosen[1:2]], torch.zeros(1))[0][0, :, 0]
    Image.fromarray(((first + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()).save(folder / "first.png")


if __name__ == "__main__":
    main()
