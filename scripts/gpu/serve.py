"""Times `ltx2 serve` against `ltx2 generate`; called by serve.sh."""

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import threading
import time
import urllib.request

LIMIT = 200  # seconds that any one thing may take


def arguments():
    parser = argparse.ArgumentParser()
    for name in ["ltx2", "out", "preset", "size", "platform", "weights"]:
        parser.add_argument(f"--{name}", required=True)
    for name in ["frames", "servers", "requests", "queued"]:
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args()


ARGS = arguments()
WIDTH, HEIGHT = ARGS.size.split("x")
KEYS = {
    "request.width": WIDTH,
    "request.height": HEIGHT,
    "request.num_frames": ARGS.frames,
    "model.weights": ARGS.weights,
    "runtime.platform": ARGS.platform,
}
SETTINGS = ["-c", ARGS.preset, *(part for key, value in KEYS.items() for part in ["--set", f"{key}={value}"])]
ROWS = []


def row(what, figure):
    ROWS.append((what, figure))
    print(f"{what:<58}{figure}", flush=True)


def seconds(since):
    return f"{time.monotonic() - since:8.2f} s"


def generate(name):
    """A run of the command, from start to end; its own figures."""
    perf, log = os.path.join(ARGS.out, f"{name}.json"), os.path.join(ARGS.out, f"{name}.log")
    command = [ARGS.ltx2, "generate", *SETTINGS, "-p", "a fox", "--force", "-o", os.path.join(ARGS.out, f"{name}.mp4")]
    started = time.monotonic()
    with open(log, "w") as file:
        subprocess.run([*command, "--perf-json", perf], stdout=file, stderr=file, check=True, timeout=LIMIT)
    row(f"generate, {name}: command to video", seconds(started))
    with open(perf) as file:
        return json.load(file)


