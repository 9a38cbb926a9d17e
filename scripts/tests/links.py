#!/usr/bin/env python3
"""Checks the Markdown pages: relative links and anchors, `make` targets, `cargo test --test` names, `ltx2` flags (by
docs/reference/cli.md) and quoted paths.
"""

import re
import subprocess
import sys
from pathlib import Path

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def anchors(page):
    """Returns the anchors of a page's headings, as GitHub generates them."""
    headings = re.findall(r"^#+\s+(.*)$", FENCE.sub("", page.read_text()), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)
    return set(plain)


MAKE = re.compile(r"(?:`|^|&& )make ([a-z][a-z0-9-]*)", re.M)
TEST = re.compile(r"--test ([a-z]+)(?: ([a-z_0-9]+)(?:::([a-z_0-9]*))?)?")
PATH = re.compile(r"`((?:\.github|assets|benchmarks|configs|crates|docs|examples|experiments|scripts|shardings|src|tests)/[\w./-]+)(?=[` ])")
RULES = re.compile(r"^([a-z][\w%-]*):", re.M)


LTX2 = re.compile(r"(?:^|[`/\s])ltx2 ([a-z]+)((?:[^`#\n\\]|\\\n)*)", re.M)
FLAG = re.compile(r"(?<![\w-])(--?[a-z][a-z-]*)")


def flags():
    """Returns the flags of each command, including those of its subcommands."""
    found = {}
    for section in re.split(r"^## ltx2 ", Path("docs/reference/cli.md").read_text(), flags=re.M)[1:]:
        command = re.match(r"[a-z]+", section)[0]
        found.setdefault(command, {"--help"}).update(FLAG.findall(section))
    return found


FLAGS = flags()


def commands(text):
    """Yields errors in the commands and paths of a page."""
    rules = RULES.findall(Path("Makefile").read_text())
    for target in MAKE.findall(text):
        if target not in rules:
            yield f"make {target}: no such target"
    for command, rest in LTX2.findall(text):
        if command in FLAGS:
            for flag in FLAG.findall(rest):
                if flag not in FLAGS[command]:
                    yield f"ltx2 {command} {flag}: no such flag"
        elif rest and FLAG.search(rest):
            yield f"ltx2 {command}: no such command"
    for path in PATH.findall(text):
        if not Path(path).exists() and not re.search("[A-Z]{3}", path):
            yield f"{path}: no such file"
    for binary, module, test in TEST.findall(" ".join(text.split())):
        folder = Path("tests") / binary
        file = folder / f"{module}.rs"
        if not folder.is_dir():
            yield f"--test {binary}: no such binary"
        elif module and not file.is_file():
            yield f"--test {binary} {module}: no such module"
        elif test and not re.search(rf"fn {test}", file.read_text()):
            yield f"--test {binary} {module}::{test}: no such test"


def main():
    pages = subprocess.check_output(["git", "ls-files", "*.md"], text=True).split()
    broken = []
    for name in pages:
        page = Path(name)
        broken += [f"{name}: {wrong}" for wrong in commands(page.read_text())]
        text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
        for link in LINK.findall(text):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path) if path else page
            if not target.exists():
                broken.append(f"{name}: {link}: no such file")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                broken.append(f"{name}: {link}: no such heading")
    print("\n".join(broken) or f"{len(pages)} pages, every link leads somewhere, every command is one")
    sys.exit(1 if broken else 0)


main()
