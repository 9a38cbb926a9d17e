"""Runs all steps of a test tier, even if one fails, and prints a summary.

    python3 scripts/tests/tier.py lint | check | test | test-tpu | test-cuda | test-gpu | test-full
    python3 scripts/tests/tier.py slowest         of the last `make test`, the table of benchmarks/tests.md

A failed step fails the tier: docs/internals/testing.md."""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "target" / "tests"
TESTS = ["cargo", "test", "--locked"]
BIN = "target/tools/bin"
DENY = f"{BIN}/cargo-deny"


@dataclass
class Step:
    name: str
    command: list
    network: bool = False
    env: dict = field(default_factory=dict)


def shell(name, line, **more):
    return Step(name, ["bash", "-c", line], **more)


def plugin(platform):
    return shell(f"plugin {platform}", f"target/debug/ltx2 plugin install {platform}", network=True)


def tests(binary, *more):
    return Step(binary, [*TESTS, "--test", binary, *more])


def threads(binary, per_core):
    """Many tests wait for the threads of devices, or for processes that they start."""
    return tests(binary, "--", "--test-threads", str(per_core * (os.cpu_count() or 1)))


FETCH = shell("fetch", "cargo fetch --locked && cargo fetch --locked --manifest-path fuzz/Cargo.toml", network=True)
VENV = f"(test -d {BIN} || python3 -m venv target/tools)"
ADVISORIES = (
    f"if {DENY} fetch db 2>/dev/null; then {DENY} --locked check advisories;"
    " else echo 'test advisories ... ignored, no database of advisories: it cannot be fetched here'; fi"
)
LINT = [
    FETCH,
    shell("tools", f"{VENV} && {BIN}/pip install -q --require-hashes -r scripts/requirements-tools.txt", network=True),
    shell("fmt", "cargo fmt --all --check"),
    shell("links", f"{BIN}/rumdl check --isolated --enable MD051,MD057 --no-cache $(git ls-files '*.md')"),
    shell("commands", "python3 scripts/tests/commands.py"),
    shell("spelling", f"{BIN}/typos --format brief"),
    shell("clippy", "cargo clippy --locked --all-targets -- -D warnings"),
    shell("dependencies", f"{DENY} --locked check bans licenses sources"),
    shell("advisories", ADVISORIES, network=True),
    shell("doc", 'RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --workspace'),
    Step("doctests", [*TESTS, "--doc", "--no-fail-fast"]),
]
UNIT = [Step("lib", [*TESTS, "--lib", "--no-fail-fast"]), tests("host")]
# All binaries of a tier at once: cargo then builds them in parallel.
BUILD = shell("build", "cargo test --locked --no-run --lib --test host --test it --test cli --test serve")
# What tests start is built with them; `cargo build` would take other features of dependencies, and build all again.
BUILD_HOST = shell("build", "cargo test --locked --no-run --test host")
TIERS = {
    "lint": ("", LINT),
    "check": ("", [*LINT, *UNIT]),
    "test": ("cpu", [FETCH, BUILD, plugin("cpu"), *UNIT, threads("it", 3), threads("cli", 4), threads("serve", 3)]),
    "test-tpu": ("cpu,tpu", [FETCH, BUILD_HOST, plugin("cpu"), plugin("tpu"), tests("tpu")]),
    "test-cuda": ("cpu,cuda", [FETCH, BUILD_HOST, plugin("cpu"), plugin("cuda"), tests("cuda")]),
    "test-gpu": ("cpu,cuda,gpu", [
        FETCH,
        shell("build", "cargo build --release --locked"),
        shell("setup", "scripts/gpu/setup.sh", network=True),
        tests("gpu", "--release", "--", "--test-threads", "1"),
    ]),
}
FULL = {"LTX2_TEST_FULL": "1"}
FULL_IT = FULL | {"LTX2_JAX_FLASH": str(ROOT / "target/jax-flash/cases")}
TIERS["test-full"] = ("cpu,tpu,cuda,jax,ffmpeg,etcd,mount", [
    *LINT,
    *[Step(f"{step.name}, in full", step.command, env=FULL) for step in UNIT],
    *map(plugin, ("cpu", "tpu", "cuda")),
    shell("jax", "make jax-cases", network=True),
    *[Step(f"{name}, in full", [*TESTS, "--test", name], env=FULL_IT) for name in ("it", "cli", "serve", "tpu", "cuda")],
    Step("tpu, alone", [*TESTS, "--test", "tpu", "compile_times_are_within_limits"], env={"LTX2_TEST_ALONE": "1"}),
    # Another model and request each day; the seed is printed, and SEED=… of `make oracle-check` draws it again.
    shell("oracle", "make oracle-check SEED=$(date +%Y%m%d)", network=True),
    shell("rehearsal", "make verify-rehearsal"),
    # OpenAI's client always; the peers' examples where PEERS names a folder of their checkouts, else each is counted as ignored.
    shell("clients", 'make serve-sdk PEERS="${PEERS:-}"', network=True),
    shell("page", "make serve-page", network=True),
    shell("report", "make report-page", network=True),
    Step("fuzz", [*TESTS, "--release", "--test", "it", "fuzz_regression::"], env={"LTX2_FUZZ_CASES": "200000"}),
])

