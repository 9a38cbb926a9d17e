#!/usr/bin/env python3
"""Plants faults, one at a time, and sees that a test finds each.

    scripts/mutants/mutants.py            plants each and runs its killing test; goes on where an earlier run ended
    scripts/mutants/mutants.py --check    whether every fault still fits the code; runs nothing
    scripts/mutants/mutants.py --list     the faults
    --only NAME                           this one; may be repeated
    --timeout SECONDS                     of one test; 300 by default
    SHARD=2/3                             the second third of the faults

README.md says what a fault is. Everything happens in a copy of the working tree under `target/mutants`: however a run ends,
no fault is left in the sources. Verdicts are kept there too, under the fault and the files that they depend on.
"""

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORK = ROOT / "target" / "mutants"
TREE = WORK / "tree"
TARGET = WORK / "target"
VERDICTS = WORK / "verdicts.jsonl"

AREAS = 18
A_AREA = 3
ALL = 60
# In the order in which they are run.
CRATES = ["stablehlo", "xla-analysis", "pjrt"]
BINARIES = [*CRATES, "lib", "host", "it", "cli", "serve", "tpu"]
# What a verdict depends on, beside the fault; of the tests' sources only what the killing test's binary shares and its module.
STATE = (
    "src/", "crates/", "tests/", "configs/", "shardings/", "experiments/", "assets/", "Cargo.", "rust-toolchain",
    "scripts/mutants/mutants.py",
)
# Variables that would make other tests of the same.
NOT_OURS = (
    "LTX2_REQUIRE", "LTX2_TEST_LOG", "LTX2_COMPILE_LOG", "LTX2_TEST_FULL", "LTX2_FUZZ_CASES", "XLA_FLAGS", "CARGO_TARGET_DIR",
)
# What is found out once: the others are tried again.
LASTING = ("killed", "survived")
# Exit code of a test binary with a failed test.
FAILED = 101


@dataclass(frozen=True)
class Mutant:
    area: str
    name: str
    file: str
    old: str
    new: str
    test: str
    equivalent: str = ""

    @property
    def binary(self):
        return self.test.partition(" ")[0]

    @property
    def function(self):
        return self.test.partition(" ")[2]

    def digest(self, state):
        return hashlib.sha256(json.dumps([asdict(self), state]).encode()).hexdigest()[:24]


def load():
    """All mutants, and what is wrong with how they are written."""
    mutants, problems = [], []
    for path in sorted(HERE.glob("*.toml")):
        try:
            tables = tomllib.loads(path.read_text()).get("mutant", [])
        except tomllib.TOMLDecodeError as error:
            problems.append(f"{path.name}: {error}")
            continue
        for table in tables:
            try:
                mutants.append(Mutant(area=path.stem, **table))
            except TypeError as error:
                problems.append(f"{path.stem}: {table.get('name', table)}: {error}")
    return mutants, problems


def state_of(mutant, hashes):
    """What the mutant's verdict depends on, from the hashes of the tree's files."""
    binary, module = mutant.binary, mutant.function.partition("::")[0]
    own = (f"tests/{binary}/{module}.rs", f"tests/{binary}/{module}/", f"tests/{binary}/main.rs", "tests/support/", "tests/macros/")
    files = (f"{name} {h}" for name, h in hashes.items() if not (name.startswith("tests/") and name.endswith(".rs")) or name.startswith(own))
    return hashlib.sha256("\n".join(files).encode()).hexdigest()


def listed(*options):
    """Paths that git knows of."""
    out = subprocess.run(["git", "ls-files", "-z", *options], cwd=ROOT, check=True, capture_output=True)
    return [name for name in out.stdout.decode().split("\0") if name]


# --- Checking


def sources_of(mutant):
    """Where the killing test may stand."""
    *modules, _ = mutant.function.split("::")
    if mutant.binary in ("lib", *CRATES):
        root = "src" if mutant.binary == "lib" else f"crates/{mutant.binary}/src"
        inline = modules[:-1] if modules[-1:] == ["tests"] else modules
        paths = ["/".join([root, *modules]), "/".join([root, *inline])]
    else:
        paths = ["/".join(["tests", mutant.binary, *modules])]
    return [ROOT / f"{path}{end}" for path in paths for end in (".rs", "/mod.rs")]


