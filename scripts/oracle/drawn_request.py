"""Draws a request from a seed.

Features are dealt to 100 rows; seed n has row n % 100. Everything else is drawn from the seed."""

import json
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
# Split sums in bf16 are up to three times as far from f32 as the reference's runs: docs/guides/layouts.md sets no limit.
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
        row["sampler"] = "res_2s" if row["pipeline"] == "hq" else "euler"
    of_diffusers, two = (lambda row: row["reference"] == "diffusers"), (lambda row: row["pipeline"] in TWO_PASSES)
    _deal(where(lambda row: not two(row) and not of_diffusers(row)), "sampler", *["euler"] * 4, "res_2s")
    kinds = ("first", "later", "both")
    _deal(where(lambda row: row["pipeline"] in ("image_to_video", "keyframes")), "images", *kinds)
    _deal(where(lambda row: row["pipeline"] in ("two_stage", "hq", "distilled")), "images", *kinds, None, None)
    by_lightricks = where(lambda row: row["images"] and not of_diffusers(row))
    _deal(by_lightricks, "below", True, False)
    _deal(by_lightricks, "cross_timestep", None, "own", "cross", "gate_only")
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
    of = _TABLE[seed % len(_TABLE)] | {name: values[seed % len(values)] for name, values in TURNS.items()}
    return of | ({"dtype": "f32"} if of["layout"] in SUM_PARTS else {})


_WORDS = "slow pan over a quiet harbour at dawn gulls calling lighthouse woman red coat stone pier 東京 café".split()
NEUTRAL = dict(cfg=1.0, stg=0.0, modality=1.0, rescale=0.0)
_SCALES = dict(cfg=[2.0, 4.0, 7.0], stg=[0.5, 1.0, 1.5], modality=[1.5, 3.0], rescale=[0.3, 0.7, 1.0])
DISTILLED = [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875]
SECOND = [0.909375, 0.725, 0.421875, 0.0]


def guidance(draw, of, layers):
    scaled = lambda subset: NEUTRAL | {term: draw.choice(_SCALES[term]) for term in subset}
    scales = {stream: scaled(subset) for stream, subset in zip(("video", "audio"), of["guidance"])}
    some = lambda: sorted(draw.sample(range(layers), draw.randint(1, layers)))
    video = audio = some()
    while of["own_blocks"] and layers > 1 and audio == video:
        audio = some()
    return scales, {"video": video, "audio": audio}


def images(draw, of, time):
    """Draws image conditions. For diffusers, later ones are where a latent begins and have strength 1, as it handles others
    differently."""
    if not of["images"]:
        return []
    starts = range(1, of["num_frames"], time if of["reference"] == "diffusers" else 1)
    at = [0] if of["images"] != "later" else []
    if of["images"] != "first":
        at += sorted(draw.sample(starts, min(len(starts), draw.randint(1, 2))))
    size, weak = lambda: draw.randint(20, 90), draw.randrange(len(at)) if of["below"] else None
    strength = lambda i: round(draw.uniform(0.4, 0.95), 2) if i == weak else 1.0
    return [dict(frame=frame, strength=strength(i), width=size(), height=size()) for i, frame in enumerate(at)]


def loras(draw, of):
    """Draws LoRA files. Lightricks' loader has no alpha; diffusers reads alpha only from the header."""
    files = []
    for index in range(of["loras"]):
        keys, scaled = of["file"] if index == 0 else (draw.choice(["diffusers", "lightricks"]), draw.random() < 0.5)
        header = keys == "diffusers" or of["reference"] == "diffusers"
        files.append(dict(
            keys=keys, strength=draw.choice([0.25, 0.8, 1.0, -0.5]), rank=draw.randint(1, 4),
            alpha=draw.choice([0.5, 2.0, 3.0, 6.0]) if scaled else None, alpha_in="header" if header else "tensors",
            stages=draw.choice([[1, 2], [1, 2], [1], [2]]) if of["pipeline"] in TWO_PASSES else [1, 2],
        ))
    return files


def adapt(config, reference):
    if reference == "diffusers":
        # diffusers' image pipelines ignore the latent scaling factor.
        config["vae"]["scaling_factor"] = 1.0
        return
    # Lightricks' code always has registers in both connectors and a causal first frame.
    for key in ("video_connector_num_learnable_registers", "audio_connector_num_learnable_registers"):
        config["connectors"][key] = config["connectors"][key] or 8
    config["transformer"]["causal_offset"] = 1


