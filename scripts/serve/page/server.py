"""A server of the real binary, for tests of its page."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

STARTS = 120
ENDS = 60


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def until(what, get, seconds, pause=0.05):
    """The first answer of `get` that is true; an error that says what was waited for, after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        found = get()
        if found:
            return found
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(pause)


class Server:
    """`ltx2 serve -c nano` on a free port of loopback; ended by its own process id."""

    def __init__(self, ltx2, state, log):
        self.ltx2, self.state = pathlib.Path(ltx2).resolve(), pathlib.Path(state)
        self.log = pathlib.Path(log)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/"
        self.process = None
        self.key = None

    def start(self, *flags, key=None, ready=True):
        """Starts with flags; waits until it answers, and unless told otherwise until it makes videos."""
        self.key = key
        command = [self.ltx2, "serve", "-c", "nano", "--platform", "cpu", "--listen", f"127.0.0.1:{self.port}", "--state", self.state]
        env = {name: value for name, value in os.environ.items() if name != "LTX2_API_KEY"}
        if key:
            env["LTX2_API_KEY"] = key
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*map(str, command), *flags], stdout=log, stderr=log, env=env)
        until("the server answers", lambda: self.answers("live"), STARTS)
        if ready:
            until("the server is ready", lambda: self.answers("ready"), STARTS)
        return self

    def answers(self, path):
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}: {self.tail()}"
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def tail(self):
        return self.log.read_text(errors="replace")[-1500:]

    def stop(self, how=signal.SIGTERM):
        """Ends it; its exit code."""
        if self.process is None or self.process.poll() is not None:
            return None
        self.process.send_signal(how)
        try:
            return self.process.wait(ENDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
            raise AssertionError(f"the server did not end within {ENDS} s: {self.tail()}") from None

    def ask(self, method, path, body=None):
        """Status and JSON of an answer."""
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
        """Ids of what runs and waits."""
        queue = self.ask("GET", "v1/queue")[1]
        return queue["running"] + queue["queued"]

    def clear(self):
        """Cancels what runs and waits."""
        for video_id in self.waiting():
            self.ask("POST", f"v1/videos/{video_id}/cancel")
        until("nothing runs or waits", lambda: not self.waiting(), 60)
