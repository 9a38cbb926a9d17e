"""The fixture models: loads them, and draws their weights. README.md says what each stands for.

Their configurations are the files in tests/fixtures/models, which stay as they are. To add a model, write its config.json.
"""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import torch
from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video, LTX2Pipeline, LTX2VideoTransformer3DModel
from diffusers.pipelines.ltx2 import (
    LTX2DurationHead, LTX2LatentUpsamplerModel, LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE,
)
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from common import MODELS, randomise
from tokenizer import save_tokenizer

# The complete models and the seeds of their weights.
WHOLE = {"tiny_a": 11, "tiny_b": 22, "tiny_2_3": 23}
PARTS = ("transformer", "connectors", "vae", "audio_vae", "vocoder")
_VARIANTS = {
    "transformer": ("dit_interleaved", "dit_perturbed", "dit_2_5", "dit_2_5_fixed_text", "dit_2_5_audio_bias"),
    "connectors": ("connectors_interleaved",),
    "vae": ("vae_patch1", "vae_timestep"),
    "audio_vae": ("audio_width", "audio_plain"),
    "vocoder": ("vocoder_bwe_odd", "vocoder_odd"),
    "latent_upsampler": ("upsampler_rational", "upsampler_plain", "upsampler_3_2", "upsampler_temporal", "upsampler_frames"),
    "duration_head": ("duration_head", "duration_head_queries", "duration_head_narrow"),
}
_CLASSES = {
    "transformer": LTX2VideoTransformer3DModel, "connectors": LTX2TextConnectors, "vae": AutoencoderKLLTX2Video,
    "audio_vae": AutoencoderKLLTX2Audio, "vocoder": LTX2Vocoder, "latent_upsampler": LTX2LatentUpsamplerModel,
    "duration_head": LTX2DurationHead,
}
VOCABULARY = 400


@functools.cache
def config(name, component):
    """Returns a component's configuration as arguments of its class."""
    data = json.loads((MODELS / name / component / "config.json").read_text())
    return {key: value for key, value in data.items() if not key.startswith("_")}


LATENT_UPSAMPLER = {name: config(name, "latent_upsampler") for name in _VARIANTS["latent_upsampler"]}
VOCODER = {name: config(name, "vocoder") for name in WHOLE}


def _class_of(component, config):
    extended = component == "vocoder" and "bwe_in_channels" in config
    return LTX2VocoderWithBWE if extended else _CLASSES[component]


def seed_of(name):
    return WHOLE.get(name, 33 + sum(name.encode()) % 1000)


def build(component, config, seed):
    """Returns a component with random weights in float32."""
    model = randomise(_class_of(component, config)(**config).to(torch.float32), f"{seed}/{component}")
    if isinstance(model, LTX2VocoderWithBWE):
        damp(model)
    return model


def damp(vocoder):
    """Scales weights so that samples mostly stay in -1..1; periodic activations add up over the blocks."""
    for generator in (vocoder.vocoder, vocoder.bwe_generator):
        generator.conv_out.weight *= 0.3 * 0.6 ** len(generator.upsamplers)
        for name, tensor in generator.state_dict().items():
            if ".convs2." in name:
                tensor *= 0.2


def build_text_encoder(config, seed):
    """Returns Gemma 3 with random weights in float32."""
    return randomise(Gemma3ForConditionalGeneration(config).to(torch.float32), f"{seed}/text_encoder")


def save_weights(model, folder, **more):
    """Writes a model's weights to a folder that has its configuration."""
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch, **more)
        for file in Path(scratch).glob("*.safetensors*"):
            shutil.copyfile(file, folder / file.name)


def save():
    """Draws the weights of all models, in bfloat16 except for tiny_b; tiny_a's transformer is in shards, like the 19B."""
    names = [(name, part) for name in WHOLE for part in PARTS]
    names += [(name, component) for component, variants in _VARIANTS.items() for name in variants]
    for name, part in names:
        dtype, shards = torch.float32 if name == "tiny_b" else torch.bfloat16, {}
        if (name, part) == ("tiny_a", "transformer"):
            shards = {"max_shard_size": "100KB"}
        save_weights(build(part, config(name, part), seed_of(name)).to(dtype), MODELS / name / part, **shards)
    for name, seed in WHOLE.items():
        folder = MODELS / name / "text_encoder"
        encoder = build_text_encoder(Gemma3Config.from_pretrained(folder), seed)
        save_weights(encoder if name == "tiny_b" else encoder.to(torch.bfloat16), folder)
        save_tokenizer(MODELS / name / "tokenizer", VOCABULARY)


def load(name, component, dtype=torch.float32):
    kind = Gemma3ForConditionalGeneration
    if component != "text_encoder":
        kind = _class_of(component, config(name, component))
    return kind.from_pretrained(MODELS / name / component, dtype=dtype).eval()


def load_pipeline(name, dtype=torch.float32, kind=LTX2Pipeline, **replaced):
    """Loads a complete model into a pipeline of diffusers."""
    pipeline = LTX2Pipeline.from_pretrained(MODELS / name, dtype=dtype)
    if kind is not LTX2Pipeline:
        parts = {part: model for part, model in pipeline.components.items() if part != "duration_head"}
        pipeline = kind(**(parts | replaced))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


COMPONENTS = {"models": save}
