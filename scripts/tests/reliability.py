#!/usr/bin/env python3
"""Prints the failure modes of docs/internals/reliability.md with the results of their tests: pass, FAIL, not run, or short.

    scripts/tests/reliability.py          results of the last run of each tier on these files
    scripts/tests/reliability.py --run    also runs, in full, every test that has not passed

A row passes if all its tests passed in full. Exit code 1 unless all rows pass.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/internals/reliability.md"
sys.path.insert(0, str(ROOT / "scripts/tests"))
from tier import tree  # noqa: E402

CRATES = {"pjrt": "ltx2-pjrt", "stablehlo": "ltx2-stablehlo", "xla-analysis": "ltx2-xla-analysis"}


def rows():
    """Yields section, fault and tests of each row."""
    section, lines = "", PAGE.read_text().splitlines()
    for line, following in zip(lines, [*lines[1:], ""]):
        if line.startswith("## "):
            section = line[3:]
        if line.startswith("|") and not line.startswith("|-") and not following.startswith("|-"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            yield section, cells[0], re.findall(r"`([^`]+)`", cells[-1])


def known():
    """Returns the last result of each test that ran."""
    files = sorted((ROOT / "target/tests").glob("*.results.jsonl"), key=lambda path: path.stat().st_mtime)
    ended = {}
    own = tree()
    for file in files:
        about, *lines = file.read_text().splitlines() or ["{}"]
        if json.loads(about).get("tree") != own:
            print(f"{file.name}: of other files than these, left out", file=sys.stderr)
            continue
        times = file.with_name(file.name.replace(".results.", ".times."))
        timed = map(json.loads, times.read_text().splitlines() if times.exists() else [])
        short = {f"{line['binary']} {line['test']}" for line in timed if line.get("short")}
        for line in map(json.loads, lines):
            # Steps are binaries, perhaps "in full"; unit tests of all crates are one step.
            binary = line["binary"].split(",")[0]
            test = f"{'lib' if binary == 'unit' else binary} {line['test']}"
            state = "FAIL" if line["ended"] != "ok" else "short" if test in short else "pass"
            # A full pass is not replaced by a later short pass.
            if line["ended"] != "ignored" and (state != "short" or ended.get(test) != "pass"):
                ended[test] = state
    return ended


def key(test):
    binary, path = test.split(" ", 1)
    return f"lib {path}" if binary in CRATES else test


def run(test):
    """Runs one test; returns pass, FAIL or not run."""
    binary, path = test.split(" ", 1)
    where = ["-p", CRATES[binary], "--lib"] if binary in CRATES else ["--lib"] if binary == "lib" else ["--test", binary]
    command = ["cargo", "test", "--quiet", "--locked", *where, "--", "--exact", path]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | {"LTX2_TEST_FULL": "1"}, capture_output=True, text=True)
    counts = re.search(r"(\d+) passed; (\d+) failed; (\d+) ignored", ran.stdout)
    passed, failed = (int(counts[1]), int(counts[2])) if counts else (0, 1)
    return "FAIL" if failed or ran.returncode else "pass" if passed == 1 else "not run"


def main():
    if sys.argv[1:] not in ([], ["--run"]):
        sys.exit(__doc__)
    ended, table = known(), list(rows())
    if sys.argv[1:]:
        for test in sorted({test for *_, tests in table for test in tests if ended.get(key(test)) != "pass"}):
            ended[key(test)] = run(test)
            print(f"{ended[key(test)]:8} {test}", file=sys.stderr, flush=True)
    counts, last = Counter(), None
    for section, fault, tests in table:
        if section != last:
            print(f"\n## {section}\n")
            last = section
        states = {test: ended.get(key(test), "not run") for test in tests}
        row = next((state for state in ("FAIL", "not run", "short") if state in states.values()), "pass")
        counts[row] += 1
        missing = "; ".join(test for test, state in states.items() if state == row != "pass")
        print(f"{row:8} {fault}{f' ({missing})' if missing else ''}")
    short = f", {counts['short']} in short forms of their tests alone" if counts["short"] else ""
    print(f"\n{len(table)} rows: {counts['pass']} pass, {counts['FAIL']} fail, {counts['not run']} not run{short}")
    sys.exit(counts["pass"] != len(table))


if __name__ == "__main__":
    main()
