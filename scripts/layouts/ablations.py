"""Writes the tables of benchmarks/ablations.md from the results of experiments/ablation.yml; `make ablations` runs it."""

import argparse
import json
import pathlib
import re
import sys

TARGETS = [("tpu:v5p:2x2x2", "v5p-8"), ("tpu:tpu7x:2x2x1", "TPU7x-8"), ("cuda:h200:1x1x4", "4 H200")]
# Consecutive steps: layout, description, published result.
STEPS = [
    [
        ("before-385", "all weights sharded along their `embed` dimension",
         "969 MB per layer (MaxDiffusion before #385 on TPU7x, including f32 keys and gathered text); 20 s per video"),
        ("ffn-matched", "feed-forward weights replicated", "701 MB; 16.7 s per video"),
        ("qkv-unsharded", "query, key and value weights replicated too", "not published"),
        ("out-unsharded", "output weights replicated too", "355 MB; 13.84 s per video"),
        ("sequence", "the final layout: bf16 keys and values gathered once, text replicated",
         "337 MB (current MaxDiffusion)"),
        ("ulysses", "all-to-all from tokens to heads instead of the gather", "110 MB (MaxDiffusion's Ulysses layout)"),
    ],
    [
        ("tensor-gathered-ffn", "inner activations gathered before the GELU",
         "AllGather 12.2 % of kernel time (SGLang before #23221, 4 H100)"),
        ("tensor", "column-parallel, then row-parallel, one all-reduce",
         "AllGather 5.4 % (after #23221); denoising step 0.3739 s instead of 0.3868"),
    ],
    [
        ("rope-gathered", "keys and RoPE tables gathered, then keys rotated",
         "7720 all-gathers, 605 ms (TensorRT-LLM before #13687, 2 GPUs)"),
        ("sequence", "keys rotated before they are gathered", "3880 all-gathers, 435 ms (after #13687)"),
    ],
]
BLOCKS = "transformer.transformer_blocks.*."


def argument(command, flag):
    return command[command.index(flag) + 1] if flag in command else None


def read(path):
    """Returns figures by target and layout, and measured seconds per step by layout."""
    compiled, measured = {}, {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        layout, result = argument(record["command"], "--layout"), record["result"]
        if result is None:
            continue
        if record["work"] == "compile":
            compiled[argument(record["command"], "--target"), layout] = result
        elif record["work"] == "measure":
            measured[layout] = result["programs"]["denoise_loop"]["median"]
    return compiled, measured


def moved(figures):
    """Returns runs and megabytes per block by kind of collective and by tensor (or name scope)."""
    sums = {}
    for c in figures["collectives"]["list"]:
        if c["per"] == "layer":
            key = c["kind"], (c["tensor"] or c["scope"]).removeprefix(BLOCKS)
            runs = c["count"] * c["trip_count"] / figures["layers"]
            count, size = sums.get(key, (0, 0.0))
            sums[key] = count + runs, size + runs * c["bytes"] / 1e6
    return sums


def more(first, second):
    """Lists what the first layout moves more than the second, largest first; counts items below 1 MB."""
    none = (0, 0.0)
    rest = {key: (n - second.get(key, none)[0], mb - second.get(key, none)[1]) for key, (n, mb) in first.items()}
    large = sorted(((mb, key, n) for key, (n, mb) in rest.items() if mb >= 1.0), reverse=True)
    small = sum(1 for _, mb in rest.values() if 0.0 < mb < 1.0)
    said = [f"`{what}` {mb:.1f} ({f'{n:.3g} ' if n > 0 else ''}{kind})" for mb, (kind, what), n in large]
    return ", ".join(said + ([f"{small} below 1 MB"] if small else [])) or "none"


def table(compiled, measured):
    heads = [f"{name}: MB per block, ms per step" for _, name in TARGETS]
    lines = [f"| layout | what it does | {' | '.join(heads)} | measured | published for the same step |", "|---" * 7 + "|"]
    for steps in STEPS:
        for layout, what, published in steps:
            cells = []
            for target, _ in TARGETS:
                f = compiled[target, layout]
                cells.append(f"{f['collectives']['per_layer_bytes'] / 1e6:.1f}, {f['predicted_all_ms']['step']:.1f}")
            ms = f"{measured[layout] * 1e3:.1f}" if layout in measured else "not measured"
            lines.append(f"| `{layout}` | {what} | {' | '.join(cells)} | {ms} | {published} |")
    return lines


def changes(compiled):
    lines = ["| step | target | collectives that it removes, MB per block | collectives that it adds |", "|---|---|---|---|"]
    for steps in STEPS:
        for (before, _, _), (after, _, _) in zip(steps, steps[1:]):
            for target, name in TARGETS:
                a, b = (moved(compiled[target, layout]) for layout in (before, after))
                lines.append(f"| `{before}` → `{after}` | {name} | {more(a, b)} | {more(b, a)} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=pathlib.Path, help="results.jsonl of the experiment")
    parser.add_argument("-o", required=True, type=pathlib.Path, help="the page")
    args = parser.parse_args()
    compiled, measured = read(args.results)
    missing = [f"{layout} for {target}" for target, _ in TARGETS for steps in STEPS for layout, _, _ in steps
               if (target, layout) not in compiled]
    if missing:
        sys.exit(f"{args.results} lacks {', '.join(missing)}")
    text = args.o.read_text()
    for mark, lines in (("steps", table(compiled, measured)), ("changes", changes(compiled))):
        pattern = rf"(<!-- {mark} -->\n).*?(<!-- end -->)"
        if not re.search(pattern, text, flags=re.S):
            sys.exit(f"{args.o} has no <!-- {mark} --> … <!-- end -->")
        text = re.sub(pattern, lambda m, lines=lines: m[1] + "\n".join(lines) + "\n" + m[2], text, flags=re.S)
    args.o.write_text(text)


if __name__ == "__main__":
    main()
