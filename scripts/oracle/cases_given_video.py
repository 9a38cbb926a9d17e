#!/usr/bin/env python3
"""Writes passes that start from an input video, and audio-only passes: latents after every step, masks, some frames and samples.

    cases_given_video.py --official FOLDER     release 1.2.0: `given_video`
    cases_given_video.py                       release 1.0.0: `given_video_1_0`

`retake*` and `text_to_audio` are Lightricks' pipelines. The other cases, which Lightricks lacks, are assembled from the parts of
`RetakePipeline` with this project's audio masks; their metadata has `assembled`.
"""

import dataclasses
import importlib
import math
from contextlib import ExitStack
from unittest.mock import patch

import official_pipelines
import torch

from cases_decoders import thin
from cases_official import SOUND, UPSAMPLERS, Model, keys, request, scales
from common import show, write_case

_FRAMES, _HEIGHT, _WIDTH, _RATE, _SAMPLES = 17, 64, 96, 24.0, 11333
_STRIDES = {"video": (1, 4, 1, 17, 17), "audio": (1, 1, 37)}
# The presets' guidance, with a block that the fixture models have.
_FULL = {
    "video": scales(cfg=3.0, stg=1.0, modality=3.0, rescale=0.7, stg_blocks=[1]),
    "audio": scales(cfg=7.0, stg=1.0, modality=3.0, rescale=0.7, stg_blocks=[1]),
}
# Input streams have no guidance.
_SOUND_ONLY = {"video": scales(), "audio": _FULL["audio"]}
# Audio-only passes have no modality guidance.
_ALONE = {"video": scales(), "audio": {**_FULL["audio"], "modality": 1.0}}


def frames():
    """Returns a pattern of bytes, `[frames, height, width, 3]`."""
    f, y, x, c = torch.meshgrid(*(torch.arange(n) for n in (_FRAMES, _HEIGHT, _WIDTH, 3)), indexing="ij")
    return (f * 11 + y * 5 + x * 3 + c * 40) % 256


def samples():
    """Returns a pattern of samples at 16 kHz, `[1, 2, n]`."""
    c, n = torch.meshgrid(torch.arange(2), torch.arange(_SAMPLES), indexing="ij")
    return (((n * 7919 + c * 104729) % 2001 - 1000).float() / 4000)[None]


def pixels(of=slice(None)):
    """Returns the frames in -1..1, `[1, 3, frames, height, width]`."""
    return frames()[of].permute(3, 0, 1, 2)[None].float() / 127.5 - 1


class Sound:
    """Conditioning that keeps the audio tokens which lie entirely within a span of seconds."""

    def __init__(self, start, end):
        self.start, self.end = start, end

    def apply_to(self, latent_state, latent_tools):
        bounds = latent_tools.patchifier.get_patch_grid_bounds(latent_tools.target_shape, device="cpu")[:, 0]
        state = latent_state.clone()
        kept = (bounds[..., 0] >= self.start) & (bounds[..., 1] <= self.end)
        state.denoise_mask.copy_((~kept).float().unsqueeze(-1))
        return state


class Noise(official_pipelines.Noise):
    """Noise source that also supports passes without video."""

    def randn(self, *shape, generator, **more):
        if self.sound is None:
            return super().randn(*shape, generator=generator, **more)
        return torch.randn(self.sound, generator=generator).transpose(1, 2).flatten(2)


