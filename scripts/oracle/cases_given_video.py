#!/usr/bin/env python3
"""Fixtures of passes that start from a given video, by the wheels 1.0.0: `cases_given_video.py`. Latents after every step.

States, masks, noiser, networks, guider and loop are Lightricks'. Ours are the text contexts and video latents (diffusers'
connectors and video VAE), and the masks of what they have no pipeline for: sound that a clip goes on behind.
"""

import importlib
import shutil
import tempfile
from pathlib import Path

import official_pipelines
import torch

import models
from cases_official import UPSAMPLERS, Model, keys, request, scales
from common import CASES, fix_numerics, show, write_case

_FRAMES, _HEIGHT, _WIDTH, _RATE, _SAMPLES = 17, 64, 96, 24.0, 11333
_OVERLAP = 9
_CFG = {"video": scales(cfg=4.0), "audio": scales(cfg=3.0)}
_SOUND_ONLY = {"video": scales(), "audio": scales(cfg=3.0)}


def frames():
    """A pattern of bytes, `[frames, height, width, 3]`."""
    f, y, x, c = torch.meshgrid(*(torch.arange(n) for n in (_FRAMES, _HEIGHT, _WIDTH, 3)), indexing="ij")
    return (f * 11 + y * 5 + x * 3 + c * 40) % 256


def samples():
    """A pattern of samples at 16 kHz, `[1, 2, n]`."""
    c, n = torch.meshgrid(torch.arange(2), torch.arange(_SAMPLES), indexing="ij")
    return (((n * 7919 + c * 104729) % 2001 - 1000).float() / 4000)[None]


class Sound:
    """A mask of audio tokens that lie wholly within a span of seconds, whose latents stay."""

    def __init__(self, end):
        self.end = end

    def apply_to(self, latent_state, latent_tools):
        bounds = latent_tools.patchifier.get_patch_grid_bounds(latent_tools.target_shape, device="cpu")[:, 0]
        state = latent_state.clone()
        state.denoise_mask.copy_((bounds[..., 1] > self.end).float().unsqueeze(-1))
        return state


class Clip:
    """The given video as latents, normalised."""

    def __init__(self, model):
        self.model, self.core = model, importlib.import_module("ltx_core.model.audio_vae")
        official = importlib.import_module("cases_sound")._official
        self.encoder = official(model.name, models.AUDIO_VAE[model.name]["mel_bins"])

    def video(self, start=0):
        """Latents of the frames from `start` on."""
        pixels = frames()[start:].permute(3, 0, 1, 2)[None].float() / 127.5 - 1
        latents, vae = self.model.vae.encode(pixels).latent_dist.mode(), self.model.vae
        return (latents - vae.latents_mean.view(1, -1, 1, 1, 1)) / vae.latents_std.view(1, -1, 1, 1, 1)

    def audio(self, start=0):
        """Latents of the sound from frame `start` on, silence behind it."""
        skipped = round(start / _RATE * 16000)
        sound = torch.nn.functional.pad(samples()[..., skipped:], (0, skipped))
        audio = importlib.import_module("ltx_core.types").Audio
        return self.core.encode_audio(audio(sound, 16000), self.encoder)


