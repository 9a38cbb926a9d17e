"""Runs a drawn request by diffusers' pipelines."""

from contextlib import nullcontext
from unittest.mock import patch

import torch
from diffusers import LTX2ConditionPipeline, LTX2ImageToVideoPipeline, LTX2VideoTransformer3DModel
from diffusers.loaders.lora_pipeline import LTX2LoraLoaderMixin
from diffusers.pipelines.ltx2 import pipeline_ltx2_condition
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from PIL import Image

from cases_pipeline import draw_noise, run_pipeline


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
