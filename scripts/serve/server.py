"""`ltx2 serve` for tests of clients and of its page, and a proxy that records requests and answers."""

import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import threading
import time
import traceback
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

READY_SECONDS = 900
# Headers of the connection, which a proxy does not forward.
HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "content-length", "host"}


def free_port():
    """Returns a port of loopback that is free."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def until(what, get, seconds, pause=0.05):
    """Returns the first true result of `get`; fails after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        found = get()
        if found:
            return found
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(pause)


class Server:
    """`ltx2 serve` on a free port of loopback; a context manager that starts and stops it."""

    def __init__(self, ltx2, folder, *arguments, config="nano"):
        self.port, self.folder = free_port(), Path(folder)
        self.url = f"http://127.0.0.1:{self.port}/"
        self.state, self.log = self.folder / f"state-{self.port}", self.folder / f"server-{self.port}.log"
        self.command = [Path(ltx2).resolve(), "serve", "-c", config, "--listen", f"127.0.0.1:{self.port}", *arguments]
        self.process = self.key = None

    def __enter__(self):
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_):
        self.stop()

    def start(self, *flags, key=None, ready=True):
        """Starts the server and waits until it answers, or until it is ready."""
        self.key = key
        env = {name: value for name, value in os.environ.items() if name != "LTX2_API_KEY"} | ({"LTX2_API_KEY": key} if key else {})
        command = [str(part) for part in (*self.command, "--state", self.state, *flags)]
        # A file, as the server blocks on a pipe that nobody reads.
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        until("the server answers", lambda: self.answers("ready" if ready else "live"), READY_SECONDS)
        return self

    def answers(self, path):
        assert self.process.poll() is None, f"the server exited with {self.process.returncode}: {self.tail()}"
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def tail(self, lines=40):
        """Returns the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, how=signal.SIGTERM):
        """Stops the server if it runs."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(how)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
            raise AssertionError(f"the server did not exit within 60 s: {self.tail()}") from None

    def ask(self, method, path, body=None):
        """Returns status and JSON of an answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"} if data else {}
        if self.key:
            headers["authorization"] = "Bearer " + self.key
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def video(self, video_id):
        return self.ask("GET", f"v1/videos/{video_id}")[1]

    def newest(self):
        return self.ask("GET", "v1/videos?limit=1")[1]["data"][0]

    def content(self, video_id, variant="video"):
        with urllib.request.urlopen(f"{self.url}v1/videos/{video_id}/content?variant={variant}", timeout=30) as answer:
            return answer.read()

    def waiting(self):
        """Returns the ids of running and queued videos."""
        queue = self.ask("GET", "v1/queue")[1]
        return queue["running"] + queue["queued"]

    def clear(self):
        """Cancels running and queued videos."""
        for video_id in self.waiting():
            self.ask("POST", f"v1/videos/{video_id}/cancel")
        until("nothing runs or waits", lambda: not self.waiting(), 60)


@dataclass
class Call:
    """A request and its answer."""

    method: str
    path: str
    headers: list
    body: bytes
    status: int = 0
    answer_headers: list = field(default_factory=list)
    answer: bytes = b""

    def header(self, name):
        """Returns a request header by its lower-case name."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    def answered(self, name):
        """Returns an answer header by its lower-case name."""
        return next((value for key, value in self.answer_headers if key.lower() == name), None)

    def json(self):
        """Returns the answer if it is JSON."""
        is_json = (self.answered("content-type") or "").startswith("application/json")
        return json.loads(self.answer) if is_json and self.answer else None

    def fields(self):
        """Returns the parts of a multipart body: name, file name, type, bytes."""
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
    """Forwards requests to a server and records each call."""

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
                """Ignores clients that disconnect."""

        self.http = Http(("127.0.0.1", 0), Handler)
        self.port = self.http.server_port

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()

    def of(self, method, ending):
        """Returns the calls with this method whose path, without the query, ends with `ending`."""
        with self.lock:
            return [e for e in self.calls if e.method == method and e.path.split("?")[0].endswith(ending)]


def png(width=64, height=64, colour=(200, 40, 40)):
    """Returns a PNG of one colour."""
    rows = b"".join(b"\0" + bytes(colour) * width for _ in range(height))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


class Checks:
    """Runs checks and prints a line for each; continues after a failure."""

    def __init__(self):
        self.failed, self.passed = [], 0

    def run(self, function, *arguments):
        """Runs a check, named by the first line of its docstring."""
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
                traceback.print_exc()

    def end(self, what):
        """Prints the summary; returns the exit code."""
        print(f"{what}: {self.passed} passed, {len(self.failed)} failed")
        for name in self.failed:
            print(f"  failed: {name}")
        return 1 if self.failed else 0


def equal(actual, expected, what):
    """Asserts equality; the message has both values."""
    assert actual == expected, f"{what}: {actual!r}, not {expected!r}"
