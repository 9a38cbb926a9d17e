#!/usr/bin/env python3
"""A screenshot of a report: scripts/tune/browse.py REPORT.html IMAGE.png [--size 1400x1500].

Needs Chromium (Debian: `apt-get install chromium`), found on the PATH or named by CHROMIUM. The page is opened from its file
with the network cut off, so a report that fetched something would show it: what the page says on its console is printed,
and an error there ends the script with 1.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

NAMES = ["chromium", "chromium-browser", "google-chrome", "chrome"]
LARGEST = 1_000_000


def browser():
    """The browser's path."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        sys.exit("browse.py: no Chromium: `apt-get install chromium`, or name one in CHROMIUM")
    return found


def screenshot(page, png, width, height):
    """Writes the top of a page as it is drawn; what the page said on its console."""
    with tempfile.TemporaryDirectory() as profile:
        command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
        command += ["--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr"]
        command += [f"--user-data-dir={profile}", f"--window-size={width},{height}", "--virtual-time-budget=3000"]
        command += [f"--screenshot={png}", page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    if not png.exists():
        sys.exit(f"browse.py: no image was made (exit code {done.returncode}): {done.stderr[-500:]}")
    return said


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=pathlib.Path)
    parser.add_argument("image", type=pathlib.Path)
    parser.add_argument("--size", default="1400x1500", help="of the window, WIDTHxHEIGHT")
    args = parser.parse_args()
    width, height = (int(n) for n in args.size.split("x"))
    if not args.report.is_file():
        sys.exit(f"browse.py: there is no {args.report}")
    args.image.parent.mkdir(parents=True, exist_ok=True)
    args.image.unlink(missing_ok=True)
    said = screenshot(args.report.resolve(), args.image.resolve(), width, height)
    for line in said:
        print(line, file=sys.stderr)
    size = args.image.stat().st_size
    print(f"{args.image}: {size} bytes")
    if any("ERROR" in line or "Uncaught" in line for line in said):
        sys.exit("browse.py: the page has errors")
    if size > LARGEST:
        sys.exit(f"browse.py: {size} bytes are more than {LARGEST}: take a smaller --size")


if __name__ == "__main__":
    main()
