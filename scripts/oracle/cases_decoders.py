"""Writes the video VAE, the audio VAE decoder, the vocoder and the upsamplers."""

import json

import torch
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplePipeline

import models
from common import randn, relative_l2, show, write_case

# Odd strides meet every phase of the power-of-two upsampling.
STRIDES = {"video": (1, 1, 1, 5, 7), "audio": (1, 1, 7)}
FULL_LIMIT = 24_000


def thin(outputs, all_strides=STRIDES, limit=FULL_LIMIT):
    """Thins outputs of more than `limit` bytes to `<name>.strided`; returns the outputs and metadata about it."""
    kept, extra = {}, {}
    for name, tensor in outputs.items():
        if name in all_strides and tensor.numel() * 4 > limit:
            strides = all_strides[name]
            kept[f"{name}.strided"] = tensor[tuple(slice(None, None, s) for s in strides)].contiguous()
            extra[f"strides.{name}"] = json.dumps(strides)
            extra[f"shape.{name}"] = json.dumps(list(tensor.shape))
        else:
            kept[name] = tensor
    return kept, extra


# Norms over two channels amplify rounding more than in any published model.
NARROW = {"tiny_2_3"}


def _write(component, case, inputs, outputs, model, seed, scalars=None, again=None):
    kept, extra = thin(outputs)
    if again is not None and model in NARROW:
        extra |= {f"bf16_spread.{k}": f"{relative_l2(v, outputs[k]):.6f}" for k, v in again(torch.bfloat16).items()}
        extra |= {f"f32_spread.{k}": f"{relative_l2(outputs[k], v):.2e}" for k, v in again(torch.float64).items()}
    write_case(component, case, inputs, kept, script=__file__, model=model, seed=seed, scalars=scalars, extra=extra)
    show(f"{component}/{case} {[list(t.shape) for t in outputs.values()]}", *outputs.values())


def video_decoder():
    """Latents, not normalised, to frames `[B, 3, F, H, W]` in -1..1."""
    cases = [
        ("tiny_a", "tiny_a", (1, 8, 2, 2, 3)),
        ("tiny_a_one_frame", "tiny_a", (1, 8, 1, 3, 2)),
        ("tiny_b", "tiny_b", (1, 6, 2, 1, 3)),
        ("tiny_b_batch", "tiny_b", (2, 6, 1, 2, 1)),
        ("patch1", "vae_patch1", (2, 4, 3, 3, 2)),
        ("timestep", "vae_timestep", (2, 4, 2, 3, 2)),
        ("tiny_2_3", "tiny_2_3", (1, 2, 2, 2, 3)),
        ("tiny_2_3_one_frame", "tiny_2_3", (1, 2, 1, 3, 2)),
    ]
    for index, (case, name, shape) in enumerate(cases):
        latents = randn(100 + index, "latents", *shape)
        inputs = {"latents": latents}
        if name == "vae_timestep":
            inputs["temb"] = torch.tensor([0.05, 0.3])

        def decode(dtype=torch.float32, name=name, inputs=inputs):
            latents = inputs["latents"].to(dtype)
            return {"video": models.load(name, "vae", dtype).decode(latents, inputs.get("temb"), return_dict=False)[0]}

        _write("video-decoder", case, inputs, decode(), name, 100 + index, again=decode)


def video_encoder():
    """Frames in -1..1 to the mean of the latent distribution, not normalised."""
    cases = [
        ("tiny_a_image", "tiny_a", (1, 3, 1, 64, 32)),
        ("tiny_b", "tiny_b", (1, 3, 5, 16, 32)),
        ("patch1", "vae_patch1", (1, 3, 5, 6, 4)),
        ("tiny_2_3", "tiny_2_3", (1, 3, 9, 32, 32)),
        ("tiny_2_3_image", "tiny_2_3", (1, 3, 1, 32, 64)),
    ]
    for index, (case, name, shape) in enumerate(cases):
        video = randn(200 + index, "video", *shape).clamp(-1, 1)

        def encode(dtype=torch.float32, name=name, video=video):
            latents = models.load(name, "vae", dtype).encode(video.to(dtype)).latent_dist.mode()
            return {"latents": latents.contiguous()}

        _write("video-encoder", case, {"video": video}, encode(), name, 200 + index, again=encode)


