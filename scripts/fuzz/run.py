#!/usr/bin/env python3
"""Fuzzes the readers of untrusted bytes under libFuzzer with AddressSanitizer; updates their rows of benchmarks/fuzz.md.

    scripts/fuzz/run.py [READER ...] [--runs N] [--seconds S] [--no-lines]

Needs the nightly toolchain with llvm-tools, and cargo-fuzz. Logs and failing inputs are in target/fuzz."""

import argparse
import datetime
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "benchmarks/fuzz.md"
LOGS = ROOT / "target/fuzz"
TARGET = "x86_64-unknown-linux-gnu"
# The uncovered lines of a reader are printed if its corpus covers less than this share.
ENOUGH = 0.8
MODELS = "audio_vae connectors diffusion_decoder duration_head gemma3 gemma4 transformer upsampler video_vae vocoder".split()
# Source files of each reader, fastest reader first.
READERS = {
    "query": ["crates/server/src/query.rs"], "mp4": ["crates/media/src/tables.rs", "crates/media/src/edit_list.rs"],
    "data_url": ["src/serve/fields/media.rs"],
    "form": ["crates/server/src/form/multipart.rs", "crates/server/src/form/brackets.rs"],
    "request": ["crates/server/src/form/json.rs", "src/serve/fields/read.rs", "src/serve/fields/request_fields.rs"],
    "words": ["crates/runtime/src/target.rs"], "layout": ["src/config/layout.rs"],
    "config": ["src/config/yaml.rs", "src/config/tree.rs", "src/config/load.rs"],
    "experiment": ["src/config/experiment.rs", "src/config/experiment_file.rs"], "index": ["crates/weights/src/checkpoint.rs"],
    "safetensors": ["crates/weights/src/checkpoint.rs", "crates/weights/src/checkpoint/rows.rs"],
    "lora": ["crates/weights/src/lora.rs", "crates/weights/src/lora_merge.rs", "crates/weights/src/pairing.rs"],
    "model_config": [f"crates/models/src/{model}/config.rs" for model in MODELS],
    "media": [f"crates/media/src/{name}.rs" for name in ("image_file", "png", "wav", "sound", "sound_file")],
    "trace": ["crates/xla-analysis/src/xplane.rs", "crates/xla-analysis/src/trace.rs"],
    "module": ["crates/xla-analysis/src/module.rs", "crates/xla-analysis/src/walk.rs"],
    "tokenizer": ["crates/models/src/tokenizer.rs", "crates/models/src/tokenizer/bytes.rs"],
}
# Maximum seconds of a run of each reader, if not 60. AddressSanitizer and debug assertions slow down the second that a release
# build may take (MAX_TIME in tests/it/fuzz_regression.rs).
MAX_SECONDS = {"model_config": 5}
# Folders with seeds, if not fuzz/seeds/READER.
SEEDS = {
    "layout": ["shardings"], "config": ["configs", "fuzz/seeds/config"], "experiment": ["experiments"],
    "model_config": ["tests/fixtures/models"], "trace": ["tests/fixtures/trace"], "tokenizer": ["tests/fixtures/tokenizer"],
}


def folders(reader):
    """Returns the corpus, to which libFuzzer adds inputs, and the seeds."""
    corpus = ROOT / "fuzz/corpus" / reader
    corpus.mkdir(parents=True, exist_ok=True)
    return [str(corpus), *(str(ROOT / folder) for folder in SEEDS.get(reader, [f"fuzz/seeds/{reader}"]))]


def cargo_fuzz(*arguments):
    subprocess.run(["cargo", "+nightly", "fuzz", *arguments], cwd=ROOT, check=True)