class Pass:
    """One pass on a fixture model."""

    def __init__(self, model, asked):
        self.helpers = importlib.import_module("ltx_pipelines.utils.helpers")
        core = importlib.import_module("ltx_core.model.transformer")
        builder = importlib.import_module("ltx_core.loader.single_gpu_model_builder").SingleGPUModelBuilder
        network = builder(
            model_path=str(model.path), model_class_configurator=core.LTXModelConfigurator,
            model_sd_ops=core.LTXV_MODEL_COMFY_RENAMING_MAP,
        ).build(device=torch.device("cpu"))
        self.network = importlib.import_module("ltx_core.model.transformer.model").X0Model(network.eval())
        types = importlib.import_module("ltx_pipelines.utils.types")
        self.components = types.PipelineComponents(torch.float32, "cpu")
        self.components.video_latent_channels = model.channels
        self.model, self.asked = model, asked
        self.sizes = model.sizes(asked)[0]
        self.pixels = importlib.import_module("ltx_core.types").VideoPixelShape(1, _FRAMES, _HEIGHT, _WIDTH, _RATE)
        self.noise = official_pipelines.Noise([self.sizes])
        noisers = importlib.import_module("ltx_core.components.noisers")
        noisers.torch = official_pipelines.Torch(randn=self.noise.randn)
        self.noiser = noisers.GaussianNoiser(generator=torch.Generator().manual_seed(asked["seed"]))
        self.stepper = importlib.import_module("ltx_core.components.diffusion_steps").EulerDiffusionStep()
        scheduler = importlib.import_module("ltx_core.components.schedulers").LTX2Scheduler()
        self.sigmas = scheduler.execute(steps=asked["steps"]).float()

    def states(self, video, audio):
        """Noised states from latents and conditionings, each a pair."""
        base = dict(
            output_shape=self.pixels, components=self.components, dtype=torch.float32, device="cpu", noiser=self.noiser
        )
        pairs = (self.helpers.noise_video_state, video), (self.helpers.noise_audio_state, audio)
        return [make(conditionings=items, initial_latent=latents, **base)[0] for make, (latents, items) in pairs]

    def guided(self):
        """Their denoising function with this request's guidance."""
        guiders = importlib.import_module("ltx_core.components.guiders")
        positive, negative = self.model.contexts
        made = []
        for stream in ("video", "audio"):
            s = self.asked["guidance"][stream]
            params = guiders.MultiModalGuiderParams(
                cfg_scale=s["cfg"], stg_scale=0.0, modality_scale=1.0, rescale_scale=0.0, stg_blocks=[]
            )
            made.append(guiders.MultiModalGuider(params, negative[stream] if s["cfg"] != 1 else None))
        return self.helpers.multi_modal_guider_denoising_func(*made, positive["video"], positive["audio"], self.network)

    def clean_video(self, video, audio, sigmas, index):
        """The same without guidance, the video at noise level 0."""
        contexts, modality = self.model.contexts[0], self.helpers.modality_from_latent_state
        streams = dict(
            video=modality(video, contexts["video"], sigmas[index] * 0), audio=modality(audio, contexts["audio"], sigmas[index])
        )
        return self.network(**streams, perturbations=None)

    def run(self, states, denoise):
        """Packed latents of both streams at the start and after every step, and their masks."""
        samplers = importlib.import_module("ltx_pipelines.utils.samplers")
        samplers.tqdm = iter
        steps = official_pipelines.Steps()
        steps.wrap(samplers.euler_denoising_loop)(
            sigmas=self.sigmas, video_state=states[0], audio_state=states[1], stepper=self.stepper, denoise_fn=denoise
        )
        return steps.passes[0]

    def sound_alone(self):
        """The loop without video."""
        draws = torch.Generator().manual_seed(self.asked["seed"])
        latent = torch.randn(self.sizes[1], generator=draws).transpose(1, 2).flatten(2)
        zeros = torch.zeros(self.sizes[0]), []
        state = self.states(zeros, (torch.zeros(self.sizes[1]), []))[1]
        replace = importlib.import_module("dataclasses").replace
        steps = []
        for index in range(len(self.sigmas) - 1):
            state = replace(state, latent=latent)
            modality = self.helpers.modality_from_latent_state(state, self.model.contexts[0]["audio"], self.sigmas[index])
            clean = self.network(video=None, audio=modality, perturbations=None)[1]
            steps.append(latent)
            latent = self.stepper.step(latent, clean, self.sigmas, index)
        return [*steps, latent]


