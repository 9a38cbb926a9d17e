"""Runs a drawn request by ltx-pipelines' states, conditionings, guiders and loops on diffusers' networks."""

import math
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch
from diffusers import LTX2Pipeline, LTXEulerAncestralRFScheduler
from diffusers.models.transformers.transformer_ltx2 import LTX2PerturbedAttnProcessor

import diffusers_run
from drawn_request import DISTILLED, NEUTRAL, SECOND, TWO_PASSES
from models import decoded
from official_pipelines import guider_parameters

# Imported by the packages for media files, which are not read here.
for name in ("av", "torchaudio", "torchaudio.transforms", "torchaudio.functional"):
    sys.modules.setdefault(name, MagicMock())
from ltx_core.components import diffusion_steps, guiders, schedulers  # noqa: E402
from ltx_core.components.noisers import GaussianNoiser  # noqa: E402
from ltx_core.conditioning import VideoConditionByKeyframeIndex, VideoConditionByLatentIndex  # noqa: E402
from ltx_core.guidance.perturbations import PerturbationType  # noqa: E402
from ltx_core.loader import fuse_loras, primitives  # noqa: E402
from ltx_core.model.transformer.model import X0Model  # noqa: E402
from ltx_core.model.upsampler import upsample_video  # noqa: E402
from ltx_core.tools import VideoLatentTools  # noqa: E402
from ltx_core.types import AudioLatentShape, SpatioTemporalScaleFactors, VideoLatentShape, VideoPixelShape  # noqa: E402
from ltx_pipelines.utils import args, helpers, samplers, types  # noqa: E402

_SELF_ATTENTION = {PerturbationType.SKIP_VIDEO_SELF_ATTN: "attn1", PerturbationType.SKIP_AUDIO_SELF_ATTN: "audio_attn1"}
_GATES = {"av_cross_attn_video_a2v_gate": "audio", "av_cross_attn_audio_v2a_gate": "video"}


class Velocity:
    """diffusers' transformer with the interface of Lightricks'."""

    def __init__(self, transformer, cross_timestep, fps, first_frame):
        """The first `first_frame` tokens are marked if the model has such a marker."""
        self.transformer, self.cross_timestep, self.fps, self.first_frame = transformer, cross_timestep, fps, first_frame
        for block in transformer.transformer_blocks:
            for name in _SELF_ATTENTION.values():
                getattr(block, name).set_processor(LTX2PerturbedAttnProcessor())

    def __call__(self, video, audio, perturbations):
        levels = {name: 1000 * m.sigma.reshape(1).float() for name, m in (("video", video), ("audio", audio))}
        network, mark = self.transformer, {}
        if network.config.use_keyframes_abs_pos_embedding:
            mark["video_keyframes_mask"] = torch.zeros(*video.latent.shape[:2], 1, device=video.latent.device)
            mark["video_keyframes_mask"][:, : self.first_frame] = 1
        skips = lambda kind, block=0: perturbations is not None and perturbations.all_in_batch(kind, block)
        cut = skips(PerturbationType.SKIP_A2V_CROSS_ATTN) and skips(PerturbationType.SKIP_V2A_CROSS_ATTN)
        with ExitStack() as stack:
            replace_forward = lambda module, make: stack.enter_context(patch.object(module, "forward", make(module.forward)))
            for (number, block), (kind, name) in product(enumerate(network.transformer_blocks), _SELF_ATTENTION.items()):
                if skips(kind, number):
                    make = lambda own: lambda *a, **k: own(*a, **{**k, "all_perturbed": True})
                    replace_forward(getattr(block, name), make)
            if self.cross_timestep == "gate_only":
                # Lightricks since May 2026: the stream's own level for scale and shift, the other's for the gate.
                for name, other in _GATES.items():
                    level = levels[other] * (network.config.cross_attn_timestep_scale_multiplier / 1000)
                    replace_forward(getattr(network, name), lambda own, level=level: lambda _, **k: own(level, **k))
            return network(
                hidden_states=video.latent, audio_hidden_states=audio.latent, encoder_hidden_states=video.context,
                audio_encoder_hidden_states=audio.context, timestep=1000 * video.timesteps[..., 0].float(),
                audio_timestep=1000 * audio.timesteps[..., 0].float(), sigma=levels["video"], audio_sigma=levels["audio"],
                video_coords=video.positions, audio_coords=audio.positions, fps=self.fps, isolate_modalities=cut,
                use_cross_timestep=self.cross_timestep == "cross", return_dict=False, **mark,
            )


