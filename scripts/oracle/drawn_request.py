"""What a seed asks for: one request, drawn from everything that changes numbers, and the features it has by name."""

import random

_WORDS = "slow pan over a quiet harbour at dawn gulls calling lighthouse woman red coat stone pier 東京 café".split()
# Every shipped layout with meshes of two to eight devices; `replicated` is what a request without a layout runs on.
LAYOUTS = {
    "sequence": ["context=2", "context=8"], "ulysses": ["context=2", "context=4"], "ring": ["context=2", "context=4"],
    "hybrid": ["context=4", "context=8"], "cfg": ["cfg=2", "cfg=4"], "cfg-ulysses": ["cfg=2,context=2", "cfg=2,context=4"],
    "tensor": ["tensor=2", "tensor=2,context=2"], "fsdp-ulysses": ["context=2", "fsdp=2,context=2"],
    "before-385": ["context=4"], "ffn-matched": ["context=2"], "qkv-unsharded": ["context=4"],
    "out-unsharded": ["context=2"], "tensor-gathered-ffn": ["tensor=2"], "rope-gathered": ["context=4"],
}
TERMS = ("cfg", "stg", "modality", "rescale")
NEUTRAL = dict(cfg=1.0, stg=0.0, modality=1.0, rescale=0.0)
_SCALES = dict(cfg=[2.0, 4.0, 7.0], stg=[0.5, 1.0, 1.5], modality=[1.5, 3.0], rescale=[0.3, 0.7, 1.0])
_PIPELINES = ["text_to_video", "text_to_video", "image_to_video", "image_to_video", "two_stage", "hq", "distilled", "keyframes"]
_RELEASES = ["official", "official", "official_1_0"]
TWO_PASSES = ("two_stage", "hq", "distilled", "keyframes")
DISTILLED = [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875]
SECOND = [0.909375, 0.725, 0.421875, 0.0]


def guidance(draw, seed, layers):
    """The subset of terms follows the seed, so that sixteen seeds in a row have all; each term is of both streams or one."""
    scales = {"video": dict(NEUTRAL), "audio": dict(NEUTRAL)}
    for bit, term in enumerate(TERMS):
        if seed >> bit & 1:
            for stream in draw.choice([("video", "audio")] * 3 + [("video",), ("audio",)]):
                scales[stream][term] = draw.choice(_SCALES[term])
    blocks = {stream: sorted(draw.sample(range(layers), draw.randint(1, layers))) for stream in scales}
    if draw.random() < 0.5:
        blocks["audio"] = blocks["video"]
    return scales, blocks


def images(draw, pipeline, frames):
    """Frames that are given: the first, others, or both."""
    if pipeline == "text_to_video" or pipeline not in ("image_to_video", "keyframes") and draw.random() < 0.4:
        return []
    kind = draw.choice(["first", "later", "both"]) if frames > 1 else "first"
    at = [0] if kind != "later" else []
    if kind != "first":
        at += sorted(draw.sample(range(1, frames), draw.randint(1, 2)))
    strength = lambda: draw.choice([1.0, 1.0, round(draw.uniform(0.4, 0.95), 2)])
    size = lambda: draw.randint(20, 90)
    return [dict(frame=frame, strength=strength(), width=size(), height=size()) for frame in at]


def loras(draw, two):
    """None, one or two files, of either convention, for one stage or both."""
    stages = [[1, 2], [1, 2], [1], [2]] if two else [[1, 2]]
    return [
        dict(
            keys=draw.choice(["diffusers", "lightricks"]), strength=draw.choice([0.25, 0.8, 1.0, -0.5]), rank=draw.randint(1, 4),
            stages=draw.choice(stages),
        )
        for _ in range(draw.choice([0, 0, 0, 1, 1, 2]))
    ]


def as_lightricks(config):
    """A configuration with what Lightricks' code has always: registers in both connectors, a causal first frame."""
    for stream in ("video", "audio"):
        key = f"{stream}_connector_num_learnable_registers"
        config["connectors"][key] = config["connectors"][key] or 8
    config["transformer"]["causal_offset"] = 1


