"""Lightricks' own pipelines on fixture models: of a checkout of their repository, or of the published wheels.

Pipelines, blocks, networks, video encoder, upsampler, conditionings, noiser, guider, schedules, loops and steps are theirs.
Ours are: the text contexts (diffusers' connectors), the noise that the noiser mixes in, float32 where a pipeline says
bfloat16, the number of latent channels where 128 is a default, and no decoding.
"""

import functools
import importlib
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import torch

PIPELINES = {
    "image_to_video": ("ti2vid_one_stage", "TI2VidOneStagePipeline"),
    "two_stage": ("ti2vid_two_stages", "TI2VidTwoStagesPipeline"),
    "distilled": ("distilled", "DistilledPipeline"),
    "hq": ("ti2vid_two_stages_hq", "TI2VidTwoStagesHQPipeline"),
    "keyframes": ("keyframe_interpolation", "KeyframeInterpolationPipeline"),
    "audio_to_video": ("a2vid_two_stage", "A2VidPipelineTwoStage"),
    "retake": ("retake", "RetakePipeline"),
    "text_to_audio": ("t2a_one_stage", "T2AOneStagePipeline"),
}


def find_packages(folder=None):
    """Readies the import of the packages: a checkout's, or the installed ones."""
    # They import it for images alone that nothing here reads.
    sys.modules.setdefault("OpenImageIO", MagicMock())
    for package in ("ltx-core", "ltx-pipelines") if folder else ():
        source = Path(folder).resolve() / "packages" / package / "src"
        if not source.is_dir():
            raise SystemExit(f"{source} is missing; give a checkout of Lightricks/LTX-2")
        sys.path.insert(0, str(source))


class Torch:
    """torch as a module of theirs sees it, with some names replaced."""

    def __init__(self, **replaced):
        self.__dict__.update(replaced)

    def __getattr__(self, name):
        return getattr(torch, name)


class Noise:
    """Draws of the noiser: each pass' video and audio unpacked, then the appended tokens, where theirs are packed."""

    def __init__(self, sizes):
        self.passes, self.audio, self.drawn = iter(sizes), None, []

    def randn(self, *shape, generator, **_):
        """Noise of a packed state `[1, n, c]`: video's, then audio's."""
        if self.audio is not None:
            packed, self.audio = self.audio, None
        else:
            video, audio = (torch.randn(size, generator=generator) for size in next(self.passes))
            self.drawn.append(video)
            video = video.flatten(2).transpose(1, 2)
            extra = shape[1] - video.shape[1]
            packed = torch.cat([video, torch.randn(1, extra, shape[2], generator=generator)], 1) if extra else video
            self.audio = audio.transpose(1, 2).flatten(2)
        assert packed.shape == shape, (packed.shape, shape)
        return packed


class Steps:
    """The latents that every step of every pass begins with, and those it ends with, packed."""

    def __init__(self):
        self.passes = []

    def wrap(self, loop, stride=1, **fixed):
        """A loop that keeps them: of every evaluation, or of every second where a step has two."""
        state = importlib.import_module("ltx_core.types").LatentState

        @functools.wraps(loop)
        def run(**given):
            seen, key = [], "denoiser" if "denoiser" in given else "denoise_fn"
            inner = given.pop(key)

            def denoise(*args, **more):
                seen.append([s.latent.clone() for s in (*args, *more.values()) if isinstance(s, state)])
                return inner(*args, **more)

            ends = loop(**given, **fixed, **{key: denoise})
            self.passes.append([*seen[::stride], [s.latent.clone() for s in ends if s is not None]])
            return ends

        return run


def set_channels(video, bins, audio):
    """Latent sizes of the fixture model in place of the published ones'."""
    shapes = importlib.import_module("ltx_core.types")
    of_video, of_audio = shapes.VideoLatentShape.from_pixel_shape, shapes.AudioLatentShape.from_video_pixel_shape
    of_video.__defaults__ = (video, of_video.__defaults__[1])
    of_audio.__defaults__ = (audio, bins, *of_audio.__defaults__[2:])


