#!/usr/bin/env python3
"""Prints what the cost model predicts of one GPU's programs beside what was measured of them earlier, as a table of Markdown.

    scripts/tune/one_gpu.py [--modules DIR] [LTX2]

Each program is compiled for a GPU that need not be here; optimized modules are kept in DIR.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIZE = [word for pair in ("width=768", "height=512", "num_frames=121") for word in ("--set", f"request.{pair}")]


def loop(of, *arguments):
    return f"LTX-2.0, a step, {of}", "denoise_loop", ["-c", "ltx2", "--layers", "3", *arguments]


def types(weights, activations):
    return [*SIZE, "--set", f"runtime.weights={weights}", "--set", f"runtime.activations={activations}"]


def program(name, generation="LTX-2.0", config="ltx2"):
    return f"{generation}, {name.replace('-', ' ')}", name.replace("-", "_"), ["-c", config, *SIZE, "--program", name]


# Files of `ltx2 bench` on one H200 below benchmarks/, with what is read of each: its name here, the program, and how it is compiled.
MEASURED = [
    ("2026-11-21-h200/384x256x121.ltx2.json",
     [loop("384x256x121", "--set", "request.width=384", "--set", "request.height=256")]),
    ("2026-11-21-h200/768x512x121.ltx2.json",
     [loop("768x512x121", *SIZE)] + [program(name) for name in
      ("text-encoder", "connectors", "prepare", "video-decoder", "audio-decoder", "vocoder")]),
    ("2026-11-21-h200/1280x768x121.ltx2.json",
     [loop("1280x768x121", "--set", "request.width=1280", "--set", "request.height=768")]),
    ("2026-11-24-h200/bf16.json", [loop("768x512x121, three days later", *SIZE)]),
    ("2026-11-24-h200/fp8.json", [loop("fp8", *types("fp8", "bf16"))]),
    ("2026-11-24-h200/int8-int8.json", [loop("int8", *types("int8", "int8"))]),
    ("2026-11-24-h200/int8-bf16.json", [loop("int8 weights", *types("int8", "bf16"))]),
    ("2026-11-21-h200/ltx2_3.768x512x121.decoders.json",
     [program(name, "LTX-2.3", "ltx2_3") for name in ("video-decoder", "vocoder")]),
]


def predicted(ltx2, modules, arguments):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [ltx2, "-q", "compile", "--target", "cuda:h200:1x1x1", "--json", file.name, "--force",
                   "--modules", modules, *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report = json.loads(pathlib.Path(file.name).read_text())
    return (report["predicted_all_ms"] or report["predicted_ms"])["step"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ltx2", nargs="?", default=ROOT / "target/release/ltx2")
    parser.add_argument("--modules", default=ROOT / "out/one-gpu")
    args = parser.parse_args()
    print("| program | measured ms | predicted ms | error | measured |\n|---|---:|---:|---:|---|")
    errors = []
    for file, rows in MEASURED:
        programs = json.loads((ROOT / "benchmarks" / file).read_text())["programs"]
        for what, name, arguments in rows:
            ms, guess = programs[name]["median"] * 1e3, predicted(args.ltx2, args.modules, arguments)
            errors.append(abs(guess / ms - 1) * 100)
            print(f"| {what} | {ms:.2f} | {guess:.2f} | {(guess / ms - 1) * 100:+.1f} % | [{file[:10]}]({file}) |", flush=True)
    print(f"\nMedian error {statistics.median(errors):.1f} %, of {len(errors)}.")


if __name__ == "__main__":
    main()
