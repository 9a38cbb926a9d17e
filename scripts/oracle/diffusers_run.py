"""Runs a drawn request by diffusers' pipelines, and the networks of a drawn model on random inputs."""

from contextlib import nullcontext
from unittest.mock import patch

import torch
from diffusers import LTX2ConditionPipeline, LTX2ImageToVideoPipeline, LTX2VideoTransformer3DModel
from diffusers.loaders.lora_pipeline import LTX2LoraLoaderMixin
from diffusers.pipelines.ltx2 import pipeline_ltx2_condition
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from PIL import Image

import cases_transformer
from cases_pipeline import draw_noise, run_pipeline
from cases_text import encode
from common import randn


def merge_loras(folder, files, strengths, dtype):
    """Returns the transformer's weights that `fuse_lora` changes."""
    network = LTX2VideoTransformer3DModel.from_pretrained(folder, torch_dtype=dtype)
    names = [f"adapter_{index}" for index in range(len(files))]
    for name, file in zip(names, files):
        tensors, metadata = LTX2LoraLoaderMixin.lora_state_dict(str(file), return_lora_metadata=True)
        network.load_lora_adapter(tensors, metadata=metadata, adapter_name=name)
    network.set_adapters(names, strengths)
    network.fuse_lora(adapter_names=names)
    return {k.replace(".base_layer", ""): v for k, v in network.state_dict().items() if k.endswith(".base_layer.weight")}


def run(model):
    request = dict(model.request, stg_blocks=model.request["stg_blocks"]["video"])
    if model.loras:
        strengths, stored = [own["strength"] for own in request["loras"]], {"f32": torch.float32, "bf16": torch.bfloat16}
        merged = merge_loras(model.folder / "transformer", model.loras, strengths, stored[request["stored"]])
        model.pipeline.transformer.load_state_dict(merged, strict=False)
    pipeline, drawn, at = model.pipeline, [], [image["frame"] for image in request["images"]]
    images = [Image.open(file).convert("RGB") for file in model.images]
    more = {"use_cross_timestep": request["cross_timestep"] != "own"} if at else {}
    if at == [0]:
        pipeline = LTX2ImageToVideoPipeline(**pipeline.components)
        more |= dict(image=images[0], image_crf=0)
    elif at:
        pipeline = LTX2ConditionPipeline(**pipeline.components)
        latent = lambda frame: (frame + pipeline.vae_temporal_compression_ratio - 1) // pipeline.vae_temporal_compression_ratio
        more["conditions"] = [LTX2VideoCondition(image, latent(frame), crf=0) for image, frame in zip(images, at)]
    pipeline.set_progress_bar_config(disable=True)
    own = pipeline_ltx2_condition.randn_tensor
    with patch.object(pipeline_ltx2_condition, "randn_tensor", lambda *a, **k: drawn.append(own(*a, **k)) or drawn[-1]):
        outputs = run_pipeline(pipeline, request, **more)
    del outputs["sigmas"]
    video, audio = draw_noise(pipeline, request)
    if drawn:
        sizes, (_, _, length, bins) = video.shape[2:], audio.shape
        video = drawn[0][:, : sizes.numel()].transpose(1, 2).reshape(video.shape)
        audio = drawn[1].reshape(1, length, -1, bins).transpose(1, 2)
    return {"noise.video": video, "noise.audio": audio, **outputs}


def limited(vocoder, clamp):
    """Limits the first of two vocoder stages to -1..1, like Lightricks' code, or does not."""
    if not hasattr(vocoder, "bwe_generator"):
        return nullcontext()
    stage = vocoder.vocoder
    return patch.object(stage, "final_act_fn", stage.final_act_fn or ("clamp" if clamp else None))


