"""Writes three tables of benchmarks/tpu.md from `ltx2 compile --json`: pods.py LTX2 PAGE; `make tpu-tables` runs it.

Optimized modules are kept in target/tpu-tables, so that a second run does not compile them again.
"""

import json
import os
import pathlib
import subprocess
import sys

import page

# Slices by configuration name.
SLICES = {
    "v5e-16": "tpu:v5e:4x4", "v6e-8": "tpu:v6e:2x4", "v6e-16": "tpu:v6e:4x4", "v6e-64": "tpu:v6e:8x8",
    "v5p-8": "tpu:v5p:2x2x2", "v5p-32": "tpu:v5p:2x4x4", "tpu7x-8": "tpu:tpu7x:2x2x1",
}
# Slices with a configuration for LTX-2.5, and its programs.
SLICES_2_5 = ["v6e-8", "v5p-8", "tpu7x-8"]
PROGRAMS_2_5 = {
    "denoise": "step with guidance", "text-encoder": "text encoder, two prompts", "video-decoder": "convolutional decoder",
    "diffusion-decoder": "diffusion decoder",
}
# Topology, concurrent videos, layout and mesh.
SCALE = [
    ("tpu:v5p:2x2x2", 1, "cfg-ulysses", "cfg=2,context=4"), ("tpu:v5p:2x2x4", 1, "cfg-ulysses", "cfg=2,context=8"),
    ("tpu:v5p:2x4x4", 1, "cfg-ulysses", "cfg=2,context=16"), ("tpu:v5p:4x4x4", 1, "cfg-ulysses", "cfg=2,context=32"),
    ("tpu:v5p:4x4x8", 1, "sequence", "cfg=2,context=64"), ("tpu:v5p:4x8x8", 1, "sequence", "cfg=2,context=128"),
    ("tpu:v5p:4x8x8", 32, "cfg-ulysses", "data=32,cfg=2,context=4"),
    ("tpu:v5p:4x8x8", 16, "cfg-ulysses", "data=16,cfg=2,context=8"),
    ("tpu:v6e:2x4", 1, "tensor", "cfg=2,context=2,tensor=2"), ("tpu:v6e:4x4", 1, "tensor", "cfg=2,context=4,tensor=2"),
    ("tpu:v6e:4x8", 1, "tensor", "cfg=2,context=8,tensor=2"), ("tpu:v6e:8x8", 1, "tensor", "cfg=2,context=16,tensor=2"),
    ("tpu:v6e:16x16", 8, "tensor", "data=8,cfg=2,context=8,tensor=2"),
    ("tpu:v6e:16x16", 32, "tensor", "data=32,cfg=2,context=2,tensor=2"),
]
LAYERS, BLOCKS, STEPS = 3, 48, 40
PARTS = ["matmuls", "memory", "collectives"]


def compile_program(target, program, *arguments, must_fit=True):
    """Returns the report of a program, or one with only an error; ends if the program must fit and does not."""
    command = [sys.argv[1], "compile", "--modules", "target/tpu-tables", "--target", target, "--program", program, *arguments]
    print(" ".join(command[1:]), file=sys.stderr, flush=True)
    environment = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run([*command, "--json", "-"], env=environment, capture_output=True, text=True)
    if must_fit and done.returncode:
        sys.exit(f"{program} on {target}: exit code {done.returncode}\n{done.stderr}")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error")]
    return json.loads(done.stdout) if done.stdout.strip() else {"error": (errors or ["error: no answer"])[-1]}


def parts(figures, scale=1.0):
    ms = figures["predicted_ms"]
    return [f"{ms[key] * scale:.1f}" for key in ("step", "compute", "memory", "collective")]


def size(figures):
    memory = figures["memory"]
    return f"{memory['total'] / 2**30:.1f} of {memory['capacity'] / 2**30:.1f}"


def moved(figures):
    return f"{figures['collectives']['per_step_bytes'] / 1e6:.0f}"


def scale():
    for target, videos, layout, mesh in SCALE:
        arguments = ["-c", "ltx2", "--layout", layout, "--mesh", mesh, "--layers", str(LAYERS)]
        for setting in ("request.width=1280", "request.height=768", f"request.num_videos={videos}"):
            arguments += ["--set", setting]
        f = compile_program(target, "denoise", *arguments, must_fit=False)
        start = [f"`{target[4:]}`", f"{f.get('devices', '')}", f"{videos}", f"`{layout}` {mesh}"]
        if "error" in f:
            yield [*start, f["error"], *[""] * 6]
            continue
        seconds = f["predicted_ms"]["step"] * BLOCKS / LAYERS * STEPS / 1e3
        hourly = 3600 / seconds * videos
        yield [*start, *parts(f, BLOCKS / LAYERS), f"{seconds:.1f}", f"{hourly:.0f}", f"{hourly / f['devices']:.2f}"]


def encoders():
    for name, target in SLICES.items():
        f = compile_program(target, "text-encoder", "-c", "ltx2", "-c", f"tpu/{name}")
        yield [name, f"`{target[4:]}`", size(f), moved(f), *parts(f)]


def newest():
    for name in SLICES_2_5:
        for program, words in PROGRAMS_2_5.items():
            f = compile_program(SLICES[name], program, "-c", "ltx2_5", "-c", f"tpu/{name}-2_5")
            yield [name, words, size(f), f"{f['memory']['temporaries'] / 2**30:.1f}", moved(f), *parts(f)]


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    rates = [f"seconds for {STEPS} steps", "videos per hour", "videos per hour and chip"]
    of_scale = ["topology", "chips", "concurrent videos", "layout, mesh", "predicted ms per step", *PARTS, *rates]
    of_encoders = ["slice", "topology", "GiB per device", "collectives, MB", "predicted ms", *PARTS]
    of_newest = ["slice", "program", "GiB per device", "of which temporaries", "collectives, MB", "predicted ms", *PARTS]
    tables = {"scale": (of_scale, scale()), "encoders": (of_encoders, encoders()), "ltx2_5": (of_newest, newest())}
    page.write(pathlib.Path(sys.argv[2]), {name: page.table(*parts) for name, parts in tables.items()})


main()
