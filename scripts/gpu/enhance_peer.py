"""Times transformers' compiled generation with a static cache by a random Gemma 3 12B, and the memory bandwidth.

Prints JSON. A prompt of 512 tokens, 256 new tokens, greedy, bf16."""

import json
import sys

import torch
import transformers
from peer import median, preset, release
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

PROMPT, NEW, RUNS = 512, 256, 3


def bandwidth():
    """Returns the bytes per second of reading (a sum of rows) and of copying, read plus written."""
    x = torch.ones(4 << 30, dtype=torch.bfloat16, device="cuda").view(-1, 8192)
    y, size = torch.empty_like(x), x.numel() * x.element_size()
    total = torch.compile(lambda x: x.sum(-1, dtype=torch.float32))
    reads = min(median("sum", lambda: total(x), 10), median("maximum", lambda: torch.amax(x, -1), 10))
    return size / reads, 2 * size / median("copy", lambda: y.copy_(x), 10)


def model():
    """Returns a model of the published sizes; the weights are random."""
    config = Gemma3TextConfig(**preset("ltx2")["text_encoder"]["text_config"], tie_word_embeddings=True, dtype=torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        made = Gemma3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    made.tie_weights()
    return made.eval()


def main():
    torch.set_float32_matmul_precision("high")
    read, copy = bandwidth()
    release()
    print(f"read {read / 1e12:.2f} TB/s, copy {copy / 1e12:.2f} TB/s", file=sys.stderr)
    net = model()
    ids = torch.randint(10, 262000, (1, PROMPT), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    mask = torch.ones_like(ids)

    def generate(new):
        asked = dict(do_sample=False, min_new_tokens=new, max_new_tokens=new, eos_token_id=None, pad_token_id=0)
        with torch.inference_mode():
            # With a static cache on a GPU, generate() compiles the decoding step with CUDA graphs.
            return net.generate(input_ids=ids, attention_mask=mask, cache_implementation="static", **asked)

    for new in (NEW, 1):
        assert generate(new).shape[1] == PROMPT + new
    whole, prompt = (median(f"{new} tokens", lambda new=new: generate(new), RUNS) for new in (NEW, 1))
    print(json.dumps({
        "transformers": transformers.__version__, "torch": torch.__version__, "read_bytes_per_second": read,
        "copy_bytes_per_second": copy, "seconds_per_token": (whole - prompt) / (NEW - 1), "prompt_seconds": prompt,
        "whole_seconds": whole, "parameter_bytes": sum(p.numel() * p.element_size() for p in net.parameters()),
    }))


if __name__ == "__main__":
    main()
