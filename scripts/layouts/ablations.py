"""The ablation table: each layout kept for its waste beside the one that mends it, compiled for eight v5p chips.

Called by `make ablations`; reads nothing but `ltx2 compile --json` and writes docs/ablations.md.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

TARGET = "tpu:v5p:2x2x2"
LAYERS = 3
# Layout, what it shows, what was published of the step it replays.
STEPS = [
    ("before-385", "every weight split along the side that the residual stream meets",
     "969 MB a layer (MaxDiffusion before #385, TPU7x, its f32 keys and gathered text included); 20 s a video"),
    ("ffn-matched", "feed-forward weights whole", "701 MB; 16.7 s a video"),
    ("qkv-unsharded", "query, key and value weights whole too", "between the PR's two steps"),
    ("out-unsharded", "output weights whole too", "355 MB; 13.84 s a video"),
    ("sequence", "what the steps lead to: bf16 keys and values gathered once, text whole", "337 MB (MaxDiffusion today)"),
    ("ulysses", "tokens traded for heads instead", "110 MB (MaxDiffusion's own)"),
    ("tensor-gathered-ffn", "inner activations gathered before the GELU",
     "AllGather 12.2 % of kernel time (SGLang before #23221, 4 H100)"),
    ("tensor", "column then row, one sum", "AllGather 5.4 %, denoise step 0.3868 to 0.3739 s (after)"),
    ("rope-gathered", "keys and their tables gathered, then rotated",
     "7720 all-gathers, 605 ms (TensorRT-LLM before #13687, 2 GPUs)"),
    ("sequence", "keys rotated where they are", "3880 all-gathers, 435 ms (after)"),
]


def measure(ltx2, layout):
    """The figures of one layout."""
    command = [ltx2, "compile", "--target", TARGET, "-c", "ltx2", "--layout", layout, "--layers", str(LAYERS), "--json", "-"]
    environment = dict(os.environ, TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout)


def kinds(figures):
    """What moves in a layer, by kind: `4 all-to-all 50.3`."""
    sums = {}
    for c in figures["collectives"]["list"]:
        if c["per"] == "layer":
            count, size = sums.get(c["kind"], (0, 0.0))
            runs = c["count"] * c["trip_count"] / LAYERS
            sums[c["kind"]] = (count + runs, size + runs * c["bytes"])
    return ", ".join(f"{n:g} {kind} {size / 1e6:.1f}" for kind, (n, size) in sorted(sums.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ltx2", required=True, help="the program")
    parser.add_argument("-o", required=True, type=pathlib.Path, help="the table")
    args = parser.parse_args()
    measured = {}
    lines = [
        "# What each step of a layout is worth",
        "",
        f"The 19B denoising loop at 768x512x121 with a negative prompt, optimized by libtpu for `{TARGET}` ({LAYERS} blocks; "
        "figures of one block do not depend on their number). MB of collective output and of wire a layer a device; "
        "times are predicted by the roofline and link model of `ltx2 compile`, not measured.",
        "",
        "| layout | what it does | MB a layer | wire MB | made of | predicted ms a layer | published of the same step |",
        "|---|---|---|---|---|---|---|",
    ]
    for layout, what, published in STEPS:
        if layout not in measured:
            print(layout, file=sys.stderr)
            measured[layout] = measure(args.ltx2, layout)
        f = measured[layout]
        c = f["collectives"]
        lines.append(
            f"| `{layout}` | {what} | {c['per_layer_bytes'] / 1e6:.1f} | {c['per_layer_wire_bytes'] / 1e6:.1f} | {kinds(f)} "
            f"| {f['predicted_ms']['step'] / LAYERS:.2f} | {published} |"
        )
    lines += [
        "",
        "Made by `make ablations`. The published figures are of other programs on other chips: MaxDiffusion pull requests "
        "385 and 414 and its own compiled programs on TPU7x, SGLang pull request 23221, TensorRT-LLM pull request 13687. "
        "They stand beside ours to show the same step, not the same clock.",
        "",
    ]
    args.o.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
