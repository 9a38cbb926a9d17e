#!/usr/bin/env bash
# nvidia-modelopt 0.47.0, comfy-kitchen 0.2.40 (torch 2.15.0): ModelOpt can export LTX-2 in nvfp4 for ComfyUI, with the scale
# layout of comfy-kitchen and with "nvfp4" as the format in the header. However, it stores the first value of each pair in the low four
# bits of a byte, and comfy-kitchen's layout class, which ComfyUI uses, reads the high ones first. Names, types, shapes and
# metadata are equal in both orders, so the file loads without an error, and neighbouring columns of every weight are swapped.
# Seen on 2026-11-29, for a random weight:
#   ModelOpt's file: weight uint8 [128, 32], weight_scale float8_e4m3fn [128, 4], weight_scale_2 float32 [], format nvfp4
#   comfy-kitchen's file: weight uint8 [128, 32], weight_scale float8_e4m3fn [128, 4], weight_scale_2 float32 [], format nvfp4
#   relative error in comfy-kitchen's layout: of its own file 0.10, of ModelOpt's 1.42, with the halves of its bytes swapped 0.10
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'nvidia-modelopt==0.47.0' 'transformers==5.23.0' 'accelerate==1.15.0' 'requests==2.34.2' \
    'comfy-kitchen==0.2.40' 'torch==2.15.0' 'numpy==2.4.6'
seen=$("$folder/venv/bin/python" - 2> "$folder/log" <<'PYTHON'
import json

import torch
from comfy_kitchen import swap_nibbles
from comfy_kitchen.tensor.nvfp4 import TensorCoreNVFP4Layout as Layout
from modelopt.torch.export.diffusers_utils import build_layerwise_quant_metadata, swizzle_nvfp4_scales
from modelopt.torch.quantization.qtensor import NVFP4QTensor

torch.manual_seed(0)
weight = torch.randn(128, 64)
packed, blocks, scale = NVFP4QTensor.quantize(weight, 16)
names = ("weight", "weight_scale", "weight_scale_2")
file = dict(zip([f"layer.{name}" for name in names], (packed._quantized_data, blocks, scale.float())))
file = swizzle_nvfp4_scales(file)
header = json.loads(build_layerwise_quant_metadata(file, {"quant_algo": "NVFP4"}))
modelopt = [file[f"layer.{name}"] for name in names]
codes, layout = Layout.quantize(weight)
comfy = [Layout.state_dict_tensors(codes, layout)[name] for name in ("", "_scale", "_scale_2")]


def described(tensors):
    parts = zip(names, tensors)
    return ", ".join(f"{name} {str(part.dtype).removeprefix('torch.')} {list(part.shape)}" for name, part in parts)


def error(codes, blocks, scale):
    params = Layout.Params(scale=scale, orig_dtype=torch.float32, orig_shape=weight.shape, block_scale=blocks)
    return (Layout.dequantize(codes, params) - weight).norm() / weight.norm()


print(f"ModelOpt's file: {described(modelopt)}, format {header['layers']['layer']['format']}")
print(f"comfy-kitchen's file: {described(comfy)}, format nvfp4")
swapped = error(swap_nibbles(modelopt[0]), *modelopt[1:])
errors = f"of its own file {error(*comfy):.2f}, of ModelOpt's {error(*modelopt):.2f}"
print(f"relative error in comfy-kitchen's layout: {errors}, with the halves of its bytes swapped {swapped:.2f}")
PYTHON
) || { cat "$folder/log"; exit 1; }
echo "$seen"
parts='weight uint8 [128, 32], weight_scale float8_e4m3fn [128, 4], weight_scale_2 float32 [], format nvfp4'
[ "$seen" = "ModelOpt's file: $parts
comfy-kitchen's file: $parts
relative error in comfy-kitchen's layout: of its own file 0.10, of ModelOpt's 1.42, with the halves of its bytes swapped 0.10" ]