def retake(start, end, video=True, audio=True):
    """Conditionings of a region."""
    region = importlib.import_module("ltx_pipelines.retake").TemporalRegionMask
    return [[region(*((start, end) if anew else (0.0, 0.0)), _RATE)] for anew in (video, audio)]


def cases(clip):
    """Name, settings, guidance, latents and conditionings of each case."""
    whole = clip.video(), clip.audio()
    by_index = importlib.import_module("ltx_core.conditioning").VideoConditionByLatentIndex
    overlap = [by_index(clip.video(_FRAMES - _OVERLAP), 1.0, 0)]
    span = "request.retake={from: 0.3, to: 0.4}"
    only = "request.retake={from: 0.3, to: 0.4, audio: false}"
    more = f"request.extend={{seconds: {8 / _RATE}, overlap: {_OVERLAP}}}"
    kept = "conditioning.given_stream=official_1_0"
    yield "retake", ["pipeline=retake", span], _CFG, whole, retake(0.3, 0.4)
    yield "retake_video", ["pipeline=retake", only, kept], _CFG, whole, retake(0.3, 0.4, audio=False)
    ends = None, clip.audio(_FRAMES - _OVERLAP)
    yield "extend", ["pipeline=extend", more], _CFG, ends, [overlap, [Sound(_OVERLAP / _RATE)]]
    silent = clip.video(), None
    yield "video_to_audio", ["pipeline=video_to_audio", kept], _SOUND_ONLY, silent, [retake(0, 0)[0], []]
    clean = ["pipeline=video_to_audio", "conditioning.given_stream=official"]
    yield "video_to_audio_clean", clean, None, silent, [retake(0, 0)[0], []]
    yield "text_to_audio", ["pipeline=text_to_audio"], None, None, None


def write(model):
    """All cases of a fixture model."""
    clip = Clip(model)
    for name, settings, guidance, latents, conditionings in cases(clip):
        neutral = {"video": scales(), "audio": scales()}
        asked = request(
            "image_to_video", num_frames=_FRAMES, width=_WIDTH, height=_HEIGHT, steps=3, guidance=guidance or neutral
        )
        one, outputs = Pass(model, asked), {}
        if latents is None:
            empty = torch.zeros(1, one.sizes[0][2] * 6, one.sizes[0][1])
            steps = [(empty, sound) for sound in one.sound_alone()]
        else:
            states = one.states(*zip(latents, conditionings))
            for stream, state in zip(("video", "audio"), states):
                outputs[f"mask.{stream}"] = state.denoise_mask[0, :, 0].contiguous()
            steps = one.run(states, one.guided() if guidance else one.clean_video)
        for step, tokens in enumerate(steps):
            named = model.unpacked(tokens, one.sizes)
            named = {n: v for n, v in named.items() if latents is not None or n == "latents.audio"}
            outputs.update({f"step_{step}.{n}": v.contiguous() for n, v in named.items()})
        own = [key for key in keys(asked, "official_1_0") if not key.startswith(("pipeline=", "request.num_frames", "request.frame_rate"))]
        if not any("extend" in key for key in settings):
            own.append(f"request.num_frames={_FRAMES}")
        scalars = {
            "preset": {"tiny_a": "ltx2", "tiny_2_3": "ltx2_3"}[model.name], "common": [*own, *settings], "keys": {"": []},
            "upsampler": UPSAMPLERS[model.name],
        }
        write_case(
            "given_video", f"{model.name}_{name}", {}, outputs, script=__file__, model=model.name, seed=asked["seed"],
            scalars=scalars, extra={"ltx-pipelines": "1.0.0"},
        )
        show(f"given_video/{model.name}_{name}: {len(outputs)} tensors", *list(outputs.values())[-2:])


def main():
    """The cases of both fixture models."""
    fix_numerics()
    official_pipelines.find_packages()
    shutil.rmtree(CASES / "given_video", ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in UPSAMPLERS:
            write(Model(name, Path(scratch)))


if __name__ == "__main__":
    with torch.no_grad():
        main()