def gate_by_own_level():
    """Has the gates between the streams see their stream's own noise levels, as in the release of January 2026."""
    name = "MultiModalTransformerArgsPreprocessor"
    preprocessor = getattr(importlib.import_module("ltx_core.model.transformer.transformer_args"), name)
    prepare = preprocessor._prepare_cross_attention_timestep

    def own(self, modality_timesteps, cross_modality_sigma, **more):
        del cross_modality_sigma
        return prepare(self, modality_timesteps, modality_timesteps, **more)

    preprocessor._prepare_cross_attention_timestep = own
    return lambda: setattr(preprocessor, "_prepare_cross_attention_timestep", prepare)


def velocity(model, streams):
    """A forward of their transformer: latents, scalar and per-token noise levels, positions and text of each stream."""
    transformer = importlib.import_module("ltx_core.model.transformer")
    builder = importlib.import_module("ltx_core.loader.single_gpu_model_builder").SingleGPUModelBuilder
    network = builder(
        model_path=str(model), model_class_configurator=transformer.LTXModelConfigurator,
        model_sd_ops=transformer.LTXV_MODEL_COMFY_RENAMING_MAP,
    ).build(device=torch.device("cpu"))
    video, audio = (transformer.Modality(enabled=True, context_mask=None, **stream) for stream in streams)
    return network.eval()(video, audio, None)


def _built(model, package, configurator, filter_of_keys):
    """A network of their file, in float32."""
    package = importlib.import_module(f"ltx_core.model.{package}")
    builder = importlib.import_module("ltx_core.loader.single_gpu_model_builder").SingleGPUModelBuilder
    made = builder(
        model_path=str(model), model_class_configurator=getattr(package, configurator),
        model_sd_ops=getattr(package, filter_of_keys),
    )
    return made.build(device=torch.device("cpu"), dtype=torch.float32).eval()


def decoded(model, vocoder, video=None, audio=None):
    """Frames `[1, f, 3, h, w]`, 0..1, and samples `[1, channels, n]` of normalised latents, by their decoders; the vocoder is given, for
    theirs is of the published sizes alone."""
    made = {}
    if video is not None:
        frames = _built(model, "video_vae", "VideoDecoderConfigurator", "VAE_DECODER_COMFY_KEYS_FILTER")(video)
        made["video"] = (frames / 2 + 0.5).clamp(0, 1).transpose(1, 2)
    if audio is not None:
        made["audio"] = vocoder(_built(model, "audio_vae", "AudioDecoderConfigurator", "AUDIO_VAE_DECODER_COMFY_KEYS_FILTER")(audio))
    return made


def guider_parameters(s):
    """The guider of a stream's scales: of all noise levels, or of each up to a bound."""
    guiders = importlib.import_module("ltx_core.components.guiders")
    own = lambda s: guiders.MultiModalGuiderParams(
        cfg_scale=s["cfg"], stg_scale=s["stg"], modality_scale=s["modality"], rescale_scale=s["rescale"],
        stg_blocks=s["stg_blocks"], skip_step=s.get("skip", 0),
    )
    if "by_sigma" not in s:
        return own(s)
    return guiders.MultiModalGuiderFactory.from_dict({at["sigma"]: own({**s, **at}) for at in s["by_sigma"]})