def whole(seed, config):
    draw, of = random.Random(f"{seed}/request"), row(seed)
    space, time = config["vae"]["spatial_compression_ratio"], config["vae"]["temporal_compression_ratio"]
    two, diffusers = of["pipeline"] in TWO_PASSES, of["reference"] == "diffusers"
    step = 64 if two else 32
    # Reflect padding needs two rows and columns of latents, also in the smaller pass.
    least = max(step, 2 * space * (2 if two else 1))
    sizes = [least, least, least + step] if two else [least, least + step, least + 2 * step]
    scales, blocks = guidance(draw, of, config["transformer"]["num_layers"])
    width, height, given = draw.choice(sizes), draw.choice(sizes), images(draw, of, time)
    if diffusers and of["images"] == "first":
        # diffusers resizes the first frame differently from Lightricks.
        given[0] |= dict(width=width, height=height)
    files, layout = loras(draw, of), of["layout"]
    # 1.0.0 merges only into bfloat16 weights.
    stored = "bf16" if files and of["reference"] == "official_1_0" else draw.choice(["f32", "bf16"])
    newest, sampler, eta = random.Random(f"{seed}/ancestral"), of["sampler"], None
    # diffusers' pipelines have no generator in their steps.
    if "use_keyframes_abs_pos_embedding" in config["transformer"] and sampler == "euler" and not diffusers:
        sampler, eta = newest.choice([("euler", None), ("euler_ancestral", 1.0), ("euler_ancestral", 0.5)])
    return dict(
        pipeline=of["pipeline"], reference=of["reference"], prompt=" ".join(draw.choices(_WORDS, k=draw.randint(1, 12))),
        negative_prompt=draw.choice(["", "static noise"]), width=width, height=height, num_frames=of["num_frames"],
        frame_rate=draw.choice([12.0, 24.0, 25.0, 30.0]), steps=draw.randint(2, 4) + (of["sampler"] == "res_2s"),
        seed=draw.randrange(2**40), max_sequence_length=64, guidance=scales, stg_blocks=blocks, sampler=sampler, eta=eta,
        images=given, loras=files, layout=layout, mesh=layout and draw.choice(LAYOUTS[layout]), dtype=of["dtype"],
        cross_timestep=of["cross_timestep"], keeps=draw.choice(["stage_1", "stage_2"]), clamp=draw.random() < 0.5, stored=stored,
        sigma_shift=draw.choice(["official", "diffusers"]) if diffusers else "official",
    )


def write_configuration(path, r, model, loras, images, platform):
    """Writes a request as a configuration of ltx2. `model`: its section without the LoRAs."""
    guidance, blocks = {stream: dict(own) for stream, own in r["guidance"].items()}, r["stg_blocks"]
    if any(own["stg"] for own in guidance.values()):
        if blocks["video"] == blocks["audio"]:
            guidance["stg_blocks"] = blocks["video"]
        else:
            guidance = {stream: own | {"stg_blocks": blocks[stream]} for stream, own in guidance.items()}
    files = lambda paths, items, *keys: [{"path": p} | {key: own[key] for key in keys} for p, own in zip(paths, items)]
    copied = ("prompt", "negative_prompt", "width", "height", "num_frames", "frame_rate", "seed", "max_sequence_length")
    images, ancestral = files(images, r["images"], "frame", "strength"), r["sampler"] == "euler_ancestral"
    config = {
        "pipeline": r["pipeline"], "reference": r["reference"],
        "model": model | {"loras": files(loras, r["loras"], "strength", "stages")},
        "request": {**{key: r[key] for key in copied}, "images": [image | {"crf": 0} for image in images]},
        "sampler": {"kind": r["sampler"], "steps": r["steps"], "sigma_shift": r["sigma_shift"]},
        "guidance": {"stg_blocks": [], **guidance},
        "conditioning": {"cross_timestep": r["cross_timestep"]} if r["cross_timestep"] else {},
        "two_stage": {"audio": r["keeps"]} | ({"sampler": "euler"} if ancestral else {}),
        "vocoder": {"stage1_clamp": "official" if r["clamp"] else "diffusers"},
        "runtime": {"platform": platform, "dtype": r["dtype"]},
    }
    if ancestral:
        config["sampler"]["eta"] = r["eta"]
    if r["pipeline"] in ("distilled", "dfr"):
        del config["sampler"]["steps"]
        config["sampler"]["sigmas"] = [*DISTILLED, 0.0]
    if r["pipeline"] == "dfr":
        config["dfr"] = {"temporal_rounds": r["temporal_rounds"]}
        del config["request"]["negative_prompt"], config["two_stage"]
    if r["layout"]:
        config["layout"] = r["layout"]
    if r["mesh"]:
        config["mesh"] = {axis: int(n) for axis, n in (part.split("=") for part in r["mesh"].split(","))}
    path.write_text(json.dumps(config, indent=1, ensure_ascii=False, default=str) + "\n")
