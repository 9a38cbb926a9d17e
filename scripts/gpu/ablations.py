"""What published techniques save, on the GPUs of this machine: ablations.py --ltx2 PROGRAM -o benchmarks/ablations-gpu.md.

Each row runs the same programs twice, without and with the technique, through `ltx2 bench`; collectives are those of
`ltx2 compile --json`, errors those of one forward pass of a small model against the reference's numbers. Rows for which
there are too few GPUs say so.
"""

import argparse
import array
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

CASE = pathlib.Path("tests/fixtures/cases/transformer/tiny_a.safetensors")
MODEL = pathlib.Path("tests/fixtures/models/tiny_a")

# What, what was published, GPUs, then layout, mesh, program and further arguments without and with it.
ROWS = [
    ("feed-forward's inner activations gathered, or one all-reduce after the second matmul",
     "AllGather 12.2 to 5.4 % of kernel time (SGLang #23221, 4 H100)", 2,
     ("tensor-gathered-ffn", "tensor=2", "denoise_loop", []), ("tensor", "tensor=2", "denoise_loop", [])),
    ("keys gathered with their tables and rotated, or rotated where they are",
     "7720 to 3880 all-gathers, 605 to 435 ms (TensorRT-LLM #13687, 2 GPUs)", 2,
     ("rope-gathered", "context=2", "denoise_loop", []), ("sequence", "context=2", "denoise_loop", [])),
    ("one prompt at a time (its time twice), or both in one pass", "", 1,
     ("replicated", "data=1", "text_encoder", ["--guidance-scale", "1"]), ("replicated", "data=1", "text_encoder", [])),
    ("a call for each step, or one for all", "", 1,
     ("replicated", "data=1", "denoise_step", []), ("replicated", "data=1", "denoise_loop", [])),
]
NOT_HERE = [
    "Not in the table, because no option turns them off: RoPE fused or not (concatenated halves against reversal,",
    "0.647 → 0.642 s a step, [more](h200.md)), and predictions gathered weighted or not (unweighted, 3.3 MB a step",
    "overlapped; weights before the gather would save nothing and lose the deviations that rescale needs).",
]
PROGRAMS = {"denoise_loop": "denoise", "denoise_step": "denoise", "text_encoder": "text-encoder"}


