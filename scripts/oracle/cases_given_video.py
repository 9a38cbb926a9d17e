"""Writes passes that start from an input video, and audio-only passes: latents after every step, masks, some frames and samples.

Release 1.2.0 writes `given_video`, 1.0.0 `given_video_1_0`. `retake*` and `text_to_audio` are Lightricks' pipelines; the other
cases are assembled from the parts of `RetakePipeline` with this project's audio masks."""

import dataclasses
import math
from contextlib import ExitStack
from unittest.mock import patch

import official_pipelines
import torch
from official_pipelines import guider_parameters, ltx

from cases_official import FULL, SOUND, Model, keys, request, scales, write_requests
from common import pattern

_FRAMES, _HEIGHT, _WIDTH, _RATE, _SAMPLES = 17, 64, 96, 24.0, 11333


def samples():
    """Returns a pattern of samples at 16 kHz, `[1, 2, n]`."""
    c, n = torch.meshgrid(torch.arange(2), torch.arange(_SAMPLES), indexing="ij")
    return (((n * 7919 + c * 104729) % 2001 - 1000).float() / 4000)[None]


def pixels(of=slice(None)):
    """Returns the frames in -1..1, `[1, 3, frames, height, width]`."""
    return pattern(_FRAMES, _HEIGHT, _WIDTH)[of].permute(3, 0, 1, 2)[None].float() / 127.5 - 1


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


