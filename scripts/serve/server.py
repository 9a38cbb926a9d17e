"""A server of `ltx2 serve` for clients' tests, and a proxy before it that notes what clients send and are answered."""

import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import threading
import time
import zlib
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

READY_SECONDS = 900
# Headers of a connection, not of a message.
HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "content-length", "host"}


def free_port():
    """A port of loopback that nobody listens at."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Server:
    """`ltx2 serve` with a state folder of its own; ready on entry, ended by its id on exit."""

    def __init__(self, ltx2, folder, *arguments, config="nano"):
        self.port = free_port()
        self.log = Path(folder) / f"server-{self.port}.log"
        self.command = [ltx2, "serve", "-c", config, "--listen", f"127.0.0.1:{self.port}"]
        self.state = Path(folder) / f"state-{self.port}"
        self.command += ["--state", self.state, *arguments]

    def __enter__(self):
        # Its log goes to a file: an unread pipe would stop it.
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen([str(part) for part in self.command], stdout=log, stderr=log)
        end = time.monotonic() + READY_SECONDS
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                self.__exit__()
                raise SystemExit(f"{' '.join(map(str, self.command))}: not ready\n{self.said()}")
            time.sleep(0.2)
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def is_ready(self):
        try:
            return self.ask("GET", "/ready")[0] == 200
        except OSError:
            return False

    def ask(self, method, path, body=None, headers=None, timeout=60):
        """Status, headers (lower case) and body of a request by nobody's client."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def said(self, lines=40):
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@dataclass
class Call:
    """A request as it came and its answer."""

    method: str
    path: str
    headers: list
    body: bytes
    status: int = 0
    answer_headers: list = field(default_factory=list)
    answer: bytes = b""

    def header(self, name):
        """A request's header, by its lower-case name."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    def answered(self, name):
        """An answer's header, by its lower-case name."""
        return next((value for key, value in self.answer_headers if key.lower() == name), None)

    def json(self):
        """The answer, where it is JSON."""
        is_json = (self.answered("content-type") or "").startswith("application/json")
        return json.loads(self.answer) if is_json and self.answer else None

    def fields(self):
        """Parts of a multipart body, in order: name, file name, type, bytes."""
        kind = self.header("content-type") or ""
        if not kind.startswith("multipart/form-data"):
            return []
        boundary = kind.split("boundary=", 1)[1].split(";")[0].strip('"').encode()
        found = []
        for piece in self.body.split(b"--" + boundary)[1:-1]:
            head, _, value = piece[2:-2].partition(b"\r\n\r\n")
            lines = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
            lines = {key.lower(): value for key, value in lines.items()}
            said = dict(part.strip().split("=", 1) for part in lines["content-disposition"].split(";")[1:])
            said = {key: value.strip('"') for key, value in said.items()}
            found.append((said["name"], said.get("filename"), lines.get("content-type"), value))
        return found


class Proxy:
    """Passes requests on to a server and keeps each call. Answers are passed on whole."""

    def __init__(self, port):
        self.calls, self.lock = [], threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def pass_on(self):
                length = int(self.headers.get("content-length") or 0)
                body = self.rfile.read(length) if length else self.chunks()
                call = Call(self.command, self.path, list(self.headers.items()), body)
                onward = {key: value for key, value in self.headers.items() if key.lower() not in HOP}
                upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=1600)
                try:
                    upstream.request(self.command, self.path, body or None, onward)
                    answer = upstream.getresponse()
                    call.status, call.answer_headers = answer.status, answer.getheaders()
                    call.answer = answer.read()
                finally:
                    upstream.close()
                with proxy.lock:
                    proxy.calls.append(call)
                self.send_response(call.status)
                for key, value in call.answer_headers:
                    if key.lower() not in HOP:
                        self.send_header(key, value)
                self.send_header("content-length", str(len(call.answer)))
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else call.answer)

            def chunks(self):
                if self.headers.get("transfer-encoding", "").lower() != "chunked":
                    return b""
                whole = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    whole += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return whole

            do_GET = do_POST = do_DELETE = do_HEAD = pass_on

            def log_message(self, *_):
                pass

        class Http(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_):
                """A client that went away is no fault."""

        self.http = Http(("127.0.0.1", 0), Handler)
        self.port = self.http.server_port

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()

    def of(self, method, ending):
        """Calls of a method whose path ends so, the query apart."""
        with self.lock:
            return [e for e in self.calls if e.method == method and e.path.split("?")[0].endswith(ending)]


def png(width, height, colour=(200, 40, 40)):
    """A PNG of one colour."""
    rows = b"".join(b"\0" + bytes(colour) * width for _ in range(height))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


class Checks:
    """Named checks: each a line; a failed one does not stop the others."""

    def __init__(self):
        self.failed, self.passed = [], 0

    def run(self, function, *arguments):
        """Runs a check; its name is the first line of its docstring."""
        name = (function.__doc__ or function.__name__).strip().splitlines()[0].rstrip(".")
        started = time.monotonic()
        try:
            function(*arguments)
            self.passed += 1
            print(f"ok      {name} ({time.monotonic() - started:.1f} s)", flush=True)
        except Exception as error:  # noqa: BLE001 - whatever a client raises is a failed check
            self.failed.append(name)
            print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
            if os.environ.get("LTX2_SERVE_TRACE"):
                import traceback

                traceback.print_exc()

    def end(self, what):
        """The last line, and the exit code."""
        print(f"{what}: {self.passed} passed, {len(self.failed)} failed")
        for name in self.failed:
            print(f"  failed: {name}")
        return 1 if self.failed else 0


def equal(actual, expected, what):
    """An assertion that says both sides."""
    assert actual == expected, f"{what}: {actual!r}, not {expected!r}"
