"""`ltx2 serve` for tests of clients and of its page, and a proxy that records requests and answers."""

import email
import http.client
import io
import json
import os
import signal
import socket
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
import wave
import zlib
from collections import namedtuple
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

READY_SECONDS = 900
# Headers of the connection, which a proxy does not forward.
HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "content-length", "host"}


def until(what, get, seconds, pause=0.05):
    """Returns the first true result of `get`; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not (found := get()):
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(pause)
    return found


def equal(actual, expected, what):
    assert actual == expected, f"{what}: {actual!r}, not {expected!r}"


def png(width=64, height=64, colour=(200, 40, 40)):
    rows = b"".join(b"\0" + bytes(colour) * width for _ in range(height))
    header, data = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"\x89PNG\r\n\x1a\n"
    for chunk in (b"IHDR" + header, b"IDAT" + zlib.compress(rows, 9), b"IEND"):
        data += struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return data


def tone(rate=48000):
    data = io.BytesIO()
    with wave.open(data, "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", None))
        out.writeframes(b"".join(struct.pack("<h", 4000 if n // 60 % 2 else -4000) for n in range(rate)))
    return data.getvalue()


class Server:
    """`ltx2 serve` with the toy model on a free port of loopback; a context manager that starts and stops it."""

    def __init__(self, ltx2, folder, *arguments):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self.state, self.log = Path(folder) / f"state-{self.port}", Path(folder) / f"server-{self.port}.log"
        self.command = [Path(ltx2).resolve(), "serve", "-c", "nano", "--listen", f"127.0.0.1:{self.port}", *arguments]
        self.process = None

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
        self.headers = {"authorization": "Bearer " + key} if key else {}
        env = {name: value for name, value in os.environ.items() if name != "LTX2_API_KEY"}
        env |= {"LTX2_API_KEY": key} if key else {}
        command = [str(part) for part in (*self.command, "--state", self.state, *flags)]
        # A file, as the server blocks on a pipe that nobody reads.
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        until("the server answers", lambda: self.answers("ready" if ready else "live"), READY_SECONDS)
        return self

    def runs(self):
        return self.process is not None and self.process.poll() is None

    def answers(self, path):
        assert self.runs(), f"the server exited with {self.process.returncode}: {self.tail()}"
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def tail(self, lines=40):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, how=signal.SIGTERM):
        if not self.runs():
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
        headers = self.headers | ({"content-type": "application/json"} if data else {})
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def video(self, video_id):
        return self.ask("GET", f"v1/videos/{video_id}")[1]

    def videos(self, query, prompt=None):
        """Returns the listed videos, newest first; only those with `prompt`."""
        return [v for v in self.ask("GET", f"v1/videos?{query}")[1]["data"] if prompt is None or v["prompt"] == prompt]

    def newest(self):
        return self.videos("limit=1")[0]

    def content(self, video_id, variant="video"):
        with urllib.request.urlopen(f"{self.url}v1/videos/{video_id}/content?variant={variant}", timeout=30) as answer:
            return answer.read()

    def waiting(self):
        queue = self.ask("GET", "v1/queue")[1]
        return queue["running"] + queue["queued"]

    def clear(self):
        for video_id in self.waiting():
            self.ask("POST", f"v1/videos/{video_id}/cancel")
        until("nothing runs or waits", lambda: not self.waiting(), 300)


class Call(namedtuple("Call", "method path headers body status answer_headers answer")):
    """A request and its answer; the names of headers are in lower case."""

    def json(self):
        is_json = self.answer_headers.get("content-type", "").startswith("application/json")
        return json.loads(self.answer) if is_json and self.answer else None

    def fields(self):
        """Returns the parts of a multipart body: name, file name, type, bytes."""
        kind = self.headers.get("content-type", "")
        if not kind.startswith("multipart/form-data"):
            return []
        parts = email.message_from_bytes(f"content-type: {kind}\r\n\r\n".encode() + self.body).get_payload()
        name = lambda part: part.get_param("name", header="content-disposition")  # noqa: E731
        return [(name(part), part.get_filename(), part["content-type"], part.get_payload(decode=True)) for part in parts]


class Proxy(ThreadingHTTPServer):
    """Forwards requests to a server and records each call."""

    daemon_threads = True

    def __init__(self, upstream):
        super().__init__(("127.0.0.1", 0), Forward)
        self.upstream, self.port, self.calls = upstream, self.server_port, []

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        super().__exit__(*error)

    def handle_error(self, *_):
        """Ignores clients that disconnect."""

    def of(self, method, ending):
        """Returns the calls with this method whose path, without the query, ends with `ending`."""
        return [e for e in list(self.calls) if e.method == method and e.path.split("?")[0].endswith(ending)]


class Forward(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def forward(self):
        # Clients send bodies of known length.
        assert "transfer-encoding" not in self.headers, self.headers["transfer-encoding"]
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        onward = {key: value for key, value in self.headers.items() if key.lower() not in HOP}
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=1600)
        try:
            upstream.request(self.command, self.path, body or None, onward)
            response = upstream.getresponse()
            answer, given = response.read(), response.getheaders()
        finally:
            upstream.close()
        sent, received = ({key.lower(): value for key, value in headers} for headers in (self.headers.items(), given))
        self.server.calls.append(Call(self.command, self.path, sent, body, response.status, received, answer))
        self.send_response(response.status)
        for key, value in given:
            if key.lower() not in HOP:
                self.send_header(key, value)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else answer)

    do_GET = do_POST = do_DELETE = do_HEAD = forward

    def log_message(self, *_):
        pass
