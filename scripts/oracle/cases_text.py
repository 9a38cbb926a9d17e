"""Writes tokenizer, Gemma 3 and connectors."""

import math
from itertools import product

import torch
from diffusers.pipelines.ltx2.connectors import per_layer_masked_mean_norm, per_token_rms_norm
from transformers import AutoTokenizer

import models
from common import MODELS, randn, spread, write_case as write

POSITIVE = "A slow pan over a quiet harbour at dawn, gulls calling; a woman says: good morning."
NEGATIVE = "worst quality, blurry, static noise"
_PROMPTS = [
    POSITIVE, "", "   leading and trailing spaces  ", "café 東京 😀 naïve", "two  spaces\nand a line\tand a tab",
    "the token <bos> and <eos> inside, 12:30 a.m.", " ".join(["the camera moves along the stone pier"] * 12),
]


def tokenize(name, prompts, length):
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name / "tokenizer", padding_side="left")
    asked = dict(padding="max_length", max_length=length, truncation=True, add_special_tokens=True, return_tensors="pt")
    batch = tokenizer([p.strip() for p in prompts], **asked)
    return batch.input_ids, batch.attention_mask


def tokenizer():
    for length in (64, 16):
        ids, mask = tokenize("tiny_a", _PROMPTS, length)
        scalars = {"prompts": _PROMPTS, "max_sequence_length": length}
        write("tokenizer", f"length_{length}", {}, {"input_ids": ids, "attention_mask": mask}, model="tiny_a", scalars=scalars)


def project(connectors, states, mask, padding="left"):
    """Returns the normalised stack and its projection; LTX-2.3's two projections are concatenated."""
    config = connectors.config
    if not config.per_modality_projections:
        normed = per_layer_masked_mean_norm(states, mask.sum(dim=-1), device="cpu", padding_side=padding)
        return normed, connectors.text_proj_in(normed)
    normed = per_token_rms_norm(states).flatten(2, 3)
    normed = torch.where(mask.bool().unsqueeze(-1), normed, torch.zeros_like(normed))
    scaled = [normed * math.sqrt(width / config.caption_channels) for width in (config.video_hidden_dim, config.audio_hidden_dim)]
    return normed, torch.cat([connectors.video_text_proj_in(scaled[0]), connectors.audio_text_proj_in(scaled[1])], dim=-1)


def encode(encoder, connectors, ids, mask):
    """Returns the hidden states `[B, T, D*(L+1)]`, normalised, and projected."""
    states = torch.stack(encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states, dim=-1)
    normed, projected = project(connectors, states, mask)
    return {"prompt_embeds": states.flatten(2, 3), "projected": projected, "normalised": normed}


def text_encoder():
    """Prompts longer than the window, with different padding in one batch. Compare only unmasked rows."""
    cases = {"short": ([NEGATIVE, ""], 16), "pair": ([POSITIVE, NEGATIVE], 64), "full": ([POSITIVE * 2], 64)}
    for (name, seed), (case, (prompts, length)) in product(models.WHOLE.items(), cases.items()):
        ids, mask = tokenize(name, prompts, length)
        load = lambda dtype: (models.load(name, part, dtype) for part in ("text_encoder", "connectors"))
        full, half = (encode(*load(dtype), ids, mask) for dtype in (torch.float32, torch.bfloat16))
        compared = {key: full[key] for key in ("prompt_embeds", "projected")}
        outputs = full if case == "short" else {"projected": full["projected"]}
        inputs, scalars = {"input_ids": ids, "attention_mask": mask}, {"prompts": prompts, "max_sequence_length": length}
        extra = spread(half, compared, mask.bool())
        write("text-encoder", f"{name}_{case}", inputs, outputs, model=name, seed=seed, scalars=scalars, extra=extra)


def connectors():
    """Mixed lengths in one batch, with and without registers, split and interleaved RoPE."""
    cases = [
        ("tiny_a_mixed", [5, 16, 1], 16), ("tiny_a_one", [8], 24), ("tiny_b_mixed", [3, 12], 12), ("tiny_b_right", [7, 2], 8),
        ("tiny_2_3_mixed", [5, 16, 1], 16), ("tiny_2_3_one", [8], 24), ("interleaved_mixed", [4, 10, 9], 10),
    ]
    for case, lengths, total in cases:
        name, _, kind = case.rpartition("_")
        name, padding = "connectors_interleaved" if name == "interleaved" else name, "right" if kind == "right" else "left"
        config = models.config(name, "connectors")
        channels, layers = config["caption_channels"], config["text_proj_in_factor"]
        states = randn(5, f"{case}/states", len(lengths), total, channels, layers)
        # Layers differ in scale and mean, which the normalisation removes.
        states = states * torch.linspace(0.3, 3.0, layers) + torch.linspace(-1.0, 1.0, layers)
        mask = (torch.arange(total) < torch.tensor(lengths)[:, None]).long()
        mask = mask.flip(1) if padding == "left" else mask
        model = models.load(name, "connectors")
        video, audio, binary = model(states, mask, padding_side=padding)
        assert (binary == 1).all(), "the reference returned a mask with zeros"
        outputs = {"video": video, "audio": audio, "projected": project(model, states, mask, padding)[1]}
        inputs = {"text_encoder_hidden_states": states.flatten(2, 3), "attention_mask": mask}
        write("connectors", case, inputs, outputs, model=name, seed=5, scalars={"padding_side": padding})