def whole(seed, config):
    """The request of a seed for a model's configuration, as plain values."""
    draw = random.Random(f"{seed}/request")
    space = config["vae"]["spatial_compression_ratio"]
    # diffusers' own pipeline makes a video from text, by Euler's steps; everything else follows ltx-pipelines.
    diffusers = draw.random() < 0.3
    pipeline = "text_to_video" if diffusers else draw.choice(_PIPELINES)
    two = pipeline in TWO_PASSES
    step = 64 if two else 32
    # Reflect padding needs two rows and two columns of latents, in the smaller pass too.
    least = max(step, 2 * space * (2 if two else 1))
    sizes = [least, least, least + step] if two else [least, least + step, least + 2 * step]
    frames = draw.choice([9, 9, 17] if pipeline == "keyframes" else [1, 9, 9, 17])
    scales, blocks = guidance(draw, seed, config["transformer"]["num_layers"])
    if pipeline == "distilled":
        scales = {"video": dict(NEUTRAL), "audio": dict(NEUTRAL)}
    if diffusers:
        # One list of blocks, perturbed where the transformer says so.
        blocks["audio"] = blocks["video"]
        if not config["transformer"].get("perturbed_attn"):
            scales = {stream: dict(s, stg=0.0) for stream, s in scales.items()}
        # Its pipeline takes an audio scale of 0 for one that was not given, and the video's in its place.
        for term in ("stg", "rescale"):
            scales["audio"][term] = scales["audio"][term] or scales["video"][term]
    given, reference = images(draw, pipeline, frames), "diffusers" if diffusers else draw.choice(_RELEASES)
    if any(image["frame"] for image in given) and config["vae"]["temporal_compression_ratio"] != 8:
        # 1.0.0 gives an appended frame the time of a latent, which this project takes for the published models' eight frames.
        reference = "official"
    second_order = pipeline == "hq" or pipeline in ("text_to_video", "image_to_video") and not diffusers and draw.random() < 0.15
    layout = draw.choice(sorted(LAYOUTS)) if draw.random() < 0.45 else None
    return dict(
        pipeline=pipeline, reference=reference,
        prompt=" ".join(draw.choices(_WORDS, k=draw.randint(1, 12))),
        negative_prompt=draw.choice(["", "static noise"]), width=draw.choice(sizes), height=draw.choice(sizes),
        num_frames=frames, frame_rate=draw.choice([12.0, 24.0, 25.0, 30.0]), steps=draw.randint(2, 4) + second_order,
        seed=draw.randrange(2**40), max_sequence_length=64, guidance=scales, stg_blocks=blocks,
        sampler="res_2s" if second_order else "euler", images=given,
        loras=[] if diffusers else loras(draw, two), layout=layout,
        mesh=layout and draw.choice(LAYOUTS[layout]), dtype="bf16" if draw.random() < 0.2 else "f32",
        cross_timestep=draw.choice([None, None, "own", "cross", "gate_only"]), keeps=draw.choice(["stage_1", "stage_2"]),
        clamp=draw.random() < 0.5, stored=draw.choice(["f32", "bf16"]),
        sigma_shift=draw.choice(["official", "diffusers"]) if diffusers else "official",
    )


def _guidance_features(request):
    scales = request["guidance"]
    on = [term for term in TERMS if any(s[term] != NEUTRAL[term] for s in scales.values())]
    yield "guidance " + ("+".join(on) or "none")
    yield from on
    if on and scales["video"] != scales["audio"]:
        yield "scales of each stream"
    if "stg" in on and request["stg_blocks"]["video"] != request["stg_blocks"]["audio"]:
        yield "STG blocks of each stream"


def features(request, generation, published, upsampler):
    """What a request has, by name: the line of a seed, and what the summary counts."""
    yield from (generation, "flags of the generation" if published else "flags drawn", request["pipeline"])
    yield from (f"by {request['reference']}", request["sampler"], request["dtype"], f"stored {request['stored']}")
    yield from _guidance_features(request)
    at = [image["frame"] for image in request["images"]]
    if at:
        yield "first frame and later ones" if 0 in at and len(at) > 1 else "first frame" if at == [0] else "later frames"
        yield f"cross timestep {request['cross_timestep'] or 'of the reference'}"
        if any(image["strength"] < 1 for image in request["images"]):
            yield "strength below 1"
    if request["pipeline"] in TWO_PASSES:
        yield from ("two passes", f"upsampler {upsampler}", f"sound of {request['keeps']}")
    if request["loras"]:
        yield "one LoRA" if len(request["loras"]) == 1 else "two LoRAs"
        yield from sorted({f"LoRA keys {lora['keys']}" for lora in request["loras"]})
    if request["layout"]:
        yield from ("layout", f"layout {request['layout']}")
    yield f"{request['frame_rate']:g} frames a second"