def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env=dict(os.environ, TPU_SKIP_MDS_QUERY="1"))
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def tensors(path):
    """The f32 tensors of a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    names = [n for n in header if n != "__metadata__" and header[n]["dtype"] == "F32"]
    at = {n: [8 + size + o for o in header[n]["data_offsets"]] for n in names}
    return {n: array.array("f", data[at[n][0]:at[n][1]]) for n in names}


def distance(got, want):
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(got, want)) / sum(b * b for b in want))


class Machine:
    def __init__(self, args):
        self.ltx2, self.platform, self.preset, self.steps = args.ltx2, args.platform, args.preset, str(args.steps)
        self.sizes = [part for value in args.set for part in ("--set", value)]
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.known = {}

    def seconds(self, layout, mesh, program, more):
        """One run times a step in the loop and by itself."""
        key = (layout, mesh, PROGRAMS[program], *more)
        if key not in self.known:
            self.known[key] = self.bench(layout, mesh, program, more)
        return self.known[key][program]["median"]

    def bench(self, layout, mesh, program, more):
        out = self.folder / "bench.json"
        run([self.ltx2, "bench", "-c", self.preset, "--weights", "random", "--platform", self.platform, "--layout", layout,
             "--mesh", mesh, "--programs", PROGRAMS[program], "--steps", self.steps, "--json", out, "--force", *self.sizes, *more])
        return json.loads(out.read_text())["programs"]

    def collectives(self, layout, mesh, devices, program, more):
        target = f"cuda:h200:1x1x{devices}" if self.platform == "cuda" else f"{self.platform}:{devices}"
        out = run([self.ltx2, "compile", "-c", self.preset, "--target", target, "--layout", layout, "--mesh", mesh,
                   "--program", PROGRAMS[program], "--json", "-", *self.sizes, *more])
        kinds = {}
        for c in json.loads(out)["collectives"]["list"]:
            count, size = kinds.get(c["kind"], (0, 0.0))
            runs = c["count"] * c["trip_count"]
            kinds[c["kind"]] = (count + runs, size + runs * c["bytes"])
        return ", ".join(f"{n:g} {kind}, {size / 1e6:.0f} MB" for kind, (n, size) in sorted(kinds.items())) or "none"

    def error(self, layout, mesh):
        known = tensors(CASE)
        given = {n[3:]: v for n, v in known.items() if n.startswith("in.")}
        header, offset = {}, 0
        source = json.loads(CASE.read_bytes()[8:8 + int.from_bytes(CASE.read_bytes()[:8], "little")])
        # What describes how the inputs were made is no argument of the network.
        scalars = json.loads(source["__metadata__"].get("scalars", "{}")).items()
        unknown = ("padding_side", "prompts", "max_sequence_length")
        scalars = [f"{name}={json.dumps(value)}" for name, value in scalars if name not in unknown]
        for name, values in given.items():
            header[name] = {"dtype": "F32", "shape": source[f"in.{name}"]["shape"],
                            "data_offsets": [offset, offset + 4 * len(values)]}
            offset += 4 * len(values)
        text = json.dumps(header).encode()
        inputs, out = self.folder / "in.safetensors", self.folder / "out.safetensors"
        inputs.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(v.tobytes() for v in given.values()))
        run([self.ltx2, "run", "transformer", "--model", MODEL, "--inputs", inputs, "-o", out, "--force", "--platform",
             self.platform, "--dtype", "bf16", "--layout", layout, "--mesh", mesh,
             *(part for scalar in scalars for part in ("--set", scalar))])
        return max(distance(values, known[f"out.{name}"]) for name, values in tensors(out).items())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ltx2", required=True, help="the program")
    parser.add_argument("-o", required=True, type=pathlib.Path, help="the table")
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--preset", default="ltx2", help="the model's sizes and the request")
    parser.add_argument("--set", action="append", default=[], help="a key of the configuration: request.width=64")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--gpus", type=int, help="how many are here (asked of nvidia-smi)")
    args = parser.parse_args()
    gpus = args.gpus or len(run(["nvidia-smi", "-L"]).splitlines())
    machine = Machine(args)
    lines = [
        "# GPU ablations: what each technique saves",
        "",
        f"`make ablations-gpu`: {gpus} devices of {args.platform}, preset {args.preset}, {args.steps} steps. Milliseconds a step or",
        "a pass; collectives of a step on one device; error: relative L2 in bf16 of a small model's forward pass.",
        "",
        "| technique, without and with | ms | collectives | error | published |",
        "|---|---|---|---|---|",
    ]
    for what, published, devices, *both in ROWS:
        if devices > gpus:
            lines.append(f"| {what} | not measured: {gpus} of {devices} GPUs | | | {published} |")
            continue
        cells = [[], [], []]
        for layout, mesh, program, more in both:
            times = 2 if "--guidance-scale" in more else 1
            cells[0].append(f"{1e3 * times * machine.seconds(layout, mesh, program, more):.1f}")
            cells[1].append(machine.collectives(layout, mesh, devices, program, more) if devices > 1 else "none")
            cells[2].append(f"{machine.error(layout, mesh):.4f}" if devices > 1 else "-")
        ms, collectives, error = (" → ".join(dict.fromkeys(c)) for c in cells)
        lines.append(f"| {what} | {ms} | {collectives} | {error} | {published} |")
        print(lines[-1], flush=True)
        # After each row: what was measured stays, whatever happens to the rest.
        args.o.write_text("\n".join(lines + ["", *NOT_HERE]) + "\n")


if __name__ == "__main__":
    main()
