#!/usr/bin/env bash
# ltx-core 1.0.0 (torch 2.15.0): the LoRA loader reads only `lora_A` and `lora_B`. It skips the tensors `alpha`, `dora_scale`,
# `lora_down` and `lora_up` of the same module without a message. A LoRA is thus merged as if alpha equalled its rank, a DoRA
# without its magnitudes, and a LoRA with kohya's tensor names not at all.
# Seen on 2026-11-29, with rank 4 and strength 1; a LoRA is merged as alpha / 4 · B · A:
#   lora_A, lora_B: 1.00 · B · A
#   lora_A, lora_B, alpha 1: 1.00 · B · A
#   lora_A, lora_B, dora_scale: 1.00 · B · A
#   lora_down, lora_up: 0.00 · B · A
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'torch==2.15.0' 'numpy==2.4.6' 'safetensors==0.8.0' 'einops==0.8.2'
"$folder/venv/bin/pip" install --quiet --no-deps 'ltx-core==1.0.0'
seen=$(cd "$folder" && venv/bin/python - 2> log <<'PYTHON'
import torch
from ltx_core.loader.fuse_loras import apply_loras
from ltx_core.loader.primitives import LoraStateDictWithStrength, StateDict
from ltx_core.loader.sd_ops import LTXV_LORA_COMFY_RENAMING_MAP
from ltx_core.loader.sft_loader import SafetensorsStateDictLoader
from safetensors.torch import save_file

MODULE = "transformer_blocks.0.attn1.to_q"
torch.manual_seed(0)
draw = lambda *shape: torch.randint(-2, 3, shape).to(torch.bfloat16)
weight, up, down = draw(16, 16), draw(16, 4), draw(4, 16)
change = (up @ down).float()
cases = {
    "lora_A, lora_B": {"lora_A.weight": down, "lora_B.weight": up},
    "lora_A, lora_B, alpha 1": {"lora_A.weight": down, "lora_B.weight": up, "alpha": torch.tensor(1.0)},
    "lora_A, lora_B, dora_scale": {"lora_A.weight": down, "lora_B.weight": up, "dora_scale": torch.full((16, 1), 9.0)},
    "lora_down, lora_up": {"lora_down.weight": down, "lora_up.weight": up},
}
for name, tensors in cases.items():
    save_file({f"diffusion_model.{MODULE}.{key}": tensor for key, tensor in tensors.items()}, "lora.safetensors")
    lora = SafetensorsStateDictLoader().load("lora.safetensors", LTXV_LORA_COMFY_RENAMING_MAP)
    model = StateDict({f"{MODULE}.weight": weight.clone()}, torch.device("cpu"), 0, {torch.bfloat16})
    merged = apply_loras(model, [LoraStateDictWithStrength(lora, 1.0)]).sd[f"{MODULE}.weight"]
    factor = ((merged - weight).float() * change).sum() / change.square().sum()
    print(f"{name}: {factor:.2f} · B · A")
PYTHON
) || { cat "$folder/log"; exit 1; }
echo "$seen"
[ "$seen" = "lora_A, lora_B: 1.00 · B · A
lora_A, lora_B, alpha 1: 1.00 · B · A
lora_A, lora_B, dora_scale: 1.00 · B · A
lora_down, lora_up: 0.00 · B · A" ]
