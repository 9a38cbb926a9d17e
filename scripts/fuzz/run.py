#!/usr/bin/env python3
"""Fuzzes the readers of untrusted bytes under libFuzzer with AddressSanitizer; writes their line coverage to benchmarks/fuzz.md.

    scripts/fuzz/run.py [READER ...] [--runs N] [--seconds S] [--no-lines] [--write FILE]

Needs the nightly toolchain with llvm-tools, and cargo-fuzz. Figures are kept in target/fuzz; readers that are not run keep their
rows.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIGURES = ROOT / "target/fuzz"
TARGET = "x86_64-unknown-linux-gnu"
BUILT = ROOT / "fuzz/target" / TARGET
# The uncovered lines of a reader are printed if its corpus covers less than this share.
ENOUGH = 0.8

# Readers, fastest first: seed folders (default: fuzz/seeds/READER) and source files.
READERS = {
    "query": ([], ["src/serve/query.rs"]),
    "mp4": ([], ["src/media/tables.rs", "src/media/edit_list.rs"]),
    "data_url": ([], ["src/serve/fields/media.rs"]),
    "form": ([], ["src/serve/form/multipart.rs", "src/serve/form/brackets.rs"]),
    "request": ([], ["src/serve/form/json.rs", "src/serve/fields/read.rs", "src/serve/fields/request_fields.rs"]),
    "words": ([], ["src/runtime/target.rs"]),
    "layout": (["shardings"], ["src/config/layout.rs"]),
    "config": (["configs", "fuzz/seeds/config"], ["src/config/yaml.rs", "src/config/tree.rs", "src/config/load.rs"]),
    "experiment": (["experiments"], ["src/config/experiment.rs", "src/config/experiment_file.rs"]),
    "index": ([], ["src/weights/checkpoint.rs"]),
    "safetensors": ([], ["src/weights/checkpoint.rs", "src/weights/checkpoint/rows.rs"]),
    "lora": ([], ["src/weights/lora.rs", "src/weights/lora_merge.rs", "src/weights/pairing.rs"]),
    "model_config": (
        ["tests/fixtures/models"],
        [
            f"src/models/{model}/config.rs"
            for model in (
                "audio_vae connectors diffusion_decoder duration_head gemma3 gemma4 transformer upsampler video_vae vocoder"
            ).split()
        ],
    ),
    "media": ([], [f"src/media/{name}.rs" for name in ("image_file", "png", "wav", "sound", "sound_file")]),
    "trace": (["tests/fixtures/trace"], ["crates/xla-analysis/src/xplane.rs", "crates/xla-analysis/src/trace.rs"]),
    "module": ([], ["crates/xla-analysis/src/module.rs", "crates/xla-analysis/src/walk.rs"]),
    "tokenizer": (["tests/fixtures/tokenizer"], ["src/models/tokenizer.rs", "src/models/tokenizer/bytes.rs"]),
}


def seeds(reader):
    return [str(ROOT / folder) for folder in READERS[reader][0] or [f"fuzz/seeds/{reader}"]]


def corpus(reader):
    folder = ROOT / "fuzz/corpus" / reader
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def cargo_fuzz(*arguments):
    subprocess.run(["cargo", "+nightly", "fuzz", *arguments], cwd=ROOT, check=True)


def fuzz(reader, runs, seconds):
    """Fuzzes for a number of runs or seconds of processor time; returns runs, seconds and edges."""
    done, spent, edges = 0, 0.0, 0
    log = FIGURES / f"{reader}.log"
    while done < runs and spent < seconds:
        before = os.times()
        command = [str(BUILT / "release" / reader), corpus(reader), *seeds(reader), f"-runs={runs - done}"]
        # libFuzzer limits wall time; another round makes up for a busy machine.
        command += [f"-max_total_time={max(1, round(seconds - spent))}", "-max_len=300000", "-rss_limit_mb=4096"]
        command += [f"-artifact_prefix={FIGURES}/{reader}-", "-print_final_stats=1"]
        with log.open("w") as said:
            code = subprocess.run(command, cwd=ROOT, stdout=said, stderr=said, check=False).returncode
        text = log.read_text(errors="replace")
        if code:
            raise SystemExit(f"{reader}: it fails; the input is in {FIGURES}, what it said in {log}:\n{text[-3000:]}")
        after = os.times()
        spent += after.children_user - before.children_user + after.children_system - before.children_system
        done += int(re.search(r"stat::number_of_executed_units:\s+(\d+)", text)[1])
        edges = int(re.findall(r"\bcov: (\d+)", text)[-1])
    return done, spent, edges


def lines(reader):
    """Returns the lines of each of the reader's files, and those that the corpus does not reach."""
    # Without optimizations, to build faster.
    cargo_fuzz("coverage", "--dev", reader, corpus(reader), *seeds(reader))
    sysroot = subprocess.check_output(["rustc", "+nightly", "--print", "sysroot"], text=True).strip()
    tool = pathlib.Path(sysroot) / "lib/rustlib" / TARGET / "bin/llvm-cov"
    binary = ROOT / "target" / TARGET / "coverage" / TARGET / "debug" / reader
    profile = ROOT / "fuzz/coverage" / reader / "coverage.profdata"
    files = [str(ROOT / name) for name in READERS[reader][1]]
    command = [str(tool), "export", "-format=lcov", f"-instr-profile={profile}", str(binary), "--sources", *files]
    found, counts = {}, {}
    for line in subprocess.check_output(command, text=True).splitlines():
        if line.startswith("SF:"):
            counts = found.setdefault(str(pathlib.Path(line[3:]).relative_to(ROOT)), {})
        elif line.startswith("DA:"):
            number, count = line[3:].split(",")[:2]
            counts[int(number)] = max(counts.get(int(number), 0), int(count))
    missing = set(READERS[reader][1]) - set(found)
    if missing:
        raise SystemExit(f"{reader}: no line of {', '.join(sorted(missing))} is in the program")
    return {name: [len(all), sorted(n for n in all if not all[n])] for name, all in found.items()}