class Given(official_pipelines.Run):
    """One request by Lightricks' pipelines, or assembled from the parts of `RetakePipeline`."""

    def __init__(self, model, asked, sizes):
        self.alone, self.masks, self.frames = asked["kind"] == "text_to_audio", {}, asked["num_frames"]
        pipeline = "text_to_audio" if self.alone else "retake"
        super().__init__(model.path, None, {**asked, "pipeline": pipeline}, model.contexts, sizes)
        if self.alone:
            noise = lambda *_, generator, **__: torch.randn(sizes[0][1], generator=generator).transpose(1, 2).flatten(2)
            ltx("core.components.noisers").torch.randn = noise
        self.types, self.contexts = ltx("core.types"), model.contexts

    def _arguments(self, _upsampler):
        # 1.2.0 assumes a distilled checkpoint by default.
        return {"loras": (), "device": torch.device("cpu"), **({} if self.wheels or self.alone else {"distilled": False})}

    def _of_checkout(self, model, *more):
        # The audio-only key map lacks the caption projection of LTX-2.0.
        if self.alone and self.request["caption_projection"]:
            self.module.LTXV_AUDIO_ONLY_MODEL_COMFY_RENAMING_MAP = ltx("core.model.transformer").LTXV_MODEL_COMFY_RENAMING_MAP
        return super()._of_checkout(model, *more)

    def _media(self, stack):
        sound = self.types.Audio(samples(), 16000) if self.request["sound"] else None
        read, module, shape = {"decode_audio_from_file": lambda *_, **__: sound}, self.module, (_RATE, _FRAMES, _WIDTH, _HEIGHT)
        if self.wheels:
            read["load_video_conditioning"] = lambda **_: pixels()
        else:
            shape, module = self.types.VideoPixelShape(1, _FRAMES, _HEIGHT, _WIDTH, _RATE), ltx("pipelines.utils.helpers")
            read["get_videostream_fps"] = lambda _: _RATE
            read["decode_video_from_file"] = lambda **_: iter(pattern(_FRAMES, _HEIGHT, _WIDTH).split(1))
        stack.enter_context(patch.object(self.module, "get_videostream_metadata", lambda *_, **__: shape))
        stack.enter_context(patch.multiple(module, **read))

    def _keep_masks(self, stack):
        """Records the mask of each stream. A frozen stream starts from its latents instead of from noise at level 0."""
        blocks = self.module if self.wheels else ltx("pipelines.utils.blocks")
        for name in ("noise_video_state", "noise_audio_state") if self.wheels else ("_build_state",):

            def kept(*args, own=getattr(blocks, name), **more):
                if not self.wheels and args[0].frozen:
                    args = (dataclasses.replace(args[0], noise_scale=0.0), *args[1:])
                made = own(*args, **more)
                state = made[0] if self.wheels else made
                self.masks["mask." + ("video", "audio")[len(self.masks)]] = state.denoise_mask[0, :, 0]
                return made

            stack.enter_context(patch.object(blocks, name, kept))

    def __call__(self):
        r = self.request
        guiders = {f"{stream}_guider_params": guider_parameters(own) for stream, own in r["guidance"].items()}
        given = dict(prompt=r["prompt"], negative_prompt=r["negative_prompt"], seed=r["seed"], num_inference_steps=r["steps"])
        if self.alone:
            given |= {key: r[key] for key in ("num_frames", "frame_rate")}
            self.pipeline(**given, audio_guider_params=guiders["audio_guider_params"])
            return self.passes[0]
        with ExitStack() as stack:
            self._media(stack)
            self._keep_masks(stack)
            if r["kind"] == "retake":
                given |= dict(zip(("start_time", "end_time"), r["span"]), regenerate_audio=r["anew"], tiling_config=None)
                self.pipeline("given", **given, **guiders)
            else:
                self._assembled()
        return self.passes[0]

    def _heard(self, sound):
        encode = ltx("core.model.audio_vae").encode_audio
        encoded = lambda encoder: encode(sound, encoder, None)[:, :, : round(self.frames / _RATE * 25)]
        return encoded(self.pipeline.model_ledger.audio_encoder()) if self.wheels else self.pipeline.audio_conditioner(encoded)

    def _encoded(self, of, delay=0, start=0):
        """Returns latents of the video frames `of`, and of the sound from frame `start`, after `delay` frames of silence."""
        count, pad = (lambda n: round(n / _RATE * 16000)), torch.nn.functional.pad
        sound = pad(samples()[..., count(start):], (count(delay), 0))[..., : count(self.frames)]
        heard = self._heard(self.types.Audio(pad(sound, (0, count(self.frames) - sound.shape[-1])), 16000))
        if self.wheels:
            return self.pipeline.model_ledger.video_encoder()(pixels(of)), heard
        return self.pipeline.image_conditioner(lambda own: own(pixels(of))), heard

    def _assembled(self):
        r, n, kind = self.request, self.frames, self.request["kind"]
        by_index = ltx("core.conditioning").VideoConditionByLatentIndex
        if kind == "audio_to_video":
            decode = ltx("pipelines.utils.media_io").decode_audio_from_file
            sound = self._heard(decode(str(r["audio"]["path"]), "cpu", r["audio"]["start"], n / _RATE))
            return self._pass({}, dict(initial_latent=sound, frozen=True), given="audio")
        if kind.startswith("inpaint"):
            # The left column of the picture is kept.
            (video, sound), keep = self._encoded(slice(None)), torch.tensor([1.0, 0, 0]).expand(1, 3, 2, 3)
            items = dict(conditionings=[ltx("core.conditioning.types.mask_cond").VideoConditionByMask(video, keep)])
            frozen = kind == "inpaint_sound"
            return self._pass(items, dict(initial_latent=sound, frozen=True) if frozen else {}, given="audio" if frozen else None)
        if kind == "video_to_audio":
            video, _ = self._encoded(slice(None))
            # 1.0.0 has no frozen streams; an empty region keeps the stream at each step's noise level.
            kept = dict(conditionings=[self.module.TemporalRegionMask(0.0, 0.0, _RATE)]) if self.wheels else dict(frozen=True)
            return self._pass(dict(initial_latent=video, **kept), {}, given="video")
        overlap = r["overlap"]
        if kind == "extend":
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
        r, module, (positive, negative) = self.request, self.module, self.contexts
        guide = ltx("core.components.guiders").MultiModalGuider
        guiders = [guide(guider_parameters(own), (positive if s == given else negative)[s]) for s, own in r["guidance"].items()]
        texts = positive["video"], positive["audio"]
        noiser = module.GaussianNoiser(generator=torch.Generator().manual_seed(r["seed"]))
        sigmas = module.LTX2Scheduler().execute(steps=r["steps"]).float()
        if not self.wheels:
            spec = module.ModalitySpec
            streams = dict(video=spec(context=texts[0], **video), audio=spec(context=texts[1], **audio))
            denoiser, size = module.GuidedDenoiser(*texts, *guiders), (_WIDTH, _HEIGHT, self.frames, _RATE)
            return self.pipeline.stage(denoiser, sigmas, noiser, *size, **streams)
        common = dict(
            output_shape=self.types.VideoPixelShape(1, self.frames, _HEIGHT, _WIDTH, _RATE), noiser=noiser,
            components=self.pipeline.pipeline_components, dtype=torch.float32, device=torch.device("cpu"), conditionings=[],
        )
        denoise = module.multi_modal_guider_denoising_func(*guiders, *texts, self.pipeline.model_ledger.transformer())
        return module.euler_denoising_loop(
            sigmas=sigmas, video_state=module.noise_video_state(**common | video)[0], stepper=module.EulerDiffusionStep(),
            audio_state=module.noise_audio_state(**common | audio)[0], denoise_fn=denoise,
        )


