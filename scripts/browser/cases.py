"""Runs test cases and prints their results as scripts/tests/tier.py counts them."""

import argparse
import inspect
import pathlib
import sys
import time
import traceback


def arguments(text, *options):
    """Reads a command line: REPORTS or LTX2, BROWSER, OUT, `--only WORD`, and further options with paths."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("tested", "browser", "out", *options):
        parser.add_argument(name, type=pathlib.Path)
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose names contain this")
    return parser.parse_args()


def cases_of(group, only=""):
    """Returns the cases of a class, whose names contain `only`: the public functions that its base does not have."""
    functions = [value for name, value in vars(group).items() if inspect.isfunction(value) and not hasattr(group.__base__, name)]
    return [function for function in functions if function.__name__[0] != "_" and only in function.__name__]


def run_case(suite, function, world, out=None, statuses=()):
    """Runs a case and prints its result; returns whether it passed. `statuses` are expected error statuses.

    `world` runs the case, closes what it opened and returns its problems (`end`); `pages` are open ones."""
    started, problems, shows = time.monotonic(), [], ""
    try:
        shows = world.call(function) or (function.__doc__ or "").split("\n")[0]
    except Exception as error:  # Other cases still run.
        places = [(pathlib.Path(f.filename), f.lineno) for f in traceback.extract_tb(error.__traceback__)]
        here = pathlib.Path(function.__code__.co_filename).parent
        place = next((f"{file.name}:{line}" for file, line in reversed(places) if file.parent == here), "")
        problems.append(f"{place} {type(error).__name__}: {error}")
        for number, page in enumerate(world.pages):
            page.page.screenshot(path=str(out / f"{function.__name__}-{number}.png"))
    problems += world.end(statuses)
    print(f"test {suite}::{function.__name__} ... {'FAILED' if problems else 'ok'}")
    for text in problems or [f"{shows} ({time.monotonic() - started:.1f} s)"]:
        print(f"    {text}", flush=True)
    return not problems


def exit_with(results, details):
    failed = results.count(False)
    counts = f"{len(results) - failed} passed; {failed} failed; 0 ignored"
    print(f"test result: {'FAILED' if failed else 'ok'}. {counts}; details: {details}")
    sys.exit(1 if failed or not results else 0)
