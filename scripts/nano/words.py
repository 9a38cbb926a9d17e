"""Captions of the toy world: a grammar with paraphrases, and its tokenizer."""

import collections
import pathlib
import random
import sys

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "oracle"))
from tokenizer import write_tokenizer
from world import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, SIZES

VOCABULARY = 704

_SHAPE = {
    "circle": ["circle", "circle", "ball", "disc"], "square": ["square", "square", "box"],
    "triangle": ["triangle"], "star": ["star"],
}
_COLOUR = {"purple": ["purple", "purple", "violet"], "cyan": ["cyan", "cyan", "turquoise"]}
_SIZE = {"small": ["small", "tiny", "little"], "medium": ["medium", "medium-sized"], "large": ["large", "big", "huge"]}
_PITCH = {"small": ["high", "high", "shrill"], "medium": ["middle", "mid"], "large": ["low", "low", "deep"]}
# Finite and continuous forms.
_MOTION = {
    "left": ["moves left", "slides to the left", "goes left", "drifts from right to left", "moving left", "sliding to the left"],
    "right": ["moves right", "slides to the right", "goes right", "drifts from left to right", "moving right", "sliding to the right"],
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
_OTHER = ["next to a still {0} {1}", "and a {0} {1} that stays still", "while a {0} {1} rests in the corner", "with a small still {0} {1}"]
_FORMS = ["{thing} {motion} {place}, {sound}"] * 5 + [
    "{sound}, {thing} {motion} {place}", "{place}, {thing} {motion}, {sound}", "{thing} {place} {motion}, {sound}",
    "{thing} {motion} {place} {sound}", "{thing} {motion} {place}; {sound}",
]
_LEADS = ["a video of", "a clip:", "animation of", "we see", "here"]


def caption(scene, draw):
    """Returns a random caption for a scene."""
    pick = draw.choice
    size, motion = scene["size"], scene["motion"]
    colour = lambda name: pick(_COLOUR.get(name, [name]))
    tell_size, tell_pitch = pick([(1, 1), (1, 1), (1, 0), (1, 0), (0, 1), (0, 1), (0, 0)])
    if scene["silent"]:
        tell_size = tell_size or draw.random() < 0.7
        sound = pick(_SILENT)
    elif tell_pitch:
        sound = pick(_BEEP if motion == "bounce" else _HUM).format(pick(_PITCH[size]))
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
    """Returns the plainest complete caption."""
    pitch = _PITCH[scene["size"]][0]
    sound = "silent" if scene["silent"] else f"{pitch} beeps" if scene["motion"] == "bounce" else f"a {pitch} hum"
    thing = f"a {scene['size']} {scene['colour']} {scene['shape']}"
    return f"{thing} {_MOTION[scene['motion']][0]} on {scene['background']}, {sound}"


def names(scenes):
    colours, backgrounds = tuple(COLOURS), tuple(BACKGROUNDS)
    columns = [getattr(scenes, k).tolist() for k in ("shape", "colour", "size", "motion", "background", "silent")]
    others = zip(scenes.other_colour.tolist(), scenes.other_shape.tolist())
    return [
        dict(
            shape=SHAPES[shape], colour=colours[colour], size=SIZES[size], motion=MOTIONS[motion],
            background=backgrounds[background], silent=bool(silent),
            other=(colours[other[0]], SHAPES[other[1]]) if other[1] >= 0 else None,
        )
        for shape, colour, size, motion, background, silent, other in zip(*columns, others)
    ]


def captions(scenes, seed):
    draw = random.Random(seed)
    return [caption(scene, draw) for scene in names(scenes)]


_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
_IMAGE = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]


def _corpus():
    """Returns the words of the grammar as the tokenizer splits them."""
    phrases = [*COLOURS, *BACKGROUNDS, *SIZES, *_LEADS, *_FORMS, *_OTHER, *_SILENT, *_PLACE, *_HUM, *_BEEP]
    for table in (_SHAPE, _COLOUR, _SIZE, _PITCH, _MOTION):
        phrases += [p for values in table.values() for p in values]
    phrases += ["a the one and with of to in on at is are it its very then two"]
    plain = "".join(c if c.isalpha() or c in " -" else " " for p in phrases for c in p + " ")
    return sorted(set(plain.split()))


def _merges(words, room):
    """Learns byte-pair merges, most frequent first, ties broken by text."""
    split = [tuple(word + "▁") for word in words] + [tuple(word) for word in words]
    merges = []
    while len(merges) < room:
        pairs = collections.Counter(pair for word in split for pair in zip(word, word[1:]))
        if not pairs:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        joined = []
        for word in split:
            out = []
            for piece in word:
                if out and (out[-1], piece) == best:
                    out[-1] = "".join(best)
                else:
                    out.append(piece)
            joined.append(tuple(out))
        split = joined
    return merges


def save_tokenizer(folder):
    """Writes a Gemma-style tokenizer: BPE with byte fallback, BOS first, padding on the left."""
    alphabet = sorted(set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789▁.,;:!?'\"-()"))
    base = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet]
    room = VOCABULARY - len(base) - len(_IMAGE)
    vocabulary = {token: index for index, token in enumerate(base)}
    kept = []
    for left, right in _merges(_corpus(), room):
        kept.append((left, right))
        vocabulary.setdefault(left + right, len(vocabulary))
    for index in range(VOCABULARY - len(vocabulary) - len(_IMAGE)):
        vocabulary[f"<unused{index}>"] = len(vocabulary)
    for token in _IMAGE:
        vocabulary[token] = len(vocabulary)
    return write_tokenizer(folder, vocabulary, kept, [*_SPECIAL, *_IMAGE])


def encode(tokenizer, texts, length):
    """Returns ids and masks, [texts, length]: BOS first, truncated on the right, padded on the left."""
    ids, masks = [], []
    for item in tokenizer.encode_batch([t.strip() for t in texts]):
        kept = item.ids[:length]
        pads = length - len(kept)
        ids.append([0] * pads + kept)
        masks.append([0] * pads + [1] * len(kept))
    return ids, masks