class Encoder:
    """diffusers' video encoder with the interface of `VideoEncoder`."""

    def __init__(self, vae):
        self.vae, self.per_channel_statistics = vae, self
        statistics = dict(latents_mean=vae.latents_mean, latents_std=vae.latents_std, scaling_factor=vae.config.scaling_factor)
        self.normalize = partial(LTX2Pipeline._normalize_latents, **statistics)
        self.un_normalize = partial(LTX2Pipeline._denormalize_latents, **statistics)

    def __call__(self, pixels):
        return self.normalize(self.vae.encode(pixels.to(self.vae.dtype)).latent_dist.mode())


class OneFrame(VideoConditionByKeyframeIndex):
    """An appended image since 1.2.0: it spans one frame instead of eight and starts from zeros."""

    def apply_to(self, latent_state, latent_tools):
        state = super().apply_to(latent_state, latent_tools)
        new = slice(latent_state.positions.shape[2], None)
        state.positions[:, 0, new, 1] = state.positions[:, 0, new, 0] + 1 / latent_tools.fps
        state.latent[:, new] = 0
        return state


class FloatPositions(VideoLatentTools):
    """Positions in f32 for any latent type, since 1.2.0."""

    def create_initial_state(self, device, *more):
        positions = super().create_initial_state(device, torch.float32).positions
        return replace(super().create_initial_state(device, *more), positions=positions)


class KeptLatent(VideoConditionByLatentIndex):
    """A replaced frame since 1.2.0: marked as known, with the latents of the previous pass."""

    def apply_to(self, latent_state, latent_tools):
        return replace(super().apply_to(latent_state, latent_tools), latent=latent_state.latent)


class BlendNoiser(GaussianNoiser):
    """Since 1.2.0: mixes noise into the latents, then blends in the known tokens by strength."""

    def __call__(self, state, scale):
        latent = torch.lerp(state.latent.float(), torch.randn(*state.latent.shape).float(), float(scale))
        return replace(state, latent=torch.lerp(state.clean_latent.float(), latent, state.denoise_mask).to(state.latent.dtype))


# Differences of each release from 1.0.0.
SINCE = {"official_1_0": dict(noiser=GaussianNoiser), "official": dict(
    noiser=BlendNoiser, VideoConditionByKeyframeIndex=OneFrame, VideoConditionByLatentIndex=KeptLatent,
    VideoLatentTools=FloatPositions,
)}


def _merged(weights, loras):
    """Merges LoRAs like 1.2.0: in bfloat16, rounding every sum."""
    half, merged = (lambda tensor: tensor.to(torch.bfloat16).float()), {}
    for name, weight in weights.items():
        stem, delta = name.removesuffix(".weight"), None
        for tensors, strength in loras:
            if f"{stem}.lora_A.weight" not in tensors:
                continue
            a, b = (half(tensors[f"{stem}.lora_{matrix}.weight"]) for matrix in "AB")
            delta = half(half(strength * b) @ a) if delta is None else half(delta + strength * (b @ a))
        if delta is not None:
            merged[name] = half(weight.float() + delta).to(weight.dtype)
    return merged


