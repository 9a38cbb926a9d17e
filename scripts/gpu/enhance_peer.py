"""Times transformers' compiled generation with a static cache by a random Gemma 3 12B, and the memory bandwidth.

Prints JSON. A prompt of 512 tokens, 256 new tokens, greedy, bf16."""

import json
import statistics
import sys
import time

import torch
import transformers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

PROMPT, NEW, RUNS = 512, 256, 3


def seconds(run, times):
    """Returns the median time of a call, in seconds."""
    spent = []
    for _ in range(times):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


def bandwidth():
    """Returns the bytes per second of reading (a sum of rows) and of copying, read plus written."""
    x = torch.ones(4 << 30, dtype=torch.bfloat16, device="cuda").view(-1, 8192)
    y, size = torch.empty_like(x), x.numel() * x.element_size()
    total = torch.compile(lambda x: x.sum(-1, dtype=torch.float32))
    total(x), y.copy_(x)
    reads = min(seconds(lambda: total(x), 10), seconds(lambda: torch.amax(x, -1), 10))
    return size / reads, 2 * size / seconds(lambda: y.copy_(x), 10)


def model():
    """Returns a model of the published sizes; the weights are random."""
    config = Gemma3TextConfig(
        vocab_size=262208, hidden_size=3840, intermediate_size=15360, num_hidden_layers=48, num_attention_heads=16,
        num_key_value_heads=8, head_dim=256, sliding_window=1024, query_pre_attn_scalar=256,
        tie_word_embeddings=True, dtype=torch.bfloat16,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        made = Gemma3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    made.tie_weights()
    return made.eval()


def main():
    torch.set_float32_matmul_precision("high")
    read, copy = bandwidth()
    torch.cuda.empty_cache()
    print(f"read {read / 1e12:.2f} TB/s, copy {copy / 1e12:.2f} TB/s", file=sys.stderr)
    net = model()
    ids = torch.randint(10, 262000, (1, PROMPT), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    mask = torch.ones_like(ids)

    def generate(new):
        asked = dict(do_sample=False, min_new_tokens=new, max_new_tokens=new, eos_token_id=None, pad_token_id=0)
        with torch.inference_mode():
            # With a static cache on a GPU, generate() compiles the decoding step with CUDA graphs.
            return net.generate(input_ids=ids, attention_mask=mask, cache_implementation="static", **asked)

    began = time.perf_counter()
    for new in (NEW, NEW, 1):
        assert generate(new).shape[1] == PROMPT + new
    print(f"warmed up in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    whole, prompt = seconds(lambda: generate(NEW), RUNS), seconds(lambda: generate(1), RUNS)
    print(json.dumps({
        "transformers": transformers.__version__, "torch": torch.__version__, "read_bytes_per_second": read,
        "copy_bytes_per_second": copy, "seconds_per_token": (whole - prompt) / (NEW - 1), "prompt_seconds": prompt,
        "whole_seconds": whole, "parameter_bytes": sum(p.numel() * p.element_size() for p in net.parameters()),
    }))


if __name__ == "__main__":
    main()
