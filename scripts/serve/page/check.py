#!/usr/bin/env python3
"""Tests the server's page in a browser: `make serve-page`, or one case: `make serve-page ONLY=narrow`.

    check.py LTX2 BROWSER OUT [--only WORD] [--images FOLDER]

Starts `ltx2 serve -c nano` and opens its page in the Chromium of scripts/browser/setup.sh. A case also fails on console errors
and
foreign requests. `--images` writes the screenshots of the guide.
"""

import argparse
import pathlib
import shutil
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "browser")]

import access  # noqa: E402
import form  # noqa: E402, F401
import images  # noqa: E402
import jobs  # noqa: E402, F401
import looks  # noqa: E402, F401
import sources  # noqa: E402, F401
from browser import Browser, exit_with, run_case  # noqa: E402
from harness import CASES, World  # noqa: E402
from server import Server  # noqa: E402

# Each group's server continues with the state of the previous one.
GROUPS = {
    "open": {"flags": ["--queue", "16", "--max-steps", "1000"]},
    "sources": {"flags": ["--max-steps", "1000", "--set", "serve.pipelines=[retake, extend, audio_to_video]"]},
    "limited": {"flags": ["--warm", "none", "--max-tokens", "3000", "--max-frames", "121"]},
    "full": {"flags": ["--queue", "1", "--max-steps", "1000"]},
    "keyed": {"flags": ["--max-steps", "1000"], "key": access.KEY},
    "stored": {"flags": ["--queue", "2000", "--queue-per-key", "2000", "--warm", "none"]},
}


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
    server = Server(args.ltx2, args.out, "--platform", "cpu")
    results = []
    try:
        with Browser(args.browser) as browser:
            for group, options in GROUPS.items():
                cases = [case for case in CASES if case.group == group and args.only in case.name]
                if not cases:
                    continue
                world = World(browser, server)
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
                    results.append(run_case("page", case.run, world, args.out, case.statuses))
                    if not results[-1] and server.process.poll() is None:
                        server.clear()
                server.stop()
            if args.images:
                server.state = args.out / "images"
                server.start("--queue", "64")
                images.take(World(browser, server), args.images)
    finally:
        server.stop()
    exit_with(results, args.out)


if __name__ == "__main__":
    main()
