#!/usr/bin/env python3
"""Compares LTX-2.5's diffusion decoder with diffusers' on one GPU: decoder_2_5.py MODEL LTX2 OUT [WIDTHxHEIGHTxFRAMES…].

MODEL is a folder that full_model.py wrote. For each size, decodes the same latents and noise by diffusers in f32 and in bf16
(flex attention compiled, masks cached) and by `ltx2 run` in bf16. Prints the relative L2 of both bf16 runs from f32, and
diffusers' time. Exit code 1 if ltx2 is more than 1.5 times as far from f32 as diffusers.
"""

import functools
import subprocess
import sys
from pathlib import Path

import torch
from diffusers import LTX2VideoDiffusionDecoderModel
from diffusers.models.autoencoders import ltx2_diffusion_decoder
from safetensors.torch import load_file, save_file
from torch.nn.attention import flex_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "oracle"))
from common import relative_l2  # noqa: E402
from peer import median, release  # noqa: E402

LIMIT = 1.5


def theirs(model, dtype, latents, noise, name):
    """Returns diffusers' video in f32 on the host and its seconds."""
    network = LTX2VideoDiffusionDecoderModel.from_pretrained(model / "diffusion_decoder", torch_dtype=dtype).to("cuda").eval()
    # Both decoders get the same noise.
    ltx2_diffusion_decoder.randn_tensor = lambda shape, **_: noise.to("cuda", dtype).reshape(shape)
    given = latents.to("cuda", dtype)
    seconds = median(name, lambda: network.decode(given, return_dict=False), 3)
    video = network.decode(given, return_dict=False)[0].float().cpu()
    ltx2_diffusion_decoder._neighborhood_block_mask.cache_clear()
    return video, seconds


def main():
    model, ltx2, out = map(Path, sys.argv[1:4])
    # One program per shape and type. Beyond the limit, torch computes attention without a kernel and runs out of memory.
    torch._dynamo.config.recompile_limit = 64
    for name in ("create_block_mask", "flex_attention"):
        setattr(flex_attention, name, torch.compile(getattr(flex_attention, name), dynamic=False))
    ltx2_diffusion_decoder._neighborhood_block_mask = functools.cache(ltx2_diffusion_decoder._neighborhood_block_mask)
    out.mkdir(parents=True, exist_ok=True)
    source, agreed = torch.Generator().manual_seed(5), True
    for text in sys.argv[4:] or ["256x256x17"]:
        width, height, pixels = (int(n) // unit for n, unit in zip(text.split("x"), (32, 32, 1)))
        frames = (pixels - 1) // 8 + 1
        latents = torch.randn(1, 128, frames, height, width, generator=source).bfloat16().float()
        noise = torch.randn(1, 3, pixels, 32 * height, 32 * width, generator=source).bfloat16().float()
        exact, _ = theirs(model, torch.float32, latents, noise, f"{text}, f32")
        release()
        rounded, seconds = theirs(model, torch.bfloat16, latents, noise, f"{text}, bf16")
        release()
        save_file({"latents": latents, "noise": noise}, out / "inputs.safetensors")
        files = ["--inputs", out / "inputs.safetensors", "--output", out / "ours.safetensors", "--force"]
        command = [ltx2, "run", "diffusion-decoder", "--model", model, *files, "--platform", "cuda", "--dtype", "bf16"]
        subprocess.run(command, check=True)
        ours = load_file(out / "ours.safetensors")["video"].float()
        own, reference = (relative_l2(video, exact) for video in (ours, rounded))
        agreed &= own <= LIMIT * reference
        print(f"decoder {text}: from f32: ltx2 {own:.3e}, diffusers {reference:.3e}; diffusers {seconds:.4f} s", flush=True)
    sys.exit(0 if agreed else 1)


torch.set_grad_enabled(False)
main()
