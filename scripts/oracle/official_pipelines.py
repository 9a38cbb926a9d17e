"""Runs Lightricks' pipelines of a checkout or of the installed wheels on fixture models. README.md lists what is replaced."""

import functools
import importlib
import tempfile
import types
from pathlib import Path

import torch

PRESETS = {"tiny_a": "ltx2", "tiny_2_3": "ltx2_3"}
PIPELINES = {
    "image_to_video": ("ti2vid_one_stage", "TI2VidOneStagePipeline"), "hq": ("ti2vid_two_stages_hq", "TI2VidTwoStagesHQPipeline"),
    "two_stage": ("ti2vid_two_stages", "TI2VidTwoStagesPipeline"), "audio_to_video": ("a2vid_two_stage", "A2VidPipelineTwoStage"),
    "keyframes": ("keyframe_interpolation", "KeyframeInterpolationPipeline"), "distilled": ("distilled", "DistilledPipeline"),
    "text_to_audio": ("t2a_one_stage", "T2AOneStagePipeline"), "retake": ("retake", "RetakePipeline"),
    "ic_lora": ("ic_lora", "ICLoraPipeline"), "dub_it": ("dubit", "DubItPipeline"), "dfr": ("dfr_pipeline", "DFRPipeline"),
}


def ltx(module):
    """Imports a module of either release, such as `core.types`."""
    return importlib.import_module(f"ltx_{module}")


def wheels():
    """Returns whether the packages are 1.0.0, else 1.2.0."""
    return not hasattr(ltx("core.types").LatentState, "frozen")


def release():
    return "1.0.0" if wheels() else "1.2.0 (400fd31)"


def each_model(kind):
    with tempfile.TemporaryDirectory() as scratch:
        for name in PRESETS:
            yield kind(name, Path(scratch))


def torch_with(**replaced):
    """Returns the names of torch with some of them replaced."""
    return types.SimpleNamespace(**{**vars(torch), **replaced})


class Noise:
    """Draws each pass's video and audio noise unpacked, then that of appended tokens, and returns it packed."""

    def __init__(self, sizes, own=None):
        """With `own`, draws from this generator instead of the noiser's, and converts to the noiser's device and type."""
        self.passes, self.audio, self.drawn, self.own = iter(sizes), None, [], own

    def randn(self, *shape, generator=None, device=None, dtype=None, **_):
        """Returns the noise of a packed state `[1, n, c]`, first the video's, then the audio's."""
        generator = self.own or generator
        if self.audio is not None:
            # Appended audio tokens have no noise.
            packed, self.audio = torch.nn.functional.pad(self.audio, (0, 0, 0, shape[1] - self.audio.shape[1])), None
        else:
            video, audio = (torch.randn(size, generator=generator) for size in next(self.passes))
            self.drawn.append((video, audio))
            video = video.flatten(2).transpose(1, 2)
            extra = shape[1] - video.shape[1]
            packed = torch.cat([video, torch.randn(1, extra, shape[2], generator=generator)], 1) if extra else video
            self.audio = audio.transpose(1, 2).flatten(2)
        assert packed.shape == shape, (packed.shape, shape)
        return packed.to(device, dtype) if self.own else packed


def recorded(passes, loop, stride=1, **fixed):
    """Returns a loop that adds the packed latents at the start of every step and at the end to `passes`.

    With `stride` 2, of every second evaluation."""
    state = ltx("core.types").LatentState

    @functools.wraps(loop)
    def run(**given):
        seen, key = [], "denoiser" if "denoiser" in given else "denoise_fn"
        inner = given.pop(key)

        def denoise(*args, **more):
            seen.append([s.latent.clone() for s in (*args, *more.values()) if isinstance(s, state)])
            return inner(*args, **more)

        ends = loop(**given, **fixed, **{key: denoise})
        passes.append([*seen[::stride], [s.latent.clone() for s in ends if s is not None]])
        return ends

    return run