def retake(start, end, anew=True):
    span = f"{{from: {start}" + (f", to: {end}" if end else "") + ("" if anew else ", audio: false") + "}"
    return dict(kind="retake", span=(start, end or 99.0), anew=anew), [f"request.retake={span}"]


def extend(overlap, before=False):
    """Returns the request of an extension by eight frames and its settings."""
    more = f"{{seconds: {8 / _RATE}, overlap: {overlap}" + (", at: start" if before else "") + "}"
    kind = "extend_before" if before else "extend"
    return dict(kind=kind, overlap=overlap, num_frames=overlap + 8), [f"request.extend={more}"]


def cases(wheels):
    both, kept = ("video", "audio"), ["conditioning.given_stream=official_1_0"]
    # Input streams have no guidance.
    to_sound = dict(kind="video_to_audio", sound=False, guidance={"video": scales(), "audio": FULL["audio"]})
    if wheels:
        asked, settings = retake(0.3, 0.4, anew=False)
        return {
            "retake": (*retake(0.3, 0.4), ()), "extend": (*extend(9), ()), "retake_video": (asked, settings + kept, ()),
            "video_to_audio": (to_sound, kept, ()),
        }
    guided = {"video": FULL["video"], "audio": scales()}
    to_video = dict(kind="audio_to_video", audio=dict(path=SOUND, start=0.05), num_frames=9, guidance=guided)
    region = "request.inpaint={region: [40, 0, 56, 64]"
    # Audio-only passes have no modality guidance.
    alone = dict(kind="text_to_audio", guidance={"video": scales(), "audio": {**FULL["audio"], "modality": 1.0}})
    return {
        "retake": (*retake(0.3, 0.4), both), "extend": (*extend(9), both), "retake_start": (*retake(0.0, 0.2), ()),
        "retake_video": (*retake(0.5, None, anew=False), ()), "extend_17": (*extend(17), ()),
        "extend_before": (*extend(9, before=True), ()), "extend_before_17": (*extend(17, before=True), ()),
        "video_to_audio": (to_sound, [], ("audio",)), "audio_to_video": (to_video, [], ("video",)),
        "inpaint": (dict(kind="inpaint"), [region + ", audio: true}"], both),
        "inpaint_sound": (dict(kind="inpaint_sound", guidance=guided), [region + "}"], ()), "text_to_audio": (alone, [], ("audio",)),
    }


def write(model, case, more, settings, decode):
    asked = request("image_to_video", num_frames=_FRAMES, width=_WIDTH, height=_HEIGHT, steps=3, guidance=FULL)
    asked = {**asked, "sound": True, "caption_projection": model.name == "tiny_a", **more}
    sizes = model.sizes(asked)
    theirs = Given(model, asked, sizes)
    steps, release = theirs(), "_1_0" if theirs.wheels else ""
    if theirs.alone:
        _, channels, *grid = sizes[0][0]
        steps = [[torch.zeros(1, math.prod(grid), channels), *tokens] for tokens in steps]
    outputs = theirs.masks | model.steps([steps], sizes)
    outputs = {name: value for name, value in outputs.items() if not (theirs.alone and name.endswith("latents.video"))}
    if decode:
        outputs |= model.decoded(steps[-1], sizes[0], decode)
    if not theirs.wheels:
        # Guidance of input streams has no effect, so the settings can be the preset's.
        asked["guidance"] = FULL
    own = keys(asked, f"official{release}", ("pipeline", "request.num_frames", "request.frame_rate"))
    if "extend" not in asked["kind"]:
        own.append(f"request.num_frames={asked['num_frames']}")
    own.append(f"pipeline={asked['kind'].removesuffix('_before').removesuffix('_sound')}")
    write_requests(
        f"given_video{release}", case, model, outputs, [*own, *settings],
        strides={"video": (1, 4, 1, 17, 17), "audio": (1, 1, 37)},
        extra={} if asked["kind"] in ("retake", "text_to_audio") else {"assembled": "true"},
    )


def given_video():
    for model in official_pipelines.each_model(Model):
        for case, parts in cases(official_pipelines.wheels()).items():
            write(model, case, *parts)
