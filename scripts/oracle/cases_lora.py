"""Writes LoRAs merged by both references' loaders: diffusers, and Lightricks 1.2.0 or 1.0.0 (bf16 weights only).

A run replaces the weights by its own release in the file."""

import json
from itertools import product

import torch
from diffusers import LTX2VideoTransformer3DModel
from ltx_core.loader.fuse_loras import apply_loras
from ltx_core.loader.primitives import LoraStateDictWithStrength, StateDict
from official_pipelines import wheels
from safetensors.torch import load_file

from common import FIXTURES, MODELS, write_safetensors
from diffusers_run import merge_loras

FOLDER = FIXTURES / "lora"
MODEL = MODELS / "tiny_a" / "transformer"
# Lightricks' name of a module, diffusers' name.
MODULES = {"patchify_proj": "proj_in"}
MODULES |= {f"transformer_blocks.{module}.to_q": f"transformer_blocks.{module}.to_q" for module in ("0.attn1", "1.audio_attn1")}
# Files and strengths of each case.
CASES = {
    "one": [("plain", 0.7)], "two": [("plain", 0.7), ("wide", -0.4)], "three": [("wide", 1.3), ("plain", 0.7), ("wide", -0.4)],
    "alpha": [("alpha", 1.0)], "peft": [("peft", 0.8)],
}
# Lightricks' loader does not read diffusers' keys; diffusers' rejects alpha tensors.
UNREAD = {"official": ["peft"], "official_1_0": ["peft"], "diffusers": ["alpha"]}
# Cases that are also merged into f32 weights.
SINGLE = ["two", "peft"]


def _official(case, dtype):
    model = LTX2VideoTransformer3DModel.from_pretrained(MODEL, torch_dtype=dtype)
    weights = {f"{official}.weight": model.get_submodule(name).weight.data for official, name in MODULES.items()}
    loras, cpu = [], torch.device("cpu")
    for file, strength in CASES[case]:
        tensors = load_file(FOLDER / f"{file}.safetensors")
        tensors = {key.replace("diffusion_model.", ""): value for key, value in tensors.items()}
        loras.append(LoraStateDictWithStrength(StateDict(tensors, cpu, 0, set()), strength))
    merged = apply_loras(StateDict(weights, cpu, 0, {dtype}), loras).sd
    return {f"{name}.weight": merged[f"{official}.weight"] for official, name in MODULES.items()}


def lora():
    merged = load_file(FOLDER / "merged.safetensors")
    files = lambda case: ([FOLDER / f"{file}.safetensors" for file, _ in CASES[case]], [strength for _, strength in CASES[case]])
    diffusers = lambda case, dtype: merge_loras(MODEL, *files(case), dtype)
    merges = {"official_1_0" if wheels() else "official": _official, "diffusers": diffusers}
    dtypes = {"bf16": torch.bfloat16, "f32": torch.float32}
    for (loader, merge), case, (label, dtype) in product(merges.items(), CASES, dtypes.items()):
        if case not in UNREAD[loader] and (label == "bf16" or case in SINGLE and loader != "official_1_0"):
            merged |= {f"{loader}/{label}/{case}/{name}": weight for name, weight in merge(case, dtype).items()}
    cases = {name: json.dumps(files) for name, files in CASES.items()}
    write_safetensors(FOLDER / "merged.safetensors", merged, {"script": "scripts/oracle/cases_lora.py", **cases})
