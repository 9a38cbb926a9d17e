"""Deals the counted features of requests to 100 rows; seed n has row n % 100. Everything else is drawn from the seed."""

import random
from itertools import combinations

TERMS = ("cfg", "stg", "modality", "rescale")
SUBSETS = [subset for size in range(len(TERMS) + 1) for subset in combinations(TERMS, size)]
TWO_PASSES = ("two_stage", "hq", "distilled", "keyframes")
# diffusers has pipelines from text and from images; everything else follows ltx-pipelines.
KINDS = [(p, release) for p in ("text_to_video", "image_to_video", *TWO_PASSES) for release in ("official", "official_1_0")]
KINDS += [("text_to_video", "diffusers"), ("image_to_video", "diffusers")]
UPSAMPLERS = ("rational", "plain", "frames")
# Every shipped layout with meshes of two to eight devices; without a layout, requests use `replicated`.
LAYOUTS = {
    "sequence": ["context=2", "context=8"], "ulysses": ["context=2", "context=4"], "ring": ["context=2", "context=4"],
    "hybrid": ["context=4", "context=8"], "cfg": ["cfg=2", "cfg=4"], "cfg-ulysses": ["cfg=2,context=2", "cfg=2,context=4"],
    "tensor": ["tensor=2", "tensor=2,context=2"], "fsdp-ulysses": ["context=2", "fsdp=2,context=2"],
    "before-385": ["context=4"], "ffn-matched": ["context=2"], "qkv-unsharded": ["context=4"],
    "out-unsharded": ["context=2"], "tensor-gathered-ffn": ["tensor=2"], "rope-gathered": ["context=4"],
}
# Split sums in bf16 are up to three times as far from f32 as the reference's runs, so bf16 is not limited:
# docs/guides/layouts.md.
SUM_PARTS = ("ring", "hybrid", "before-385", "ffn-matched", "qkv-unsharded", "out-unsharded")
# Networks that are also run alone.
NETWORKS = [
    ("transformer", "connectors"), ("text-encoder", "video-decoder"), ("audio-decoder", "vocoder"),
    ("video-encoder", "upsampler"),
]
# Repeats with the seed; coprime periods vary the combinations.
TURNS = {
    "published": (True, False, False), "generation": ("2.0", "2.3", "2.3", "2.0", "2.3", "2.0", "2.3"),
    "dtype": ("f32",) * 3 + ("bf16",) + ("f32",) * 3 + ("bf16",) + ("f32",) * 2 + ("bf16",),
    "layout": (None, *sorted(LAYOUTS)[:7], None, *sorted(LAYOUTS)[7:]),
}


def _deal(rows, name, *values):
    """Assigns the values to the rows in equal numbers, shuffled."""
    dealt = [values[n % len(values)] for n in range(len(rows))]
    random.Random(name).shuffle(dealt)
    for row, value in zip(rows, dealt):
        row[name] = value


def _pairs(count):
    """Returns pairs of guidance terms for video and audio: every subset equally often, mostly the same in both."""
    same, draw = 3, random.Random("guidance")
    rest = [SUBSETS[n % len(SUBSETS)] for n in range(2 * (count - same * len(SUBSETS)))]
    draw.shuffle(rest)
    pairs = [(subset, subset) for subset in SUBSETS * same] + list(zip(rest[::2], rest[1::2]))
    draw.shuffle(pairs)
    return pairs


def _allowed(row, video, audio):
    """Returns whether diffusers supports the terms: it treats an audio scale of 0 as unset, and rescales with the input frames'
    predictions."""
    if row["reference"] != "diffusers":
        return True
    return {"stg", "rescale"} & set(video) <= set(audio) and (row["pipeline"] == "text_to_video" or "rescale" not in video)


