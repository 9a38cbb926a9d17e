"""Writes three tables of benchmarks/tpu.md from `ltx2 compile --json`; `make tpu-tables` runs it.

Reports are cached in --cache by arguments and by the binary's hash.
"""

import argparse
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys

# Slices by configuration name.
SLICES = {
    "v5e-16": "tpu:v5e:4x4",
    "v6e-8": "tpu:v6e:2x4",
    "v6e-16": "tpu:v6e:4x4",
    "v6e-64": "tpu:v6e:8x8",
    "v5p-8": "tpu:v5p:2x2x2",
    "v5p-32": "tpu:v5p:2x4x4",
    "tpu7x-8": "tpu:tpu7x:2x2x1",
}
# Slices with a configuration for LTX-2.5, and its programs.
SLICES_2_5 = ["v6e-8", "v5p-8", "tpu7x-8"]
PROGRAMS_2_5 = {
    "denoise": "step with guidance",
    "text-encoder": "text encoder, two prompts",
    "video-decoder": "convolutional decoder",
    "diffusion-decoder": "diffusion decoder",
}
# Topology, concurrent videos, layout and mesh.
SCALE = [
    ("tpu:v5p:2x2x2", 1, "cfg-ulysses cfg=2,context=4"),
    ("tpu:v5p:2x2x4", 1, "cfg-ulysses cfg=2,context=8"),
    ("tpu:v5p:2x4x4", 1, "cfg-ulysses cfg=2,context=16"),
    ("tpu:v5p:4x4x4", 1, "cfg-ulysses cfg=2,context=32"),
    ("tpu:v5p:4x4x8", 1, "sequence cfg=2,context=64"),
    ("tpu:v5p:4x8x8", 1, "sequence cfg=2,context=128"),
    ("tpu:v5p:4x8x8", 32, "cfg-ulysses data=32,cfg=2,context=4"),
    ("tpu:v5p:4x8x8", 16, "cfg-ulysses data=16,cfg=2,context=8"),
    ("tpu:v6e:2x4", 1, "tensor cfg=2,context=2,tensor=2"),
    ("tpu:v6e:4x4", 1, "tensor cfg=2,context=4,tensor=2"),
    ("tpu:v6e:4x8", 1, "tensor cfg=2,context=8,tensor=2"),
    ("tpu:v6e:8x8", 1, "tensor cfg=2,context=16,tensor=2"),
    ("tpu:v6e:16x16", 8, "tensor data=8,cfg=2,context=8,tensor=2"),
    ("tpu:v6e:16x16", 32, "tensor data=32,cfg=2,context=2,tensor=2"),
]
LAYERS = 3
BLOCKS = 48
STEPS = 40


