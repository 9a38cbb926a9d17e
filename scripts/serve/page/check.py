"""Tests the server's page in a browser: `make serve-page`, or one case: `make serve-page ONLY=narrow`.

    check.py LTX2 BROWSER OUT [--only WORD] [--images FOLDER]

A case also fails on console errors and foreign requests. `--images` writes the screenshots of the guide."""

import pathlib
import shutil
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "browser")]

import access  # noqa: E402
from browser import Browser  # noqa: E402
from cases import arguments, cases_of, exit_with, run_case  # noqa: E402
from form import Form, Limited, Sources  # noqa: E402
from jobs import Jobs  # noqa: E402
from looks import FilledForms, Images, Looks  # noqa: E402
from server import Server  # noqa: E402

# Each server continues with the state of the previous one.
GROUPS = [Form, Jobs, Looks, Sources, Limited, access.Full, access.Keyed, access.Stored]

args = arguments(__doc__, "--images")
shutil.rmtree(args.out, ignore_errors=True)
args.out.mkdir(parents=True)
Images.folder = args.images
server = Server(args.tested, args.out, "--platform", "cpu")
results, flags = [], None
try:
    with Browser(args.browser) as browser:
        for group in [*GROUPS, Images, FilledForms] if args.images else GROUPS:
            cases = cases_of(group, args.only)
            world = group(browser, server)
            if cases and flags != world.flags:
                server.stop()
                world.prepare()
                flags = world.flags
            for case in cases:
                if not server.runs():
                    world.start()
                results.append(run_case("page", case, world, args.out, getattr(case, "statuses", ())))
                if server.runs():
                    server.clear()
finally:
    server.stop()
exit_with(results, args.out)
