#!/usr/bin/env bash
# lycoris-lora 4.1.3 (torch 2.15.0): `merge_to` multiplies the change of a LoHa or LoKr by alpha/rank twice; `forward`, with which
# the adapter was trained, does so once. A merged model therefore differs from the trained one unless alpha equals the rank.
# Seen on 2026-11-29, with alpha 1 and rank 2:
#   LohaModule: merged change / change in forward = 0.500
#   LokrModule: merged change / change in forward = 0.500
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'lycoris-lora==4.1.3' 'torch==2.15.0'
seen=$("$folder/venv/bin/python" - 2> "$folder/log" <<'PYTHON'
import torch
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule

torch.manual_seed(0)
for kind in (LohaModule, LokrModule):
    linear = torch.nn.Linear(64, 64, bias=False)
    start = linear.weight.detach().clone()
    adapter = kind("linear", linear, multiplier=1.0, lora_dim=2, alpha=1)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_()
        trained = adapter(torch.eye(64)).T - start
        adapter.merge_to(1.0)
        merged = linear.weight - start
    ratio = ((merged * trained).sum() / (trained * trained).sum()).item()
    print(f"{kind.__name__}: merged change / change in forward = {ratio:.3f}")
PYTHON
) || { cat "$folder/log"; exit 1; }
echo "$seen"
[ "$seen" = "LohaModule: merged change / change in forward = 0.500
LokrModule: merged change / change in forward = 0.500" ]