# Limits of docs/internals/testing.md: programs that a tier compiles, and minutes, without those of the network.
MOST_COMPILES = {"test": 475}
MOST_MINUTES = {"lint": 5, "test": 15, "test-tpu": 6}

RESULT = re.compile(r"test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored")
IGNORED = re.compile(r"^test (\S+) +\.\.\. ignored(?:, (.*)| \((.*)\))?$")
FAILED = re.compile(r"^test (\S+).*\.\.\. FAILED$")


def run(step, required, counts, reasons, failures):
    """Runs a step; its own words go to the terminal, stderr of tests into a file that is shown when it fails."""
    print(f"\n== {step.name}: {' '.join(step.command[2:] if step.command[0] == 'bash' else step.command)}", flush=True)
    testing, counted = step.command[:2] == TESTS[:2], 0
    log = WORK / f"{step.name.replace(', ', '-').replace(' ', '-')}.stderr"
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=os.environ | {"LTX2_REQUIRE": required} | step.env, stdout=subprocess.PIPE,
            stderr=errors if testing else None, text=True, errors="replace",
        )
        for line in process.stdout:
            if result := RESULT.search(line):
                counted += sum(map(int, result.groups()))
                counts.update(dict(zip(["passed", "failed", "ignored"], map(int, result.groups()))))
            if ignored := IGNORED.match(line):
                reasons[ignored[2] or ignored[3] or "marked so"] += 1
                counts["ignored"] += not testing
            if failed := FAILED.match(line):
                failures.append(f"{step.name} {failed[1]}")
            if not testing or not line.startswith("test ") or " ... ok" not in line:
                print(line, end="", flush=True)
    code = process.wait()
    if code != 0 and testing:
        print(f"-- the end of {log.relative_to(ROOT)}:")
        print("".join(log.read_text(errors="replace").splitlines(keepends=True)[-60:]))
    if testing and code == 0 and counted == 0:
        code = 1
        print(f"{step.name}: no test ran")
    if code != 0 and not any(f.startswith(f"{step.name} ") for f in failures):
        failures.append(f"{step.name} (exit code {code})")


def read(log):
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def slowest(log, form="{:7.1f} s  {} {}", many=25):
    lines = sorted(read(log), key=lambda line: -line["seconds"])
    return [form.format(line["seconds"], line["binary"], line["test"]) for line in lines[:many] if line["seconds"] > 1]


def compiles(log):
    """Returns the number of compiled programs, and a text with plugins and seconds."""
    lines = read(log)
    each = ", ".join(f"{count} by {plugin}" for plugin, count in Counter(line["plugin"] for line in lines).most_common())
    distinct, seconds = len({line["hash"] for line in lines}), sum(line["seconds"] for line in lines)
    return len(lines), f"{len(lines)} compiles, {distinct} of them distinct ({each or 'none'}; {seconds:.0f} s of compilers)"


def main():
    if sys.argv[1:] == ["slowest"]:
        print("\n".join(["| seconds | test |", "|---|---|", *slowest(WORK / "test.times.jsonl", "| {:.0f} | `{} {}` |")]))
        return
    if len(sys.argv) != 2 or sys.argv[1] not in TIERS:
        sys.exit(__doc__)
    tier = sys.argv[1]
    requires, steps = TIERS[tier]
    required = ",".join(filter(None, [requires, os.environ.get("LTX2_REQUIRE", "")]))
    WORK.mkdir(parents=True, exist_ok=True)
    times, programs = WORK / f"{tier}.times.jsonl", WORK / f"{tier}.compiles.jsonl"
    for file in (times, programs):
        file.unlink(missing_ok=True)
    os.environ |= {"LTX2_TEST_LOG": str(times), "LTX2_COMPILE_LOG": str(programs)}
    counts, reasons, failures = Counter(passed=0, failed=0, ignored=0), Counter(), []
    took, begun = {}, time.time()
    for step in steps:
        started = time.time()
        run(step, required, counts, reasons, failures)
        took[step.name] = time.time() - started
    network = sum(took[step.name] for step in steps if step.network)
    print("\n== The slowest tests\n" + ("\n".join(slowest(times)) or "none above a second") + "\n\n== Steps")
    print("\n".join(f"{took[step.name]:7.1f} s  {step.name}{' (network)' if step.network else ''}" for step in steps))
    count, words = compiles(programs)
    print(f"\n{words}")
    if count > MOST_COMPILES.get(tier, count):
        failures.append(f"{count} compiles (exit code 0): at most {MOST_COMPILES[tier]}, docs/internals/testing.md")
    minutes = (time.time() - begun) / 60
    print(f"{minutes:.1f} min, {network / 60:.1f} of them network")
    if tier in MOST_MINUTES:
        # Printed, not a failure: a busy machine takes longer.
        print(f"{tier}: {minutes - network / 60:.1f} of {MOST_MINUTES[tier]} minutes")
    for failure in failures:
        print(f"FAILED: {failure}")
    steps = sum(" (exit code " in failure for failure in failures)
    why = "; ".join(f"{count} because {reason}" for reason, count in reasons.most_common())
    ignored = f"{counts['ignored']} ignored" + (f" ({why})" if why else "")
    print(f"{tier}: {counts['passed']} passed, {counts['failed']} failed, {ignored}", end="")
    print(f"; steps that failed: {steps}" if steps else "")
    sys.exit(1 if failures or counts["failed"] else 0)


main()