def names_a_test(mutant):
    function = mutant.function.rpartition("::")[2]
    marked = re.compile(rf"#\[(?:test|needs\([^)]*\))\]\s*(?:#\[[^\n]*\]\s*)*fn {re.escape(function)}\(\)")
    return any(path.is_file() and marked.search(path.read_text()) for path in sources_of(mutant))


def changed_lines(mutant):
    old, new = mutant.old.split("\n"), mutant.new.split("\n")
    return sum(a != b for a, b in zip(old, new)) if len(old) == len(new) else None


def check():
    """What is wrong, a line each."""
    mutants, problems = load()
    tracked = set(listed())
    for name, count in Counter(m.name for m in mutants).items():
        if count > 1:
            problems.append(f"{name}: {count} mutants have this name")
    for m in mutants:

        def fail(why, m=m):
            problems.append(f"{m.area}/{m.name}: {why}")

        if m.file not in tracked:
            fail(f"{m.file} is no file of the repository")
            continue
        text = (ROOT / m.file).read_text()
        times = text.count(m.old) if m.old else 0
        if times != 1:
            fail(f"the old text stands {times} times in {m.file}, must stand once")
        elif m.file.endswith(".rs") and "#[cfg(test)]\nmod tests {" in text[: text.index(m.old)]:
            fail(f"the old text stands among the tests of {m.file}")
        if changed_lines(m) != 1:
            fail("old and new differ in more or less than one line")
        if m.binary not in BINARIES:
            fail(f"'{m.test}' begins with none of {', '.join(BINARIES)}")
        elif not names_a_test(m):
            where = " or ".join(str(p.relative_to(ROOT)) for p in sources_of(m))
            fail(f"no test '{m.function}' in {where}")
    counted = [m for m in mutants if not m.equivalent]
    areas = Counter(m.area for m in counted)
    if len(areas) != AREAS:
        problems.append(f"{len(areas)} areas, there must be {AREAS}")
    problems += [f"{area}: {count} mutants, there must be {A_AREA}" for area, count in areas.items() if count < A_AREA]
    if len(counted) < ALL:
        problems.append(f"{len(counted)} mutants, there must be {ALL}")
    return mutants, problems


# --- The copy of the tree


def synchronize():
    """Makes the copy what the working tree is, writes only what differs (cargo goes by times), and gives its files' hashes."""
    names = sorted(set(listed("--cached", "--others", "--exclude-standard")))
    hashes = {}
    kept = set()
    for name in names:
        source, target = ROOT / name, TREE / name
        if source.is_symlink():
            # A part of a model that is another model's.
            if not target.is_symlink():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(source.readlink())
            continue
        if not source.is_file():
            continue
        kept.add(name)
        content = source.read_bytes()
        if name.startswith(STATE):
            hashes[name] = hashlib.sha256(content).hexdigest()
        if not target.is_file() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            target.chmod(source.stat().st_mode & 0o777)
    for path in TREE.rglob("*"):
        if path.is_file() and not path.is_symlink() and str(path.relative_to(TREE)) not in kept:
            path.unlink()
    plugins = TREE / "plugins"
    if not plugins.is_symlink() and (ROOT / "plugins").is_dir():
        shutil.rmtree(plugins, ignore_errors=True)
        plugins.symlink_to(ROOT / "plugins")
    return hashes


class planted:
    """A mutant in the copy, for as long as the context lasts."""

    def __init__(self, mutant):
        self.file = TREE / mutant.file
        self.was = self.file.read_bytes()
        text = self.was.decode()
        assert text.count(mutant.old) == 1, mutant.name
        self.text = text.replace(mutant.old, mutant.new)

    def __enter__(self):
        self.file.write_text(self.text)

    def __exit__(self, *_):
        self.file.write_bytes(self.was)


# --- Building and running


