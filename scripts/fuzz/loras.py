#!/usr/bin/env python3
"""Writes fuzz/seeds/lora: LoRAs of tests/fixtures/models/tiny_a with both key conventions."""

import json
import pathlib
import struct

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = ROOT / "fuzz/seeds/lora"

# Weight, rows and columns, by diffusers' names.
DIFFUSERS = {
    "transformer.transformer_blocks.0.attn1.to_q": (32, 32),
    "transformer.transformer_blocks.1.audio_ff.net.0.proj": (64, 16),
    "connectors.video_connector.transformer_blocks.0.attn1.to_k": (24, 24),
}
# By Lightricks' names.
OFFICIAL = {
    "diffusion_model.adaln_single.linear": (192, 32),
    "diffusion_model.transformer_blocks.0.audio_to_video_attn.to_out.0": (32, 16),
    "diffusion_model.audio_embeddings_connector.transformer_1d_blocks.0.attn1.to_v": (24, 24),
    "text_embedding_projection.aggregate_embed": (24, 192),
}


def number(dtype, value):
    return {"F32": struct.pack("<f", value), "F16": struct.pack("<e", value), "BF16": struct.pack("<f", value)[2:]}[dtype]


def values(dtype, shape, seed):
    count = 1
    for size in shape:
        count *= size
    return b"".join(number(dtype, ((seed + 7919 * at) * 2654435761 % 4096 - 2048) / 2048) for at in range(count))


def write(name, modules, rank, dtype, ends, alpha=None, metadata=None):
    header, data = ({"__metadata__": metadata} if metadata else {}), b""

    def add(key, dtype, shape):
        nonlocal data
        start, data = len(data), data + values(dtype, shape, len(header))
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, len(data)]}

    for module, (rows, columns) in modules.items():
        down, up = ends
        add(f"{module}.{down}.weight", dtype, [rank, columns])
        add(f"{module}.{up}.weight", dtype, [rows, rank])
        if alpha:
            start, data = len(data), data + number("F32", alpha)
            header[f"{module}.alpha"] = {"dtype": "F32", "shape": [], "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (OUT / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    adapter = {"transformer.r": 2, "transformer.lora_alpha": 4, "transformer.use_dora": False, "transformer.alpha_pattern": {}}
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(adapter)}
    write("diffusers", DIFFUSERS, 2, "BF16", ("lora_A", "lora_B"), metadata=metadata)
    write("official", OFFICIAL, 1, "F32", ("lora_A", "lora_B"))
    # Older trainers' names, with alphas.
    write("older", {key: OFFICIAL[key] for key in list(OFFICIAL)[:2]}, 3, "F16", ("lora_down", "lora_up"), alpha=1.5)


if __name__ == "__main__":
    main()
