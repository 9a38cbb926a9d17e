"""Writes tests/fixtures/lora/adapters: small adapters by PEFT and LyCORIS, and the weights that these packages merge.

pip install torch==2.15.0 numpy==2.4.6 safetensors==0.8.0 peft==0.21.2 lycoris-lora==4.1.3   # Python 3.11

All numbers are multiples of powers of two, so sums are exact in any order and the expected bits do not depend on the machine.
LyCORIS' `get_diff_weight` multiplies LoHa and LoKr by alpha / rank twice; the expected weights follow its `forward`."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import torch
from lycoris import LycorisNetwork
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "lora" / "adapters"
RUNS = [("f32", torch.float32, 1.0), ("f32", torch.float32, 0.5), ("bf16", torch.bfloat16, 0.5)]
BOTH, TARGETS = ["to_q", "to_out.0"], r".*\.(to_q|to_out\.0)"
PEFT = {
    "peft_lora": LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, lora_bias=True, rank_pattern={"to_q": 2}, alpha_pattern={"to_out.0": 1}),
    "peft_rslora": LoraConfig(r=4, lora_alpha=1, use_rslora=True, target_modules=TARGETS),
    "peft_dora": LoraConfig(r=4, lora_alpha=2, use_dora=True, target_modules=TARGETS),
    "peft_loha": LoHaConfig(r=3, alpha=5, target_modules=TARGETS),
    "peft_lokr": LoKrConfig(r=1, alpha=3, decompose_both=True, rank_pattern={"to_q": 9}, target_modules=TARGETS),
}
LORA, LOHA, LOKR, DORA = {"network_module": "lora"}, {"network_module": "loha"}, {"network_module": "lokr"}, {"weight_decompose": True}
LYCORIS = {
    "lycoris_lora": LORA, "lycoris_dora": LORA | DORA, "lycoris_dora_columns": LORA | DORA | {"wd_on_out": False},
    "lycoris_loha": LOHA, "lycoris_loha_dora": LOHA | DORA, "lycoris_lokr_whole": LOKR | {"full_matrix": True},
    "lycoris_lokr": LOKR | {"factor": 2, "lora_dim": 2, "alpha": 1}, "lycoris_full": {"network_module": "full"},
    "lycoris_lokr_pairs": LOKR | {"factor": 4, "decompose_both": True, "lora_dim": 1, "alpha": 0.5},
}


def draw(named, seed, unit=0.5, limit=2):
    for i, (name, tensor) in enumerate(named):
        numbers = torch.randint(-limit, limit + 1, tensor.shape, generator=torch.Generator().manual_seed(seed + i)) * unit
        tensor.data = numbers.abs() + 0.5 if "magnitude" in name or "dora_scale" in name else numbers


def model():
    """Returns a model of two linear layers with names of LTX-2's, `[12, 8]` and `[8, 12]`."""
    attention = torch.nn.ModuleDict({"to_q": torch.nn.Linear(8, 12), "to_out": torch.nn.ModuleList([torch.nn.Linear(12, 8)])})
    made = torch.nn.ModuleDict({"transformer_blocks": torch.nn.ModuleList([torch.nn.ModuleDict({"attn1": attention})])})
    draw(made.named_parameters(), 0, 0.125, 16)
    return made


def by_peft(name, config):
    adapted = get_peft_model(model(), config)
    draw([(key, tensor) for key, tensor in adapted.named_parameters() if tensor.requires_grad], 100)
    adapted.save_pretrained(FOLDER / name)
    (FOLDER / name / "README.md").unlink()
    for label, dtype, strength in RUNS:
        loaded = PeftModel.from_pretrained(model().to(dtype), FOLDER / name)
        [module.set_scale("default", strength) for module in loaded.modules() if hasattr(module, "set_scale")]
        merged = loaded.merge_and_unload().state_dict().items()
        yield from ((f"{name}/{strength}/{label}/{key}", value) for key, value in merged if "weight" in key or name == "peft_lora")


def by_lycoris(name, options):
    LycorisNetwork.apply_preset({"target_module": ["Linear"], "lora_prefix": "lora_unet" if name == "lycoris_lora" else "lycoris"})
    network = LycorisNetwork(model(), **{"lora_dim": 4, "alpha": 2, **options})
    base = [[tensor.clone() for tensor in module.org_module[0].parameters()] for module in network.loras]
    network.apply_to()
    for module, origin, end in zip(network.loras, base, BOTH):
        draw(module.named_parameters(), 200 + len(end))
        diffs = [module.get_weight(module.shape)] if hasattr(module, "get_weight") else module.get_diff_weight()
        for label, dtype, strength in RUNS:
            for kind, weight, diff in zip(("weight", "bias"), origin, (diff for diff in diffs if diff is not None)):
                merged = module.apply_weight_decompose(weight + diff, strength) if DORA.items() <= options.items() else weight + diff * strength
                yield f"{name}/{strength}/{label}/transformer_blocks.0.attn1.{end}.{kind}", merged.to(dtype)
    network.save_weights(str(FOLDER / f"{name}.safetensors"), torch.float32, {})


torch.set_grad_enabled(False)
shutil.rmtree(FOLDER, ignore_errors=True)
expected = {key: value for item in PEFT.items() for key, value in by_peft(*item)}
expected |= {key: value for item in LYCORIS.items() for key, value in by_lycoris(*item)}
save_file(model().state_dict(), FOLDER / "weights.safetensors")
versions = json.dumps({package: version(package) for package in ("torch", "peft", "lycoris-lora")})
save_file({k: v.contiguous() for k, v in expected.items()}, FOLDER / "merged.safetensors", {"versions": versions})