def set_channels(video, bins, audio):
    """Sets the fixture model's latent sizes as defaults."""
    shapes = ltx("core.types")
    of_video, of_audio = shapes.VideoLatentShape.from_pixel_shape, shapes.AudioLatentShape.from_video_pixel_shape
    of_video.__defaults__ = (video, of_video.__defaults__[1])
    of_audio.__defaults__ = (audio, bins, *of_audio.__defaults__[2:])


def gate_by_own_level():
    """Computes cross-modal gates from the stream's own noise level, like the release of January 2026."""
    preprocessor = ltx("core.model.transformer.transformer_args").MultiModalTransformerArgsPreprocessor
    prepare = preprocessor._prepare_cross_attention_timestep

    def own(self, modality_timesteps, cross_modality_sigma, **more):
        del cross_modality_sigma
        return prepare(self, modality_timesteps, modality_timesteps, **more)

    preprocessor._prepare_cross_attention_timestep = own
    return lambda: setattr(preprocessor, "_prepare_cross_attention_timestep", prepare)


def _built(model, package, configurator, renaming):
    package = ltx(f"core.model.{package}")
    parts = dict(model_class_configurator=getattr(package, configurator), model_sd_ops=getattr(package, renaming))
    builder = ltx("core.loader.single_gpu_model_builder").SingleGPUModelBuilder(model_path=str(model), **parts)
    return builder.build(device=torch.device("cpu"), dtype=torch.float32).eval()


def velocity(model, streams):
    network = _built(model, "transformer", "LTXModelConfigurator", "LTXV_MODEL_COMFY_RENAMING_MAP")
    modality = ltx("core.model.transformer").Modality
    return network(*(modality(enabled=True, context_mask=None, **stream) for stream in streams), None)


def decoded(model, vocoder, video=None, audio=None):
    """Decodes normalised latents to frames `[1, f, 3, h, w]` in 0..1 and samples. The vocoder is diffusers', as Lightricks' has
    fixed sizes."""
    made = {}
    if video is not None:
        frames = _built(model, "video_vae", "VideoDecoderConfigurator", "VAE_DECODER_COMFY_KEYS_FILTER")(video)
        made["video"] = (frames / 2 + 0.5).clamp(0, 1).transpose(1, 2)
    if audio is not None:
        decoder = _built(model, "audio_vae", "AudioDecoderConfigurator", "AUDIO_VAE_DECODER_COMFY_KEYS_FILTER")
        made["audio"] = vocoder(decoder(audio))
    return made


def guider_parameters(s):
    guiders = ltx("core.components.guiders")
    if "by_sigma" in s:
        levels = {at["sigma"]: guider_parameters({k: v for k, v in (s | at).items() if k != "by_sigma"}) for at in s["by_sigma"]}
        return guiders.MultiModalGuiderFactory.from_dict(levels)
    scales = {f"{term}_scale": s[term] for term in ("cfg", "stg", "modality", "rescale")}
    return guiders.MultiModalGuiderParams(**scales, stg_blocks=s["stg_blocks"], skip_step=s.get("skip", 0))


def build_arguments(name, upsampler, lora, strengths, device):
    """Returns the arguments of a pipeline's class besides the checkpoint. `strengths`: of the distilled LoRA in each stage."""
    arguments, loader = {"loras": (), "device": device}, ltx("core.loader")
    if name != "image_to_video":
        arguments["spatial_upsampler_path"] = upsampler
    if name in ("two_stage", "keyframes", "audio_to_video", "hq"):
        make = lambda strength: loader.LoraPathStrengthAndSDOps(lora, strength, loader.LTXV_LORA_COMFY_RENAMING_MAP)
        arguments["distilled_lora"] = [make(strength) for strength in strengths[:1]]
    if name == "hq":
        arguments |= {f"distilled_lora_strength_stage_{n}": strength for n, strength in enumerate(strengths, 1)}
    return arguments


def call_arguments(r):
    image = ltx("pipelines.utils.args").ImageConditioningInput
    arguments = {key: r[key] for key in ("prompt", "seed", "height", "width", "num_frames", "frame_rate")}
    arguments["images"] = [image(str(i["path"]), i["frame"], i["strength"], 0) for i in r["images"]]
    if r["pipeline"] not in ("distilled", "ic_lora", "dub_it", "dfr"):
        arguments |= dict(negative_prompt=r["negative_prompt"], num_inference_steps=r["steps"])
        arguments |= {f"{stream}_guider_params": guider_parameters(s) for stream, s in r["guidance"].items()}
    return arguments