def run(command, limit, env=None):
    """Exit code (None: it took too long), stdout, stderr. What it started ends with it."""
    process = subprocess.Popen(
        command,
        cwd=TREE,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit)
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return None, out, err
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def environment():
    env = {k: v for k, v in os.environ.items() if k not in NOT_OURS}
    return env | {
        "CARGO_INCREMENTAL": "1",
        # A snapshot that differs is a failure, not a new file.
        "INSTA_UPDATE": "no",
        "INSTA_WORKSPACE_ROOT": str(TREE),
        "RUST_BACKTRACE": "0",
    }


def build(binary):
    """The binary's executable, or what is wrong."""
    package = f"ltx2-{binary}" if binary in CRATES else "ltx2"
    which = ["--package", package, *(["--test", binary] if binary in BINARIES[-4:] else ["--lib"])]
    command = ["cargo", "test", "--locked", "--target-dir", str(TARGET), *which, "--no-run", "--message-format=json"]
    code, out, err = run(command, 3600, environment())
    messages = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if code != 0:
        said = [m["message"] for m in messages if m["reason"] == "compiler-message"]
        words = [m["message"] for m in said if m["level"].startswith("error")]
        return None, (words or err.strip().splitlines()[-1:] or ["cargo failed"])[0]
    kind = "test" if "--test" in which else "lib"
    found = [
        m["executable"]
        for m in messages
        if m["reason"] == "compiler-artifact" and m["executable"] and kind in m["target"]["kind"]
    ]
    return (found[-1], "") if found else (None, "cargo made no executable")


RESULT = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", re.MULTILINE)
PANIC = re.compile(r"panicked at (([^\n:]*):(\d+):\d+):\n([^\n]*(?:\n[^\n]+){0,4})")


def asserted(file, line, message):
    """Whether a panic is an assertion of a test: below tests/, in a module of tests, or behind `#[cfg(test)]`; or a snapshot's."""
    if message.startswith("snapshot assertion for"):
        return True
    path = TREE / file
    if not path.is_file():
        return False
    before = path.read_text().splitlines()[: int(line)]
    own = file.startswith("tests/") or file.endswith("/tests.rs") or "/tests/" in file
    return "assert" in before[-1] and (own or any(text.strip() == "#[cfg(test)]" for text in before))


def judge(executable, function, limit):
    """Verdict and what was said: `passed`, `failed` by an assertion of the test, or why neither is known."""
    code, out, err = run([executable, "--exact", function], limit, environment())
    if code is None:
        return "timed out", f"after {limit} s"
    if code < 0:
        return "signal", signal.Signals(-code).name
    counts = RESULT.search(out)
    passed, failed, _ = map(int, counts.groups()) if counts else (0, 0, 0)
    if (passed, failed, code) == (1, 0, 0):
        return "passed", ""
    panics = [*PANIC.finditer(err), *PANIC.finditer(out)]
    if (passed, failed, code) == (0, 1, FAILED) and panics:
        own = [panic for panic in panics if asserted(panic[2], panic[3], panic[4])]
        panic = (own or panics)[0]
        said = f"{panic[1]}: {' '.join(panic[4].split())[:160]}"
        return ("failed" if own else "panicked, not by an assertion"), said
    return "not run", " ".join((out + err).split())[-160:]


def verdict_of(mutant, limit):
    with planted(mutant):
        start = time.monotonic()
        executable, why = build(mutant.binary)
        built = time.monotonic() - start
        if executable is None:
            return {"verdict": "does not build", "said": why, "build": built, "run": 0.0}
        start = time.monotonic()
        outcome, said = judge(executable, mutant.function, limit)
        ran = time.monotonic() - start
    names = {"failed": "killed", "passed": "survived", "not run": "test not run"}
    return {"verdict": names.get(outcome, outcome), "said": said, "build": built, "run": ran}


def fails_anyway(binary, functions, limit):
    """Of tests on the tree as it is those that do not pass, with what they said."""
    executable, why = build(binary)
    if executable is None:
        sys.exit(f"error: {binary} does not build without any fault: {why}")
    broken = {}
    for function in functions:
        outcome, said = judge(executable, function, limit)
        if outcome != "passed":
            broken[function] = f"{outcome}: {said}"
    return broken


# --- All of it


def known():
    """Verdicts of earlier runs, by key."""
    if not VERDICTS.exists():
        return {}
    lines = (json.loads(line) for line in VERDICTS.read_text().splitlines() if line)
    return {line["key"]: line for line in lines}


