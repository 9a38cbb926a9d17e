"""The fixture models: loads them, and draws their weights. README.md says what each stands for.

Their configurations are the files in tests/fixtures/models, which stay as they are. To add a model, write its config.json."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video, LTX2Pipeline, LTX2VideoDiffusionDecoderModel, LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import (
    LTX2DurationHead, LTX2LatentUpsamplerModel, LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE,
)
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

from common import MODELS, randomise

# The complete models and the seeds of their weights.
WHOLE = {"tiny_a": 11, "tiny_b": 22, "tiny_2_3": 23}
PARTS = ("transformer", "connectors", "vae", "audio_vae", "vocoder")
CLASSES = {
    "transformer": LTX2VideoTransformer3DModel, "connectors": LTX2TextConnectors, "vae": AutoencoderKLLTX2Video,
    "audio_vae": AutoencoderKLLTX2Audio, "vocoder": LTX2Vocoder, "latent_upsampler": LTX2LatentUpsamplerModel,
    "duration_head": LTX2DurationHead, "diffusion_decoder": LTX2VideoDiffusionDecoderModel,
}
TEXT_ENCODERS = {"gemma3": Gemma3ForConditionalGeneration, "gemma4_unified": Gemma4UnifiedForConditionalGeneration}
VOCABULARY = 400


@functools.cache
def config(name, component):
    data = json.loads((MODELS / name / component / "config.json").read_text())
    return {key: value for key, value in data.items() if not key.startswith("_")}


def class_of(component, config):
    if component == "text_encoder":
        return TEXT_ENCODERS[config["model_type"]]
    return LTX2VocoderWithBWE if "bwe_in_channels" in config else CLASSES[component]


def build(component, config, seed):
    model = randomise(class_of(component, config)(**config).to(torch.float32), f"{seed}/{component}")
    # Periodic activations add up over the blocks; with smaller weights samples mostly stay in -1..1.
    for generator in (model.vocoder, model.bwe_generator) if isinstance(model, LTX2VocoderWithBWE) else ():
        generator.conv_out.weight *= 0.3 * 0.6 ** len(generator.upsamplers)
        for name, tensor in generator.state_dict().items():
            if ".convs2." in name:
                tensor *= 0.2
    return model


def gemma_config(text, **more):
    """Returns the configuration of Gemma 3 or 4 with the smallest vision and audio towers, as only text is encoded."""
    if "global_head_dim" in text:
        vision = dict(mm_embed_dim=4, output_proj_dims=4, mm_posemb_size=4, patch_size=2)
        return Gemma4UnifiedConfig(text_config=text, vision_config=vision, audio_config=dict(audio_embed_dim=4))
    vision = dict(hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1, image_size=8, patch_size=4)
    vision |= dict(num_channels=3, vision_use_head=False)
    return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **more)


def build_text_encoder(config, seed):
    return randomise(Gemma3ForConditionalGeneration(config).to(torch.float32), f"{seed}/text_encoder")


def save_weights(model, folder, **more):
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch, **more)
        for file in Path(scratch).glob("*.safetensors*"):
            shutil.copyfile(file, folder / file.name)


def copy_tokenizer(folder):
    """Copies the tokenizer of the fixture models: Gemma-style BPE of `VOCABULARY` entries with byte fallback; adds BOS."""
    shutil.copytree(MODELS / "tiny_a" / "tokenizer", folder)


def models():
    """Draws the weights of all models, in bfloat16 except for tiny_b; tiny_a's transformer is in shards, like the 19B."""
    dtype_of = lambda name: torch.float32 if name == "tiny_b" else torch.bfloat16
    for name, part in (file.parts[-3:-1] for file in sorted(MODELS.glob("*/*/config.json"))):
        # cases_gemma4.py draws the weights of LTX-2.5's text encoders and connectors.
        if part not in (*PARTS, "latent_upsampler", "duration_head") or name.startswith(("gemma4", "tiny_2_5")):
            continue
        model = build(part, config(name, part), WHOLE.get(name, 33 + sum(name.encode()) % 1000))
        shards = {"max_shard_size": "100KB"} if (name, part) == ("tiny_a", "transformer") else {}
        save_weights(model.to(dtype_of(name)), MODELS / name / part, **shards)
    for name, seed in WHOLE.items():
        folder = MODELS / name / "text_encoder"
        save_weights(build_text_encoder(Gemma3Config.from_pretrained(folder), seed).to(dtype_of(name)), folder)


def load(name, component, dtype=torch.float32):
    return class_of(component, config(name, component)).from_pretrained(MODELS / name / component, dtype=dtype).eval()


def load_pipeline(name, dtype=torch.float32, kind=LTX2Pipeline, **replaced):
    pipeline = LTX2Pipeline.from_pretrained(MODELS / name, dtype=dtype)
    if kind is not LTX2Pipeline:
        pipeline = kind(**{k: v for k, v in pipeline.components.items() if k != "duration_head"} | replaced)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def decoded(pipeline, video, audio):
    """Returns final latents with their frames and samples, decoded like at the end of the pipeline."""
    frames = pipeline.vae.decode(video.to(pipeline.dtype), None, return_dict=False)[0]
    frames = pipeline.video_processor.postprocess_video(frames, output_type="pt")
    samples = pipeline.vocoder(pipeline.audio_vae.decode(audio.to(pipeline.dtype), return_dict=False)[0])
    return {"latents.video": video, "latents.audio": audio, "video": frames, "audio": samples}
