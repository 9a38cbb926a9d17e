"""The toy model: builds, reads and writes its components in the diffusers layout, configured like those of assets/nano."""

import json
import pathlib

import diffusers
import torch
from diffusers.pipelines import ltx2
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from mel import fill_stft

ASSETS = pathlib.Path(__file__).resolve().parents[2] / "assets/nano"
_MEL_MEAN, _MEL_SPREAD = -8.0, 3.2
"""Roughly, of the world's logarithmic spectrograms."""


@torch.no_grad()
def build(part):
    torch.manual_seed(0)
    if part == "text_encoder":
        # Gemma 3 with a stub of the unused vision tower. Its configuration names bfloat16, for readers of the weights.
        config = Gemma3Config.from_pretrained(ASSETS / part)
        config.dtype = config.text_config.dtype = None
        return Gemma3ForConditionalGeneration(config)
    config = json.loads((ASSETS / part / "config.json").read_text())
    name = config["_class_name"]
    model = getattr(diffusers, name, getattr(ltx2, name, None)).from_config(config).float()
    readers = []
    if part == "vocoder":
        fill_stft(model)
        readers = [model.vocoder.conv_in, model.bwe_generator.conv_in]
        model.vocoder.conv_out.weight.mul_(0.1)
        model.bwe_generator.conv_out.weight.mul_(0.01)
    if part == "audio_vae":
        readers = [model.encoder.conv_in.conv]
        torch.nn.init.constant_(model.decoder.conv_out.conv.bias, _MEL_MEAN)
    if part == "transformer":
        _calm(model)
    # Normalises spectrograms to mean 0 and deviation 1 in the layers that read them.
    for layer in readers:
        layer.weight.div_(_MEL_SPREAD)
        layer.bias.sub_(_MEL_MEAN * layer.weight.flatten(1).sum(1))
    return model


def _calm(transformer):
    """Initialises to no shifts or scales, half-open gates, and zero velocities."""
    for name, parameter in transformer.named_parameters():
        if name.endswith("scale_shift_table"):
            parameter.zero_()
            if parameter.shape[0] in (5, 9):
                parameter[4 if parameter.shape[0] == 5 else slice(2, None, 3)] = 0.5
    for name, module in transformer.named_modules():
        modulation = type(transformer.get_submodule(name.rpartition(".")[0])).__name__ == "LTX2AdaLayerNormSingle"
        if (modulation and name.endswith(".linear")) or name.endswith("to_gate_logits") or name in ("proj_out", "audio_proj_out"):
            torch.nn.init.zeros_(module.weight)
            torch.nn.init.zeros_(module.bias)


def _files(folder, part):
    """Returns the file of a component's weights, and a function that spells a tensor's name like published repositories."""
    if part != "text_encoder":
        return pathlib.Path(folder, part, "diffusion_pytorch_model.safetensors"), lambda name: name
    published = lambda name: name.removeprefix("model.").replace("language_model.", "language_model.model.", 1)
    return pathlib.Path(folder, part, "model.safetensors"), published


def load(folder, part, device="cpu"):
    """Returns a component in float32, with initial weights if the folder has none."""
    model, (path, published) = build(part), _files(folder, part)
    if path.exists():
        tensors = load_file(path)
        # The text encoder's tied `lm_head` is not stored.
        model.load_state_dict({k: tensors[published(k)] for k in model.state_dict() if "lm_head" not in k}, strict=False)
    return model.to(device)


def save(folder, **parts):
    for part, model in parts.items():
        path, published = _files(folder, part)
        state = {published(k): v for k, v in model.state_dict().items() if "lm_head" not in k}
        state = {k: v.detach().to("cpu", torch.bfloat16).contiguous().clone() for k, v in sorted(state.items())}
        save_file(state, path, metadata={"format": "pt"})