def audio_decoder():
    """Latents `[B, C, L, M]`, not normalised, to log-mel `[B, channels, 4L-3, mel_bins]`."""
    cases = [
        ("tiny_a", "tiny_a", (1, 2, 5, 2)),
        ("tiny_a_one", "tiny_a", (2, 2, 1, 2)),
        ("tiny_b", "tiny_b", (2, 2, 6, 4)),
        ("tiny_b_one", "tiny_b", (1, 2, 1, 4)),
        ("width", "audio_width", (1, 3, 4, 3)),
        ("plain", "audio_plain", (2, 1, 3, 4)),
        ("tiny_2_3", "tiny_2_3", (1, 2, 5, 2)),
    ]
    for index, (case, name, shape) in enumerate(cases):
        latents = randn(300 + index, "latents", *shape)
        mel = models.load(name, "audio_vae").decode(latents, return_dict=False)[0]
        _write("audio-decoder", case, {"latents": latents}, {"mel": mel}, name, 300 + index)


def vocoder():
    """Log-mel `[B, channels, T, mel_bins]` to samples. `clamp` limits the first of two stages, like Lightricks' code."""
    cases = [
        ("tiny_a", "tiny_a", (1, 2, 5, 8), None),
        ("tiny_a_one", "tiny_a", (2, 2, 1, 8), None),
        ("tiny_b", "tiny_b", (1, 2, 7, 16), None),
        ("odd", "vocoder_odd", (2, 2, 4, 3), None),
        ("tiny_2_3", "tiny_2_3", (2, 2, 5, 8), False),
        ("tiny_2_3_clamped", "tiny_2_3", (1, 2, 7, 8), True),
        ("tiny_2_3_one", "tiny_2_3", (1, 2, 1, 8), False),
        ("bwe_odd", "vocoder_bwe_odd", (2, 2, 7, 3), False),
    ]
    for index, (case, name, shape, clamp) in enumerate(cases):
        mel, model = randn(400 + index, "mel", *shape), models.load(name, "vocoder")
        if clamp:
            model.vocoder.final_act_fn = "clamp"
        scalars = {} if clamp is None else {"clamp": clamp}
        _write("vocoder", case, {"mel": mel}, {"audio": model(mel)}, name, 400 + index, scalars)


def upsampler():
    cases = [
        ("rational", "upsampler_rational", (1, 8, 3, 2, 3)),
        ("plain", "upsampler_plain", (2, 2, 2, 3, 2)),
        ("broken", "upsampler_3_2", (1, 4, 2, 3, 5)),
        ("temporal", "upsampler_temporal", (2, 4, 3, 2, 2)),
        ("frames", "upsampler_frames", (2, 3, 3, 2, 3)),
    ]
    for index, (case, name, shape) in enumerate(cases):
        latents = randn(500 + index, "latents", *shape)
        grown = models.load(name, "latent_upsampler")(latents)
        _write("upsampler", case, {"latents": latents}, {"latents": grown.contiguous()}, name, 500 + index)


def duration_head():
    all_sizes = {"duration_head": (2, 8, 8), "duration_head_queries": (1, 5, 3), "duration_head_narrow": (3, 2, 6)}
    for index, (name, (batch, video, audio)) in enumerate(all_sizes.items()):
        config = models.DURATION_HEAD[name]
        inputs = {
            f"{stream}_tokens": randn(540 + index, stream, batch, tokens, config[f"{stream}_cross_attention_dim"])
            for stream, tokens in (("video", video), ("audio", audio))
        }
        seconds = models.load(name, "duration_head")(**inputs)
        _write("duration-head", name, inputs, {"seconds": seconds}, name, 540 + index)


def filters():
    """The filters of diffusers' upsampling pipeline; Lightricks' packages have none."""
    pipeline = LTX2LatentUpsamplePipeline
    latents, reference = randn(520, "latents", 2, 4, 3, 4, 6, scale=1.7) + 0.4, randn(520, "reference", 2, 4, 3, 2, 3) - 0.2
    outputs = {f"adain.{factor}": pipeline.adain_filter_latent(None, latents, reference, factor) for factor in (0.3, 1.0)}
    outputs |= {f"tone_map.{c}": pipeline.tone_map_latents(None, latents, c) for c in (0.4, 1.0)}
    _write("filters", "filters", {"latents": latents, "reference": reference}, outputs, "none", 520)


COMPONENTS = {
    "filters": filters, "video-decoder": video_decoder, "video-encoder": video_encoder, "audio-decoder": audio_decoder,
    "vocoder": vocoder, "upsampler": upsampler, "duration-head": duration_head,
}
