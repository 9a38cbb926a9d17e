#!/usr/bin/env python3
"""Takes a screenshot of a report: browse.py REPORT.html IMAGE.png [--size 1400x1500] [--dark] [--at SELECTOR].

Runs in the venv of `scripts/browser/setup.sh`. Fails on console errors, requests and axe violations.
"""

import argparse
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "browser"))

from browser import Browser  # noqa: E402

LARGEST = 300_000


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=pathlib.Path)
    parser.add_argument("image", type=pathlib.Path)
    parser.add_argument("--size", default="1400x1500", help="of the window, WIDTHxHEIGHT")
    parser.add_argument("--dark", action="store_true", help="the page's dark colors")
    parser.add_argument("--at", help="element that the window is scrolled to")
    parser.add_argument("--browser", default="target/browser", help="folder of scripts/browser/setup.sh")
    args = parser.parse_args()
    width, height = (int(n) for n in args.size.split("x"))
    if not args.report.is_file():
        sys.exit(f"browse.py: there is no {args.report}")
    with Browser(args.browser) as browser:
        page = browser.open(args.report.resolve().as_uri(), width=width, height=height, color_scheme="dark" if args.dark else "light")
        page.wait_for_load_state("networkidle")
        if args.at:
            page.locator(args.at).first.evaluate("(element) => element.scrollIntoView()")
            # Waits for plots that are drawn when they become visible.
            page.wait_for_timeout(500)
        size = page.shot(args.image, LARGEST)
        problems = page.problems() + page.axe(browser.axe)
    print(f"{args.image}: {size} bytes")
    if problems:
        sys.exit("browse.py: " + "\n".join(problems))


if __name__ == "__main__":
    main()
