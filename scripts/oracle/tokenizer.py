"""A small Gemma-style tokenizer: BPE over "▁"-joined text with byte fallback; <pad> 0, <eos> 1, <bos> 2; adds BOS."""

import collections
import json

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
_IMAGE = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
_TEXT = (
    "a slow pan over a quiet harbour at dawn, gulls calling and the water lapping against wooden boats; "
    "the camera moves past a lighthouse while a woman in a red coat walks along the stone pier and says good morning. "
    "worst quality, blurry, jittery, distorted, low volume, static noise"
)


def _learn_merges(words, count):
    """Learns byte-pair merges; ties are broken by text."""
    words = {tuple(word): number for word, number in words.items()}
    merges = []
    while len(merges) < count:
        pairs = collections.Counter()
        for word, number in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += number
        if not pairs:
            break
        pair = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(pair)
        merged = collections.Counter()
        for word, number in words.items():
            out = []
            for token in word:
                if out and (out[-1], token) == pair:
                    out[-1] += token
                else:
                    out.append(token)
            merged[tuple(out)] += number
        words = merged
    return merges


def save_tokenizer(folder, size):
    """Writes tokenizer.json and its config with exactly `size` entries."""
    words = collections.Counter(word + "▁" for word in _TEXT.split())
    alphabet = sorted(set("".join(words)) | set(".,;:!?'\"-0123456789AEIT"))
    base = _SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)] + alphabet
    merges = _learn_merges(words, size)
    vocabulary = {token: index for index, token in enumerate(base)}
    kept = []
    for left, right in merges:
        if len(vocabulary) == size - len(_IMAGE):
            break
        kept.append((left, right))
        vocabulary.setdefault(left + right, len(vocabulary))
    vocabulary |= {token: len(vocabulary) + index for index, token in enumerate(_IMAGE)}
    if len(vocabulary) != size:
        raise ValueError(f"the corpus yields {len(vocabulary)} tokens, {size} wanted")
    write_tokenizer(folder, vocabulary, kept, _SPECIAL + _IMAGE)


def write_tokenizer(folder, vocabulary, merges, special):
    """Writes tokenizer.json and tokenizer_config.json of a Gemma-style BPE; returns the tokenizer."""
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, fuse_unk=True, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", "<bos> $A <bos>:1 $B:1", [("<bos>", 2)])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(special)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n")
    config = {
        "add_bos_token": True, "add_eos_token": False, "bos_token": "<bos>", "clean_up_tokenization_spaces": False,
        "eos_token": "<eos>", "mask_token": "<mask>", "model_max_length": 1024, "pad_token": "<pad>",
        "padding_side": "left", "tokenizer_class": "GemmaTokenizer", "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return tokenizer
