"""Writes LTX-2.5's model, whose parts that equal LTX-2.3's are links, and its requests in one and two passes."""

import shutil
from contextlib import contextmanager, nullcontext

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler, LTX2DFRPipeline, LTX2LatentUpsamplePipeline, LTX2Pipeline, LTX2VideoDiffusionDecodePipeline,
    LTX2VideoDiffusionDecoderModel, LTXEulerAncestralRFScheduler,
)
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES
from transformers import AutoTokenizer

import cases_diffusion_decoder
import cases_gemma4
import cases_upsampling
import models
from cases_decoders import thin
from cases_pipeline import noise_shapes, official_sigmas, verbatim_scheduler
from cases_text import NEGATIVE, POSITIVE
from common import MODELS, as_list, keeps, randomise, show, write_case

NAME = "tiny_2_5"
_TEXT = dict(
    hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    sliding_window=12, attention_k_eq_v=True, num_global_key_value_heads=1, global_head_dim=8,
    layer_types=["sliding_attention", "full_attention"],
)
_LINKS = {
    "transformer": "dit_2_5", "vae": "tiny_2_3", "audio_vae": "tiny_2_3", "vocoder": "tiny_2_3", "tokenizer": "tiny_2_3",
    "scheduler": "tiny_2_3", "latent_upsampler": "upsampler_plain",
    "duration_head": "duration_head",
}


def save():
    """Writes the text encoder and connectors in bfloat16, and links to other models' parts."""
    folder = MODELS / NAME
    if keeps(folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for part, source in _LINKS.items():
        (folder / part).symlink_to(f"../{source}/{part}")
    text = cases_gemma4.text_encoder(NAME, _TEXT, models.VOCABULARY).to(torch.bfloat16)
    text.save_pretrained(folder / "text_encoder")
    (folder / "text_encoder" / "generation_config.json").unlink(missing_ok=True)
    dit = models.TRANSFORMER["dit_2_5"]
    connectors = cases_gemma4.connectors(_TEXT, (10, 6), (dit["cross_attention_dim"], dit["audio_cross_attention_dim"]))
    connectors = randomise(connectors, f"{NAME}/connectors").to(torch.bfloat16)
    connectors.save_pretrained(folder / "connectors")
    read = lambda part: models.load(_LINKS[part], part)
    LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"), text_encoder=text,
        connectors=connectors, tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        transformer=models.load("dit_2_5", "transformer"), vae=read("vae"), audio_vae=read("audio_vae"), vocoder=read("vocoder"),
    ).save_config(folder)


@contextmanager
def marked(network):
    """Makes the transformer mark the tokens of the first latent frame, like Lightricks' pipelines."""
    own = network.forward

    def forward(hidden_states, *rest, num_frames, height, width, **more):
        mask = torch.zeros(*hidden_states.shape[:2], 1)
        mask[:, : height * width] = 1
        return own(
            hidden_states, *rest, num_frames=num_frames, height=height, width=width, video_keyframes_mask=mask, **more
        )

    network.forward = forward
    try:
        yield
    finally:
        network.forward = own


def ancestral(source):
    """Returns the scheduler with noise of one generator for both streams."""

    class Drawn(LTXEulerAncestralRFScheduler):
        def set_timesteps(self, sigmas, device=None, mu=None):
            super().set_timesteps(sigmas=sigmas, device=device)

        def step(self, model_output, timestep, sample, return_dict=True):
            return super().step(model_output, timestep, sample, generator=source, return_dict=return_dict)

    return Drawn(eta=1.0)


def _arguments(request, scheduler_sigmas):
    arguments = dict(
        prompt=request["prompt"], negative_prompt=request["negative_prompt"], num_frames=request["num_frames"],
        frame_rate=request["frame_rate"], max_sequence_length=request["max_sequence_length"], return_dict=False,
        spatio_temporal_guidance_blocks=request.get("stg_blocks") or None, sigmas=scheduler_sigmas,
    )
    for prefix, stream in (("", "video"), ("audio_", "audio")):
        scales = request["guidance"][stream]
        names = dict(guidance_scale="cfg", stg_scale="stg", modality_scale="modality", guidance_rescale="rescale")
        arguments |= {prefix + name: scales[key] for name, key in names.items()}
    return arguments


def _decoded(pipeline, video, audio):
    """Returns final latents with their frames and samples, decoded like at the end of the pipeline."""
    frames = pipeline.vae.decode(video, None, return_dict=False)[0]
    frames = pipeline.video_processor.postprocess_video(frames, output_type="pt")
    samples = pipeline.vocoder(pipeline.audio_vae.decode(audio, return_dict=False)[0])
    return {"latents.video": video, "latents.audio": audio, "video": frames, "audio": samples}


