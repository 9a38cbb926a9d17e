#!/usr/bin/env bash
# diffusers 0.42.1 (peft 0.21.2, torch 2.15.0): `load_lora_weights` of LTX-2's pipelines knows LoRA tensors only by the prefixes
# `transformer.` and `diffusion_model.`. It drops all others. If none is left, it logs that this "is safe to ignore" and returns
# as after success: PEFT's own file, musubi-tuner's names and ComfyUI's longer prefix leave the model as it was. If some are
# left, it logs nothing about the dropped ones.
# Seen on 2026-11-29, with one module for each prefix:
#   transformer.: changed
#   diffusion_model.: changed
#   base_model.model. (PEFT): unchanged, 1 warning
#   model.diffusion_model. (ComfyUI): unchanged, 1 warning
#   lora_unet_ (musubi-tuner): unchanged, 1 warning
#   transformer. and base_model.model.: only the first changed, 0 warnings
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'diffusers==0.42.1' 'transformers==5.23.0' 'peft==0.21.2' 'accelerate==1.15.0' \
    'safetensors==0.8.0' 'torch==2.15.0' 'numpy==2.4.6'
seen=$(cd "$folder" && venv/bin/python - 2> log <<'PYTHON'
import copy
import logging

import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.loaders import LTX2LoraLoaderMixin
from safetensors.torch import save_file

torch.manual_seed(0)
sizes = dict(in_channels=4, out_channels=4, num_layers=1, caption_channels=8)
video = dict(num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32)
audio = dict(num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16, in_channels=4, out_channels=4)
model = LTX2VideoTransformer3DModel(**sizes, **video, **{f"audio_{key}": value for key, value in audio.items()})
warnings = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("diffusers.loaders").addHandler(handler)
logging.getLogger("diffusers.loaders").propagate = False


class Pipeline(LTX2LoraLoaderMixin):
    """LTX-2's pipelines as far as LoRAs are concerned."""

    def __init__(self, transformer):
        self.transformer, self.components, self.hf_device_map = transformer, {"transformer": transformer}, None


def lora(prefix, layer, names=("lora_A", "lora_B")):
    module = f"transformer_blocks.0.attn1.{layer}"
    module = module.replace(".", "_") if prefix == "lora_unet_" else module
    return {f"{prefix}{module}.{name}.weight": torch.randn(shape) for name, shape in zip(names, ((2, 32), (32, 2)))}


cases = {prefix: lora(prefix.split(" ")[0], "to_q") for prefix in (
    "transformer.", "diffusion_model.", "base_model.model. (PEFT)", "model.diffusion_model. (ComfyUI)",
)}
cases["lora_unet_ (musubi-tuner)"] = lora("lora_unet_", "to_q", ("lora_down", "lora_up"))
cases["lora_unet_ (musubi-tuner)"]["lora_unet_transformer_blocks_0_attn1_to_q.alpha"] = torch.tensor(2.0)
cases["transformer. and base_model.model."] = lora("transformer.", "to_q") | lora("base_model.model.", "to_k")
for name, tensors in cases.items():
    save_file(tensors, "lora.safetensors")
    transformer = copy.deepcopy(model)
    warnings.clear()
    Pipeline(transformer).load_lora_weights(".", weight_name="lora.safetensors")
    attention = transformer.transformer_blocks[0].attn1
    adapted = [hasattr(layer, "lora_A") for layer in (attention.to_q, attention.to_k)]
    if adapted == [True, False] and " and " in name:
        print(f"{name}: only the first changed, {len(warnings)} warnings")
    elif any(adapted):
        print(f"{name}: changed")
    else:
        safe = [text for text in warnings if "safe to ignore" in text]
        print(f"{name}: unchanged, {len(safe)} warning")
PYTHON
) || { cat "$folder/log"; exit 1; }
echo "$seen"
[ "$seen" = "transformer.: changed
diffusion_model.: changed
base_model.model. (PEFT): unchanged, 1 warning
model.diffusion_model. (ComfyUI): unchanged, 1 warning
lora_unet_ (musubi-tuner): unchanged, 1 warning
transformer. and base_model.model.: only the first changed, 0 warnings" ]
