#!/usr/bin/env python3
"""Checks that every relative link of the Markdown pages leads to a file, and every anchor to a heading of it."""

import re
import subprocess
import sys
from pathlib import Path

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def anchors(page):
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+\s+(.*)$", FENCE.sub("", page.read_text()), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)
    return set(plain)


def main():
    pages = subprocess.check_output(["git", "ls-files", "*.md"], text=True).split()
    broken = []
    for name in pages:
        page = Path(name)
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
    print("\n".join(broken) or f"{len(pages)} pages, every link leads somewhere")
    sys.exit(1 if broken else 0)


main()
