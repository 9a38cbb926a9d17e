"""Writes the figures of three tables of benchmarks/tpu.md by `ltx2 compile --json`: pods.py LTX2 PAGE; `make tpu-tables` runs it.

To add a row, write its first cells on the page. Optimized modules are kept in target/tpu-tables."""

import json
import os
import pathlib
import subprocess
import sys

import page

# Program names of LTX-2.5, by their labels on the page.
PROGRAMS_2_5 = {
    "step with guidance": "denoise", "text encoder, two prompts": "text-encoder", "convolutional decoder": "video-decoder",
    "diffusion decoder": "diffusion-decoder",
}
LAYERS, BLOCKS, STEPS = 3, 48, 40


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


def scale(rows):
    for topology, _, videos, placed, *_ in rows:
        target, (layout, mesh) = "tpu:" + topology.strip("`"), placed.split()
        arguments = ["-c", "ltx2", "--layout", layout.strip("`"), "--mesh", mesh, "--layers", str(LAYERS)]
        for setting in ("request.width=1280", "request.height=768", f"request.num_videos={videos}"):
            arguments += ["--set", setting]
        f = compile_program(target, "denoise", *arguments, must_fit=False)
        start = [topology, f"{f.get('devices', '')}", videos, placed]
        if "error" in f:
            yield [*start, f["error"], *[""] * 6]
            continue
        seconds = f["predicted_ms"]["step"] * BLOCKS / LAYERS * STEPS / 1e3
        hourly = 3600 / seconds * int(videos)
        yield [*start, *parts(f, BLOCKS / LAYERS), f"{seconds:.1f}", f"{hourly:.0f}", f"{hourly / f['devices']:.2f}"]


def encoders(rows):
    for name, topology, *_ in rows:
        f = compile_program("tpu:" + topology.strip("`"), "text-encoder", "-c", "ltx2", "-c", f"tpu/{name}")
        yield [name, topology, size(f), moved(f), *parts(f)]


def newest(rows, topologies):
    for name, words, *_ in rows:
        target = "tpu:" + topologies[name].strip("`")
        f = compile_program(target, PROGRAMS_2_5[words], "-c", "ltx2_5", "-c", f"tpu/{name}-2_5")
        yield [name, words, size(f), f"{f['memory']['temporaries'] / 2**30:.1f}", moved(f), *parts(f)]


if len(sys.argv) != 3:
    sys.exit(__doc__)
tables = pathlib.Path(sys.argv[2])
of_scale, of_encoders, of_newest = (page.read(tables, name) for name in ("scale", "encoders", "ltx2_5"))
topologies = {name: topology for name, topology, *_ in of_encoders}
figures = {"scale": scale(of_scale), "encoders": encoders(of_encoders), "ltx2_5": newest(of_newest, topologies)}
page.write(tables, figures)
