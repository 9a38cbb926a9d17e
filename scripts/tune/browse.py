#!/usr/bin/env python3
"""Writes the screenshots tuning-*.png of a report to a folder: browse.py REPORT.html FOLDER BROWSER.

Runs in the venv of `scripts/browser/setup.sh BROWSER`. Fails on console errors, requests and axe violations.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "browser"))

from browser import Browser  # noqa: E402

LARGEST = 300_000
# By name: options of the window, and the element that it is scrolled to.
LOOKS = {
    "light": (dict(width=1300, height=1150, color_scheme="light"), None),
    "dark": (dict(width=1300, height=900, color_scheme="dark"), ".figures"),
    "narrow": (dict(width=360, height=900, color_scheme="light"), ".figures"),
}


def main():
    report, folder, browser = map(pathlib.Path, sys.argv[1:])
    problems = []
    with Browser(browser) as browser:
        for name, (options, at) in LOOKS.items():
            page = browser.open(report.resolve().as_uri(), **options)
            page.wait_for_load_state("networkidle")
            if at:
                page.locator(at).first.evaluate("(element) => element.scrollIntoView()")
                # Waits for plots that are drawn when they become visible.
                page.wait_for_timeout(500)
            image = folder / f"tuning-{name}.png"
            print(f"{image}: {page.shot(image, LARGEST)} bytes")
            problems += [f"{name}: {problem}" for problem in page.problems() + page.axe(browser.axe)]
            browser.close(page)
    if problems:
        sys.exit("browse.py: " + "\n".join(problems))


if __name__ == "__main__":
    main()
