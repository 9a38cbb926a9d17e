"""Writes the figures of benchmarks/ablations.md: ablations.py RESULTS.jsonl PAGE; `make ablations` runs it.

To add a row, write its words on the page; the script fills in the figures."""

import json
import pathlib
import sys
from itertools import pairwise, product

import page

TARGETS = {"tpu:v5p:2x2x2": "v5p-8", "tpu:tpu7x:2x2x1": "TPU7x-8", "cuda:h200:1x1x4": "4 H200"}
BLOCKS = "transformer.transformer_blocks.*."


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


if len(sys.argv) != 3:
    sys.exit(__doc__)
results, tables = map(pathlib.Path, sys.argv[1:])
compiled, measured = {}, {}
for record in map(json.loads, results.read_text().splitlines()):
    options, result = dict(pairwise(record["command"])), record["result"]
    if result and record["work"] == "compile":
        compiled[options["--target"], options.get("--layout")] = result
    elif result and record["work"] == "measure":
        measured[options.get("--layout")] = result["programs"]["denoise_loop"]["median"]
rows = page.read(tables, "steps")
wanted = product(TARGETS, [layout.strip("`") for layout, *_ in rows])
missing = [f"{layout} for {target}" for target, layout in wanted if (target, layout) not in compiled]
if missing:
    sys.exit(f"{results} lacks {', '.join(missing)}")
steps, changes, targets = [], [], {name: target for target, name in TARGETS.items()}
for layout, what, *_, published in rows:
    name = layout.strip("`")
    figures = (compiled[target, name] for target in TARGETS)
    cells = (f"{f['collectives']['per_layer_bytes'] / 1e6:.1f}, {f['predicted_all_ms']['step']:.1f}" for f in figures)
    ms = f"{measured[name] * 1e3:.1f}" if name in measured else "not measured"
    steps.append([layout, what, *cells, ms, published])
for step, name, *_ in page.read(tables, "changes"):
    a, b = (moved(compiled[targets[name], layout.strip("`")]) for layout in step.split(" → "))
    changes.append([step, name, more(a, b), more(b, a)])
page.write(tables, {"steps": steps, "changes": changes})
