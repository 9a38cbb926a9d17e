#!/usr/bin/env python3
"""Releases of libtpu, the newest first: whether each compiles the attention kernel in one of sixteen shapes for its chips, the loops
of the shipped slices at two layers (three for integers), and text encoder and video decoder of one slice of each chip; what these take.

    scripts/layouts/releases.py [--chip v6e] [-o benchmarks/tpu.md] [RELEASE …]

Downloads what is missing to target/libtpu, runs the tests of `cargo test --test tpu` with each release, and writes the tables
between the marks of the page, or prints them. Answers are kept in target/libtpu/RELEASE.json, modules where the tests keep theirs:
what was compiled is not compiled again. Half an hour a release on two cores (an estimate).
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "target" / "libtpu"
# The pinned one first: the others' figures are next to its.
RELEASES = ["0.0.52", "0.0.51", "0.0.46"]
FULL = {"LTX2_TEST_FULL": "1"}
# What is asked, the test that answers it, and its variables.
QUESTIONS = [
    ("the attention kernel, one shape in sixteen", "attention::the_kernel", {}),
    ("the shipped slices' loops", "shipped::every_shipped_loop_keeps", FULL),
    ("encoder and decoder, a slice of each chip", "shipped::encoder_and_decoder", {}),
]
FIGURES = re.compile(r"^(tpu/\S+) +(\S.*?) +([0-9.]+) MB a layer, .*temporaries +([0-9]+) MB", re.M)


def library(release):
    """The library of a release, downloaded where it is missing."""
    folder = FOLDER / release
    path = folder / "libtpu" / "libtpu.so"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.11"]
        where = ["--platform", "manylinux_2_31_x86_64", "-d", str(FOLDER), f"libtpu=={release}"]
        subprocess.run([*pip, *where], check=True)
        (wheel,) = FOLDER.glob(f"libtpu-{release}-*.whl")
        subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(folder)], check=True)
        wheel.unlink()
    return path


def asked(release, chip):
    """The answers of a release: by question, and MB a layer and of temporaries by slice and program."""
    kept = FOLDER / f"{release}{'-' + chip if chip else ''}.json"
    environment = os.environ | {"LTX2_PJRT_PLUGIN": str(library(release)), "LTX2_REQUIRE": "cpu,tpu"}
    if chip:
        environment["LTX2_TEST_CHIP"] = chip
    answers, figures = {}, {}
    for question, test, variables in QUESTIONS:
        command = ["cargo", "test", "--locked", "--test", "tpu", test]
        print(f"{release}: {test}", file=sys.stderr, flush=True)
        done = subprocess.run(command, cwd=ROOT, env=environment | variables, capture_output=True, text=True)
        said = done.stdout + done.stderr
        (FOLDER / f"{release}.log").write_text(said)
        failure = re.search(r"^.*(?:panicked|error).*$", said, re.M)
        answers[question] = "compiles" if done.returncode == 0 else f"fails: {failure[0] if failure else 'no answer'}"
        figures |= {f"{slice} {program}": [mb, mega] for slice, program, mb, mega in FIGURES.findall(done.stderr)}
    kept.write_text(json.dumps({"answers": answers, "figures": figures}, indent=1))
    return answers, figures


def tables(all_asked):
    """The two tables: answers, and figures of each release beside those of the first."""
    lines = ["| libtpu | " + " | ".join(question for question, _, _ in QUESTIONS) + " |", "|---" * (1 + len(QUESTIONS)) + "|"]
    lines += [f"| {release} | " + " | ".join(answers.values()) + " |" for release, (answers, _) in all_asked.items()]
    lines += ["", "MB of collectives a layer, MB of temporaries:", ""]
    lines += ["| program | " + " | ".join(all_asked) + " |", "|---" * (1 + len(all_asked)) + "|"]
    programs = dict.fromkeys(name for _, figures in all_asked.values() for name in figures)
    for name in programs:
        cells = [figures.get(name) for _, figures in all_asked.values()]
        lines.append(f"| {name} | " + " | ".join(", ".join(cell) if cell else "" for cell in cells) + " |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", default=RELEASES)
    parser.add_argument("--chip", choices=["v5e", "v5p", "v6e", "tpu7x"], help="slices of one chip alone")
    parser.add_argument("-o", type=Path, help="the page, with a mark for the tables")
    args = parser.parse_args()
    lines = tables({release: asked(release, args.chip) for release in args.releases})
    if args.o is None:
        print("\n".join(lines))
        return
    text = args.o.read_text()
    mark = re.compile(r"(<!-- releases -->\n).*?(<!-- end -->)", re.S)
    if not mark.search(text):
        sys.exit(f"{args.o} has no <!-- releases --> … <!-- end -->")
    args.o.write_text(mark.sub(lambda m: m[1] + "\n".join(lines) + "\n" + m[2], text))


if __name__ == "__main__":
    main()
