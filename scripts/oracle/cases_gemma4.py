"""Writes LTX-2.5's text encoder: Gemma 4 and its text projection."""

import json
import re
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from transformers import AutoTokenizer, GemmaTokenizer, Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

import cases_text
from common import FIXTURES, MODELS, generator, keeps, randn, randomise, relative_l2, show, write_case

_FULL, _SLIDING = "full_attention", "sliding_attention"

# `gemma4_a` has the topology of the 12B. `gemma4_b` has other numbers and irregular layer types.
# `gemma4_c` has value projections in full layers, and full RoPE there.
GEMMA4 = {
    "gemma4_a": dict(
        hidden_size=24, intermediate_size=32, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        sliding_window=6, attention_k_eq_v=True, num_global_key_value_heads=1, global_head_dim=16,
        final_logit_softcapping=30.0,
    ),
    "gemma4_b": dict(
        hidden_size=18, intermediate_size=26, num_hidden_layers=7, num_attention_heads=6, num_key_value_heads=3, head_dim=8,
        sliding_window=5, attention_k_eq_v=True, num_global_key_value_heads=2, global_head_dim=12, rms_norm_eps=1e-5,
        use_bidirectional_attention=None,
        layer_types=[_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL, _FULL, _FULL],
        rope_parameters={
            _SLIDING: {"rope_type": "default", "rope_theta": 500.0},
            _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 50_000.0, "factor": 4.0},
        },
    ),
    "gemma4_c": dict(
        hidden_size=20, intermediate_size=28, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4, head_dim=6,
        sliding_window=3, global_head_dim=10, layer_types=[_FULL, _SLIDING, _FULL] * 2,
        rope_parameters={
            _SLIDING: {"rope_type": "proportional", "partial_rotary_factor": 0.75, "rope_theta": 1000.0},
            _FULL: {"rope_type": "default", "rope_theta": 80_000.0},
        },
    ),
}
# The published 12B; only its configuration is written.
_PUBLISHED = dict(
    hidden_size=3840, intermediate_size=15360, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=8,
    attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=30.0,
)
# Written in the publisher's spelling of the full layers' options.
_PUBLISHED_SPELLING = {"gemma4_b"}
_VOCABULARY = 96


def connectors(text, heads=(8, 4), hidden=(16, 8)):
    """Returns the smallest connectors for these hidden states; head dimensions and widths of video and audio."""
    return LTX2TextConnectors(
        caption_channels=text["hidden_size"], text_proj_in_factor=text["num_hidden_layers"] + 1,
        video_connector_num_attention_heads=2, video_connector_attention_head_dim=heads[0], video_connector_num_layers=1,
        video_connector_num_learnable_registers=4, video_gated_attn=True, audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=heads[1], audio_connector_num_layers=1, audio_connector_num_learnable_registers=4,
        audio_gated_attn=True, rope_type="split", per_modality_projections=True, video_hidden_dim=hidden[0],
        audio_hidden_dim=hidden[1], proj_bias=True,
    )


def text_encoder(name, text, vocabulary=_VOCABULARY):
    """Returns the text stack with the smallest vision and audio towers."""
    config = Gemma4UnifiedConfig(
        text_config=dict(text, vocab_size=vocabulary, max_position_embeddings=256),
        vision_config=dict(mm_embed_dim=4, output_proj_dims=4, mm_posemb_size=4, patch_size=2),
        audio_config=dict(audio_embed_dim=4),
    )
    model = randomise(Gemma4UnifiedForConditionalGeneration(config), f"{name}/text_encoder")
    for key, tensor in model.state_dict().items():
        if key.endswith("norm.weight"):
            # Norms multiply by weight; other Gemma generations multiply by 1 + weight.
            tensor.copy_(1.0 + 0.25 * torch.randn(tensor.shape, generator=generator(name, key)))
        elif key.endswith("layer_scalar"):
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator(name, key)))
    return model


def _in_published_spelling(path, config):
    """Rewrites config.json, where transformers saves an entry per full layer."""
    data = json.loads(path.read_text())
    del data["text_config"]["per_layer_config"]
    for key in ("num_global_key_value_heads", "global_head_dim"):
        data["text_config"][key] = config[key]
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")


def save(name):
    folder = MODELS / name
    if keeps(folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    joined = randomise(connectors(GEMMA4[name]), f"{name}/connectors")
    joined.to(torch.bfloat16).save_pretrained(folder / "connectors")
    text_encoder(name, GEMMA4[name]).to(torch.bfloat16).save_pretrained(folder / "text_encoder")
    (folder / "text_encoder" / "generation_config.json").unlink(missing_ok=True)
    if name in _PUBLISHED_SPELLING:
        _in_published_spelling(folder / "text_encoder" / "config.json", GEMMA4[name])


def _load(name, dtype):
    folder = MODELS / name
    encoder = Gemma4UnifiedForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=dtype).eval()
    return encoder, LTX2TextConnectors.from_pretrained(folder / "connectors", dtype=dtype).eval()


