"""Writes the held-out prompts of the tests: prompts.py FOLDER.

prompts.json: prompts with the expected contents; any eight consecutive ones have every motion once.
first.png: the first frame of a clip of the second prompt, for image_to_video."""

import json
import pathlib
import sys

import torch
from PIL import Image

import world
from words import names, plain_caption

EACH = 9


folder, scenes = pathlib.Path(sys.argv[1]), world.sample(600, torch.Generator().manual_seed(77), held=True)
told = names(scenes)
kinds = [[i for i, scene in enumerate(told) if scene["motion"] == motion][:EACH] for motion in world.MOTIONS]
chosen = [i for row in zip(*kinds) for i in row]
kept = ("colour", "background", "motion", "shape", "pitch")
lines = [json.dumps({"prompt": plain_caption(told[i]), **{key: told[i][key] for key in kept}}) for i in chosen]
(folder / "prompts.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
first = world.render(scenes[chosen[1:2]])[0][0, :, 0]
Image.fromarray(((first + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()).save(folder / "first.png")
