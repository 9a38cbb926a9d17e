"""Writes generated tables of a page, which stand between <!-- NAME --> and <!-- end -->."""

import re
import sys


def table(heads, rows):
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def write(path, tables):
    text = path.read_text()
    for name, lines in tables.items():
        table = "\n".join(lines) + "\n"
        text, found = re.subn(rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m: m[1] + table + m[2], text, count=1, flags=re.S)
        if not found:
            sys.exit(f"{path} has no <!-- {name} --> … <!-- end -->")
    path.write_text(text)
