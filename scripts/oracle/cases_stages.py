"""Fixtures of whole requests beyond one plain stage: image conditioning, two stages, the second-order sampler.

The loops, the guider and the steps are ltx-pipelines' and ltx-core's own, run in float32 on diffusers' networks; what
stands between (positions, noise, blending) follows the official semantics of the specification.
"""

import json
import math
import sys
from unittest.mock import MagicMock

import torch
from PIL import Image

import models
from cases_decoders import thin
from cases_pipeline import _neutral, _request, official_sigmas
from cases_text import encode, tokenize
from common import FIXTURES, randn, show, write_case

# What the official packages import for files of media alone, which nothing here reads.
for name in ("av", "torchaudio", "torchaudio.transforms", "torchaudio.functional"):
    sys.modules.setdefault(name, MagicMock())
from ltx_core.components.diffusion_steps import EulerDiffusionStep, Res2sDiffusionStep  # noqa: E402
from ltx_core.components.guiders import MultiModalGuider, MultiModalGuiderParams  # noqa: E402
from ltx_core.model.video_vae.tiling import DimensionIntervals, create_tiles  # noqa: E402
from ltx_core.model.video_vae.video_vae import (  # noqa: E402
    make_mapping_operation,
    map_spatial_interval_to_pixel,
    map_temporal_interval_to_frame,
    split_temporal_latents,
    split_with_symmetric_overlaps,
)
from ltx_core.types import LatentState  # noqa: E402
from ltx_pipelines.utils.media_io import resize_and_center_crop  # noqa: E402
from ltx_pipelines.utils.samplers import euler_denoising_loop, res2s_audio_video_denoising_loop  # noqa: E402

IMAGE = FIXTURES / "images" / "shapes.png"
SECOND = [0.909375, 0.725, 0.421875, 0.0]