def _table():
    rows = [{} for _ in range(100)]
    where = lambda fits: [row for row in rows if fits(row)]
    _deal(rows, "kind", *KINDS)
    for row in rows:
        row["pipeline"], row["reference"] = row.pop("kind")
        row |= dict(images=None, below=False, upsampler=None, file=None, cross_timestep=None, guidance=((), ()), own_blocks=False)
    of_diffusers, two = (lambda row: row["reference"] == "diffusers"), (lambda row: row["pipeline"] in TWO_PASSES)
    _deal(rows, "sampler", "euler")
    _deal(where(lambda row: not two(row) and not of_diffusers(row)), "sampler", *["euler"] * 4, "res_2s")
    _deal(where(lambda row: row["pipeline"] == "hq"), "sampler", "res_2s")
    kinds = ("first", "later", "both")
    _deal(where(lambda row: row["pipeline"] in ("image_to_video", "keyframes")), "images", *kinds)
    _deal(where(lambda row: row["pipeline"] in ("two_stage", "hq", "distilled")), "images", *kinds, None, None)
    _deal(where(lambda row: row["images"] and not of_diffusers(row)), "below", True, False)
    _deal(where(lambda row: row["images"] and not of_diffusers(row)), "cross_timestep", None, "own", "cross", "gate_only")
    _deal(where(lambda row: row["images"] and of_diffusers(row)), "cross_timestep", None, "own", "cross")
    long = lambda row: row["images"] in ("later", "both") or row["pipeline"] == "keyframes"
    _deal(where(long), "num_frames", 9, 17)
    _deal(where(lambda row: not long(row)), "num_frames", 1, 9, 17)
    _deal(where(two), "upsampler", *UPSAMPLERS)
    _deal(rows, "loras", 0, 1, 0, 1, 2)
    # Key convention of the first file, and whether it has an alpha.
    _deal(where(lambda row: row["loras"]), "file", *[(keys, alpha) for keys in ("diffusers", "lightricks") for alpha in (0, 1)])
    _deal(rows, "networks", *NETWORKS)
    guided = where(lambda row: row["pipeline"] != "distilled")
    pairs = _pairs(len(guided))
    for row in sorted(guided, key=lambda row: not of_diffusers(row)):
        fits = ((p, pair) for p in pairs for pair in (p, p[::-1]) if _allowed(row, *pair))
        taken, row["guidance"] = next(fits)
        pairs.remove(taken)
    # diffusers has one list of blocks.
    _deal(where(lambda row: "stg" in sum(row["guidance"], ()) and not of_diffusers(row)), "own_blocks", True, True, False)
    return rows


_TABLE = _table()


def row(seed):
    """Returns the counted features of a seed."""
    of = _TABLE[seed % len(_TABLE)] | {name: values[seed % len(values)] for name, values in TURNS.items()}
    return of | ({"dtype": "f32"} if of["layout"] in SUM_PARTS else {})


def stream_guided(subset):
    return f"a stream guided by {'+'.join(subset) or 'nothing'}"


# Minimum number of seeds in 100 that have a feature.
LEAST = dict.fromkeys(
    [
        "2.0", "2.3", "flags of the generation", "flags drawn", "f32", "bf16", "stored f32", "stored bf16", "euler", "res_2s",
        *dict.fromkeys(pipeline for pipeline, _ in KINDS), *dict.fromkeys(f"by {reference}" for _, reference in KINDS),
        *TERMS, *(stream_guided(subset) for subset in SUBSETS), "scales of each stream", "STG blocks of each stream",
        "first frame", "later frames", "first frame and later ones", "strength below 1",
        *(f"cross timestep {level}" for level in ("of the reference", "own", "cross", "gate_only")),
        "1 frame", "9 frames", "17 frames",
        "two passes", *(f"upsampler {kind}" for kind in UPSAMPLERS), "sound of stage_1", "sound of stage_2",
        "no LoRA", "one LoRA", "two LoRAs", "LoRA keys diffusers", "LoRA keys lightricks", "alpha in the header",
        "alpha among the tensors", "layout", "no layout",
        *(f"network {name}" for pair in NETWORKS for name in pair),
    ],
    10,
)
LEAST |= dict.fromkeys((f"{pipeline} by {reference}" for pipeline, reference in KINDS), 100 // len(KINDS))
LEAST |= dict.fromkeys((f"layout {name}" for name in LAYOUTS), 100 // len(TURNS["layout"]))
