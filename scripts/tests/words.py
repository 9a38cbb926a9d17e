#!/usr/bin/env python3
"""Finds old words by scripts/words.tsv: scripts/tests/words.py [--counts]. Prints file:line: word -> better; exits 1 on any.

Scopes: *path* is file names; *identifier* Rust code without comments and strings; *prose* Markdown outside code, doc comments
and the text of error and help attributes. A line that says `alias`, or in Markdown `was:`, may use an old word.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

LEFT_OUT = {"docs/glossary.md", "CHANGELOG.md", "scripts/words.tsv", "scripts/tests/words.py"}
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
HELP = re.compile(r"#\[(?:error|command|arg|clap)\(|\babout\b|_help\b")


def prose(name, text):
    """Lines of prose by number."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if name.endswith(".md"):
            fenced ^= line.startswith("```")
            said = "" if fenced else re.sub(r"\]\([^)]*\)", "]", line)
        elif line.startswith(("///", "//!")):
            said = line[3:].strip()
        else:
            said = " ".join(STRING.findall(line)) if HELP.search(line) else ""
        yield number, re.sub(r"`[^`]*`", "", said)


def code(_, text):
    for number, line in enumerate(text.splitlines(), 1):
        yield number, re.sub(r"//.*", "", STRING.sub('""', line))


def main():
    rows = [line.split("\t") for line in Path("scripts/words.tsv").read_text().splitlines()[1:] if line and line[0] != "#"]
    rules = [(scope, re.compile(pattern, re.I if scope == "prose" else 0), better) for scope, pattern, better in rows]
    # One look for all rules of a scope, as few lines have any.
    first = {s: re.compile("|".join(p.pattern for q, p, _ in rules if q == s), re.I if s == "prose" else 0) for s, *_ in rules}
    found = Counter()
    for name in subprocess.check_output(["git", "ls-files"], text=True).split("\n"):
        if name in LEFT_OUT or not Path(name).is_file():
            continue
        rust = name.endswith(".rs") and name.startswith(("src/", "crates/", "tests/", "examples/"))
        lines = {"path": [(1, name)], "identifier": [], "prose": []}
        if rust or name.endswith(".md"):
            text = Path(name).read_text()
            marked = {n for n, line in enumerate(text.splitlines(), 1) if "alias" in line or "was:" in line}
            readers = {"prose": prose} | ({"identifier": code} if rust else {})
            lines |= {scope: [x for x in read(name, text) if x[0] not in marked] for scope, read in readers.items()}
        for scope, number, line in ((s, *x) for s, read in lines.items() for x in read if first[s].search(x[1])):
            for pattern, better in ((p, b) for s, p, b in rules if s == scope):
                for match in pattern.finditer(line):
                    found[scope, pattern.pattern, better] += 1
                    if "--counts" not in sys.argv:
                        print(f"{name}:{number}: {match[0]} -> {better}")
    for (scope, pattern, better), count in found.most_common() if "--counts" in sys.argv else []:
        print(f"{count:5} {scope:10} {pattern} -> {better}")
    sys.exit(1 if found else 0)


main()