# Functions named like components; each returns inputs, outputs, and optionally `scalars` and the `rows` to compare.
def transformer(model, draw):
    config, batch = model.config["transformer"], draw.randint(1, 2)
    shape = dict(frames=draw.randint(1, 3), height=draw.randint(1, 4), width=draw.randint(1, 4), audio_frames=draw.randint(1, 9))
    newest = {"marked": draw.random() < 0.7} if config.get("use_keyframes_abs_pos_embedding") else {}
    more = dict(newest, text=draw.randint(1, 20), per_token=draw.random() < 0.4, masked=draw.random() < 0.4)
    values = cases_transformer.inputs_for(config, **more, seed=model.seed, batch=batch, **shape)
    levels = dict(fps=draw.choice([24.0, 25.0, 12.5]), use_cross_timestep=draw.random() < 0.5)
    scalars = cases_transformer.scalars_for(**shape, **levels, isolate_modalities=draw.random() < 0.2)
    if config.get("perturbed_attn"):
        scalars["stg_blocks"] = [draw.randrange(config["num_layers"])]
    return values, cases_transformer.run(model.parts["transformer"], values, scalars), {"scalars": scalars}


def _mask(draw, batch, total):
    """Draws a mask of prompts that are padded on the left."""
    return torch.stack([(torch.arange(total) >= total - draw.randint(1, total)).long() for _ in range(batch)])


def connectors(model, draw):
    config, total, batch = model.config["connectors"], 16 * draw.randint(1, 3), draw.randint(1, 3)
    states = randn(model.seed, "states", batch, total, config["caption_channels"] * config["text_proj_in_factor"])
    mask = _mask(draw, batch, total)
    video, audio, _ = model.parts["connectors"](states, mask)
    return {"text_encoder_hidden_states": states, "attention_mask": mask}, {"video": video, "audio": audio}, {}


def text_encoder(model, draw):
    """Draws ids. Padding rows are not compared; both the stack and its projection are accepted."""
    total, batch = 16 * draw.randint(1, 3), 2
    mask = _mask(draw, batch, total)
    ids = torch.tensor([[draw.randrange(3, 380) for _ in range(total)] for _ in range(batch)]) * mask
    outputs = encode(model.parts["text_encoder"], model.parts["connectors"], ids, mask)
    return {"input_ids": ids, "attention_mask": mask}, {"prompt_embeds": outputs}, {"rows": mask.bool()}


def video_decoder(model, draw):
    """Draws latents, not normalised, of at least two rows and columns, which reflect padding needs."""
    batch, channels = draw.randint(1, 2), model.config["vae"]["latent_channels"]
    latents = randn(model.seed, "latents", batch, channels, draw.randint(1, 3), draw.randint(2, 4), draw.randint(2, 4))
    return {"latents": latents}, {"video": model.parts["vae"].decode(latents, return_dict=False)[0]}, {}


def audio_decoder(model, draw):
    config, batch = model.config["audio_vae"], draw.randint(1, 2)
    latents = randn(model.seed, "latents", batch, config["latent_channels"], draw.randint(1, 9), config["mel_bins"] // 4)
    return {"latents": latents}, {"mel": model.parts["audio_vae"].decode(latents, return_dict=False)[0]}, {}


def vocoder(model, draw):
    mel = randn(model.seed, "mel", draw.randint(1, 2), 2, draw.randint(1, 9), model.config["audio_vae"]["mel_bins"])
    part, clamp = model.parts["vocoder"], draw.random() < 0.5
    with limited(part, clamp):
        return {"mel": mel}, {"audio": part(mel)}, {"scalars": {"clamp": clamp}} if hasattr(part, "bwe_generator") else {}


def video_encoder(model, draw):
    config = model.config["vae"]
    space, frames = config["spatial_compression_ratio"], 1 + config["temporal_compression_ratio"] * draw.randint(0, 2)
    video = randn(model.seed, "pixels", 1, 3, frames, space * draw.randint(2, 3), space * draw.randint(2, 3), scale=0.5)
    return {"video": video}, {"latents": model.parts["vae"].encode(video).latent_dist.mode()}, {}


def upsampler(model, draw):
    channels = model.config["latent_upsampler"]["in_channels"]
    latents = randn(model.seed, "latents", 1, channels, draw.randint(1, 3), draw.randint(2, 4), draw.randint(1, 4))
    return {"latents": latents}, {"latents": model.upsampler(latents)}, {}