def _merged_1_0(weights, loras):
    """Merges LoRAs by the loader of 1.0.0, in bfloat16."""
    state = lambda tensors: primitives.StateDict(tensors, torch.device("cpu"), 0, set())
    touched = {key.replace(".lora_A.", ".") for tensors, _ in loras for key in tensors}
    stored = state({name: w.to(torch.bfloat16) for name, w in weights.items() if name in touched})
    updates = [primitives.LoraStateDictWithStrength(state(tensors), strength) for tensors, strength in loras]
    merged = fuse_loras.apply_loras(stored, updates).sd
    return {name: weight.to(weights[name].dtype) for name, weight in merged.items()}


MERGES = {"official": _merged, "official_1_0": _merged_1_0}


class Noise:
    """Lightricks' noiser with noise in the order of ltx2: video, audio, appended tokens."""

    def __init__(self, noiser, generator, dtype, device):
        self.noiser, self.generator, self.dtype, self.device = noiser(None), generator, dtype, device
        self.waiting, self.drawn = [], {}

    def stage(self, video, audio, appended):
        """Draws the noise of a pass."""
        draw = lambda *shape: torch.randn(shape, generator=self.generator)
        self.drawn = {"noise.video": draw(*video.to_torch_shape()), "noise.audio": draw(*audio.to_torch_shape())}
        tokens = self.drawn["noise.video"].flatten(2).transpose(1, 2)
        if appended:
            tokens = torch.cat([tokens, draw(1, appended, video.channels)], 1)
        self.waiting = [tokens, self.drawn["noise.audio"].transpose(1, 2).flatten(2)]

    def __call__(self, state, scale):
        with patch("torch.randn", lambda *shape, **_: self.waiting.pop(0).to(self.device, self.dtype)):
            return self.noiser(state, scale)


class HostNoise(dict):
    """Noise of the second-order sampler, drawn on the host so that it is the same on every device. Has generators by seed."""

    def __call__(self, latents, generator):
        seed = generator.initial_seed()
        own = self.setdefault(seed, torch.Generator("cpu").manual_seed(seed))
        return samplers._get_new_noise(latents, own).to(latents.device)


class AncestralLoop:
    """Lightricks' ancestral loop since 1.2.0: its own generator, video before audio, known tokens restored before and after the
    step."""

    def __init__(self, seed, eta, dtype):
        self.source, self.dtype = torch.Generator("cpu").manual_seed(seed + 10_000), dtype
        self.scheduler = LTXEulerAncestralRFScheduler(eta=eta)

    def _draw(self, shape, device=None, **_):
        # Since torch 2.12 bf16 draws are rounded f32 draws, except for a tail.
        drawn = torch.float32 if math.prod(shape) % 16 == 0 else self.dtype
        return torch.randn(*shape, generator=self.source, dtype=drawn).to(self.dtype).float().to(device)

    def _step(self, state, clean, sigmas, index):
        known = lambda x: x * state.denoise_mask + state.clean_latent.float() * (1 - state.denoise_mask)
        clean, latent = known(clean.float()), state.latent.float()
        self.scheduler.set_timesteps(sigmas=[float(s) for s in sigmas], device=latent.device)
        self.scheduler._step_index = index
        with patch("diffusers.schedulers.scheduling_ltx_euler_ancestral_rf.randn_tensor", self._draw):
            velocity = (latent - clean) / sigmas[index]
            latent = self.scheduler.step(velocity, self.scheduler.timesteps[index], latent, return_dict=False)[0]
        disturbed = self.scheduler.config.eta > 0 and sigmas[index + 1] > 0
        return replace(state, latent=(known(latent) if disturbed else latent).to(self.dtype))

    def __call__(self, sigmas, video_state, audio_state, stepper, denoise_fn):
        for index in range(len(sigmas) - 1):
            pairs = zip((video_state, audio_state), denoise_fn(video_state, audio_state, sigmas, index))
            video_state, audio_state = (self._step(*pair, sigmas, index) for pair in pairs)
        return video_state, audio_state