def write_image():
    """A small image of smooth and sharp parts, 40 x 30."""
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    pixels = [
        (255 * x // 39, 255 * y // 29, 220 if (x - 12) ** 2 + (y - 15) ** 2 < 60 else 30) for y in range(30) for x in range(40)
    ]
    image = Image.new("RGB", (40, 30))
    image.putdata(pixels)
    image.save(IMAGE)


def image_tokens(pipeline, height, width):
    """The image's normalised latents as tokens."""
    pixels = torch.frombuffer(bytearray(Image.open(IMAGE).tobytes()), dtype=torch.uint8).reshape(30, 40, 3)
    video = resize_and_center_crop(pixels.float(), height, width) / 127.5 - 1.0
    vae = pipeline.vae
    latents = vae.encode(video).latent_dist.mode()
    return pack(normalize(vae, latents))


def normalize(vae, latents):
    shape = (1, -1, 1, 1, 1)
    return (latents - vae.latents_mean.view(shape)) / vae.latents_std.view(shape)


def denormalize(vae, latents):
    shape = (1, -1, 1, 1, 1)
    return latents * vae.latents_std.view(shape) + vae.latents_mean.view(shape)


def pack(latents):
    return latents.flatten(2).transpose(1, 2)


class Stage:
    """One stage of a request at one size."""

    def __init__(self, pipeline, request, generator, width, height, before=None, scale=1.0):
        self.pipeline, self.request = pipeline, request
        ratio = pipeline.vae_spatial_compression_ratio
        self.frames = (request["num_frames"] - 1) // pipeline.vae_temporal_compression_ratio + 1
        self.height, self.width = height // ratio, width // ratio
        config, audio = pipeline.transformer.config, pipeline.audio_vae.config
        rate = pipeline.audio_sampling_rate / pipeline.audio_hop_length / pipeline.audio_vae_temporal_compression_ratio
        self.length = round(request["num_frames"] / request["frame_rate"] * rate)
        self.bins = audio.mel_bins // pipeline.audio_vae_mel_compression_ratio
        draw = lambda *shape: torch.randn(shape, generator=generator)
        self.video_noise = draw(1, config.in_channels, self.frames, self.height, self.width)
        self.audio_noise = draw(1, audio.latent_channels, self.length, self.bins)
        video, sound = pack(self.video_noise).clone(), self.audio_noise.transpose(1, 2).flatten(2)
        self.own = video.shape[1]
        fps = request["frame_rate"]
        coords = pipeline.transformer.rope.prepare_video_coords(1, self.frames, self.height, self.width, "cpu", fps=fps)
        mask, clean = torch.ones(1, self.own, 1), torch.zeros_like(video)
        extra = []
        for image in request.get("images", []):
            tokens = image_tokens(pipeline, height, width)
            part = 1.0 - image["strength"]
            if image["frame"] == 0 and not request.get("keyframes"):
                clean[:, : tokens.shape[1]], mask[:, : tokens.shape[1]] = tokens, part
                continue
            at = pipeline.transformer.rope.prepare_video_coords(1, 1, self.height, self.width, "cpu", fps=fps)
            at[:, 0, :, 0], at[:, 0, :, 1] = image["frame"] / fps, (image["frame"] + 1) / fps
            extra.append((tokens, part, at))
        if extra:
            noise = draw(1, sum(t.shape[1] for t, _, _ in extra), config.in_channels)
            video = torch.cat([video, noise], 1)
            clean = torch.cat([clean, *(t for t, _, _ in extra)], 1)
            mask = torch.cat([mask, *(torch.full((1, t.shape[1], 1), p) for t, p, _ in extra)], 1)
            coords = torch.cat([coords, *(c for _, _, c in extra)], 2)
        if before is not None:
            video[:, : self.own] = video[:, : self.own] * scale + before[0] * (1 - scale)
            sound = sound * scale + before[1] * (1 - scale)
        video = video * mask + clean * (1 - mask)
        self.video = LatentState(video, mask, coords, clean)
        self.audio = LatentState(sound, torch.ones(1, sound.shape[1], 1), torch.zeros(()), torch.zeros_like(sound))

    def denoiser(self, texts, scales):
        """ltx-pipelines' denoising function: both streams' guided clean predictions."""
        guiders = {
            stream: MultiModalGuider(
                params=MultiModalGuiderParams(
                    cfg_scale=s["cfg"], stg_scale=s["stg"], modality_scale=s["modality"], rescale_scale=s["rescale"]
                )
            )
            for stream, s in scales.items()
        }
        any_of = lambda test: any(test(s) for s in scales.values())

        def predict(states, sigma, text, **more):
            tau = 1000 * sigma.reshape(1).float()
            velocity = self.pipeline.transformer(
                hidden_states=states[0].latent, audio_hidden_states=states[1].latent, encoder_hidden_states=text["video"],
                audio_encoder_hidden_states=text["audio"], timestep=tau * states[0].denoise_mask[..., 0],
                audio_timestep=tau * states[1].denoise_mask[..., 0], sigma=tau, audio_sigma=tau, fps=self.request["frame_rate"],
                num_frames=self.frames, height=self.height, width=self.width, audio_num_frames=self.length,
                video_coords=states[0].positions, use_cross_timestep=self.request["cross_timestep"] == "cross",
                return_dict=False, **more,
            )
            return [s.latent - sigma.float() * s.denoise_mask * v for s, v in zip(states, velocity)]

        def denoise(video_state, audio_state, sigmas, step_index):
            states, sigma = (video_state, audio_state), sigmas[step_index]
            cond = predict(states, sigma, texts[0])
            none = [0.0, 0.0]
            uncond = predict(states, sigma, texts[1]) if any_of(lambda s: s["cfg"] != 1) else none
            alone = predict(states, sigma, texts[0], isolate_modalities=True) if any_of(lambda s: s["modality"] != 1) else none
            each = zip(guiders.values(), cond, uncond, alone)
            return tuple(g.calculate(c, u, 0.0, m) for g, c, u, m in each)

        return denoise

    def run(self, texts, scales, sigmas):
        denoise = self.denoiser(texts, scales)
        common = dict(sigmas=sigmas, video_state=self.video, audio_state=self.audio, denoise_fn=denoise)
        if self.request["sampler"] == "res_2s":
            video, audio = res2s_audio_video_denoising_loop(stepper=Res2sDiffusionStep(), model_dtype=torch.float32, **common)
        else:
            video, audio = euler_denoising_loop(stepper=EulerDiffusionStep(), **common)
        return video.latent[:, : self.own].float(), audio.latent.float()

    def unpacked(self, tokens):
        return tokens.transpose(1, 2).reshape(1, -1, self.frames, self.height, self.width)


def run(name, request):
    """A request's final latents, un-normalised, and what its stages drew."""
    pipeline = models.load_pipeline(name)
    texts = []
    for text in (request["prompt"], request["negative_prompt"]):
        ids, mask = tokenize(name, [text], request["max_sequence_length"])
        encoded = encode(pipeline.text_encoder, pipeline.connectors, ids, mask)
        video, audio, _ = pipeline.connectors(encoded["prompt_embeds"], mask, padding_side="left")
        texts.append({"video": video, "audio": audio})
    generator = torch.Generator("cpu").manual_seed(request["seed"])
    width, height = request["width"], request["height"]
    two = "upsampler" in request
    first = Stage(pipeline, request, generator, *((width // 2, height // 2) if two else (width, height)))
    anchor = first.own if request["sampler"] == "res_2s" else 4096
    video, audio = first.run(texts, request["guidance"], official_sigmas(request["steps"], anchor))
    last, outputs = first, {}
    if two:
        upsampler = models.load(request["upsampler"], "latent_upsampler")
        outputs["stage_1.latents.video"] = denormalize(pipeline.vae, first.unpacked(video))
        grown = normalize(pipeline.vae, upsampler(outputs["stage_1.latents.video"]))
        sigmas = torch.tensor(SECOND)
        last = Stage(pipeline, request, generator, width, height, before=(pack(grown), audio), scale=SECOND[0])
        plain = {stream: _neutral() for stream in ("video", "audio")}
        video, refined = last.run(texts, plain, sigmas)
        audio = refined if request["keeps_audio"] else audio
        outputs["stage_2.noise.video"] = last.video_noise
    vae = pipeline.audio_vae
    outputs["latents.video"] = denormalize(pipeline.vae, last.unpacked(video))
    audio = audio * vae.latents_std + vae.latents_mean
    outputs["latents.audio"] = audio.reshape(1, first.length, -1, first.bins).transpose(1, 2)
    return {k: v.contiguous().float() for k, v in outputs.items()}


def _staged(**more):
    return _request(**{**dict(sampler="euler", cross_timestep="own", max_sequence_length=64, seed=4), **more})


_GUIDED = {
    "video": _neutral(3.0, modality=3.0, rescale=0.45),
    "audio": _neutral(7.0, modality=3.0, rescale=1.0),
}
_PLAIN = {"video": _neutral(), "audio": _neutral()}
_CASES = {
    "image": _staged(
        width=96, height=64, num_frames=9, steps=3, guidance=_GUIDED, images=[dict(frame=0, strength=1.0)], cross_timestep="cross"
    ),
    "images": _staged(
        width=64, height=96, num_frames=17, steps=2,
        images=[dict(frame=0, strength=0.75), dict(frame=16, strength=1.0), dict(frame=5, strength=0.5)],
    ),
    "res_2s": _staged(width=96, height=64, num_frames=9, steps=6, guidance=_GUIDED, sampler="res_2s"),
    "two_stage": _staged(
        width=128, height=64, num_frames=9, steps=2, upsampler="upsampler_rational", keeps_audio=False,
        images=[dict(frame=0, strength=1.0)],
    ),
    "distilled": _staged(
        width=64, height=128, num_frames=9, steps=2, guidance=_PLAIN, upsampler="upsampler_rational", keeps_audio=True
    ),
    "hq": _staged(
        width=128, height=64, num_frames=9, steps=3, guidance=_GUIDED, sampler="res_2s", upsampler="upsampler_rational",
        keeps_audio=False, images=[dict(frame=8, strength=0.9)],
    ),
    "keyframes": _staged(
        width=64, height=64, num_frames=9, steps=2, upsampler="upsampler_rational", keeps_audio=True, keyframes=True,
        images=[dict(frame=0, strength=1.0), dict(frame=8, strength=1.0)],
    ),
}


def stages():
    """Latents of every case in float32."""
    write_image()
    for case, request in _CASES.items():
        outputs = run("tiny_a", request)
        kept, extra = thin(outputs)
        assert all(math.isfinite(v.abs().max()) for v in outputs.values())
        write_case(
            "stages", case, {}, kept, script=__file__, model="tiny_a", seed=request["seed"], scalars=request, extra=extra
        )
        show(f"stages/{case} {json.dumps(sorted(kept))}", *outputs.values())


def tiled():
    """A decoded video by tiles of the official splitters and ramps, each decoded by diffusers."""
    vae = models.load_pipeline("tiny_a").vae
    latents = randn(31, "latents", 1, vae.config.latent_channels, 5, 5, 3)
    size = [round(2 * n / 5) for n in latents.shape[3:]]
    spatial = [split_with_symmetric_overlaps(max(2, n), 1) for n in size]
    whole = [lambda length: DimensionIntervals([0], [length], [0], [0])] * 2
    pixels = make_mapping_operation(map_spatial_interval_to_pixel, scale=32)
    frames = make_mapping_operation(map_temporal_interval_to_frame, scale=8)
    all_of_it = [lambda _: ([slice(0, None)], [None])] * 2
    tiles = create_tiles(latents.shape, [*whole, split_temporal_latents(3, 1), *spatial], [*all_of_it, frames, pixels, pixels])
    video, weights = torch.zeros(1, 3, 33, 160, 96), torch.zeros(1, 1, 33, 160, 96)
    for tile in tiles:
        place = (slice(None), slice(None), *tile.out_coords[2:])
        video[place] += vae.decode(latents[tile.in_coords], return_dict=False)[0] * tile.blend_mask
        weights[place] += tile.blend_mask
    kept, extra = thin({"video": video / weights.clamp(min=1e-8)})
    scalars = dict(pixels=64, overlap=32, frames=24, frame_overlap=8)
    write_case(
        "tiled", "space_and_time", {"latents": latents}, kept, script=__file__, model="tiny_a", seed=31, scalars=scalars, extra=extra
    )
    show(f"tiled {len(tiles)} tiles", video)


COMPONENTS = {"stages": stages, "tiled": tiled}
