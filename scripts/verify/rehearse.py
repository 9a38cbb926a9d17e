"""Runs verify_real.sh on tiny random models, by a Python that has the reference: rehearse.py LTX2 OUT [OPTION…].

Writes a model per generation, as a diffusers folder and (except LTX-2.5) as Lightricks' file, each with upsampler and LoRA;
distilled ones of LTX-2.3 and LTX-2.5."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "oracle"))
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

import official_file  # noqa: E402
from common import MODELS, fix_numerics, generator  # noqa: E402
from models import build, config  # noqa: E402

MODEL_OF = {"2.0": "tiny_a", "2.3": "tiny_2_3", "2.5": "tiny_2_5"}
UPSAMPLERS = {"2.0": "upsampler_rational", "2.3": "upsampler_plain", "2.5": "upsampler_plain"}
# Lightricks' code supports only the published dilations.
_THREE = [[1, 3, 5]] * 3
VOCODERS = {"tiny_2_3": dict(config("tiny_2_3", "vocoder"), resnet_dilations=_THREE, bwe_resnet_dilations=_THREE)}


def write_lora(transformer, file):
    pairs, source = {}, generator(7, "lora")
    for name, weight in transformer.items():
        if name.endswith(("attn1.to_q.weight", "attn2.to_v.weight", "ff.net.2.weight")):
            a, b = torch.randn(4, weight.shape[1], generator=source), torch.randn(weight.shape[0], 4, generator=source)
            for kind, matrix in (("A", a / weight.shape[1] ** 0.5), ("B", b * 0.2)):
                module = name.removesuffix(".weight")
                pairs[f"diffusion_model.{module}.lora_{kind}.weight"] = matrix.to(torch.bfloat16)
    save_file(pairs, file)


def write(generation, folder, distilled):
    shutil.rmtree(folder, ignore_errors=True)
    model, kind, diffusers = MODEL_OF[generation], "distilled" if distilled else "dev", folder / "diffusers"
    shutil.copytree(MODELS / model, diffusers)
    if model in VOCODERS:
        build("vocoder", VOCODERS[model], 6).to(torch.bfloat16).save_pretrained(diffusers / "vocoder")
    if generation != "2.5":
        official_file.convert(diffusers, folder / f"ltx-{generation}-{kind}.safetensors")
    channels = json.loads((diffusers / "vae" / "config.json").read_text())["latent_channels"]
    resampler = dict(config(UPSAMPLERS[generation], "latent_upsampler"), in_channels=channels)
    build("latent_upsampler", resampler, 5).to(torch.bfloat16).save_pretrained(diffusers / "latent_upsampler")
    file = folder / f"ltx-{generation}-spatial-upscaler-x2.safetensors"
    official_file.write(file, official_file.tensors_of(diffusers / "latent_upsampler"), official_file.upsampler_header(resampler))
    if not distilled:
        lora = folder / f"ltx-{generation}-distilled-lora-4.safetensors"
        write_lora(official_file.tensors_of(diffusers / "transformer"), lora)
        shutil.copy(lora, diffusers)


if len(sys.argv) < 3:
    sys.exit(__doc__)
ltx2, out, *more = sys.argv[1:]
fix_numerics()
options = ["--sizes", "128x64x1", "128x128x9", "192x128x17", "--steps", "3", "--max-sequence-length", "64"]
options += ["--set", "runtime.xla_flags.xla_backend_optimization_level=0", *more]
failed = 0
for name in ("2.0", "2.3", "2.3-distilled", "2.5", "2.5-distilled"):
    folder = Path(out, "models", name)
    write(name[:3], folder, "distilled" in name)
    for model in (folder / "diffusers", *folder.glob("ltx-*-dev.safetensors"), *folder.glob("ltx-*-distilled.safetensors")):
        command = [sys.executable, HERE / "main.py", model, "--diffusers", folder / "diffusers", "--ltx2", ltx2]
        command += ["--python", sys.executable, "-o", Path(out, f"{name}-{'folder' if model.is_dir() else 'file'}"), *options]
        failed = subprocess.run(command).returncode or failed
sys.exit(failed)