def _case(name, case, lengths, total, keep):
    mask = torch.tensor([[0] * (total - length) + [1] * length for length in lengths])
    ids = (randn(7, f"{name}/{case}", len(lengths), total).abs() * 1e6).long() % (_VOCABULARY - 4) + 4
    for row, length in enumerate(lengths):
        ids[row, total - length] = 2
    ids = torch.where(mask.bool(), ids, torch.zeros_like(ids))
    outputs = cases_text.encode(*_load(name, torch.float32), ids, mask)
    half = cases_text.encode(*_load(name, torch.bfloat16), ids, mask)
    valid = mask.bool()
    spread = {f"bf16_spread.{k}": f"{relative_l2(half[k][valid], outputs[k][valid]):.6f}" for k in keep}
    write_case(
        "gemma4", case, {"input_ids": ids, "attention_mask": mask}, {k: outputs[k] for k in keep}, script=__file__,
        model=name, seed=0, extra=spread,
    )
    show(f"gemma4/{case} {spread}", *(outputs[k][valid] for k in keep))


def _published_tensors(config, path):
    """Writes names and shapes of the published model's tensors, one row for all layers with the same shape."""
    with torch.device("meta"):
        state = Gemma4UnifiedForConditionalGeneration(config).state_dict()
    rows = {}
    for name, tensor in state.items():
        if name == "lm_head.weight":
            continue  # The embeddings, a second time.
        layer = re.search(r"\.layers\.(\d+)\.", name)
        key = (name if layer is None else name.replace(layer.group(), ".layers.*."), "x".join(map(str, tensor.shape)))
        rows.setdefault(key, []).extend([] if layer is None else [layer.group(1)])
    lines = [f"{name}\t{','.join(layers)}\t{shape}" for (name, shape), layers in rows.items()]
    about = f"# Tensors of Gemma4UnifiedForConditionalGeneration at the published sizes, transformers {transformers.__version__}."
    path.write_text("\n".join([about, "name\tlayers\tshape", *lines]) + "\n")


def gemma4():
    """Prompts longer than the window, with different padding in one batch. Compare only unmasked rows."""
    published, folder = Gemma4UnifiedConfig(text_config=_PUBLISHED, vision_config={}, audio_config={}), MODELS / "gemma4_12b"
    published.save_pretrained(folder / "text_encoder")
    _published_tensors(published, folder / "text_encoder" / "tensors.tsv")
    for name in GEMMA4:
        save(name)
        _case(name, name, [16, 5], 16, ("prompt_embeds", "projected"))


# Values of `add_bos_token` and `add_eos_token` in tokenizer_config.json.
_FLAGS = [{}, {"add_bos_token": True, "add_eos_token": False}, {"add_bos_token": False}, {"add_eos_token": True}]
_BOS_PROMPTS = ["a red fox", "", "<bos> twice", "the waves " * 4]
# Releases of transformers save different post-processors.
_TRANSFORMERS = "5.24.0"


def _saved(source, **more):
    """Returns tokenizer.json and tokenizer_config.json as transformers saves them."""
    data = json.loads((source / "tokenizer.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        GemmaTokenizer(vocab=data["model"]["vocab"], merges=[], **more).save_pretrained(folder)
        return [json.loads((Path(folder) / f).read_text()) for f in ("tokenizer.json", "tokenizer_config.json")]


def _template(*pieces):
    """Returns a post-processor that adds special tokens to the text `A`."""
    piece = lambda name: {"Sequence": {"id": name, "type_id": 0}} if name in "AB" else {"SpecialToken": {"id": name, "type_id": 0}}
    ids = {"<eos>": 1, "<bos>": 2}
    special = {n: {"id": n, "ids": [ids[n]], "tokens": [n]} for n in ids if n in pieces}
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
        files.append((name, *_saved(source, **more), {}))
    for pieces in (("A", "<eos>"), ("<bos>", "A", "<eos>"), ("<bos>", "A", "<bos>")):
        files.append((" ".join(pieces), dict(model, post_processor=_template(*pieces)), config, {}))
    cases = []
    for name, tokens, settings, flags in files:
        with tempfile.TemporaryDirectory() as folder:
            for file, data in (("tokenizer_config.json", settings), ("tokenizer.json", tokens)):
                (Path(folder) / file).write_text(json.dumps(data))
            tokenizers = [kind.from_pretrained(folder) for kind in (AutoTokenizer, GemmaTokenizer)]
            asked = dict(max_length=12, truncation=True, add_special_tokens=True)
            ids, same = ([t(prompt.strip(), **asked).input_ids for prompt in _BOS_PROMPTS] for t in tokenizers)
            assert ids == same
            begun = lambda prompt, own: own if own[:1] == [2] else tokenizers[0]("<bos>" + prompt.strip(), **asked).input_ids
            forced = [begun(*case) for case in zip(_BOS_PROMPTS, ids)]
        case = {"name": name, "post_processor": tokens["post_processor"], "config": flags, "ids": ids, "forced": forced}
        cases.append(case)
    about = {"script": "scripts/oracle/cases_gemma4.py", "transformers": transformers.__version__}
    text = json.dumps(about | {"prompts": _BOS_PROMPTS, "max_length": 12, "cases": cases})
    (FIXTURES / "tokenizer" / "bos.json").write_text(text.replace('{"name"', '\n{"name"') + "\n")
    print("tokenizer/bos:", [case["ids"][1] for case in cases])


COMPONENTS = {"gemma4": gemma4, "bos": bos}