def ranges(numbers):
    """Formats numbers like `1-3, 7`."""
    spans = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in spans)


def reached(figures):
    """Returns the share of its own lines that a reader reaches."""
    all_lines = sum(total for total, _ in figures["lines"].values())
    return 1 - sum(len(none) for _, none in figures["lines"].values()) / all_lines


def table(earlier):
    """Returns the page; readers without figures keep their earlier rows."""
    page = [
        "# Fuzzing",
        "",
        "`make fuzz` runs the fuzz targets of `fuzz/src/lib.rs`, each a parser of untrusted bytes, under libFuzzer with",
        "AddressSanitizer and debug assertions; `scripts/fuzz/run.py READER --runs N --seconds S` runs one. A target runs for two",
        "million inputs or 1,200 s of CPU time, whichever ends first. Lines are the share of the parser's own source lines that its",
        f"corpus covers. Below {ENOUGH:.0%}, the script prints the uncovered lines; `--no-lines` skips the measurement.",
        "",
        "| fuzz target | runs | CPU time, s | edges | lines covered | date |",
        "|---|---|---|---|---|---|",
    ]
    for reader in READERS:
        kept = FIGURES / f"{reader}.json"
        if not kept.exists():
            own = [line for line in earlier if line.startswith(f"| `{reader}` |")]
            page += own or [f"| `{reader}` | not run | | | | |"]
            continue
        figures = json.loads(kept.read_text())
        part = f"{reached(figures):.0%}" if figures["lines"] else "not measured"
        row = [f"`{reader}`", f"{figures['runs']:,}", f"{figures['seconds']:.0f}", f"{figures['edges']:,}"]
        page.append(f"| {' | '.join(row)} | {part} | {figures['date']} |")
    return "\n".join(page) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("readers", nargs="*", metavar="READER", help="all without one")
    parser.add_argument("--runs", type=int, default=2_000_000, help="runs of a reader")
    parser.add_argument("--seconds", type=float, default=1200, help="seconds of processor time of a reader")
    parser.add_argument("--no-lines", action="store_true", help="without the second build, which measures lines")
    parser.add_argument("--write", type=pathlib.Path, default=ROOT / "benchmarks/fuzz.md", help="the page")
    given = parser.parse_args()
    unknown = set(given.readers) - set(READERS)
    if unknown:
        parser.error(f"unknown reader {', '.join(sorted(unknown))}; there are {', '.join(READERS)}")
    built = subprocess.check_output(["cargo", "+nightly", "fuzz", "list"], cwd=ROOT, text=True).split()
    if set(built) != set(READERS):
        sys.exit(f"error: fuzz/Cargo.toml and READERS differ in {', '.join(sorted(set(built) ^ set(READERS)))}")
    FIGURES.mkdir(parents=True, exist_ok=True)
    cargo_fuzz("build")
    for reader in given.readers or READERS:
        runs, seconds, edges = fuzz(reader, given.runs, given.seconds)
        print(f"{reader}: {runs} runs in {seconds:.0f} s, {edges} edges", flush=True)
        figures = {"runs": runs, "seconds": seconds, "edges": edges, "lines": {} if given.no_lines else lines(reader)}
        if figures["lines"] and reached(figures) < ENOUGH:
            missed = "; ".join(f"{name} {ranges(none)}" for name, (_, none) in figures["lines"].items() if none)
            print(f"{reader}: uncovered: {missed}", flush=True)
        figures["date"] = datetime.date.today().isoformat()
        (FIGURES / f"{reader}.json").write_text(json.dumps(figures))
        given.write.write_text(table(given.write.read_text().splitlines() if given.write.exists() else []))


if __name__ == "__main__":
    main()
