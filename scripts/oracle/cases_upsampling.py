#!/usr/bin/env python3
"""Writes two-pass requests with other upsampling factors than two, by Lightricks 1.0.0.

This project chooses the first pass's size and frames, chains upsamplers, and keeps the first pass's sound after temporal
upsampling.
"""

import importlib
import json

import official_pipelines
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel

import cases_official
import models
from cases_decoders import thin
from cases_official import image, keys, request, scales
from common import randomise, show, write_case

_ROWS = {"spatial_x2": (2, 1), "spatial_x1_5": (3, 2), "temporal_x2": (1, 1)}
_MOST_FRAMES = 60.0
_STRIDES = {"video": (1, 8, 1, 17, 17), "audio": (1, 1, 211)}


def upsampler(name, kind):
    """Returns the configuration of an upsampler and the seed of its weights."""
    own = dict(in_channels=models.VAE[name]["latent_channels"], mid_channels=32, num_blocks_per_stage=0)
    own |= {
        "spatial_x2": dict(use_rational_resampler=False),
        "spatial_x1_5": dict(use_rational_resampler=True, rational_spatial_scale=1.5),
        "temporal_x2": dict(spatial_upsample=False, temporal_upsample=True, use_rational_resampler=True),
    }[kind]
    return own, f"{name}_{kind}"


def their_upsampler(name, kind):
    config, seed = upsampler(name, kind)
    drawn = randomise(LTX2LatentUpsamplerModel(**config), seed)
    theirs = {"rational_resampler": config["use_rational_resampler"], "spatial_scale": config.get("rational_spatial_scale", 2.0)}
    theirs |= {key: value for key, value in config.items() if "rational" not in key}
    network = importlib.import_module("ltx_core.model.upsampler").LatentUpsamplerConfigurator.from_config(theirs)
    network.load_state_dict(drawn.state_dict())
    return network.eval()


def first(asked):
    """Returns width, height, frames and frame rate of the first pass."""
    width, height, frames, rate = (asked[key] for key in ("width", "height", "num_frames", "frame_rate"))
    for kind in asked["upsample"]:
        times, of = _ROWS[kind]
        width, height = width // times * of, height // times * of
        if kind == "temporal_x2":
            frames, rate = (frames - 1) // 2 + 1, rate / 2
    return width, height, frames, rate