def _latents(pipeline, request, source):
    pipeline.scheduler = verbatim_scheduler()
    return pipeline(
        generator=source, output_type="latent", width=request["width"], height=request["height"],
        **_arguments(request, as_list(official_sigmas(request["steps"])[:-1])),
    )


def _one_pass(pipeline, request):
    return _decoded(pipeline, *_latents(pipeline, request, torch.Generator("cpu").manual_seed(request["seed"])))


def diffusion_decoder():
    name = "diffusion_d"
    decoder = randomise(LTX2VideoDiffusionDecoderModel(**cases_diffusion_decoder.CONFIGS[name]), name)
    decoder.latents_mean.copy_(torch.tensor([0.25, -0.5]))
    decoder.latents_std.copy_(torch.tensor([1.5, 0.75]))
    return decoder


def _by_diffusion(pipeline, request):
    """Runs one pass and decodes by diffusion, whole or in tiles, with noise of the same generator."""
    source = torch.Generator("cpu").manual_seed(request["seed"])
    video, _ = _latents(pipeline, request, source)
    decoder = diffusion_decoder()
    if tiling := request.get("tiling"):
        pixels, frames = (tiling["pixels"], tiling["overlap"]), (tiling["frames"], tiling["frame_overlap"])
        sizes = dict(height=pixels, width=pixels, num_frames=frames)
        decoder.enable_tiling(
            **{f"tile_sample_min_{axis}": size for axis, (size, _) in sizes.items()},
            **{f"tile_sample_stride_{axis}": size - overlap for axis, (size, overlap) in sizes.items()},
        )
    return decode_by_diffusion(pipeline, decoder, video, source)


