"""Writes two-pass requests with other upsampling factors than two, by Lightricks 1.0.0."""

import json

import official_pipelines
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel
from official_pipelines import ltx

import cases_official
import models
from cases_official import GUIDED, image, keys, request, write_requests
from common import FULL_LIMIT, randomise
from official_file import upsampler_header

_ROWS = {"spatial_x2": (2, 1), "spatial_x1_5": (3, 2), "temporal_x2": (1, 1)}
_MOST_FRAMES = 60.0
_KINDS = {
    "spatial_x2": dict(use_rational_resampler=False),
    "spatial_x1_5": dict(use_rational_resampler=True, rational_spatial_scale=1.5),
    "temporal_x2": dict(spatial_upsample=False, temporal_upsample=True, use_rational_resampler=True),
}


def upsampler(name, kind):
    """Returns the configuration of an upsampler and the seed of its weights."""
    channels = models.config(name, "vae")["latent_channels"]
    return dict(in_channels=channels, mid_channels=32, num_blocks_per_stage=0, **_KINDS[kind]), f"{name}_{kind}"


def first(asked):
    width, height, frames, rate = (asked[key] for key in ("width", "height", "num_frames", "frame_rate"))
    for kind in asked["upsample"]:
        times, of = _ROWS[kind]
        width, height = width // times * of, height // times * of
        if kind == "temporal_x2":
            frames, rate = (frames - 1) // 2 + 1, rate / 2
    return width, height, frames, rate


class Run(official_pipelines.Run):
    def _of_wheels(self, model, upsampler, sizes):
        pipeline = super()._of_wheels(model, upsampler, sizes)
        asked, module, types = self.request, self.module, ltx("core.types")
        self.in_time, self.helpers, self.passes_begun = "temporal_x2" in asked["upsample"], ltx("pipelines.utils.helpers"), 0
        pixels, size = types.VideoPixelShape, (asked["num_frames"], asked["height"], asked["width"])
        rate = min(asked["frame_rate"], _MOST_FRAMES) if self.in_time else asked["frame_rate"]
        width, height, frames, first_rate = first(asked)
        shapes = iter([pixels(1, frames, height, width, first_rate), pixels(1, *size, rate)])
        module.VideoPixelShape = lambda **_: next(shapes)
        # Both passes have sound for the complete video.
        self.sounds, self.own_length = types.AudioLatentShape, types.AudioLatentShape.from_video_pixel_shape
        self.sounds.from_video_pixel_shape = staticmethod(lambda _: self.own_length(pixels(1, *size, asked["frame_rate"])))
        module.assert_resolution = lambda **_: None
        module.upsample_video = self._upsampled
        keyframes = asked["pipeline"] == "keyframes"
        name = "image_conditionings_by_adding_guiding_latent" if keyframes else "combined_image_conditionings"
        setattr(module, name, lambda images, **more: getattr(self.helpers, name)(images=self._in_time(images), **more))
        module.denoise_audio_video = self._pass
        module.simple_denoising_func = self._simple
        return pipeline

    def __call__(self):
        made = super().__call__()
        self.sounds.from_video_pixel_shape = staticmethod(self.own_length)
        return made

    def _upsampled(self, latent, video_encoder, **_):
        package = ltx("core.model.upsampler")
        for kind in self.request["upsample"]:
            config, seed = upsampler(self.request["model"], kind)
            network = package.LatentUpsamplerConfigurator.from_config(upsampler_header(config)).eval()
            network.load_state_dict(randomise(LTX2LatentUpsamplerModel(**config), seed).state_dict())
            latent = package.upsample_video(latent, video_encoder, network)
        return latent

    def _in_time(self, images):
        # The first pass has every second frame.
        halves = self.in_time and self.passes_begun == 0
        return [own._replace(frame_idx=own.frame_idx // 2) for own in images] if halves else images

    def _pass(self, **given):
        self.passes_begun += 1
        if self.passes_begun == 1 or not self.in_time:
            video, self.audio = self.helpers.denoise_audio_video(**given)
            return video, self.audio
        return self.helpers.denoise_video_only(**given), self.audio

    def _simple(self, video_context, audio_context, transformer):
        modality = self.helpers.modality_from_latent_state

        def denoise(video_state, audio_state, sigmas, step_index):
            sigma = sigmas[step_index]
            audio = modality(audio_state, audio_context, sigma * (audio_state.denoise_mask.max() > 0))
            return transformer(video=modality(video_state, video_context, sigma), audio=audio, perturbations=None)

        return denoise


class Model(cases_official.Model):
    runs = Run

    def sizes(self, request):
        length = round(request["num_frames"] / request["frame_rate"] * 25)
        passes = [first(request), tuple(request[key] for key in ("width", "height", "num_frames", "frame_rate"))]
        latents = [(self.channels, (frames - 1) // 8 + 1, height // 32, width // 32) for width, height, frames, _ in passes]
        return [((1, *video), (1, self.sound, length, self.bins)) for video in latents]


# 45 frames/s would give the first pass longer sound; 72 exceeds the maximum of the positions.
_CASES = {
    "x1_5": request("two_stage", guidance=GUIDED, images=[image(0)], width=96, height=96, upsample=["spatial_x1_5"]),
    "temporal_x1_5": request(
        "two_stage", guidance=GUIDED, images=[image(0), image(11, 0.75)], width=96, height=96, num_frames=17,
        frame_rate=45.0, upsample=["temporal_x2", "spatial_x1_5"],
    ),
    "x2_temporal": request(
        "keyframes", guidance=GUIDED, images=[image(0), image(8, 0.8)], width=128, height=64, num_frames=17,
        frame_rate=72.0, upsample=["spatial_x2", "temporal_x2"],
    ),
}


def upsampling():
    for model, case, asked in ((model, *own) for model in official_pipelines.each_model(Model) for own in _CASES.items()):
        asked = {**asked, "model": model.name}
        outputs = model.run(asked)
        if case == "temporal_x1_5":
            mel = model.audio_vae.decode(outputs["latents.audio"], return_dict=False)[0]
            outputs |= {"video": model.frames(outputs), "audio": models.load(model.name, "vocoder")(mel)}
        # Skips duplicates: final latents, and sound that the second pass keeps.
        kept_sound = "temporal_x2" in asked["upsample"]
        twice = lambda name: name.startswith("latents.") or kept_sound and name.startswith("stage_2.") and name.endswith("audio")
        outputs = {name: value for name, value in outputs.items() if not twice(name) and "noise" not in name}
        parts = {f"{'temporal_' * ('temporal' in k)}latent_upsampler": upsampler(model.name, k) for k in asked["upsample"]}
        settings = [*keys(asked, "official_1_0"), f"two_stage.upsample={json.dumps(asked['upsample'])}"]
        write_requests(
            "upsampling", case, model, outputs, settings, "_two_stage", more={"upsamplers": parts},
            strides={"video": (1, 8, 1, 17, 17), "audio": (1, 1, 211)}, limit=FULL_LIMIT,
        )