class Run(official_pipelines.Run):
    """A request whose passes differ by other factors than two."""

    def _of_wheels(self, model, upsampler, sizes):
        pipeline = super()._of_wheels(model, upsampler, sizes)
        asked, module, types = self.request, self.module, importlib.import_module("ltx_core.types")
        self.in_time = "temporal_x2" in asked["upsample"]
        self.helpers, self.passes_begun = importlib.import_module("ltx_pipelines.utils.helpers"), 0
        pixels = types.VideoPixelShape
        rate = min(asked["frame_rate"], _MOST_FRAMES) if self.in_time else asked["frame_rate"]
        width, height, frames, first_rate = first(asked)
        shapes = [
            pixels(1, frames, height, width, first_rate),
            pixels(1, asked["num_frames"], asked["height"], asked["width"], rate),
        ]
        whole = pixels(1, asked["num_frames"], asked["height"], asked["width"], asked["frame_rate"])
        # Both passes have sound for the complete video.
        self.sounds, own = types.AudioLatentShape, types.AudioLatentShape.from_video_pixel_shape
        self.own_length = own
        self.sounds.from_video_pixel_shape = staticmethod(lambda _: own(whole))
        in_turn = iter(shapes)
        module.VideoPixelShape = lambda **_: next(in_turn)
        module.assert_resolution = lambda **_: None
        module.upsample_video = self._upsampled
        name = "image_conditionings_by_adding_guiding_latent" if asked["pipeline"] == "keyframes" else "combined_image_conditionings"
        setattr(module, name, lambda images, **more: getattr(self.helpers, name)(images=self._in_time(images), **more))
        module.denoise_audio_video = self._pass
        module.simple_denoising_func = self._simple
        return pipeline

    def __call__(self):
        made = super().__call__()
        self.sounds.from_video_pixel_shape = staticmethod(self.own_length)
        return made

    def _upsampled(self, latent, video_encoder, upsampler):
        del upsampler
        upsample = importlib.import_module("ltx_core.model.upsampler").upsample_video
        for kind in self.request["upsample"]:
            latent = upsample(latent, video_encoder, their_upsampler(self.request["model"], kind))
        return latent

    def _in_time(self, images):
        """Returns a pass's images; the first pass has every second frame."""
        if self.in_time and self.passes_begun == 0:
            return [own._replace(frame_idx=own.frame_idx // 2) for own in images]
        return images

    def _pass(self, **given):
        self.passes_begun += 1
        if self.passes_begun == 1 or not self.in_time:
            video, audio = self.helpers.denoise_audio_video(**given)
            self.audio = audio
            return video, audio
        return self.helpers.denoise_video_only(**given), self.audio

    def _simple(self, video_context, audio_context, transformer):
        modality = self.helpers.modality_from_latent_state

        def denoise(video_state, audio_state, sigmas, step_index):
            sigma = sigmas[step_index]
            level = sigma * (audio_state.denoise_mask.max() > 0)
            streams = dict(
                video=modality(video_state, video_context, sigma), audio=modality(audio_state, audio_context, level)
            )
            return transformer(**streams, perturbations=None)

        return denoise


class Model(cases_official.Model):
    """A fixture model whose pass sizes follow from the upsamplers."""

    runs = Run

    def sizes(self, request):
        length = round(request["num_frames"] / request["frame_rate"] * 25)
        passes = [first(request), tuple(request[key] for key in ("width", "height", "num_frames", "frame_rate"))]
        latents = [(self.channels, (frames - 1) // 8 + 1, height // 32, width // 32) for width, height, frames, _ in passes]
        return [((1, *video), (1, self.sound, length, self.bins)) for video in latents]

    def decoded(self, outputs):
        frames = self.vae.decode(outputs["latents.video"], None, return_dict=False)[0]
        samples = models.load(self.name, "vocoder")(self.audio_vae.decode(outputs["latents.audio"], return_dict=False)[0])
        return {"video": (frames / 2 + 0.5).clamp(0, 1).transpose(1, 2).contiguous(), "audio": samples}


_GUIDED = {"video": scales(cfg=3.0, modality=3.0, rescale=0.45), "audio": scales(cfg=7.0, modality=3.0, rescale=1.0)}
# 45 frames/s would give the first pass longer sound; 72 exceeds the maximum of the positions.
_CASES = {
    "x1_5": request("two_stage", guidance=_GUIDED, images=[image(0)], width=96, height=96, upsample=["spatial_x1_5"]),
    "temporal_x1_5": request(
        "two_stage", guidance=_GUIDED, images=[image(0), image(11, 0.75)], width=96, height=96, num_frames=17,
        frame_rate=45.0, upsample=["temporal_x2", "spatial_x1_5"],
    ),
    "x2_temporal": request(
        "keyframes", guidance=_GUIDED, images=[image(0), image(8, 0.8)], width=128, height=64, num_frames=17,
        frame_rate=72.0, upsample=["spatial_x2", "temporal_x2"],
    ),
}
_DECODED = "temporal_x1_5"


def write(model, case, asked):
    asked = {**asked, "model": model.name}
    outputs = model.run(asked)
    if case == _DECODED:
        outputs |= model.decoded(outputs)
    # Skips duplicates: final latents, and sound that the second pass keeps.
    kept_sound = "temporal_x2" in asked["upsample"]
    twice = lambda name: name.startswith("latents.") or kept_sound and name.startswith("stage_2.") and name.endswith("audio")
    outputs = {name: value for name, value in outputs.items() if not twice(name) and "noise" not in name}
    kept, extra = thin(outputs, _STRIDES)
    settings = [*keys(asked, "official_1_0"), f"two_stage.upsample={json.dumps(asked['upsample'])}"]
    parts = {"temporal_latent_upsampler" if kind == "temporal_x2" else "latent_upsampler": upsampler(model.name, kind)
             for kind in asked["upsample"]}
    scalars = {"preset": f"{official_pipelines.PRESETS[model.name]}_two_stage", "common": settings, "keys": {"": []}, "upsamplers": parts}
    write_case(
        "upsampling", f"{model.name}_{case}", {}, kept, script=__file__, model=model.name, seed=asked["seed"],
        scalars=scalars, extra={"ltx-pipelines": "1.0.0", **extra},
    )
    show(f"upsampling/{model.name}_{case}: {len(outputs)} tensors", *list(outputs.values())[-3:])


def main():
    official_pipelines.prepare(__doc__)
    official_pipelines.clear("upsampling")
    official_pipelines.for_each_model(Model, lambda model: [write(model, case, asked) for case, asked in _CASES.items()])


if __name__ == "__main__":
    main()