class Reference:
    def __init__(self, model, dtype):
        self.model, self.request, self.pipeline, self.dtype = model, model.request, model.pipeline, dtype
        self.device = self.pipeline.transformer.device
        self.components = types.PipelineComponents(dtype, self.device)
        vae, audio = model.config["vae"], model.config["audio_vae"]
        space = vae["spatial_compression_ratio"]
        self.components.video_scale_factors = SpatioTemporalScaleFactors(vae["temporal_compression_ratio"], space, space)
        self.components.video_latent_channels = vae["latent_channels"]
        sizes = dict(channels=audio["latent_channels"], mel_bins=audio["mel_bins"] // 4)
        self.audio_shape = partial(AudioLatentShape.from_video_pixel_shape, **sizes)
        self.encoder, self.since = Encoder(self.pipeline.vae), dict(SINCE[self.request["reference"]])
        generator = torch.Generator("cpu").manual_seed(self.request["seed"])
        self.noise = Noise(self.since.pop("noiser"), generator, dtype, self.device)
        # A copy, as merging changes them; only if there are LoRAs.
        weights = self.pipeline.transformer.state_dict() if model.loras else {}
        self.weights = {k: v.to("cpu", copy=True) for k, v in weights.items()}
        self.texts = [self._text(self.request[key]) for key in ("prompt", "negative_prompt")]

    def _text(self, prompt):
        tokenizer = self.pipeline.tokenizer
        begins = tokenizer("a").input_ids[0] == tokenizer.bos_token_id
        if self.pipeline.text_encoder.config.model_type == "gemma4_unified" and not begins:
            # Lightricks' code adds BOS to every prompt of LTX-2.5.
            prompt = tokenizer.bos_token + prompt.strip()
        more = dict(max_sequence_length=self.request["max_sequence_length"], device=self.device)
        embeds, mask, _, _ = self.pipeline.encode_prompt(prompt, do_classifier_free_guidance=False, **more)
        return dict(zip(("video", "audio"), self.pipeline.connectors(embeds, mask, padding_side="left")))

    def _merge(self, stage):
        if not self.weights:
            return
        loras = []
        for file, lora in zip(self.model.loras, self.request["loras"]):
            if stage in lora["stages"]:
                tensors = {k.removeprefix("transformer."): v for k, v in LTX2Pipeline.lora_state_dict(str(file)).items()}
                # The loaders ignore alpha; diffusers' keys have one.
                scaled = lora.get("alpha") and lora["keys"] == "diffusers"
                loras.append((tensors, lora["strength"] * (lora["alpha"] / lora["rank"] if scaled else 1)))
        merged = MERGES[self.request["reference"]](self.weights, loras)
        if loras and not merged:
            raise ValueError("no tensor of the LoRAs fits the transformer")
        self.pipeline.transformer.load_state_dict(self.weights | merged)

    def _conditionings(self, shape):
        if not self.request["images"]:
            return []
        pairs = zip(self.model.images, self.request["images"])
        inputs = [args.ImageConditioningInput(str(file), i["frame"], i["strength"], 0) for file, i in pairs]
        keyframes = self.request["pipeline"] == "keyframes"
        make = helpers.image_conditionings_by_adding_guiding_latent if keyframes else helpers.combined_image_conditionings
        return make(inputs, shape.height, shape.width, self.encoder, self.dtype, self.device)

    def _denoiser(self, guided, first_frame):
        r = self.request
        cross = r["cross_timestep"] or {"official": "gate_only", "official_1_0": "cross"}[r["reference"]]
        x0 = X0Model(Velocity(self.pipeline.transformer, cross, r["frame_rate"], first_frame))
        positive, negative = self.texts
        if not guided:
            return helpers.simple_denoising_func(*positive.values(), x0)
        parameters = lambda stream: guider_parameters({**r["guidance"][stream], "stg_blocks": r["stg_blocks"][stream]})
        own = [guiders.MultiModalGuider(parameters(stream), text) for stream, text in negative.items()]
        return helpers.multi_modal_guider_denoising_func(*own, *positive.values(), x0)

    def stage(self, number, divisor, sigmas, before=None):
        """Returns the normalised latents of both streams after one pass. `before`: latents and noise level at the start."""
        r = self.request
        self._merge(number)
        pixels = VideoPixelShape(1, r["num_frames"], r["height"] // divisor, r["width"] // divisor, r["frame_rate"])
        sizes = self.components.video_latent_channels, self.components.video_scale_factors
        latents = VideoLatentShape.from_pixel_shape(pixels, *sizes)
        conditionings = self._conditionings(pixels)
        appended = sum(isinstance(c, VideoConditionByKeyframeIndex) for c in conditionings) * latents.height * latents.width
        self.noise.stage(latents, self.audio_shape(pixels), appended)
        if sigmas is None:
            shaped = torch.empty(latents) if r["pipeline"] == "hq" else None
            sigmas = schedulers.LTX2Scheduler().execute(r["steps"], latent=shaped)
        stepper, loop = diffusion_steps.EulerDiffusionStep(), samplers.euler_denoising_loop
        if r["sampler"] == "res_2s":
            stepper, loop = diffusion_steps.Res2sDiffusionStep(), samplers.res2s_audio_video_denoising_loop
            loop = partial(loop, model_dtype=self.dtype, new_noise_fn=HostNoise())
        elif r["sampler"] == "euler_ancestral" and number == 1:
            loop = AncestralLoop(r["seed"], r["eta"], self.dtype)
        guided = any(s != NEUTRAL for s in r["guidance"].values()) and number == 1
        denoise = self._denoiser(guided, latents.height * latents.width)
        video, audio = helpers.denoise_audio_video(
            output_shape=pixels, conditionings=conditionings, noiser=self.noise, sigmas=sigmas.to(self.device), stepper=stepper,
            denoising_loop_fn=lambda s, v, a, stepper: loop(
                sigmas=s, video_state=v, audio_state=a, stepper=stepper, denoise_fn=denoise
            ),
            components=self.components, dtype=self.dtype, device=self.device, **(before or {}),
        )
        return video.latent, audio.latent

    def run(self):
        # The release's behaviour and the model's sizes.
        since = dict(self.since, AudioLatentShape=SimpleNamespace(from_video_pixel_shape=self.audio_shape))
        tools = since.get("VideoLatentTools", VideoLatentTools)
        since["VideoLatentTools"] = partial(tools, scale_factors=self.components.video_scale_factors)
        with patch.multiple(helpers, **since):
            return {name: tensor.float().cpu().contiguous() for name, tensor in self._run().items()}

    def _run(self):
        r, pipeline, outputs = self.request, self.pipeline, {}
        if r["pipeline"] in TWO_PASSES:
            video, sound = self.stage(1, 2, torch.tensor([*DISTILLED, 0.0]) if r["pipeline"] == "distilled" else None)
            outputs["stage_1.latents.video"] = self.encoder.un_normalize(video)
            grown = upsample_video(video, self.encoder, self.model.upsampler)
            before = dict(initial_video_latent=grown, initial_audio_latent=sound, noise_scale=SECOND[0])
            video, refined = self.stage(2, 1, torch.tensor(SECOND), before)
            outputs["stage_2.noise.video"] = self.noise.drawn["noise.video"]
            audio = refined if r["keeps"] == "stage_2" else sound
        else:
            video, audio = self.stage(1, 1, None)
            outputs |= self.noise.drawn
        if self.weights:
            pipeline.transformer.load_state_dict(self.weights)
        video, vae, packed = self.encoder.un_normalize(video), pipeline.audio_vae, LTX2Pipeline._pack_audio_latents(audio)
        packed = LTX2Pipeline._denormalize_audio_latents(packed, vae.latents_mean, vae.latents_std)
        audio = LTX2Pipeline._unpack_audio_latents(packed, audio.shape[2], audio.shape[3])
        return outputs | decoded(pipeline, video, audio)


def run(model, dtype):
    """Runs a request by the reference that it names."""
    with diffusers_run.limited(model.pipeline.vocoder, model.request["clamp"]):
        return diffusers_run.run(model) if model.request["reference"] == "diffusers" else Reference(model, dtype).run()