def decode_by_diffusion(pipeline, decoder, video, source):
    vae = pipeline.vae
    plain = pipeline._normalize_latents(video, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
    decode = LTX2VideoDiffusionDecodePipeline(diffusion_decoder=decoder, scheduler=pipeline.scheduler)
    frames = decode(plain, generator=source, output_type="pt", return_dict=False)[0]
    return {"latents.video": video, "video": frames}


def upsampled(pipeline, video):
    upsample = LTX2LatentUpsamplePipeline(pipeline.vae, models.load("upsampler_plain", "latent_upsampler"))
    return upsample(latents=video, output_type="latent", return_dict=False)[0]


def _two_passes(pipeline, request):
    """Runs eight ancestral steps at a half or two thirds of the size, then three Euler steps at full size."""
    times, of = (3, 2) if "upsampler" in request else (2, 1)
    half = dict(request, **{side: request[side] // times * of for side in ("width", "height")})
    source = torch.Generator("cpu").manual_seed(request["seed"])
    # Seeded like Lightricks' loop.
    pipeline.scheduler = ancestral(torch.Generator("cpu").manual_seed(request["seed"] + 10_000))
    video, audio = pipeline(
        generator=source, output_type="latent", width=half["width"], height=half["height"],
        **_arguments(half, DISTILLED_SIGMA_VALUES + [0.0]),
    )
    first = {"stage_1.latents.video": video, "stage_1.latents.audio": audio}
    if "upsampler" in request:
        config, seed = request["upsampler"]
        network = randomise(LTX2LatentUpsamplerModel(**config), seed).eval()
    else:
        network = models.load("upsampler_plain", "latent_upsampler")
    upsample = LTX2LatentUpsamplePipeline(pipeline.vae, network)
    larger = upsample(
        latents=video, height=half["height"], width=half["width"], num_frames=request["num_frames"], output_type="latent",
        return_dict=False,
    )[0]
    level, statistics = request["refine_sigmas"][0], (pipeline.audio_vae.latents_mean, pipeline.audio_vae.latents_std)
    larger = pipeline._normalize_latents(
        larger, pipeline.vae.latents_mean, pipeline.vae.latents_std, pipeline.vae.config.scaling_factor
    )
    noises = [torch.randn(shape, generator=source) for shape in noise_shapes(pipeline, request)]
    packed = pipeline._pack_latents(level * noises[0] + (1 - level) * larger)
    sound = pipeline._normalize_audio_latents(pipeline._pack_audio_latents(audio), *statistics)
    sound = level * pipeline._pack_audio_latents(noises[1]) + (1 - level) * sound
    pipeline.scheduler = verbatim_scheduler()
    video, audio = pipeline(
        generator=source, output_type="latent", width=request["width"], height=request["height"], latents=packed,
        audio_latents=pipeline._denormalize_audio_latents(sound, *statistics),
        **_arguments(request, request["refine_sigmas"][:-1]),
    )
    return first | _decoded(pipeline, video, audio)


def _two_passes_by_itself(pipeline, request):
    """Runs two passes of plain steps like diffusers' documentation, whose pipeline draws the second pass's noise."""
    half = dict(request, width=request["width"] // 2, height=request["height"] // 2)
    source = torch.Generator("cpu").manual_seed(request["seed"])
    video, audio = pipeline(
        generator=source, output_type="latent", width=half["width"], height=half["height"],
        **_arguments(half, DISTILLED_SIGMA_VALUES),
    )
    first = {"stage_1.latents.video": video, "stage_1.latents.audio": audio}
    larger = upsampled(pipeline, video)
    pipeline.scheduler = verbatim_scheduler()
    video, audio = pipeline(
        generator=source, output_type="latent", width=request["width"], height=request["height"], latents=larger,
        audio_latents=audio, noise_scale=request["refine_sigmas"][0], **_arguments(request, request["refine_sigmas"][:-1]),
    )
    return first | {"latents.video": video, "latents.audio": audio}


def _beside_a_generated_frame(pipeline, request):
    """Runs one pass by `LTX2DFRPipeline`, which generates a keyframe at frame 24."""
    parts = {name: part for name, part in pipeline.components.items() if name != "scheduler"}
    whole = LTX2DFRPipeline(scheduler=verbatim_scheduler(), **parts)
    made = whole(
        prompt=request["prompt"], width=request["width"], height=request["height"], num_frames=request["num_frames"],
        frame_rate=request["frame_rate"], max_sequence_length=request["max_sequence_length"], output_type="latent",
        generator=torch.Generator("cpu").manual_seed(request["seed"]),
    )
    assert list(made.keyframe_positions) == [request["num_frames"] - 1]
    return {"latents.video": made.frames, "latents.audio": made.audio}


_NEUTRAL = dict(cfg=1.0, stg=0.0, modality=1.0, rescale=0.0)
_COMMON = dict(prompt=POSITIVE, negative_prompt=NEGATIVE, num_frames=9, frame_rate=24.0, max_sequence_length=64)
_GUIDED = dict(
    _COMMON, width=64, height=64, steps=3, seed=10, stg_blocks=[1],
    guidance={
        "video": dict(cfg=3.0, stg=1.0, modality=3.0, rescale=0.7),
        "audio": dict(cfg=7.0, stg=1.0, modality=3.0, rescale=0.7),
    },
)
_DISTILLED = dict(
    _COMMON, width=128, height=64, seed=7, guidance={"video": _NEUTRAL, "audio": _NEUTRAL},
    refine_sigmas=[0.909375, 0.725, 0.421875, 0.0],
)
_CASES = {
    "guided": (_one_pass, _GUIDED),
    "decoded": (_by_diffusion, _GUIDED),
    "decoded_tiled": (
        _by_diffusion, dict(_GUIDED, tiling=dict(pixels=32, overlap=8, frames=6, frame_overlap=2)),
    ),
    "distilled": (_two_passes, _DISTILLED),
    "distilled_x1_5": (
        _two_passes, dict(_DISTILLED, width=96, height=96, upsampler=cases_upsampling.upsampler("tiny_2_3", "spatial_x1_5")),
    ),
    "distilled_by_diffusers": (_two_passes_by_itself, _DISTILLED),
    "generated_frame": (
        _beside_a_generated_frame,
        dict(_COMMON, width=64, height=64, num_frames=25, seed=7, guidance={"video": _NEUTRAL, "audio": _NEUTRAL}),
    ),
}
# diffusers marks frames by itself.
_BY_THEMSELVES = (_two_passes_by_itself, _beside_a_generated_frame)
_STRIDES = {"video": (1, 4, 1, 9, 9), "audio": (1, 1, 53)}


def pipeline_2_5():
    save()
    cases_diffusion_decoder.configuration("diffusion_d")
    for case, (run, request) in _CASES.items():
        whole = models.load_pipeline(NAME)
        with nullcontext() if run in _BY_THEMSELVES else marked(whole.transformer):
            outputs = {k: v.float() for k, v in run(whole, request).items()}
        kept, extra = thin(outputs, _STRIDES)
        write_case(
            "pipeline_2_5", case, {}, kept, script=__file__, model=NAME, seed=request["seed"], scalars=request, extra=extra
        )
        show(f"pipeline_2_5/{case}", *outputs.values())


COMPONENTS = {"pipeline_2_5": pipeline_2_5}
