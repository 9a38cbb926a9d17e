"""Writes tests/fixtures/tokenizer/ids.json and the tokenizer `merges`: token ids by transformers' AutoTokenizer.

`bytes` is the tokenizer that `ltx2 init --preset nano` writes; `merges` is a Gemma-style BPE with turn markers, trained here.
"""

import json
import shutil
from pathlib import Path

import tokenizers
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, GemmaTokenizerFast

from common import FIXTURES, write_json

OUT = FIXTURES / "tokenizer"
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
TEXT = """A red fox runs through the snow while the camera follows it from the side; the snow crunches under its feet.
Rain falls on the roof of a small house. A woman opens the window and sings, softly, to the street below.
The waves break on the rocks, and the gulls cry over the harbour. "Come back!" he shouts, and the echo answers him."""
PROMPTS = [
    "",
    " \n\t ",
    "a robot dancing",
    "  The camera follows the red fox,  slowly.\n",
    "Tabs\tand\nlines\r\n\r\nstay inside",
    "naïve café — “quotes” … Ωmega, Привет, 你好世界, こんにちは, مرحبا",
    "🦊 runs 👩‍👩‍👧 and 🏳️‍🌈!",
    "e\u0301 is not \u00e9; \u00a0nbsp and \u3000wide space\u3000",
    "\u001c separators \u001f",
    "zero\u0000byte and \u2581 itself",
    "<bos> and <start_of_turn> inside <eos>",
    "0123456789 !\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    "the waves " * 20,
]


def train(directory: Path) -> None:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # for training: merges within a word
    special = SPECIAL + ["<start_of_turn>", "<end_of_turn>"] + [f"<0x{b:02X}>" for b in range(256)]
    tokenizer.train_from_iterator(TEXT.split("\n"), trainers.BpeTrainer(vocab_size=420, special_tokens=special))
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [t for t in data["added_tokens"] if not t["content"].startswith("<0x")]
    data["pre_tokenizer"] = json.loads(pre_tokenizers.Split(" ", "merged_with_previous").__getstate__())
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", "<bos> $A <bos>:1 $B:1", [("<bos>", 2)])
    # Padding settings in the file must be ignored.
    tokenizer.enable_padding(pad_id=0, pad_token="<pad>")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False, **names}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def reference(name: str) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(OUT / name)
    fast = GemmaTokenizerFast.from_pretrained(OUT / name)
    tokenizer.padding_side = fast.padding_side = "left"
    cases = []
    for prompt in PROMPTS:
        for max_length in (7, 96):
            asked = dict(padding="max_length", max_length=max_length, truncation=True, add_special_tokens=True)
            out = tokenizer(prompt.strip(), **asked)
            assert out.input_ids == fast(prompt.strip(), **asked).input_ids
            whole = tokenizer(prompt.strip(), add_special_tokens=True).input_ids
            pads = out.attention_mask.count(0)
            assert out.input_ids[:pads] == [tokenizer.pad_token_id] * pads
            kept = out.input_ids[pads:]
            cut = len(whole) - len(kept)
            cases.append({"prompt": prompt, "max_length": max_length, "pads": pads, "cut": cut, "ids": kept})
    return {"dir": name, "vocab_size": len(tokenizer), "cases": cases}


def main() -> None:
    train(OUT / "merges")
    versions = {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__}
    data = {"script": "scripts/oracle/byte_tokenizer.py", "versions": versions, "seed": None}
    data["tokenizers"] = [reference("bytes"), reference("merges")]
    write_json(OUT / "ids.json", data, ('{"prompt"',))


COMPONENTS = {"ids": main}