class Run:
    def __init__(self, model, upsampler, request, contexts, sizes):
        self.request, self.passes, self.kept = request, [], {}
        self.text = [types.SimpleNamespace(video_encoding=c["video"], audio_encoding=c["audio"]) for c in contexts]
        module, self.kind = PIPELINES[request["pipeline"]]
        self.module = ltx(f"pipelines.{module}")
        self.module.torch = torch_with(bfloat16=torch.float32, cuda=types.SimpleNamespace(synchronize=lambda: None))
        self.noise = Noise(sizes)
        ltx("core.components.noisers").torch = torch_with(randn=self.noise.randn)
        self.undo = gate_by_own_level() if request["cross_timestep"] == "own" else lambda: None
        self.wheels = wheels()
        self.pipeline = (self._of_wheels if self.wheels else self._of_checkout)(str(model), str(upsampler), sizes)

    def _loops(self, *modules):
        """Makes the loops record. A second-order step evaluates twice."""
        own = ltx("pipelines.utils.samplers")
        own.tqdm = iter
        euler = recorded(self.passes, self.request.get("loop", lambda s: s.euler_denoising_loop)(own))
        second = recorded(self.passes, own.res2s_audio_video_denoising_loop, stride=2, model_dtype=torch.float32)
        for module in modules:
            for name, loop in (("euler_denoising_loop", euler), ("res2s_audio_video_denoising_loop", second)):
                if hasattr(module, name):
                    setattr(module, name, loop)

    def _keep(self, name, latents):
        self.kept[name] = latents.clone()

    def _arguments(self, upsampler):
        pipeline = self.request["pipeline"]
        return build_arguments(pipeline, upsampler, "", [0.0, 0.0] if pipeline == "hq" else [], torch.device("cpu"))

    def _of_checkout(self, model, upsampler, _sizes):
        module = self.module
        self._loops(ltx("pipelines.utils.blocks"), module)

        def decoder(name):
            made = lambda latents, *_, **__: self._keep(name, latents)
            made.checkpoint_path, made.diffvae_optimization = model, None
            return lambda *_, **__: made

        module.PromptEncoder = lambda *_, **__: lambda prompts, **___: self.text[: len(prompts)]
        module.VideoDecoder, module.AudioDecoder = decoder("video"), decoder("audio")
        module.DurationPredictor = types.SimpleNamespace(from_checkpoint=lambda *_, **__: None)
        paths = ltx("pipelines.utils.model_paths").ModelPaths.from_monolith(model)
        return getattr(module, self.kind)(model_paths=paths, **self._arguments(upsampler))

    def _of_wheels(self, model, upsampler, sizes):
        module = self.module
        self._loops(module)
        module.cleanup_memory = lambda: None
        module.encode_prompts = lambda prompts, *_, **__: self.text[: len(prompts)]
        module.vae_decode_video = lambda latents, *_, **__: self._keep("video", latents)
        module.vae_decode_audio = lambda latents, *_, **__: self._keep("audio", latents)
        for part in ("video_decoder", "audio_decoder", "vocoder"):
            setattr(module.ModelLedger, part, lambda _: None)
        pipeline = getattr(module, self.kind)(checkpoint_path=model, gemma_root=None, **self._arguments(upsampler))
        pipeline.pipeline_components.video_latent_channels = sizes[0][0][1]
        return pipeline

    def __call__(self):
        """Returns the latents of every step of every pass, and the decoder's inputs."""
        r, arguments = self.request, call_arguments(self.request)
        if r["audio"]:
            arguments |= {"audio_path": str(r["audio"]["path"]), "audio_start_time": r["audio"]["start"]}
            arguments["audio_max_duration"] = r["num_frames"] / r["frame_rate"]
        if not self.wheels or r["pipeline"] != "image_to_video":
            arguments["tiling_config"] = None
        self.returned = self.pipeline(**arguments)
        self.undo()
        return self.passes, self.kept
