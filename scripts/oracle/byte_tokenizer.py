"""Writes tests/fixtures/tokenizer/ids.json: token ids by transformers' AutoTokenizer.

`bytes` is the tokenizer that `ltx2 init --preset nano` writes; `merges` is a Gemma-style BPE with turn markers and with padding
settings, which must be ignored.
"""

from itertools import product

import tokenizers
import transformers
from transformers import AutoTokenizer, GemmaTokenizerFast

from common import FIXTURES, write_json

OUT = FIXTURES / "tokenizer"
PROMPTS = [
    "", " \n\t ", "a robot dancing", "  The camera follows the red fox,  slowly.\n", "Tabs\tand\nlines\r\n\r\nstay inside",
    "naïve café — “quotes” … Ωmega, Привет, 你好世界, こんにちは, مرحبا", "🦊 runs 👩‍👩‍👧 and 🏳️‍🌈!",
    "e\u0301 is not \u00e9; \u00a0nbsp and \u3000wide space\u3000", "\u001c separators \u001f",
    "zero\u0000byte and \u2581 itself", "<bos> and <start_of_turn> inside <eos>",
    "0123456789 !\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", "the waves " * 20,
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


def main():
    versions = {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__}
    data = {"script": "scripts/oracle/byte_tokenizer.py", "versions": versions, "seed": None}
    write_json(OUT / "ids.json", data | {"tokenizers": [reference("bytes"), reference("merges")]}, ('{"prompt"',))


COMPONENTS = {"ids": main}
