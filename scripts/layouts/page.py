"""Reads and writes the rows of a page's generated tables; a table, with its header, is between <!-- NAME --> and <!-- end -->."""

import re
import sys


def _table(text, name):
    found = re.search(rf"<!-- {name} -->\n(\|.*?\n\|-.*?\n)(.*?)<!-- end -->", text, re.S)
    return found or sys.exit(f"the page has no table <!-- {name} --> … <!-- end -->")


def read(path, name):
    return [row[2:-2].split(" | ") for row in _table(path.read_text(), name)[2].splitlines()]


def write(path, tables):
    tables = {name: list(rows) for name, rows in tables.items()}
    text = path.read_text()
    for name, rows in tables.items():
        start, end = _table(text, name).span(2)
        text = text[:start] + "".join(f"| {' | '.join(row)} |\n" for row in rows) + text[end:]
    path.write_text(text)
