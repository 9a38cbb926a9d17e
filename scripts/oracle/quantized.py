#!/usr/bin/env python3
"""Writes tests/fixtures/quantized: small files in quantized formats, with the values that their own packages decode.

Needs torch==2.15.0 (CPU), numpy==2.4.6, safetensors==0.8.0, comfy-kitchen==0.2.40, gguf==0.19.0, packaging, pyyaml,
requests, tqdm. Usage: quantized.py FOLDER."""
import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from comfy_kitchen.backends.eager import quantization as ck
from safetensors.torch import save_file

TYPES = "Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS F16 BF16 F32".split()
# Offsets of the f16 scales in a block, for types that the package cannot quantize to.
SCALES = {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0]}
F32 = torch.float32
ROTATED = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}


def marker(**conf):
    return torch.tensor(list(json.dumps(conf).encode()), dtype=torch.uint8)


def comfy(folder):
    torch.manual_seed(0)
    file, want = {}, {}

    def layer(name, conf, **tensors):
        file.update({f"{name}.{key}": value for key, value in tensors.items()})
        if conf:
            file[f"{name}.comfy_quant"] = marker(**conf)

    for name, kind in [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]:
        scale = torch.tensor(0.0123)
        weight = ck.quantize_per_tensor_fp8(torch.randn(3, 5), scale, kind)
        conf = {"format": {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[name]}
        layer(name, conf, weight=weight, weight_scale=scale, input_scale=torch.tensor(0.5))
        want[name] = ck.dequantize_per_tensor_fp8(weight, scale, F32)
    codes, scale = ck.quantize_int8_rowwise(torch.randn(3, 20))
    layer("int8", {"format": "int8_tensorwise"}, weight=codes, weight_scale=scale)
    want["int8"] = ck.dequantize_int8_simple(codes, scale)
    want["original"] = torch.randn(4, 512)
    codes, scale = ck.quantize_int8_convrot_weight(want["original"], 256)
    layer("convrot", ROTATED, weight=codes, weight_scale=scale)
    want["convrot"] = ck.dequantize_int8_convrot_weight(codes, scale, 256)
    want["convrot.bf16"] = ck.dequantize_int8_convrot_weight_dtype(codes, scale, 256, 2)
    # 144 rows of 5 blocks: two tiles of scales in each direction. Only some rows of the values are kept.
    x = torch.randn(144, 80)
    whole = x.abs().amax() / 2688
    codes, blocks = ck.quantize_nvfp4(x, whole)
    layer("nvfp4", {"format": "nvfp4"}, weight=codes, weight_scale=blocks, weight_scale_2=whole)
    want["nvfp4"] = ck.dequantize_nvfp4(codes, whole, blocks, F32)[[0, 31, 32, 127, 128, 143]].contiguous()
    save_file(file, folder / "comfy.safetensors")
    save_file(want, folder / "comfy_values.safetensors")


def of_convert(folder):
    """Layers with official names, and their bytes in the forms of `ltx2 convert`."""
    torch.manual_seed(1)
    connector = "video_embeddings_connector.transformer_1d_blocks.0.attn1.to_k"
    layers = ["transformer_blocks.1.attn1.to_q", "transformer_blocks.0.ff.net.2", connector]
    layers = {f"model.diffusion_model.{name}": torch.randn(3, 256 * (1 + i)) for i, name in enumerate(layers)}
    other = "model.diffusion_model.transformer_blocks.1.attn1.to_gate_logits.weight"
    source = {other: torch.randn(2, 256)} | {f"{name}.weight": weight for name, weight in layers.items()}
    save_file(source, folder / "convert.safetensors", {"config": '{"transformer":{}}'})
    kinds = {
        "fp8": (lambda w, s: (ck.quantize_per_tensor_fp8(w, s), s), {"format": "float8_e4m3fn"}, 1),
        "int8": (lambda w, _: ck.quantize_int8_rowwise(w), {"format": "int8_tensorwise"}, 1),
        "int8-convrot": (lambda w, _: ck.quantize_int8_convrot_weight(w, 256), ROTATED, 3),
    }
    want = {}
    for form, (quantize, conf, count) in kinds.items():
        for name, weight in list(layers.items())[:count]:
            codes, scale = quantize(weight, weight.abs().amax() / 448)
            parts = {"weight": codes, "weight_scale": scale, "comfy_quant": marker(**conf)}
            want |= {f"{form}/{name}.{key}": value for key, value in parts.items()}
    save_file(want, folder / "convert_values.safetensors")


def codes_of(name, values):
    """Codes of a type: by the package, or random codes with small scales."""
    kind = gguf.GGMLQuantizationType[name]
    if name not in SCALES:
        return kind, gguf.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(len(name) + size)
    codes = random.integers(0, 256, (values.size // block, size), dtype=np.uint8)
    for at in SCALES[name]:
        codes[:, at : at + 2] = random.uniform(-0.01, 0.01, (len(codes), 1)).astype(np.float16).view(np.uint8)
    return kind, codes.reshape(values.shape[0], -1)


def of_gguf(folder):
    values = np.random.default_rng(0).standard_normal((2, 256)).astype(np.float32)
    writer, want = gguf.GGUFWriter(folder / "types.gguf", "ltxv"), {}
    for name in TYPES:
        kind, codes = codes_of(name, values)
        writer.add_tensor(f"{name.lower()}.weight", codes, raw_dtype=kind)
        decoded = gguf.dequantize(codes, kind).reshape(values.shape)
        want[name.lower()] = torch.from_numpy(np.ascontiguousarray(decoded))
    # ComfyUI-GGUF's converter stores a tensor whose rows are not whole blocks as rows of 256.
    kind, codes = codes_of("Q4_K", values)
    writer.add_array("comfy.gguf.orig_shape.reshaped.weight", [4, 2, 64])
    writer.add_tensor("reshaped.weight", codes, raw_dtype=kind)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "long token"])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 100)
    writer.add_string("config", json.dumps({"transformer": {}}))
    for write in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, write)()
    save_file(want, folder / "types_values.safetensors")


out = Path(sys.argv[1])
out.mkdir(parents=True, exist_ok=True)
comfy(out)
of_gguf(out)
of_convert(out)
