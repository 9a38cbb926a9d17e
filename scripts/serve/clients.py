"""Runs cases of a client against `ltx2 serve`, and records their requests."""

import argparse
import sys
import tempfile
from pathlib import Path

import recorded
from server import Proxy, Server

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "browser"))

from cases import cases_of, exit_with, run_case  # noqa: E402


class Client:
    """A server, the proxy in front of it, and a working folder; the base class of groups of cases."""

    pages, end = (), staticmethod(lambda _statuses: [])

    def __init__(self, server, proxy):
        self.server, self.proxy, self.address = server, proxy, f"http://127.0.0.1:{proxy.port}"
        self.work = server.log.parent

    def call(self, function):
        return function(self)


class Run:
    """A run of groups of cases; reads the command line, to which `options` adds arguments."""

    def __init__(self, suite, text, **options):
        parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--ltx2", required=True)
        parser.add_argument("--record", help="writes the requests of these cases")
        parser.add_argument("--only", default="", help="cases whose names contain this")
        for name, described in options.items():
            parser.add_argument(f"--{name}", default="", help=described)
        self.arguments, self.suite, self.results, self.calls = parser.parse_args(), suite, [], []
        self.temporary = tempfile.TemporaryDirectory()

    def group(self, group, *flags):
        cases = cases_of(group, self.arguments.only)
        if not cases:
            return
        with Server(self.arguments.ltx2, self.temporary.name, *flags) as server, Proxy(server.port) as proxy:
            client = group(server, proxy)
            for case in cases:
                start = len(proxy.calls)
                self.results.append(run_case(self.suite, case, client))
                self.calls.append((case.__name__, proxy.calls[start:]))
            if False in self.results:
                print(server.tail())

    def end(self, client):
        if self.arguments.record:
            recorded.write(self.arguments.record, client, self.calls)
        exit_with(self.results, "above")
