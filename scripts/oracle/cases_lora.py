"""Writes LoRAs merged by both references' loaders: diffusers, Lightricks 1.2.0 (from the checkout) and 1.0.0 (bf16 weights only)."""

import importlib.util
import json
from pathlib import Path

import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.loaders.lora_pipeline import LTX2LoraLoaderMixin
from ltx_core.loader import fuse_loras as fuse_1_0
from ltx_core.loader.primitives import LoraStateDictWithStrength, StateDict
from safetensors.torch import load_file

from common import FIXTURES, MODELS, randn, write_safetensors

FOLDER = FIXTURES / "lora"
MODEL = MODELS / "tiny_a" / "transformer"
FUSE = "packages/ltx-core/src/ltx_core/loader/fuse_loras.py"
# Lightricks' name of a module, diffusers' name.
MODULES = [
    ("patchify_proj", "proj_in"),
    ("transformer_blocks.0.attn1.to_q", "transformer_blocks.0.attn1.to_q"),
    ("transformer_blocks.1.audio_attn1.to_q", "transformer_blocks.1.audio_attn1.to_q"),
]
# Ranks per file; the published LoRAs have 384.
RANKS = {"plain": [4, 16, 384], "wide": [8, 8, 12], "alpha": [4, 16, 8], "peft": [4, 16, 8]}
# Files and strengths of each case.
CASES = {
    "one": [("plain", 0.7)],
    "two": [("plain", 0.7), ("wide", -0.4)],
    "three": [("wide", 1.3), ("plain", 0.7), ("wide", -0.4)],
    "alpha": [("alpha", 1.0)],
    "peft": [("peft", 0.8)],
}
# Lightricks' loader does not read diffusers' keys; diffusers' rejects alpha tensors.
UNREAD = {"official": ["peft"], "official_1_0": ["peft"], "diffusers": ["alpha"]}
# Cases that are also merged into f32 weights.
SINGLE = ["two", "peft"]


def _shapes():
    model = LTX2VideoTransformer3DModel.from_pretrained(MODEL)
    return [tuple(model.get_submodule(name).weight.shape) for _, name in MODULES]


def _pairs(file, dtype, names, prefix):
    """Returns the matrices of a file; B is scaled so that an update is about as large as a weight."""
    tensors = {}
    for (official, name), rank, (rows, columns) in zip(MODULES, RANKS[file], _shapes(), strict=True):
        module = f"{prefix}.{official if names == 'official' else name}"
        a, b = randn(0, f"{file}/{name}/A", rank, columns), randn(0, f"{file}/{name}/B", rows, rank, scale=0.2 / rank**0.5)
        tensors |= {f"{module}.lora_A.weight": a.to(dtype), f"{module}.lora_B.weight": b.to(dtype)}
    return tensors


def write_files():
    """Writes LoRAs with both key conventions, several ranks and element types, and alphas as tensors and in the header."""
    write_safetensors(FOLDER / "plain.safetensors", _pairs("plain", torch.bfloat16, "official", "diffusion_model"))
    write_safetensors(FOLDER / "wide.safetensors", _pairs("wide", torch.float32, "official", "diffusion_model"))
    alphas = {f"diffusion_model.{official}.alpha": torch.tensor(6.0) for official, _ in MODULES}
    pairs = _pairs("alpha", torch.bfloat16, "official", "diffusion_model")
    write_safetensors(FOLDER / "alpha.safetensors", pairs | alphas)
    ranks = {f"^{name}": rank for (_, name), rank in zip(MODULES, RANKS["peft"], strict=True) if rank != 16}
    config = {
        "r": 16,
        "lora_alpha": 12,
        "rank_pattern": ranks,
        "alpha_pattern": {"^proj_in": 7, "audio_attn1.to_q": 2},
        "target_modules": [name for _, name in MODULES],
        "use_rslora": False,
    }
    text = json.dumps({f"transformer.{key}": value for key, value in config.items()})
    pairs = _pairs("peft", torch.bfloat16, "diffusers", "transformer")
    write_safetensors(FOLDER / "peft.safetensors", pairs, {"lora_adapter_metadata": text})


def _diffusers(case, dtype):
    model = LTX2VideoTransformer3DModel.from_pretrained(MODEL, torch_dtype=dtype)
    for i, (file, _) in enumerate(CASES[case]):
        path = FOLDER / f"{file}.safetensors"
        tensors, metadata = LTX2LoraLoaderMixin.lora_state_dict(str(path), return_lora_metadata=True)
        model.load_lora_adapter(tensors, metadata=metadata, adapter_name=f"adapter_{i}")
    names = [f"adapter_{i}" for i in range(len(CASES[case]))]
    model.set_adapters(names, [strength for _, strength in CASES[case]])
    model.fuse_lora(adapter_names=names)
    return {name: model.get_submodule(name).get_base_layer().weight.data for _, name in MODULES}


def _official(fuse, case, dtype):
    model = LTX2VideoTransformer3DModel.from_pretrained(MODEL, torch_dtype=dtype)
    weights = {f"{official}.weight": model.get_submodule(name).weight.data for official, name in MODULES}
    cpu = torch.device("cpu")
    loras = []
    for file, strength in CASES[case]:
        tensors = load_file(FOLDER / f"{file}.safetensors")
        tensors = {key.replace("diffusion_model.", ""): value for key, value in tensors.items()}
        loras.append(LoraStateDictWithStrength(StateDict(tensors, cpu, 0, set()), strength))
    merged = fuse.apply_loras(StateDict(weights, cpu, 0, {dtype}), loras).sd
    return {name: merged[f"{official}.weight"] for official, name in MODULES}


def make_lora(repository):
    path = Path(repository) / FUSE
    spec = importlib.util.spec_from_file_location("fuse_loras", path)
    fuse = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuse)
    write_files()
    merged = {}
    for case in CASES:
        for dtype, label in [(torch.bfloat16, "bf16"), (torch.float32, "f32")]:
            loaders = {
                "official": lambda *a: _official(fuse, *a), "official_1_0": lambda *a: _official(fuse_1_0, *a), "diffusers": _diffusers
            }
            for loader, merge in loaders.items():
                if case in UNREAD[loader] or (label == "f32" and case not in SINGLE) or (label, loader) == ("f32", "official_1_0"):
                    continue
                for name, weight in merge(case, dtype).items():
                    merged[f"{loader}/{label}/{case}/{name}.weight"] = weight
    cases = {name: json.dumps(files) for name, files in CASES.items()}
    write_safetensors(FOLDER / "merged.safetensors", merged, {"script": "scripts/oracle/cases_lora.py", **cases})
