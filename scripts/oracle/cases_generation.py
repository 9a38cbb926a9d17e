"""Writes texts that the text encoders' language models generate, and token probabilities of the sampling rules."""

import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import models
from common import randn, write_case

NEW_TOKENS = 64
# Temperature, top-k (0: all tokens) and top-p.
RULES = [(1.0, 0, 1.0), (0.7, 12, 1.0), (1.3, 0, 0.8), (0.7, 20, 0.9)]


def prompts(name, lengths, total):
    """Returns random token ids with padding on the left, and their mask."""
    vocabulary = models.config(name, "text_encoder")["text_config"]["vocab_size"]
    mask = (torch.arange(total) >= total - torch.tensor(lengths)[:, None]).long()
    ids = (randn(3, f"{name}/generation", len(lengths), total).abs() * 1e6).long() % (min(vocabulary, 390) - 4) + 4
    return ids * mask, mask


def generate(model, ids, mask, stops, **more):
    """Returns the new tokens, padded with 0 to NEW_TOKENS, and the lengths of the texts, including the stop token."""
    asked = dict(do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0, eos_token_id=stops or None, use_cache=True)
    whole = model.generate(input_ids=ids, attention_mask=mask, **asked | more)
    new = whole[:, ids.shape[1]:]
    new = torch.nn.functional.pad(new, (0, NEW_TOKENS - new.shape[1]))
    ends = torch.isin(new, torch.tensor(stops, dtype=torch.long))
    first = torch.where(ends.any(1), ends.int().argmax(1) + 1, NEW_TOKENS)
    return new * (torch.arange(NEW_TOKENS) < first[:, None]), first


def generation():
    """Two prompts of different lengths, one longer than the window; without and with stop tokens."""
    for name, more in (("tiny_a", {}), ("gemma4_a", {}), ("tiny_b", {"no_repeat_ngram_size": 3})):
        model, (ids, mask) = models.load(name, "text_encoder"), prompts(name, (20, 9), 24)
        model.generation_config.eos_token_id = None
        tokens, lengths = generate(model, ids, mask, [], **more)
        assert (lengths == NEW_TOKENS).all()
        # A token of the first text that ends it early, and a token that never occurs.
        own = tokens[0].tolist()
        stop = next(t for at, t in enumerate(own) if at >= 10 and t not in own[:at])
        absent = next(t for t in range(5, 90) if t not in set(tokens.flatten().tolist()))
        stops = [absent, stop]
        stopped, stopped_lengths = generate(model, ids, mask, stops, **more)
        print(name, len(set(own)), "different tokens; stop", stops, stopped_lengths.tolist())
        outputs = {"tokens": tokens, "lengths": lengths, "stopped": stopped, "stopped_lengths": stopped_lengths}
        scalars = {"stop_tokens": stops, "limit": NEW_TOKENS, **more}
        write_case("generation", name, {"input_ids": ids, "attention_mask": mask}, outputs, model=name, scalars=scalars)


def sampling():
    """Probabilities of the first new token for each of the rules, `[rules, vocabulary]`."""
    name = "gemma4_b"
    model, (ids, mask) = models.load(name, "text_encoder"), prompts(name, (6,), 8)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -1].float()
    rows = []
    for temperature, top_k, top_p in RULES:
        warpers = [TemperatureLogitsWarper(temperature)]
        warpers += [TopKLogitsWarper(top_k)] if top_k else []
        warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        scores = logits
        for warper in warpers:
            scores = warper(ids, scores)
        rows.append(scores.softmax(-1)[0])
        print(name, temperature, top_k, top_p, int((rows[-1] > 0).sum()), "tokens, largest", f"{rows[-1].max():.3f}")
    outputs = {"probabilities": torch.stack(rows)}
    write_case("sampling", name, {"input_ids": ids, "attention_mask": mask}, outputs, model=name, scalars={"rules": RULES})
