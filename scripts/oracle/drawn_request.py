"""Draws a request from a seed, and names its features."""

import random

from drawn_table import LAYOUTS, TERMS, TWO_PASSES, row, stream_guided

_WORDS = "slow pan over a quiet harbour at dawn gulls calling lighthouse woman red coat stone pier 東京 café".split()
NEUTRAL = dict(cfg=1.0, stg=0.0, modality=1.0, rescale=0.0)
_SCALES = dict(cfg=[2.0, 4.0, 7.0], stg=[0.5, 1.0, 1.5], modality=[1.5, 3.0], rescale=[0.3, 0.7, 1.0])
DISTILLED = [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875]
SECOND = [0.909375, 0.725, 0.421875, 0.0]


def guidance(draw, of, layers):
    """Draws the guidance scales of both streams and the blocks that STG perturbs."""
    scales = {
        stream: NEUTRAL | {term: draw.choice(_SCALES[term]) for term in subset}
        for stream, subset in zip(("video", "audio"), of["guidance"])
    }
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
    return [
        dict(frame=frame, strength=round(draw.uniform(0.4, 0.95), 2) if i == weak else 1.0, width=size(), height=size())
        for i, frame in enumerate(at)
    ]


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


def as_lightricks(config):
    """Sets what Lightricks' code always has: registers in both connectors, a causal first frame."""
    for stream in ("video", "audio"):
        key = f"{stream}_connector_num_learnable_registers"
        config["connectors"][key] = config["connectors"][key] or 8
    config["transformer"]["causal_offset"] = 1


def as_diffusers(config):
    """Removes the latent scaling factor, which diffusers' image pipelines ignore."""
    config["vae"]["scaling_factor"] = 1.0


def whole(seed, config):
    """Returns the request of a seed as plain values."""
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
        pipeline=of["pipeline"], reference=of["reference"],
        prompt=" ".join(draw.choices(_WORDS, k=draw.randint(1, 12))),
        negative_prompt=draw.choice(["", "static noise"]), width=width, height=height, num_frames=of["num_frames"],
        frame_rate=draw.choice([12.0, 24.0, 25.0, 30.0]), steps=draw.randint(2, 4) + (of["sampler"] == "res_2s"),
        seed=draw.randrange(2**40), max_sequence_length=64, guidance=scales, stg_blocks=blocks, sampler=sampler, eta=eta,
        images=given, loras=files, layout=layout, mesh=layout and draw.choice(LAYOUTS[layout]), dtype=of["dtype"],
        cross_timestep=of["cross_timestep"], keeps=draw.choice(["stage_1", "stage_2"]), clamp=draw.random() < 0.5, stored=stored,
        sigma_shift=draw.choice(["official", "diffusers"]) if diffusers else "official",
    )


def _guidance_features(request):
    scales = request["guidance"]
    on = [term for term in TERMS if any(s[term] != NEUTRAL[term] for s in scales.values())]
    yield from on
    yield from (stream_guided(tuple(t for t in TERMS if s[t] != NEUTRAL[t])) for s in scales.values())
    if on and scales["video"] != scales["audio"]:
        yield "scales of each stream"
    if "stg" in on and request["stg_blocks"]["video"] != request["stg_blocks"]["audio"]:
        yield "STG blocks of each stream"


def features(request, generation, published, upsampler):
    """Yields the names of the features that a request has."""
    yield from (generation, "flags of the generation" if published else "flags drawn", request["pipeline"])
    yield from (f"by {request['reference']}", f"{request['pipeline']} by {request['reference']}")
    yield from (request["sampler"], request["dtype"], f"stored {request['stored']}")
    yield f"{request['num_frames']} frame{'s' * (request['num_frames'] > 1)}"
    yield from _guidance_features(request)
    at = [image["frame"] for image in request["images"]]
    if at:
        yield "first frame and later ones" if 0 in at and len(at) > 1 else "first frame" if at == [0] else "later frames"
        yield f"cross timestep {request['cross_timestep'] or 'of the reference'}"
        if any(image["strength"] < 1 for image in request["images"]):
            yield "strength below 1"
    if request["pipeline"] in TWO_PASSES:
        yield from ("two passes", f"upsampler {upsampler}", f"sound of {request['keeps']}")
    yield ("no LoRA", "one LoRA", "two LoRAs")[len(request["loras"])]
    yield from sorted({f"LoRA keys {lora['keys']}" for lora in request["loras"]})
    places = {"header": "alpha in the header", "tensors": "alpha among the tensors"}
    yield from sorted({places[lora["alpha_in"]] for lora in request["loras"] if lora["alpha"]})
    yield from ("layout", f"layout {request['layout']}") if request["layout"] else ("no layout",)
    yield f"{request['frame_rate']:g} frames a second"
