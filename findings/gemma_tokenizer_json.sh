#!/usr/bin/env bash
# transformers 5.23.0 (tokenizers 0.23.3): `GemmaTokenizer`, with which diffusers encodes LTX-2's prompts, reads the vocabulary
# and the post-processor of tokenizer.json, but replaces the normalizer by its own. `add_bos_token` in tokenizer_config.json has
# no effect. The same file therefore gives other tokens than in `tokenizers`, the library that defines the format.
# Seen on 2026-11-29, with a file that normalizes "a a" to "▁a▁a" and adds <bos>, and with `"add_bos_token": false`:
#   tokenizers: <bos> ▁a ▁a
#   GemmaTokenizer: <bos> a ▁a
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'transformers==5.23.0' 'tokenizers==0.23.3' 'numpy==2.4.6'
seen=$(cd "$folder" && venv/bin/python - 2> log <<'PYTHON'
import json

from tokenizers import Tokenizer, models, normalizers, processors
from transformers import GemmaTokenizer

special = ["<pad>", "<eos>", "<bos>", "<unk>"]
vocabulary = {token: number for number, token in enumerate([*special, "▁", "a", "▁a"])}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>"))
tokenizer.add_special_tokens(special)
tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
bos = vocabulary["<bos>"]
tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
tokenizer.save("tokenizer.json")
names = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk")}
with open("tokenizer_config.json", "w") as file:
    json.dump({"tokenizer_class": "GemmaTokenizer", "add_bos_token": False, **names}, file)
print("tokenizers:", *Tokenizer.from_file("tokenizer.json").encode("a a").tokens)
gemma = GemmaTokenizer.from_pretrained(".")
print("GemmaTokenizer:", *gemma.convert_ids_to_tokens(gemma("a a").input_ids))
PYTHON
) || { cat "$folder/log"; exit 1; }
echo "$seen"
[ "$seen" = "tokenizers: <bos> ▁a ▁a
GemmaTokenizer: <bos> a ▁a" ]
