"""Runs a drawn request by diffusers' pipelines."""

from contextlib import contextmanager, nullcontext

import torch
from diffusers import LTX2ConditionPipeline, LTX2ImageToVideoPipeline, LTX2VideoTransformer3DModel
from diffusers.pipelines.ltx2 import pipeline_ltx2_condition
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from PIL import Image

from cases_pipeline import draw_noise, run_pipeline


@contextmanager
def noise_as_drawn(drawn):
    """Records the noise that the pipeline draws."""
    own = pipeline_ltx2_condition.randn_tensor

    def draw(*shape, **more):
        drawn.append(own(*shape, **more))
        return drawn[-1]

    pipeline_ltx2_condition.randn_tensor = draw
    try:
        yield
    finally:
        pipeline_ltx2_condition.randn_tensor = own


def _merge(model):
    """Merges the LoRAs into the transformer by `fuse_lora` in the stored type."""
    if not model.loras:
        return
    stored = {"f32": torch.float32, "bf16": torch.bfloat16}[model.request["stored"]]
    network = LTX2VideoTransformer3DModel.from_pretrained(model.folder / "transformer", torch_dtype=stored)
    names = [file.stem for file in model.loras]
    for name, file in zip(names, model.loras):
        tensors, metadata = model.pipeline.lora_state_dict(str(file), return_lora_metadata=True)
        network.load_lora_adapter(tensors, metadata=metadata, adapter_name=name)
    network.set_adapters(names, [lora["strength"] for lora in model.request["loras"]])
    network.fuse_lora(adapter_names=names)
    merged = {k.replace(".base_layer", ""): v for k, v in network.state_dict().items() if k.endswith(".base_layer.weight")}
    model.pipeline.transformer.load_state_dict(merged, strict=False)


def run(model, dtype):
    """Returns noise, final latents, frames and samples."""
    request = dict(model.request, stg_blocks=model.request["stg_blocks"]["video"])
    _merge(model)
    pipeline, more, order, drawn = model.pipeline, {}, nullcontext(), []
    at = [image["frame"] for image in request["images"]]
    images = [Image.open(file).convert("RGB") for file in model.images]
    if at:
        more["use_cross_timestep"] = request["cross_timestep"] != "own"
    if at == [0]:
        pipeline = LTX2ImageToVideoPipeline(**pipeline.components)
        more |= dict(image=images[0], image_crf=0)
    elif at:
        pipeline = LTX2ConditionPipeline(**pipeline.components)
        latent = lambda frame: (frame + pipeline.vae_temporal_compression_ratio - 1) // pipeline.vae_temporal_compression_ratio
        more["conditions"] = [LTX2VideoCondition(image, latent(frame), crf=0) for image, frame in zip(images, at)]
        order = noise_as_drawn(drawn)
    pipeline.set_progress_bar_config(disable=True)
    with order:
        outputs = run_pipeline(pipeline, request, **more)
    del outputs["sigmas"]
    video, audio = draw_noise(pipeline, request)
    if drawn:
        (_, channels, *sizes), (_, _, length, bins) = video.shape, audio.shape
        own = sizes[0] * sizes[1] * sizes[2]
        video = drawn[0][:, :own].transpose(1, 2).reshape(1, channels, *sizes)
        audio = drawn[1].reshape(1, length, -1, bins).transpose(1, 2)
    return outputs if dtype == torch.bfloat16 else {"noise.video": video, "noise.audio": audio, **outputs}
