"""Writes LTX-2.5's text encoder: Gemma 4 and its text projection."""

import json
import tempfile
from pathlib import Path

import torch
import transformers
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from transformers import AutoTokenizer, GemmaTokenizer, Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

import cases_text
import models
from common import FIXTURES, MODELS, generator, randn, randomise, spread, write_case

# `gemma4_a` has the topology of the 12B. `gemma4_b` has other numbers and irregular layer types.
# `gemma4_c` has value projections in full layers, and full RoPE there.
NAMES = ("gemma4_a", "gemma4_b", "gemma4_c", "tiny_2_5")


def text_encoder(name, config):
    model = randomise(Gemma4UnifiedForConditionalGeneration(config), f"{name}/text_encoder")
    for key, tensor in model.state_dict().items():
        if key.endswith("norm.weight"):
            # Norms multiply by weight; other Gemma generations multiply by 1 + weight.
            tensor.copy_(1.0 + 0.25 * torch.randn(tensor.shape, generator=generator(name, key)))
        elif key.endswith("layer_scalar"):
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator(name, key)))
    return model


def gemma4_models():
    for name in NAMES:
        folder = MODELS / name
        joined = randomise(LTX2TextConnectors(**models.config(name, "connectors")), f"{name}/connectors")
        models.save_weights(joined.to(torch.bfloat16), folder / "connectors")
        encoder = text_encoder(name, Gemma4UnifiedConfig.from_pretrained(folder / "text_encoder"))
        models.save_weights(encoder.to(torch.bfloat16), folder / "text_encoder")


def gemma4():
    """Writes two prompts, one longer than the window and one padded. Compare only unmasked rows."""
    for name in NAMES[:3]:
        total, lengths, vocabulary = 16, (16, 5), models.config(name, "text_encoder")["text_config"]["vocab_size"]
        mask = (torch.arange(total) >= total - torch.tensor(lengths)[:, None]).long()
        ids = (randn(7, f"{name}/{name}", len(lengths), total).abs() * 1e6).long() % (vocabulary - 4) + 4
        for row, length in enumerate(lengths):
            ids[row, total - length] = 2
        ids *= mask
        load = lambda dtype: (models.load(name, part, dtype) for part in ("text_encoder", "connectors"))
        full, half = (cases_text.encode(*load(dtype), ids, mask) for dtype in (torch.float32, torch.bfloat16))
        outputs = {key: full[key] for key in ("prompt_embeds", "projected")}
        extra, inputs = spread(half, outputs, mask.bool()), {"input_ids": ids, "attention_mask": mask}
        write_case("gemma4", name, inputs, outputs, model=name, extra=extra)


# Values of `add_bos_token` and `add_eos_token` in tokenizer_config.json.
_FLAGS = [{}, {"add_bos_token": True, "add_eos_token": False}, {"add_bos_token": False}, {"add_eos_token": True}]
_BOS_PROMPTS = ["a red fox", "", "<bos> twice", "the waves " * 4]
# Releases of transformers save different post-processors.
_TRANSFORMERS = "5.24.0"


def _template(*pieces):
    """Returns a post-processor that adds special tokens to the text `A`."""
    piece = lambda name: {"Sequence" if name in "AB" else "SpecialToken": {"id": name, "type_id": 0}}
    special = {n: {"id": n, "ids": [at], "tokens": [n]} for n, at in (("<eos>", 1), ("<bos>", 2)) if n in pieces}
    single = [piece(name) for name in pieces]
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, piece("B")], "special_tokens": special}


def bos():
    """Writes token ids for tokenizer files with different post-processors and flags."""
    if transformers.__version__ != _TRANSFORMERS:
        print(f"tokenizer/bos: kept, transformers {_TRANSFORMERS} makes it")
        return
    source = FIXTURES / "tokenizer" / "bytes"
    config, model = (json.loads((source / f).read_text()) for f in ("tokenizer_config.json", "tokenizer.json"))
    config = {k: v for k, v in config.items() if k not in ("add_bos_token", "add_eos_token")}
    files = [(name, dict(model, post_processor=p), config | flags, flags) for flags in _FLAGS for name, p in (
        ("transformers 4", model["post_processor"]), ("null", None),
    )]
    for name, more in (("transformers 5", {}), ("transformers 5, BOS", {"add_bos_token": True})):
        with tempfile.TemporaryDirectory() as folder:
            GemmaTokenizer(vocab=model["model"]["vocab"], merges=[], **more).save_pretrained(folder)
            saved = (Path(folder, file).read_text() for file in ("tokenizer.json", "tokenizer_config.json"))
            files.append((name, *map(json.loads, saved), {}))
    for pieces in (("A", "<eos>"), ("<bos>", "A", "<eos>"), ("<bos>", "A", "<bos>")):
        files.append((" ".join(pieces), dict(model, post_processor=_template(*pieces)), config, {}))
    cases, asked = [], dict(max_length=12, truncation=True, add_special_tokens=True)
    for name, tokens, settings, flags in files:
        with tempfile.TemporaryDirectory() as folder:
            for file, data in (("tokenizer_config.json", settings), ("tokenizer.json", tokens)):
                (Path(folder) / file).write_text(json.dumps(data))
            tokenizers = [kind.from_pretrained(folder) for kind in (AutoTokenizer, GemmaTokenizer)]
        ids, same = ([t(prompt.strip(), **asked).input_ids for prompt in _BOS_PROMPTS] for t in tokenizers)
        assert ids == same
        begun = lambda prompt, own: own if own[:1] == [2] else tokenizers[0]("<bos>" + prompt.strip(), **asked).input_ids
        forced = [begun(*case) for case in zip(_BOS_PROMPTS, ids)]
        post = tokens["post_processor"]
        cases.append({"name": name, "post_processor": post, "config": flags, "ids": ids, "forced": forced})
    about = {"script": "scripts/oracle/cases_gemma4.py", "transformers": transformers.__version__}
    text = json.dumps(about | {"prompts": _BOS_PROMPTS, "max_length": 12, "cases": cases})
    (FIXTURES / "tokenizer" / "bos.json").write_text(text.replace('{"name"', '\n{"name"') + "\n")