def keep(**line):
    with open(VERDICTS, "a") as file:
        file.write(json.dumps(line) + "\n")


def shard(mutants):
    given = os.environ.get("SHARD")
    if not given:
        return mutants
    number, _, count = given.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        sys.exit(f"error: SHARD={given}: must be I/N with I from 1 to N")
    number, count = int(number), int(count)
    return mutants[len(mutants) * (number - 1) // count : len(mutants) * number // count]


def chosen(mutants, only):
    missing = set(only or []) - {m.name for m in mutants}
    if missing:
        sys.exit(f"error: no mutant {', '.join(sorted(missing))}; --list has all")
    wanted = [m for m in mutants if (m.name in only if only else not m.equivalent)]
    return shard(sorted(wanted, key=lambda m: (BINARIES.index(m.binary), m.area, m.name)))


def everything(mutants, limit):
    WORK.mkdir(parents=True, exist_ok=True)
    lock = open(WORK / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit("error: another run is under way in target/mutants")
    hashes = synchronize()
    states = {m: state_of(m, hashes) for m in mutants}
    verdicts = known()
    open_ones = [m for m in mutants if m.digest(states[m]) not in verdicts]
    if len(open_ones) < len(mutants):
        print(f"{len(mutants) - len(open_ones)} of {len(mutants)} are known from an earlier run", flush=True)
    for binary in BINARIES:
        own = [m for m in open_ones if m.binary == binary]
        passes = {m.function: f"{binary} {m.function} {states[m]}" for m in own}
        functions = sorted(function for function, key in passes.items() if key not in verdicts)
        broken = {}
        if functions:
            print(f"{binary}: {len(functions)} tests on the tree as it is", flush=True)
            broken = fails_anyway(binary, functions, limit)
            for function in set(functions) - set(broken):
                keep(key=passes[function], verdict="passes")
        for number, m in enumerate(own, 1):
            if m.function in broken:
                found = {"verdict": "fails anyway", "said": broken[m.function], "build": 0.0, "run": 0.0}
            else:
                found = verdict_of(m, limit)
            verdicts[m.digest(states[m])] = found
            if found["verdict"] in LASTING:
                keep(key=m.digest(states[m]), name=m.name, **found)
            seconds = f"{found['build']:.0f}+{found['run']:.0f} s"
            print(f"{binary} {number}/{len(own)} {m.area}/{m.name}: {found['verdict']} ({seconds})", flush=True)
    return [(m, verdicts[m.digest(states[m])]) for m in mutants]


def report(results, equivalents):
    width = max(len(f"{m.area}/{m.name}") for m, _ in results)
    print()
    for m, found in sorted(results, key=lambda r: (r[0].area, r[0].name)):
        print(f"{m.area + '/' + m.name:{width}}  {found['verdict']:14}  {m.test}  {found['said']}".rstrip())
    for m in equivalents:
        print(f"{m.area + '/' + m.name:{width}}  {'equivalent':14}  {m.equivalent}")
    counts = Counter(found["verdict"] for _, found in results)
    ordered = ["killed", "survived", *sorted(set(counts) - {"killed", "survived"})]
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in ordered))
    return counts["killed"] == len(results)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", action="append", metavar="NAME")
    parser.add_argument("--timeout", type=int, default=300, metavar="SECONDS")
    arguments = parser.parse_args()

    mutants, problems = check()
    if problems:
        print("\n".join(problems))
        sys.exit(1)
    equivalents = [m for m in mutants if m.equivalent]
    if arguments.check:
        areas = len({m.area for m in mutants})
        print(f"{len(mutants) - len(equivalents)} mutants in {areas} areas fit the code, {len(equivalents)} equivalent")
        return
    wanted = chosen(mutants, arguments.only)
    if arguments.list:
        for m in wanted:
            print(f"{m.area}/{m.name}  {m.file}  {m.test}")
        return
    if not wanted:
        print("no mutant in this part")
        return
    # An end by a signal puts the copy right again.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = everything(wanted, arguments.timeout)
    sys.exit(0 if report(results, equivalents if not arguments.only else []) else 1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
