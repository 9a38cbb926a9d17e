#!/usr/bin/env python3
"""Writes tiny random models for a rehearsal: rehearsal_models.py OUT.

One per generation, as a diffusers folder and (except LTX-2.5) as Lightricks' file, each with upsampler and LoRA; distilled ones
of LTX-2.3 and LTX-2.5.
"""

import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "oracle"))
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import official_file  # noqa: E402
from common import MODELS, fix_numerics, generator  # noqa: E402
from models import LATENT_UPSAMPLER, VOCODER, build  # noqa: E402

UPSAMPLERS = {"2.0": "upsampler_rational", "2.3": "upsampler_plain", "2.5": "upsampler_plain"}
# Lightricks' code supports only the published dilations.
_THREE = [[1, 3, 5]] * 3
VOCODERS = {"tiny_2_3": dict(VOCODER["tiny_2_3"], resnet_dilations=_THREE, bwe_resnet_dilations=_THREE)}


def tensors_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def write_lora(transformer, file):
    pairs, source = {}, generator(7, "lora")
    for name, weight in transformer.items():
        module = name.removesuffix(".weight")
        if not name.endswith(("attn1.to_q.weight", "attn2.to_v.weight", "ff.net.2.weight")):
            continue
        a, b = torch.randn(4, weight.shape[1], generator=source), torch.randn(weight.shape[0], 4, generator=source)
        pairs[f"diffusion_model.{module}.lora_A.weight"] = (a / weight.shape[1] ** 0.5).to(torch.bfloat16)
        pairs[f"diffusion_model.{module}.lora_B.weight"] = (b * 0.2).to(torch.bfloat16)
    save_file(pairs, file)


def write(model, generation, folder, distilled):
    shutil.rmtree(folder, ignore_errors=True)
    diffusers = folder / "diffusers"
    shutil.copytree(MODELS / model, diffusers)
    if model in VOCODERS:
        build("vocoder", VOCODERS[model], 6).to(torch.bfloat16).save_pretrained(diffusers / "vocoder")
    kind = "distilled" if distilled else "dev"
    if generation != "2.5":
        official_file.convert(diffusers, folder / f"ltx-{generation}-{kind}.safetensors")
    channels = json.loads((diffusers / "vae" / "config.json").read_text())["latent_channels"]
    config = dict(LATENT_UPSAMPLER[UPSAMPLERS[generation]], in_channels=channels)
    build("latent_upsampler", config, 5).to(torch.bfloat16).save_pretrained(diffusers / "latent_upsampler")
    file = folder / f"ltx-{generation}-spatial-upscaler-x2.safetensors"
    official_file.write(file, tensors_of(diffusers / "latent_upsampler"), official_file.upsampler_header(config))
    if not distilled:
        lora = folder / f"ltx-{generation}-distilled-lora-4.safetensors"
        write_lora(tensors_of(diffusers / "transformer"), lora)
        shutil.copy(lora, diffusers)


def main():
    out = Path(sys.argv[1])
    fix_numerics()
    for model, name in (("tiny_a", "2.0"), ("tiny_2_3", "2.3"), ("tiny_2_3", "2.3-distilled"), ("tiny_2_5", "2.5"),
                        ("tiny_2_5", "2.5-distilled")):
        write(model, name[:3], out / name, "distilled" in name)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main()
