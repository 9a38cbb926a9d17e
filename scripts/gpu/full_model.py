"""Writes a random model of the published size: full_model.py 2.0|2.3|2.5 [FOLDER]; prints its path.

Builds diffusers' and transformers' classes from crates/models/src/presets with random bf16 weights on the GPU, one component
at a time. Exit code 4 if no folder has the space."""

import json
import math
import shutil
import sys
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "oracle"))
from models import CLASSES, TEXT_ENCODERS, class_of, copy_tokenizer, gemma_config  # noqa: E402
from peer import preset, release  # noqa: E402

GIB = 1 << 30
PRESETS = {"2.0": "ltx2", "2.3": "ltx2_3", "2.5": "ltx2_5"}
# Too large to build in f32 first.
LARGE = ("transformer", "text_encoder")
# Gemma-4 does not scale its attention scores; without small norms, softmax would select one token, which any rounding changes.
UNSCALED = ("q_norm.weight", "k_norm.weight")
# Without these factors LTX-2.3's vocoder clips nearly all samples.
QUIETER = {"convs2": 0.3, "conv_out": 0.2}


def built(name, config, device):
    with torch.device(device):
        if name == "text_encoder":
            return TEXT_ENCODERS[config["model_type"]](gemma_config(config["text_config"]))
        return class_of(name, config).from_config(config)


def filled(name, config):
    network = built(name, config, "meta" if name in LARGE else "cpu").to(torch.bfloat16).eval()
    # The upsampler builds its table by an integer matmul, which CUDA lacks.
    network = network.to_empty(device="cuda") if name in LARGE else network.to("cuda")
    source = torch.Generator("cuda").manual_seed(1)
    quieter = QUIETER if config.get("act_fn") == "snakebeta" else {}
    # Gemma-3's norms multiply by 1 + weight.
    offset = config.get("model_type") == "gemma3"
    for key, tensor in network.named_parameters():
        if tensor.ndim >= 2:
            scale = tensor[0].numel() ** -0.5 * math.prod(factor for part, factor in quieter.items() if part in key)
            tensor.normal_(0, 0.02 if "embed" in key else scale, generator=source)
        elif key.endswith(UNSCALED) and config.get("model_type") == "gemma4_unified":
            tensor.fill_(tensor.numel() ** -0.25)
        elif key.endswith("weight") and not offset:
            tensor.fill_(1)
        else:
            tensor.normal_(0, 0.02, generator=source)
    for key, tensor in network.named_buffers():
        # Spectrogram tables of LTX-2.3's vocoder are zero by default.
        if key.endswith("layer_scalar"):
            tensor.uniform_(0.9, 1.1, generator=source)
        if key.endswith("basis"):
            tensor.normal_(0, tensor[0].numel() ** -0.5, generator=source)
        if key.endswith("mel_basis"):
            tensor.abs_()
    return network


if len(sys.argv) not in (2, 3) or sys.argv[1] not in PRESETS:
    sys.exit(__doc__)
torch.set_grad_enabled(False)
generation = sys.argv[1]
configs = preset(PRESETS[generation])
parts = {name: configs[name] for name in (*CLASSES, "text_encoder") if name in configs and name != "duration_head"}
networks = [built(name, config, "meta") for name, config in parts.items()]
need = 2 * sum(t.numel() for network in networks for t in (*network.parameters(), *network.buffers())) + GIB // 4
for place in map(Path, sys.argv[2:] or ["/dev/shm", Path.cwd(), "/tmp"]):
    free = shutil.disk_usage(place).free if place.is_dir() else 0
    print(f"full_model.py: {place}: {free / GIB:.0f} GiB free, {need / GIB:.0f} GiB needed", file=sys.stderr)
    if free > need:
        break
else:
    print("full_model.py: no folder holds the model: give one with more space as WHERE", file=sys.stderr)
    sys.exit(4)
folder = place / f"ltx2-full-{generation}"
shutil.rmtree(folder, ignore_errors=True)
for name, config in parts.items():
    network = filled(name, config)
    network.save_pretrained(folder / name, max_shard_size="8GB")
    print(f"full_model.py: {name} written", file=sys.stderr, flush=True)
    del network
    release()
FlowMatchEulerDiscreteScheduler.from_config(configs["scheduler"]).save_pretrained(folder / "scheduler")
copy_tokenizer(folder / "tokenizer")
index = configs["model_index"] | {"tokenizer": ["transformers", "GemmaTokenizer"]}
(folder / "model_index.json").write_text(json.dumps(index, indent=1) + "\n")
print(folder)
