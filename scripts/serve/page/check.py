#!/usr/bin/env python3
"""Tests of the server's page in a browser: `make serve-page`, or with one word of a case's name `make serve-page ONLY=narrow`.

    check.py LTX2 BROWSER OUT [--only WORD] [--images FOLDER]

Starts `LTX2 serve -c nano` on loopback with a state in OUT, opens its page in the Chromium of scripts/browser/setup.sh, and says of
each case what it shows. Each case also fails on an error or warning of the page's console, and on a request to another origin.
`--images` writes the screenshots of the guide.
"""

import argparse
import pathlib
import shutil
import sys
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "browser"))

import access  # noqa: E402
import form  # noqa: E402, F401
import images  # noqa: E402
import jobs  # noqa: E402, F401
import looks  # noqa: E402, F401
import sources  # noqa: E402, F401
from browser import Browser  # noqa: E402
from harness import CASES, World  # noqa: E402
from server import Server  # noqa: E402

# In this order: each group's server goes on with the state of the one before.
GROUPS = {
    "open": {"flags": ["--queue", "16", "--max-steps", "1000"]},
    "sources": {"flags": ["--max-steps", "1000", "--set", "serve.pipelines=[retake, extend, audio_to_video]"]},
    "limited": {"flags": ["--warm", "none", "--max-tokens", "3000", "--max-frames", "121"]},
    "full": {"flags": ["--queue", "1", "--max-steps", "1000"]},
    "keyed": {"flags": ["--max-steps", "1000"], "key": access.KEY},
    "stored": {"flags": ["--queue", "2000", "--queue-per-key", "2000", "--warm", "none"]},
}


def run(case, world):
    """Runs a case; its line, and whether it passed."""
    started = time.monotonic()
    problems, shows = [], ""
    try:
        shows = case.run(world)
    except Exception as error:  # whatever it is, the other cases go on
        lines = traceback.extract_tb(error.__traceback__)
        place = next((f"{pathlib.Path(f.filename).name}:{f.lineno}" for f in reversed(lines) if pathlib.Path(f.filename).parent == HERE), "")
        problems.append(f"{place} {type(error).__name__}: {error}")
        for number, page in enumerate(world.pages):
            page.page.screenshot(path=str(world.out / f"{case.name}-{number}.png"))
    problems += world.end(case.statuses)
    if problems and world.server.process.poll() is None:
        world.server.clear()
    print(f"test page::{case.name} ... {'FAILED' if problems else 'ok'}")
    for text in problems or [f"{shows} ({time.monotonic() - started:.1f} s)"]:
        print(f"    {text}", flush=True)
    return not problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ltx2", type=pathlib.Path)
    parser.add_argument("browser", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--images", type=pathlib.Path)
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    server = Server(args.ltx2, args.out / "state", args.out / "server.log")
    passed, failed = 0, 0
    try:
        with Browser(args.browser) as browser:
            for group, options in GROUPS.items():
                cases = [case for case in CASES if case.group == group and args.only in case.name]
                if not cases:
                    continue
                world = World(browser, server)
                world.out = args.out
                if group == "stored":
                    access.a_video(server)
                    access.clone(server.state, access.MANY_JOBS)

                def start(options=options):
                    server.start(*options["flags"], key=options.get("key"))

                world.restart = start
                start()
                for case in cases:
                    if server.process.poll() is not None:
                        start()
                    good = run(case, world)
                    passed, failed = passed + good, failed + (not good)
                server.stop()
            if args.images:
                server.state = args.out / "images"
                server.start("--queue", "64")
                images.take(World(browser, server), args.images)
    finally:
        server.stop()
    print(f"test result: {'FAILED' if failed else 'ok'}. {passed} passed; {failed} failed; 0 ignored; log and images of failures: {args.out}")
    sys.exit(1 if failed or not passed else 0)


if __name__ == "__main__":
    main()
