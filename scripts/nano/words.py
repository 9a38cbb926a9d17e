"""Captions of the toy world: a grammar with paraphrases."""

import random
import types

import torch
from tokenizers import Tokenizer

from world import BACKGROUNDS, COLOURS, MOTIONS, PITCHES, SHAPES, SIZES

TOKENS = 64
"""Text tokens a prompt is padded to in training; the connectors have as many registers."""

_SHAPE = {
    "circle": ["circle", "circle", "ball", "disc"], "square": ["square", "square", "box"], "triangle": ["triangle"],
    "star": ["star"],
}
_COLOUR = {"purple": ["purple", "purple", "violet"], "cyan": ["cyan", "cyan", "turquoise"]}
_SIZE = {"small": ["small", "tiny", "little"], "medium": ["medium", "medium-sized"], "large": ["large", "big", "huge"]}
_PITCH = {"high": ["high", "high", "shrill"], "middle": ["middle", "mid"], "low": ["low", "low", "deep"]}
# Finite and continuous forms.
_MOTION = {
    "left": ["moves left", "slides to the left", "goes left", "drifts from right to left", "moving left", "sliding to the left"],
    "right": [
        "moves right", "slides to the right", "goes right", "drifts from left to right", "moving right", "sliding to the right",
    ],
    "up": ["moves up", "rises", "goes up", "floats upwards", "moving up", "rising"],
    "down": ["moves down", "falls", "goes down", "sinks", "moving down", "falling"],
    "bounce": ["bounces", "bounces up and down", "hops on the floor", "bouncing", "is bouncing"],
    "orbit": ["orbits", "goes round and round", "runs in a ring", "moves in a loop", "orbiting the middle"],
    "grow": ["grows", "gets bigger", "swells", "expands", "growing"],
    "fade": ["fades away", "fades out", "slowly disappears", "vanishes", "fading away"],
}
_PLACE = ["on {0}", "on {0}", "on a {0} background", "over {0}", "against a {0} backdrop", "in front of {0}"]
_HUM = ["{0} hum", "a {0} hum", "with a {0} tone", "a {0} tone", "humming {0}", "a {0} note sounds", "{0} sound"]
_BEEP = ["{0} beeps", "with {0} beeps", "{0} beeping", "a {0} beep at each bounce", "{0} beeps as it bounces", "{0} sound"]
_SILENT = ["silent", "no sound", "in silence", "without sound", "silence"]
_OTHER = [
    "next to a still {0} {1}", "and a {0} {1} that stays still", "while a {0} {1} rests in the corner",
    "with a small still {0} {1}",
]
_FORMS = ["{thing} {motion} {place}, {sound}"] * 5 + [
    "{sound}, {thing} {motion} {place}", "{place}, {thing} {motion}, {sound}", "{thing} {place} {motion}, {sound}",
    "{thing} {motion} {place} {sound}", "{thing} {motion} {place}; {sound}",
]
_LEADS = ["a video of", "a clip:", "animation of", "we see", "here"]


def caption(scene, draw):
    pick = draw.choice
    size, motion, pitch = scene["size"], scene["motion"], scene["pitch"]
    colour = lambda name: pick(_COLOUR.get(name, [name]))
    tell_size, tell_pitch = pick([(1, 1), (1, 1), (1, 0), (1, 0), (0, 1), (0, 1), (0, 0)])
    if pitch == "silent":
        tell_size = tell_size or draw.random() < 0.7
        sound = pick(_SILENT)
    elif tell_pitch:
        sound = pick(_BEEP if motion == "bounce" else _HUM).format(pick(_PITCH[pitch]))
    else:
        sound = pick(["", "", "beeps" if motion == "bounce" else "a hum", "with sound"])
    words = [pick(_SIZE[size])] if tell_size else []
    words += [colour(scene["colour"]), pick(_SHAPE[scene["shape"]])]
    thing = " ".join([pick(["a", "a", "a", "the", "one"]), *words])
    place = pick(_PLACE).format(scene["background"])
    if scene["other"]:
        place += " " + pick(_OTHER).format(colour(scene["other"][0]), pick(_SHAPE[scene["other"][1]]))
    text = pick(_FORMS).format(thing=thing, motion=pick(_MOTION[motion]), place=place, sound=sound)
    text = " ".join(text.strip(" ,;").replace(" ,", ",").split()).lstrip(", ")
    if draw.random() < 0.08:
        text = f"{pick(_LEADS)} {text}"
    if draw.random() < 0.1:
        text = text[0].upper() + text[1:]
    return text + ("." if draw.random() < 0.15 else "")


def plain_caption(scene):
    pitch = scene["pitch"]
    sound = pitch if pitch == "silent" else f"{pitch} beeps" if scene["motion"] == "bounce" else f"a {pitch} hum"
    thing = f"a {scene['size']} {scene['colour']} {scene['shape']}"
    return f"{thing} {_MOTION[scene['motion']][0]} on {scene['background']}, {sound}"


def names(scenes):
    """Returns the properties of each scene by name; `other` is the colour and shape of the second shape, or None."""
    colours, backgrounds, pitches = tuple(COLOURS), tuple(BACKGROUNDS), tuple(PITCHES)
    columns = {name: field.tolist() for name, field in vars(scenes).items()}
    rows = (types.SimpleNamespace(**dict(zip(columns, row))) for row in zip(*columns.values()))
    return [dict(
        shape=SHAPES[s.shape], colour=colours[s.colour], size=SIZES[s.size], motion=MOTIONS[s.motion],
        background=backgrounds[s.background], pitch="silent" if s.silent else pitches[s.size],
        other=(colours[s.other_colour], SHAPES[s.other_shape]) if s.other_shape >= 0 else None,
    ) for s in rows]


def captions(scenes, seed):
    draw = random.Random(seed)
    return [caption(scene, draw) for scene in names(scenes)]


def encode(folder, texts, length=TOKENS):
    """Returns ids and masks [texts, length] by a model's tokenizer: BOS first, truncated on the right, padded on the left."""
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer/tokenizer.json")
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(direction="left", length=length)
    items = tokenizer.encode_batch([text.strip() for text in texts])
    return torch.tensor([item.ids for item in items]), torch.tensor([item.attention_mask for item in items])