class Given(official_pipelines.Run):
    """One request by Lightricks' pipelines, or assembled from the parts of `RetakePipeline`."""

    def __init__(self, model, asked, sizes):
        alone = asked["kind"] == "text_to_audio"
        pipeline, self.masks, self.frames = ("text_to_audio" if alone else "retake"), {}, asked["num_frames"]
        super().__init__(model.path, None, {**asked, "pipeline": pipeline}, model.contexts, sizes)
        self.noise = Noise(sizes)
        self.noise.sound = sizes[0][1] if alone else None
        importlib.import_module("ltx_core.components.noisers").torch.randn = self.noise.randn
        self.types = importlib.import_module("ltx_core.types")

    def _arguments(self, _upsampler):
        own = {"loras": (), "device": torch.device("cpu")}
        # 1.2.0 assumes a distilled checkpoint by default.
        return own if self.wheels or self.request["pipeline"] == "text_to_audio" else {**own, "distilled": False}

    def _of_checkout(self, model, *more):
        # The audio-only key map lacks the caption projection of LTX-2.0.
        if self.request["pipeline"] == "text_to_audio" and self.request["caption_projection"]:
            transformer = importlib.import_module("ltx_core.model.transformer")
            self.module.LTXV_AUDIO_ONLY_MODEL_COMFY_RENAMING_MAP = transformer.LTXV_MODEL_COMFY_RENAMING_MAP
        return super()._of_checkout(model, *more)

    def _media(self, stack):
        """Makes the pipelines read the patterns instead of files."""
        sound = self.types.Audio(samples(), 16000) if self.request["sound"] else None
        pixel_shape = self.types.VideoPixelShape(1, _FRAMES, _HEIGHT, _WIDTH, _RATE)
        given = {"get_videostream_metadata": lambda *_, **__: pixel_shape}
        read, module = {"decode_audio_from_file": lambda *_, **__: sound}, self.module
        if self.wheels:
            given = {"get_videostream_metadata": lambda _: (_RATE, _FRAMES, _WIDTH, _HEIGHT)}
            read["load_video_conditioning"] = lambda **_: pixels()
        else:
            module = importlib.import_module("ltx_pipelines.utils.helpers")
            read["get_videostream_fps"] = lambda _: _RATE
            read["decode_video_from_file"] = lambda **_: iter(frames().to(torch.uint8).split(1))
        for module, functions in ((self.module, given), (module, read)):
            for name, function in functions.items():
                stack.enter_context(patch.object(module, name, function))

    def _keep_masks(self, stack):
        """Records the mask of each stream. A frozen stream starts from its latents instead of from noise at level 0."""
        blocks = self.module if self.wheels else importlib.import_module("ltx_pipelines.utils.blocks")
        names = ("noise_video_state", "noise_audio_state") if self.wheels else ("_build_state",)
        for name in names:
            own = getattr(blocks, name)

            def kept(*args, own=own, **more):
                if not self.wheels and args[0].frozen:
                    args = (dataclasses.replace(args[0], noise_scale=0.0), *args[1:])
                made = own(*args, **more)
                state = made[0] if self.wheels else made
                self.masks[("video", "audio")[len(self.masks)]] = state.denoise_mask[0, :, 0].contiguous()
                return made

            stack.enter_context(patch.object(blocks, name, kept))

    def __call__(self):
        r = self.request
        with ExitStack() as stack:
            if r["kind"] == "text_to_audio":
                self.pipeline(
                    **{key: r[key] for key in ("prompt", "negative_prompt", "seed", "num_frames", "frame_rate")},
                    num_inference_steps=r["steps"], audio_guider_params=official_pipelines.guider_parameters(r["guidance"]["audio"]),
                )
            else:
                self._media(stack)
                self._keep_masks(stack)
                self._retake() if r["kind"] == "retake" else self._assembled()
        return self.steps.passes[0]

    def _retake(self):
        r = self.request
        guiders = {f"{s}_guider_params": official_pipelines.guider_parameters(own) for s, own in r["guidance"].items()}
        self.pipeline(
            "given", r["prompt"], *r["span"], r["seed"], negative_prompt=r["negative_prompt"], num_inference_steps=r["steps"],
            **guiders, regenerate_audio=r["anew"], tiling_config=None,
        )

    def _encoded(self, of, delay=0, start=0):
        """Returns latents of the video frames `of`, and of the sound from frame `start`, after `delay` frames of silence."""
        count = lambda n: round(n / _RATE * 16000)
        sound = torch.nn.functional.pad(samples()[..., count(start):], (count(delay), 0))[..., : count(self.frames)]
        sound = self.types.Audio(torch.nn.functional.pad(sound, (0, count(self.frames) - sound.shape[-1])), 16000)
        encode = importlib.import_module("ltx_core.model.audio_vae").encode_audio
        heard = lambda encoder: encode(sound, encoder, None)[:, :, : round(self.frames / _RATE * 25)]
        if self.wheels:
            ledger = self.pipeline.model_ledger
            return ledger.video_encoder()(pixels(of)), heard(ledger.audio_encoder())
        return self.pipeline.image_conditioner(lambda own: own(pixels(of))), self.pipeline.audio_conditioner(heard)

    def _assembled(self):
        """Runs requests for which Lightricks has no pipeline."""
        r, n = self.request, self.frames
        by_index = importlib.import_module("ltx_core.conditioning").VideoConditionByLatentIndex
        if r["kind"] == "audio_to_video":
            media = importlib.import_module("ltx_pipelines.utils.media_io")
            given = media.decode_audio_from_file(str(r["audio"]["path"]), "cpu", r["audio"]["start"], n / _RATE)
            encode = importlib.import_module("ltx_core.model.audio_vae").encode_audio
            sound = self.pipeline.audio_conditioner(lambda encoder: encode(given, encoder, None))[:, :, : round(n / _RATE * 25)]
            return self._pass({}, dict(initial_latent=sound, frozen=True), given="audio")
        if r["kind"] == "video_to_audio":
            video, _ = self._encoded(slice(None))
            region = self.module.TemporalRegionMask(0.0, 0.0, _RATE)
            # 1.0.0 has no frozen streams; an empty region keeps the stream at each step's noise level.
            kept = dict(conditionings=[region]) if self.wheels else dict(frozen=True)
            return self._pass(dict(initial_latent=video, **kept), {}, given="video")
        overlap = r["overlap"]
        if r["kind"] == "extend":
            video, audio = self._encoded(slice(_FRAMES - overlap, None), start=_FRAMES - overlap)
            items = by_index(video, 1.0, 0), Sound(0.0, overlap / _RATE)
        else:
            video, audio = self._encoded(slice(overlap), delay=n - overlap)
            # The first latent covers one frame, the target positions eight.
            video = video[:, :, 1:]
            items = by_index(video, 1.0, (n - 1) // 8 + 1 - video.shape[2]), Sound((n - overlap + 1) / _RATE, float("inf"))
        return self._pass(dict(conditionings=[items[0]]), dict(conditionings=[items[1]], initial_latent=audio))

    def _pass(self, video, audio, given=None):
        """Runs one denoising pass; an input stream gets the prompt in the negative branch too."""
        r, positive, negative = self.request, *self.contexts
        guiders = importlib.import_module("ltx_core.components.guiders")
        guider = [
            guiders.MultiModalGuider(
                official_pipelines.guider_parameters(own), positive[s] if s == given else negative[s]
            ) for s, own in r["guidance"].items()
        ]
        texts = positive["video"], positive["audio"]
        noiser = self.module.GaussianNoiser(generator=torch.Generator().manual_seed(r["seed"]))
        sigmas = self.module.LTX2Scheduler().execute(steps=r["steps"]).float()
        if not self.wheels:
            spec = self.module.ModalitySpec
            return self.pipeline.stage(
                self.module.GuidedDenoiser(*texts, *guider), sigmas, noiser, _WIDTH, _HEIGHT, self.frames, _RATE,
                video=spec(context=texts[0], **video), audio=spec(context=texts[1], **audio),
            )
        states = [
            make(
                output_shape=self.types.VideoPixelShape(1, self.frames, _HEIGHT, _WIDTH, _RATE), noiser=noiser,
                components=self.pipeline.pipeline_components, dtype=torch.float32, device=torch.device("cpu"),
                **{"conditionings": [], **own},
            )[0] for make, own in ((self.module.noise_video_state, video), (self.module.noise_audio_state, audio))
        ]
        denoise = self.module.multi_modal_guider_denoising_func(*guider, *texts, self.pipeline.model_ledger.transformer())
        return self.module.euler_denoising_loop(
            sigmas=sigmas, video_state=states[0], audio_state=states[1], stepper=self.module.EulerDiffusionStep(), denoise_fn=denoise,
        )


def retake(start, end, anew=True):
    """Returns the request of a retake and its settings."""
    span = f"{{from: {start}" + (f", to: {end}" if end else "") + ("" if anew else ", audio: false") + "}"
    return dict(kind="retake", span=(start, end or 99.0), anew=anew), ["pipeline=retake", f"request.retake={span}"]


def extend(overlap, before=False):
    """Returns the request of an extension by eight frames and its settings."""
    more = f"{{seconds: {8 / _RATE}, overlap: {overlap}" + (", at: start" if before else "") + "}"
    kind = "extend_before" if before else "extend"
    return dict(kind=kind, overlap=overlap, num_frames=overlap + 8), ["pipeline=extend", f"request.extend={more}"]


def cases(wheels):
    """Yields name, request, settings, and whether to keep frames and samples."""
    to_sound = dict(kind="video_to_audio", sound=False, guidance=_SOUND_ONLY), ["pipeline=video_to_audio"]
    yield "retake", *retake(0.3, 0.4), not wheels
    yield "extend", *extend(9), not wheels
    if wheels:
        kept = "conditioning.given_stream=official_1_0"
        asked, settings = retake(0.3, 0.4, anew=False)
        yield "retake_video", asked, [*settings, kept], False
        yield "video_to_audio", to_sound[0], [*to_sound[1], kept], False
        return
    yield "retake_start", *retake(0.0, 0.2), False
    yield "retake_video", *retake(0.5, None, anew=False), False
    yield "extend_17", *extend(17), False
    yield "extend_before", *extend(9, before=True), False
    yield "extend_before_17", *extend(17, before=True), False
    yield "video_to_audio", *to_sound, True
    to_video = dict(
        kind="audio_to_video", audio=dict(path=SOUND, start=0.05), num_frames=9,
        guidance={"video": _FULL["video"], "audio": scales()},
    )
    yield "audio_to_video", to_video, ["pipeline=audio_to_video"], True
    yield "text_to_audio", dict(kind="text_to_audio", guidance=_ALONE), ["pipeline=text_to_audio"], True


def write(model, component, source):
    for name, more, settings, decode in cases(component.endswith("_1_0")):
        asked = request("image_to_video", num_frames=_FRAMES, width=_WIDTH, height=_HEIGHT, steps=3, guidance=_FULL)
        asked = {**asked, "sound": True, "caption_projection": model.name == "tiny_a", **more}
        sizes, outputs, alone = model.sizes(asked), {}, asked["kind"] == "text_to_audio"
        theirs = Given(model, asked, sizes)
        steps = theirs()
        outputs = {f"mask.{stream}": mask for stream, mask in theirs.masks.items()}
        _, channels, *grid = sizes[0][0]
        empty = torch.zeros(1, math.prod(grid), channels)
        for step, tokens in enumerate(steps):
            named = model.unpacked([empty, *tokens] if alone else tokens, sizes[0])
            named = {n: v for n, v in named.items() if not alone or n == "latents.audio"}
            outputs.update({f"step_{step}.{n}": v.contiguous() for n, v in named.items()})
        if decode:
            made_of = {"text_to_audio": ["audio"], "video_to_audio": ["audio"], "audio_to_video": ["video"]}
            kept = made_of.get(asked["kind"], ["video", "audio"])
            outputs |= model.decoded(steps[-1], sizes[0], kept)
        outputs, extra = thin({k: v.contiguous() for k, v in outputs.items()}, _STRIDES, limit=0)
        # Guidance of input streams has no effect, so the settings can be the preset's.
        told = {**asked, "guidance": asked["guidance"] if component.endswith("_1_0") else _FULL}
        reference = "official_1_0" if component.endswith("_1_0") else "official"
        own = [key for key in keys(told, reference) if not key.startswith(("pipeline=", "request.num_frames", "request.frame_rate"))]
        if not any("extend" in key for key in settings):
            own.append(f"request.num_frames={asked['num_frames']}")
        scalars = {
            "preset": official_pipelines.PRESETS[model.name], "common": [*own, *settings], "keys": {"": []},
            "upsampler": UPSAMPLERS[model.name],
        }
        assembled = {} if asked["kind"] in ("retake", "text_to_audio") else {"assembled": "true"}
        write_case(
            component, f"{model.name}_{name}", {}, outputs, script=__file__, model=model.name, seed=asked["seed"],
            scalars=scalars, extra={"ltx-pipelines": source, **assembled, **extra},
        )
        show(f"{component}/{model.name}_{name}: {len(outputs)} tensors", *list(outputs.values())[-2:])


def main():
    folder = official_pipelines.prepare(__doc__).official
    component, source = ("given_video", official_pipelines.RELEASE) if folder else ("given_video_1_0", "1.0.0")
    official_pipelines.clear(component)
    official_pipelines.for_each_model(Model, lambda model: write(model, component, source))


if __name__ == "__main__":
    main()