class Server:
    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.place = f"127.0.0.1:{free.getsockname()[1]}"
        self.log = open(os.path.join(ARGS.out, "serve.log"), "w")
        state = os.path.join(ARGS.out, "state")
        command = [ARGS.ltx2, "serve", *SETTINGS, "--listen", self.place, "--state", state]
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def ask(self, path, body=None, method=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://{self.place}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()

    def wait_ready(self):
        while True:
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended: see {self.log.name}")
            if time.monotonic() - self.started > LIMIT:
                raise SystemExit("the server is not ready in time")
            try:
                self.ask("/ready")
                return
            except OSError:
                time.sleep(0.02)

    def create(self, seed):
        body = {"prompt": "a fox runs through snow", "seed": seed}
        return json.loads(self.ask("/v1/videos", body))["id"]

    def get(self, job):
        return json.loads(self.ask(f"/v1/videos/{job}"))

    def busy(self):
        """Seconds that the device has worked so far."""
        text = self.ask("/metrics").decode()
        found = re.search(r"^ltx2_device_busy_seconds_total(?:\{[^}]*\})? (\S+)$", text, re.M)
        return float(found[1]) if found else None

    def finish(self, job):
        """Waits for a job; its last state."""
        started = time.monotonic()
        while (state := self.get(job))["status"] not in ["completed", "failed"]:
            if time.monotonic() - started > LIMIT:
                raise SystemExit(f"{job} does not end: {state}")
            time.sleep(0.01)
        if state["status"] == "failed":
            raise SystemExit(f"{job} failed: {state['error']}")
        return state

    def end(self):
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = "killed after a minute"
        row(f"SIGTERM to exit (code {code})", seconds(started))


class Follow(threading.Thread):
    """Notes when a job is in which phase, and when the device's working time grew: at the end of each run."""

    def __init__(self, server, jobs):
        super().__init__(daemon=True)
        self.server, self.jobs = server, jobs
        self.seen = {job: {} for job in jobs}
        self.busy = []

    def run(self):
        started = time.monotonic()
        open_jobs = set(self.jobs)
        while open_jobs and time.monotonic() - started < LIMIT:
            busy = self.server.busy()
            if busy is not None and (not self.busy or self.busy[-1][1] != busy):
                self.busy.append((time.monotonic(), busy))
            for job in sorted(open_jobs):
                state = self.server.get(job)
                now = time.monotonic()
                phase = state["status"] if state["status"] in ["completed", "failed", "queued"] else state["phase"]
                first, _ = self.seen[job].get(phase, (now, now))
                self.seen[job][phase] = (first, now)
                if phase in ["completed", "failed"]:
                    open_jobs.discard(job)
            time.sleep(0.005)


def queue(server, count):
    """Jobs that wait for each other: how long the device does nothing between them."""
    jobs = [server.create(100 + n) for n in range(count)]
    follow = Follow(server, jobs)
    follow.start()
    server.finish(jobs[-1])
    follow.join(LIMIT)
    # From one end to the next, less the work between them; the first entry is from before.
    ends = follow.busy[1:]
    idle = [(until - since) - (last - first) for (since, first), (until, last) in zip(ends, ends[1:])]
    if idle:
        mean = sum(idle) / len(idle)
        row(f"device idle between queued jobs, by metrics (of {len(idle)})", f"{1000 * mean:8.1f} ms, {1000 * max(idle):.1f} at most")
    gaps, overlaps = [], 0
    for before, after in zip(jobs, jobs[1:]):
        writing = follow.seen[before].get("encoding")
        phases = [span for phase, span in follow.seen[after].items() if phase not in ["queued", "encoding", "completed"]]
        if writing and phases:
            gaps.append(min(span[0] for span in phases) - writing[0])
            overlaps += any(span[0] < writing[1] and span[1] > writing[0] for span in phases)
    if gaps:
        row("the same, as polls see it (largest; polls are 5 ms apart or more)", f"{1000 * max(gaps):8.1f} ms")
    row("videos written while the next one runs", f"{overlaps:>8} of {count - 1}")


def phase(state, key):
    """Seconds of a phase of a job that ended."""
    value = (state.get("timings") or {}).get(key)
    return value.get("total") if isinstance(value, dict) else value


# Stages of a request that run on the device; the rest is the host's: planning, writing the video.
DEVICE = ["text_encoder", "connectors", "denoise", "upsampler", "refine", "video_decoder", "audio_decoder"]


def serve(is_last):
    """One server's life: seconds of each request, sent one by one, and seconds of the device for the first and the last."""
    server = Server()
    try:
        server.wait_ready()
        row("serve: command to /ready, programs cached", seconds(server.started))
        took, states = [], []
        for n in range(ARGS.requests):
            started = time.monotonic()
            states.append(server.finish(server.create(n)))
            took.append(time.monotonic() - started)
        row("  each request, alone", " ".join(f"{seconds:.2f}" for seconds in took))
        device = [sum(phase(state, key) or 0 for key in DEVICE) for state in (states[0], states[-1])]
        row("  of that on the device, first and last", f"{device[0]:8.3f} s, {device[1]:.3f} s")
        if is_last:
            for key in states[-1].get("timings") or {}:
                first, last = (phase(state, key) for state in (states[0], states[-1]))
                if isinstance(first, float) and isinstance(last, float):
                    row(f"  {key}, first and last", f"{first:8.3f} s, {last:.3f} s")
            queue(server, ARGS.queued)
        return took, device
    finally:
        server.end()


def main():
    generate("nothing cached")
    perf = generate("programs cached")
    for key in ["load", "compile", "text_encoder", "denoise", "refine", "video_decoder", "encoding", "total"]:
        value = perf.get(key)
        value = value.get("total") if isinstance(value, dict) else value
        if value is not None:
            row(f"  {key}", f"{value:8.2f} s")
    lives = [serve(n + 1 == ARGS.servers) for n in range(ARGS.servers)]
    row(f"first request after /ready, median of {len(lives)} servers", f"{statistics.median(took[0] for took, _ in lives):8.2f} s")
    row(f"request {ARGS.requests}, the same", f"{statistics.median(took[-1] for took, _ in lives):8.2f} s")
    over = [100 * (took[0] / took[-1] - 1) for took, _ in lives]
    row("the first against the last, each and median", " ".join(f"{one:+.1f}" for one in over) + f"; {statistics.median(over):+.1f} %")
    on_device = statistics.median(100 * (first / last - 1) for _, (first, last) in lives)
    row("the same on the device alone, median", f"{on_device:+8.1f} %")
    if statistics.median(over) > 5:
        row("NOT MET", "the first is slower than the last by more than 5 %")
    with open(os.path.join(ARGS.out, "serve-table.json"), "w") as file:
        json.dump(ROWS, file, indent=1)


main()