class Run:
    """One request through one of their pipelines."""

    def __init__(self, model, upsampler, request, contexts, sizes):
        self.request, self.contexts, self.steps, self.kept = request, contexts, Steps(), {}
        module, self.kind = PIPELINES[request["pipeline"]]
        self.module = importlib.import_module(f"ltx_pipelines.{module}")
        self.module.torch = Torch(bfloat16=torch.float32, cuda=types.SimpleNamespace(synchronize=lambda: None))
        self.noise = Noise(sizes)
        importlib.import_module("ltx_core.components.noisers").torch = Torch(randn=self.noise.randn)
        self.undo = gate_by_own_level() if request["cross_timestep"] == "own" else lambda: None
        self.wheels = not hasattr(importlib.import_module("ltx_core.types").LatentState, "frozen")
        self.pipeline = (self._of_wheels if self.wheels else self._of_checkout)(str(model), str(upsampler), sizes)

    def _loops(self, *modules):
        """Has them record; a second-order step evaluates twice and rounds to the model's type."""
        own = importlib.import_module("ltx_pipelines.utils.samplers")
        own.tqdm = iter
        for module in modules:
            if hasattr(module, "euler_denoising_loop"):
                module.euler_denoising_loop = self.steps.wrap(self.request.get("loop", lambda s: s.euler_denoising_loop)(own))
            if hasattr(module, "res2s_audio_video_denoising_loop"):
                second = self.steps.wrap(own.res2s_audio_video_denoising_loop, stride=2, model_dtype=torch.float32)
                module.res2s_audio_video_denoising_loop = second

    def _text(self):
        return [types.SimpleNamespace(video_encoding=c["video"], audio_encoding=c["audio"]) for c in self.contexts]

    def _keep(self, name, latents):
        self.kept[name] = latents.clone()

    def _arguments(self, upsampler):
        """What the constructors of two stages take beside the model."""
        loras = importlib.import_module("ltx_core.loader")
        none = loras.LoraPathStrengthAndSDOps("", 0.0, loras.LTXV_LORA_COMFY_RENAMING_MAP)
        arguments = {"loras": (), "device": torch.device("cpu")}
        if self.request["pipeline"] != "image_to_video":
            arguments["spatial_upsampler_path"] = upsampler
        if self.request["pipeline"] in ("two_stage", "keyframes", "audio_to_video"):
            arguments["distilled_lora"] = []
        if self.request["pipeline"] == "hq":
            strengths = {f"distilled_lora_strength_stage_{n}": 0.0 for n in (1, 2)}
            arguments.update(distilled_lora=[none], **strengths)
        return arguments

    def _of_checkout(self, model, upsampler, _sizes):
        blocks, paths = (importlib.import_module(f"ltx_pipelines.utils.{name}") for name in ("blocks", "model_paths"))
        self._loops(blocks, self.module)
        text = self._text()

        def decoder(name):
            made = types.SimpleNamespace(checkpoint_path=model, diffvae_optimization=None)
            return lambda *_, **__: _Decoder(made, lambda latents: self._keep(name, latents))

        self.module.PromptEncoder = lambda *_, **__: lambda prompts, **___: text[: len(prompts)]
        self.module.VideoDecoder, self.module.AudioDecoder = decoder("video"), decoder("audio")
        self.module.DurationPredictor = types.SimpleNamespace(from_checkpoint=lambda *_, **__: None)
        paths = paths.ModelPaths.from_monolith(model)
        return getattr(self.module, self.kind)(model_paths=paths, **self._arguments(upsampler))

    def _of_wheels(self, model, upsampler, sizes):
        self._loops(self.module)
        module, text = self.module, self._text()
        module.cleanup_memory = lambda: None
        module.encode_prompts = lambda prompts, *_, **__: text[: len(prompts)]
        module.vae_decode_video = lambda latents, *_, **__: self._keep("video", latents)
        module.vae_decode_audio = lambda latents, *_, **__: self._keep("audio", latents)
        for part in ("video_decoder", "audio_decoder", "vocoder"):
            setattr(module.ModelLedger, part, lambda _: None)
        pipeline = getattr(module, self.kind)(checkpoint_path=model, gemma_root=None, **self._arguments(upsampler))
        pipeline.pipeline_components.video_latent_channels = sizes[0][0][1]
        return pipeline

    def __call__(self):
        """Runs it: latents of every pass and step, and those that are decoded, normalised."""
        r = self.request
        images = importlib.import_module("ltx_pipelines.utils.args").ImageConditioningInput
        arguments = {key: r[key] for key in ("prompt", "seed", "height", "width", "num_frames", "frame_rate")}
        arguments["images"] = [images(str(i["path"]), i["frame"], i["strength"], 0) for i in r["images"]]
        if r["pipeline"] != "distilled":
            arguments.update(negative_prompt=r["negative_prompt"], num_inference_steps=r["steps"])
            if r.get("audio"):
                arguments |= {"audio_path": str(r["audio"]["path"]), "audio_start_time": r["audio"]["start"]}
                arguments["audio_max_duration"] = r["num_frames"] / r["frame_rate"]
            for stream, s in r["guidance"].items():
                arguments[f"{stream}_guider_params"] = guider_parameters(s)
        self.returned = self.pipeline(**arguments, tiling_config=None) if self._tiles() else self.pipeline(**arguments)
        self.undo()
        return self.steps.passes, self.kept

    def _tiles(self):
        return not self.wheels or self.request["pipeline"] != "image_to_video"


class _Decoder:
    """Keeps what it is given to decode."""

    def __init__(self, about, keep):
        self.__dict__.update(vars(about))
        self._keep = keep

    def __call__(self, latents, *_, **__):
        self._keep(latents)