class Compiler:
    """Runs `ltx2 compile` and caches its reports."""

    def __init__(self, ltx2, cache):
        self.ltx2, self.cache = ltx2, cache
        cache.mkdir(parents=True, exist_ok=True)
        self.version = hashlib.sha256(pathlib.Path(ltx2).read_bytes()).hexdigest()

    def figures(self, target, program, arguments):
        """Returns the report, or an error."""
        modules = ["--modules", str(self.cache / "modules")]
        command = [self.ltx2, "compile", *modules, "--target", target, "--program", program, *arguments]
        name = hashlib.sha256("\n".join([self.version, *command[1:]]).encode()).hexdigest()[:24]
        kept = self.cache / f"{name}.json"
        if not kept.exists():
            print(" ".join(command[1:]), file=sys.stderr, flush=True)
            environment = dict(os.environ, TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
            done = subprocess.run([*command, "--json", "-"], env=environment, capture_output=True, text=True)
            errors = [line for line in done.stderr.splitlines() if line.startswith("error")]
            said = done.stdout if done.stdout.strip() else json.dumps({"error": (errors or ["error: no answer"])[-1]})
            kept.write_text(json.dumps({**json.loads(said), "exit": done.returncode}))
        return json.loads(kept.read_text())


def gib(figures):
    memory = figures["memory"]
    return f"{memory['total'] / 2**30:.1f} of {memory['capacity'] / 2**30:.1f}"


def parts(figures, scale=1.0):
    """Returns predicted milliseconds of the step and its parts."""
    ms = figures["predicted_ms"]
    return " | ".join(f"{ms[key] * scale:.1f}" for key in ("step", "compute", "memory", "collective"))


def scale(compiler):
    """Returns the table of 1280x768x121 on up to 256 chips."""
    lines = [
        "| topology | chips | concurrent videos | layout, mesh | predicted ms per step | matmuls | memory | collectives | "
        f"seconds for {STEPS} steps | videos per hour | videos per hour and chip |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for target, videos, candidate in SCALE:
        layout, mesh = candidate.split()
        arguments = ["-c", "ltx2", "--layout", layout, "--mesh", mesh, "--layers", str(LAYERS)]
        for setting in ("request.width=1280", "request.height=768", f"request.num_videos={videos}"):
            arguments += ["--set", setting]
        f = compiler.figures(target, "denoise", arguments)
        start = f"| `{target[4:]}` | {f.get('devices', '')} | {videos} | `{layout}` {mesh} |"
        if "error" in f:
            lines.append(f"{start} {f['error']} | | | | | | |")
            continue
        seconds = f["predicted_ms"]["step"] * BLOCKS / LAYERS * STEPS / 1e3
        hourly = 3600 / seconds * videos
        lines.append(
            f"{start} {parts(f, BLOCKS / LAYERS)} | {seconds:.1f} | {hourly:.0f} | {hourly / f['devices']:.2f} |"
        )
    return lines


def encoders(compiler):
    """Returns the table of the text encoder on each slice."""
    lines = [
        "| slice | topology | GiB per device | collectives, MB | predicted ms | matmuls | memory | collectives, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, target in SLICES.items():
        f = compiler.figures(target, "text-encoder", ["-c", "ltx2", "-c", f"tpu/{name}"])
        if "error" in f or f["exit"]:
            sys.exit(f"{name}: {f.get('error', 'does not fit')}")
        moved = f["collectives"]["per_step_bytes"] / 1e6
        lines.append(f"| {name} | `{target[4:]}` | {gib(f)} | {moved:.0f} | {parts(f)} |")
    return lines


def newest(compiler):
    """Returns the table of LTX-2.5 on the slices that have a configuration for it."""
    lines = [
        "| slice | program | GiB per device | of which temporaries | collectives, MB | predicted ms | matmuls | memory | "
        "collectives, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for slice_name in SLICES_2_5:
        for program, words in PROGRAMS_2_5.items():
            f = compiler.figures(SLICES[slice_name], program, ["-c", "ltx2_5", "-c", f"tpu/{slice_name}-2_5"])
            if "error" in f or f["exit"]:
                sys.exit(f"{slice_name}, {program}: {f.get('error', 'does not fit')}")
            moved, temporaries = f["collectives"]["per_step_bytes"] / 1e6, f["memory"]["temporaries"] / 2**30
            lines.append(f"| {slice_name} | {words} | {gib(f)} | {temporaries:.1f} | {moved:.0f} | {parts(f)} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ltx2", required=True, help="the program")
    parser.add_argument("--cache", default="target/tpu-tables", type=pathlib.Path, help="what was compiled before")
    parser.add_argument("-o", required=True, type=pathlib.Path, help="the page")
    parser.add_argument("--only", choices=["encoders", "ltx2_5", "scale"], help="one of the tables")
    args = parser.parse_args()
    compiler = Compiler(args.ltx2, args.cache)
    text = args.o.read_text()
    tables = {}
    if args.only in (None, "scale"):
        tables["scale"] = scale(compiler)
    if args.only in (None, "encoders"):
        tables["encoders"] = encoders(compiler)
    if args.only in (None, "ltx2_5"):
        tables["ltx2_5"] = newest(compiler)
    for mark, lines in tables.items():
        pattern = rf"(<!-- {mark} -->\n).*?(<!-- end -->)"
        if not re.search(pattern, text, flags=re.S):
            sys.exit(f"{args.o} has no <!-- {mark} --> … <!-- end -->")
        text = re.sub(pattern, lambda m, lines=lines: m[1] + "\n".join(lines) + "\n" + m[2], text, flags=re.S)
    args.o.write_text(text)


if __name__ == "__main__":
    main()
