#!/usr/bin/env python3
"""Finds words that the project has replaced, by the rows of scripts/words.tsv.

    scripts/tests/words.py [--counts] [PATH…]      PATH: a file or folder; without one, the whole repository

Prints `file:line: word -> better` and exits 1 on any. `--counts` prints hits by row, then by folder.

Columns of the table: scope, where (a regular expression of paths; empty is everywhere), pattern, better. Scopes:
  path        a file's name
  identifier  Rust and Python without comments and strings
  prose       Markdown without code; comments and texts of Rust (a string with a space); comments of YAML, TOML, Python, shell,
              make; docstrings of Python. Code between backticks is left out, the backticks stay.
  summary     the first line of a Rust doc comment
  unique      type names that may be defined once in src and crates
  skip        paths in which nothing is looked at; `better` is the reason
A line of Rust or YAML that says `alias`, or of Markdown that says `was:`, may use an old word.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

TABLE = Path("scripts/words.tsv")
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
COMMENT = re.compile(r"//[/!]?\s?(.*)$")
HASH = re.compile(r"(?:^|\s)#+\s(.*)$")
DEFINED = re.compile(r"\b(?:struct|enum|trait|type|union) ([A-Z]\w*)")
RUST = re.compile(r"^(?:src|crates|tests|examples|fuzz|assets)/.*\.rs$")
HASHED = re.compile(r"\.(?:ya?ml|toml|sh)$|(?:^|/)Makefile$")


def bare(text):
    """Prose without the code in it."""
    return re.sub(r"`[^`]*`", "``", text)


def rust(lines):
    """(scope, number, text) of Rust."""
    before = False
    for number, line in lines:
        code, strings = STRING.sub('""', line), STRING.findall(line)
        comment = COMMENT.search(code)
        quoted = COMMENT.search(line)
        doc = bool(re.match(r"\s*//[/!]", line))
        if comment and quoted:
            text = bare(quoted[1])
            yield "prose", number, text
            if doc and not before and text:
                yield "summary", number, text
        if not doc:
            for text in strings:
                if " " in text:
                    yield "prose", number, re.sub(r"\{[^}]*\}", "", bare(text[1:-1]))
        yield "identifier", number, code[: comment.start()] if comment else code
        before = doc


def markdown(lines):
    fenced = False
    for number, line in lines:
        fenced ^= line.lstrip().startswith("```")
        if not fenced:
            yield "prose", number, bare(re.sub(r"\]\([^)]*\)", "]", line))


def hashed(lines):
    for number, line in lines:
        if comment := HASH.search(line):
            yield "prose", number, bare(comment[1])


def python(lines):
    """Comments and docstrings as prose, names as identifiers."""
    yield from hashed(lines)
    source = "".join(f"{line}\n" for _, line in lines)
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node) is not None:
            string = node.body[0].value
            for number in range(string.lineno, string.end_lineno + 1):
                line = lines[number - 1][1]
                # Indented lines are commands.
                if not re.match(r"\s{4,}\S", line[string.col_offset :]):
                    yield "prose", number, bare(line)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield "identifier", token.start[0], token.string


def read(name):
    yield "path", 1, name
    readers = ((RUST, rust), (re.compile(r"\.md$"), markdown), (re.compile(r"\.py$"), python), (HASHED, hashed))
    reader = next((reader for of, reader in readers if of.search(name)), None)
    if reader:
        lines = list(enumerate(Path(name).read_text(errors="replace").splitlines(), 1))
        marked = {n for n, line in lines if "was:" in line or ("alias" in line and reader is not markdown)}
        yield from (found for found in reader(lines) if found[1] not in marked)


def main():
    flags = {a for a in sys.argv[1:] if a.startswith("--")}
    if flags - {"--counts"}:
        sys.exit(__doc__)
    paths = [a for a in sys.argv[1:] if not a.startswith("--")]
    rows = [line.split("\t") for line in TABLE.read_text().splitlines()[1:] if line and line[0] != "#"]
    if wrong := [row for row in rows if len(row) != 4]:
        sys.exit(f"{TABLE}: four columns, not {wrong[0]}")
    skipped = [re.compile(where) for scope, where, _, _ in rows if scope == "skip"]
    once = {n for scope, _, names, _ in rows if scope == "unique" for n in names.split("|")}
    rules = {}
    for scope, where, pattern, better in rows:
        if scope not in ("skip", "unique"):
            flag = re.I if scope == "prose" else 0
            rules.setdefault(scope, []).append((re.compile(where), re.compile(pattern, flag), better))
    # One look for all rules of a scope, as few lines have any.
    first = {s: re.compile("|".join(f"(?:{p.pattern})" for _, p, _ in r), r[0][1].flags & re.I) for s, r in rules.items()}
    hits, defined = [], {}
    for name in subprocess.check_output(["git", "ls-files", "--", *paths], text=True).splitlines():
        if not Path(name).is_file() or any(s.search(name) for s in skipped):
            continue
        for scope, number, text in read(name):
            if scope == "identifier" and name.startswith(("src/", "crates/")):
                for type_name in DEFINED.findall(text):
                    if type_name in once:
                        defined.setdefault(type_name, []).append((name, number))
            if scope in first and first[scope].search(text):
                for where, pattern, better in rules[scope]:
                    if where.search(name):
                        hits += [(name, number, m[0], better, pattern.pattern) for m in pattern.finditer(text)]
    for type_name, places in defined.items():
        if len(places) > 1:
            hits += [(*place, type_name, f"one meaning a word: {len(places)} types", type_name) for place in places]
    if "--counts" in flags:
        for (pattern, better), count in Counter((h[4], h[3]) for h in hits).most_common():
            print(f"{count:5} {pattern} -> {better}")
        for folder, count in sorted(Counter("/".join(h[0].split("/")[:2]) for h in hits).items()):
            print(f"{count:5} {folder}")
    else:
        for name, number, word, better, _ in hits:
            print(f"{name}:{number}: {word} -> {better}")
    sys.exit(1 if hits else 0)


main()
