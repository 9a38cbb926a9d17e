#!/usr/bin/env bash
# comfy-kitchen 0.2.40 (torch 2.15.0): the data type of the caller changes quantized values. int8: scales are computed in f32, but
# rounded to the weight's type before the division, and the quotient is rounded too. A bf16 weight is thus off by up to a whole
# step instead of half a step, while the file's scale is the unrounded one. nvfp4: with bf16 output, the tensor's scale and its
# product with the block's scale are rounded before the multiplication, which doubles the error of rounding the f32 output once.
# Seen on 2026-11-29, with the same weight as f32 and bf16:
#   int8, largest error in steps: f32 0.50, bf16 1.00; relative error: f32 0.0087, bf16 0.0093
#   nvfp4, relative error of bf16 values: rounded once 0.0018, by the package 0.0040
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'comfy-kitchen==0.2.40' 'packaging==26.4' 'torch==2.15.0' 'numpy==2.4.6'
seen=$("$folder/venv/bin/python" - 2> "$folder/log" <<'PYTHON'
import comfy_kitchen
import torch

torch.manual_seed(0)
# Values of a bf16 checkpoint, exact in f32 too.
weight = (torch.randn(512, 4096) * 0.02).bfloat16().float()
relative = lambda values, exact: ((values.float() - exact).norm() / exact.norm()).item()
steps, errors = [], []
for dtype in (torch.float32, torch.bfloat16):
    codes, scale = comfy_kitchen.quantize_int8_rowwise(weight.to(dtype))
    assert scale.dtype == torch.float32
    values = codes.float() * scale
    steps.append(((values - weight).abs() / scale).max().item())
    errors.append(relative(values, weight))
print("int8, largest error in steps: f32 {:.2f}, bf16 {:.2f};".format(*steps), end=" ")
print("relative error: f32 {:.4f}, bf16 {:.4f}".format(*errors))

torch.manual_seed(0)
weight = torch.randn(256, 1024).mul(0.02).bfloat16().float()
scale = weight.abs().max() / (6 * 448)
codes, blocks = comfy_kitchen.quantize_nvfp4(weight, scale)
exact, rounded = (comfy_kitchen.dequantize_nvfp4(codes, scale, blocks, dtype) for dtype in (torch.float32, torch.bfloat16))
once = relative(exact.bfloat16(), exact)
print(f"nvfp4, relative error of bf16 values: rounded once {once:.4f}, by the package {relative(rounded, exact):.4f}")
PYTHON
) || { cat "$folder/log"; exit 1; }
echo "$seen"
[ "$seen" = "int8, largest error in steps: f32 0.50, bf16 1.00; relative error: f32 0.0087, bf16 0.0093
nvfp4, relative error of bf16 values: rounded once 0.0018, by the package 0.0040" ]
