"""Writes tests/fixtures/tokenizer/ids.json: token ids by transformers' AutoTokenizer.

`bytes` is the tokenizer that `ltx2 init --preset nano` writes; `merges` is a Gemma-style BPE with turn markers and with padding
settings, which must be ignored. `spiece` is a SentencePiece model with Gemma's settings, which this script trains; there,
transformers must agree with sentencepiece, which does not know names of special tokens in a prompt."""

import io
from itertools import product

import sentencepiece
import tokenizers
import transformers
from transformers import AutoTokenizer, GemmaTokenizerFast

from common import FIXTURES, REPOSITORY, write_json

OUT = FIXTURES / "tokenizer"
PROMPTS = [
    "", " \n\t ", "a robot dancing", "  The camera follows the red fox,  slowly.\n", "Tabs\tand\nlines\r\n\r\nstay inside",
    "naïve café — “quotes” … Ωmega, Привет, 你好世界, こんにちは, مرحبا", "🦊 runs 👩‍👩‍👧 and 🏳️‍🌈!",
    "e\u0301 is not \u00e9; \u00a0nbsp and \u3000wide space\u3000", "\u001c separators \u001f",
    "zero\u0000byte and \u2581 itself", "<bos> and <start_of_turn> inside <eos>",
    "runs   of     spaces", "0123456789 !\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", "the waves " * 20,
]


def reference(name):
    tokenizer, fast = (kind.from_pretrained(OUT / name) for kind in (AutoTokenizer, GemmaTokenizerFast))
    tokenizer.padding_side = fast.padding_side = "left"
    cases = []
    for prompt, max_length in product(PROMPTS, (7, 96)):
        asked = dict(padding="max_length", max_length=max_length, truncation=True, add_special_tokens=True)
        out = tokenizer(prompt.strip(), **asked)
        assert out.input_ids == fast(prompt.strip(), **asked).input_ids
        pads = out.attention_mask.count(0)
        assert out.input_ids[:pads] == [tokenizer.pad_token_id] * pads
        kept = out.input_ids[pads:]
        cut = len(tokenizer(prompt.strip(), add_special_tokens=True).input_ids) - len(kept)
        cases.append({"prompt": prompt, "max_length": max_length, "pads": pads, "cut": cut, "ids": kept})
    return {"dir": name, "vocab_size": len(tokenizer), "cases": cases}


def sentence_piece():
    out, text = io.BytesIO(), (REPOSITORY / "LICENSE").read_text().splitlines() + PROMPTS[2:5]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=out, model_type="bpe", vocab_size=400, byte_fallback=True, num_threads=1,
        normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False, split_digits=True,
        allow_whitespace_only_pieces=True, minloglevel=2, pad_id=0, eos_id=1, bos_id=2, unk_id=3, pad_piece="<pad>",
        eos_piece="<eos>", bos_piece="<bos>", user_defined_symbols=[
            "<start_of_turn>", "<end_of_turn>", "\n", "\n\n", *("▁" * n for n in range(2, 7)), "<table>"],
    )
    (OUT / "spiece").mkdir(exist_ok=True)
    (OUT / "spiece/tokenizer.model").write_bytes(out.getvalue())
    tokenizer = GemmaTokenizerFast.from_pretrained(OUT / "spiece")
    model, cases = sentencepiece.SentencePieceProcessor(model_file=str(OUT / "spiece/tokenizer.model")), []
    for prompt, max_length in product(PROMPTS, (7, 96)):
        words = tokenizer(prompt.strip(), add_special_tokens=False).input_ids
        assert "<eos>" in prompt or words == model.encode(prompt.strip()), prompt
        kept = [tokenizer.bos_token_id, *words][:max_length]
        pads, cut = max_length - len(kept), len(words) + 1 - len(kept)
        cases.append({"prompt": prompt, "max_length": max_length, "pads": pads, "cut": cut, "ids": kept})
    return {"dir": "spiece", "vocab_size": model.get_piece_size(), "cases": cases}


def ids():
    versions = {package.__name__: package.__version__ for package in (transformers, tokenizers, sentencepiece)}
    data = {"versions": versions, "seed": None, "tokenizers": [reference("bytes"), reference("merges"), sentence_piece()]}
    write_json(OUT / "ids.json", data, ('{"prompt"',))