def fuzz(reader, runs, seconds):
    """Fuzzes for a number of runs or seconds of processor time; returns runs, seconds and edges."""
    done, spent, edges, log = 0, 0.0, 0, LOGS / f"{reader}.log"
    while done < runs and spent < seconds:
        before = os.times()
        command = [str(ROOT / "fuzz/target" / TARGET / "release" / reader), *folders(reader), f"-runs={runs - done}"]
        # libFuzzer limits wall time; another round makes up for a busy machine.
        command += [f"-max_total_time={max(1, round(seconds - spent))}", "-max_len=300000", "-rss_limit_mb=4096"]
        command += [f"-artifact_prefix={LOGS}/{reader}-", "-print_final_stats=1", f"-timeout={MAX_SECONDS.get(reader, 60)}"]
        with log.open("w") as output:
            code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, check=False).returncode
        text = log.read_text(errors="replace")
        if code:
            sys.exit(f"{reader} failed; the input is in {LOGS}, the output in {log}:\n{text[-3000:]}")
        after = os.times()
        spent += after.children_user - before.children_user + after.children_system - before.children_system
        done += int(re.search(r"stat::number_of_executed_units:\s+(\d+)", text)[1])
        edges = int(re.findall(r"\bcov: (\d+)", text)[-1])
    return done, spent, edges


def coverage(reader):
    """Returns the share of the reader's own lines that its corpus covers; prints the other lines if it is low."""
    # Without optimizations, to build faster.
    cargo_fuzz("coverage", "--dev", reader, *folders(reader))
    sysroot = subprocess.check_output(["rustc", "+nightly", "--print", "sysroot"], text=True).strip()
    profile = ROOT / "fuzz/coverage" / reader / "coverage.profdata"
    command = [pathlib.Path(sysroot) / "lib/rustlib" / TARGET / "bin/llvm-cov", "export", "-format=lcov"]
    command += [f"-instr-profile={profile}", ROOT / "target" / TARGET / "coverage" / TARGET / "debug" / reader, "--sources"]
    counts, file = {}, None
    report = subprocess.check_output([*command, *(ROOT / name for name in READERS[reader])], text=True)
    for kind, _, value in (line.partition(":") for line in report.splitlines()):
        if kind == "SF":
            file = str(pathlib.Path(value).relative_to(ROOT))
        elif kind == "DA":
            line = file, int(value.split(",")[0])
            counts[line] = max(counts.get(line, 0), int(value.split(",")[1]))
    if missing := set(READERS[reader]) - {file for file, _ in counts}:
        sys.exit(f"{reader}: no line of {', '.join(sorted(missing))} is in the program")
    share = sum(1 for count in counts.values() if count) / len(counts)
    for name in READERS[reader] if share < ENOUGH else []:
        uncovered = [str(line) for (file, line), count in counts.items() if file == name and not count]
        print(f"{reader}: {name}: uncovered: {', '.join(uncovered)}", flush=True)
    return share


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("readers", nargs="*", metavar="READER", help="default: all")
parser.add_argument("--runs", type=int, default=2_000_000, help="runs of a reader")
parser.add_argument("--seconds", type=float, default=1200, help="seconds of processor time of a reader")
parser.add_argument("--no-lines", action="store_true", help="without the second build, which measures lines")
args = parser.parse_args()
if unknown := set(args.readers) - set(READERS):
    parser.error(f"unknown reader {', '.join(sorted(unknown))}; known: {', '.join(READERS)}")
built = subprocess.check_output(["cargo", "+nightly", "fuzz", "list"], cwd=ROOT, text=True).split()
if differ := set(built) ^ set(READERS):
    sys.exit(f"error: fuzz/Cargo.toml and READERS differ in {', '.join(sorted(differ))}")
LOGS.mkdir(parents=True, exist_ok=True)
cargo_fuzz("build")
for reader in args.readers or READERS:
    runs, seconds, edges = fuzz(reader, args.runs, args.seconds)
    print(f"{reader}: {runs} runs in {seconds:.0f} s, {edges} edges", flush=True)
    share = "not measured" if args.no_lines else f"{coverage(reader):.0%}"
    row = f"| `{reader}` | {runs:,} | {seconds:.0f} | {edges:,} | {share} | {datetime.date.today()} |"
    page, rows = re.subn(rf"^\| `{reader}` \|.*", row, PAGE.read_text(), flags=re.M)
    if rows != 1:
        sys.exit(f"{PAGE} must have one row of {reader}")
    PAGE.write_text(page)
