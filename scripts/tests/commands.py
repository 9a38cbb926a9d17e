"""Checks commands and paths in the Markdown pages: `make` targets, `cargo test --test` names, flags of `ltx2` (by
docs/reference/cli.md) and paths in backticks. Links are checked by rumdl."""

import re
import subprocess
import sys
from pathlib import Path

MAKE = re.compile(r"(?:`|^|&& )make ([a-z][a-z0-9-]*)", re.M)
TARGETS = re.compile(r"^([a-z][\w% -]*):", re.M)
TEST = re.compile(r"--test ([a-z]+)(?: ([a-z_0-9]+)(?:::([a-z_0-9]*))?)?")
FOLDERS = r"\.github|assets|benchmarks|configs|crates|docs|examples|experiments|scripts|shardings|src|tests"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]+)(?=[` ])")
LTX2 = re.compile(r"(?:^|[`/\s])ltx2 ([a-z]+)((?:[^`#\n\\]|\\\n)*)", re.M)
FLAG = re.compile(r"(?<![\w-])(--?[a-z][a-z-]*)")


def errors(text, targets, known):
    yield from (f"make {target}: no such target" for target in MAKE.findall(text) if target not in targets)
    for command, rest in LTX2.findall(text):
        used = FLAG.findall(rest)
        if command in known:
            yield from (f"ltx2 {command} {flag}: no such flag" for flag in used if flag not in known[command])
        elif used:
            yield f"ltx2 {command}: no such command"
    for path in PATH.findall(text):
        if not Path(path).exists() and not re.search("[A-Z]{3}", path):
            yield f"{path}: no such file"
    for binary, module, test in TEST.findall(" ".join(text.split())):
        file = Path("tests", binary, f"{module}.rs")
        if not file.parent.is_dir():
            yield f"--test {binary}: no such binary"
        elif module and not file.is_file():
            yield f"--test {binary} {module}: no such module"
        elif test and f"fn {test}" not in file.read_text():
            yield f"--test {binary} {module}::{test}: no such test"


pages = subprocess.check_output(["git", "ls-files", "*.md"], text=True).split()
targets, known = " ".join(TARGETS.findall(Path("Makefile").read_text())).split(), {}
# The flags of each command, including those of its subcommands.
for section in re.split(r"^## ltx2 ", Path("docs/reference/cli.md").read_text(), flags=re.M)[1:]:
    known.setdefault(re.match(r"[a-z]+", section)[0], {"--help"}).update(FLAG.findall(section))
wrong = [f"{name}: {error}" for name in pages for error in errors(Path(name).read_text(), targets, known)]
print("\n".join(wrong) or f"{len(pages)} pages: every command and path exists")
sys.exit(bool(wrong))
