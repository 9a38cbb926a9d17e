"""Writes the tables of benchmarks/ablations.md: ablations.py RESULTS.jsonl PAGE; `make ablations` runs it."""

import json
import pathlib
import sys
from itertools import chain, pairwise, product

import page

TARGETS = {"tpu:v5p:2x2x2": "v5p-8", "tpu:tpu7x:2x2x1": "TPU7x-8", "cuda:h200:1x1x4": "4 H200"}
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


def read(path):
    compiled, measured = {}, {}
    for record in map(json.loads, path.read_text().splitlines()):
        options, result = dict(pairwise(record["command"])), record["result"]
        if result and record["work"] == "compile":
            compiled[options["--target"], options.get("--layout")] = result
        elif result and record["work"] == "measure":
            measured[options.get("--layout")] = result["programs"]["denoise_loop"]["median"]
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
    rest = {key: [a - b for a, b in zip(both, second.get(key, (0, 0.0)))] for key, both in first.items()}
    large = sorted(((mb, key, n) for key, (n, mb) in rest.items() if mb >= 1.0), reverse=True)
    small = sum(1 for _, mb in rest.values() if 0.0 < mb < 1.0)
    said = [f"`{what}` {mb:.1f} ({f'{n:.3g} ' if n > 0 else ''}{kind})" for mb, (kind, what), n in large]
    return ", ".join(said + ([f"{small} below 1 MB"] if small else [])) or "none"


def table(compiled, measured):
    of_targets = [f"{name}: MB per block, ms per step" for name in TARGETS.values()]
    heads, rows = ["layout", "what it does", *of_targets, "measured", "published for the same step"], []
    for layout, what, published in chain(*STEPS):
        figures = (compiled[target, layout] for target in TARGETS)
        cells = (f"{f['collectives']['per_layer_bytes'] / 1e6:.1f}, {f['predicted_all_ms']['step']:.1f}" for f in figures)
        ms = f"{measured[layout] * 1e3:.1f}" if layout in measured else "not measured"
        rows.append([f"`{layout}`", what, *cells, ms, published])
    return page.table(heads, rows)


def changes(compiled):
    heads, rows = ["step", "target", "collectives that it removes, MB per block", "collectives that it adds"], []
    for (before, *_), (after, *_) in chain(*map(pairwise, STEPS)):
        for target, name in TARGETS.items():
            a, b = (moved(compiled[target, layout]) for layout in (before, after))
            rows.append([f"`{before}` → `{after}`", name, more(a, b), more(b, a)])
    return page.table(heads, rows)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    results, tables = map(pathlib.Path, sys.argv[1:])
    compiled, measured = read(results)
    wanted = product(TARGETS, [layout for layout, *_ in chain(*STEPS)])
    missing = [f"{layout} for {target}" for target, layout in wanted if (target, layout) not in compiled]
    if missing:
        sys.exit(f"{results} lacks {', '.join(missing)}")
    page.write(tables, {"steps": table(compiled, measured), "changes": changes(compiled)})


main()
