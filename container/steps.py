#!/usr/bin/env python3
"""Runs the steps of container/Dockerfile without docker, and the server that they make.

    steps.py cpu|cuda [--binary FILE]              in a folder; --binary takes a built `ltx2` in place of the build stage's
    steps.py cpu|cuda --binary FILE --debian ROOT  in ROOT, a clean Debian system (container/debian.sh makes one); as root
    steps.py cpu|cuda --list                       prints each instruction and what is done with it

A folder is the image's root: `ROOT` in the Dockerfile. What only an image has (its base, its packages and users) is left out, and
said so; of this machine's programs, a step finds those that the image's packages have. In a Debian system every step runs, by chroot.
Then the entry point runs with the toy model: it has to become healthy by the image's own check, make a video, keep it over a restart,
and end by its stop signal with exit code 0.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
DOCKERFILE = REPOSITORY / "container" / "Dockerfile"
READY_SECONDS = 1800
# Instructions that describe the image; they are checked when the server runs, or have no counterpart in a folder.
DESCRIBED = {"ARG", "ENV", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "USER"}
# Commands that change a system.
OF_AN_IMAGE = ("apt-get ", "useradd ", "chown ")
# Programs that steps and server may run in a folder: those of Debian's essential packages, and of packages that the image installs.
ESSENTIAL = ["sh", "mkdir", "env"]
PROGRAMS = {"ca-certificates": [], "curl": ["curl"], "ffmpeg": ["ffmpeg", "ffprobe"]}
# Variables that reach the network; nothing else of this machine's environment is given to a step.
NETWORK = ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"]
NETWORK += ["SSL_CERT_FILE", "PIP_INDEX_URL", "PIP_CERT"]


def instructions():
    """Pairs of a word and its text, in order."""
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(" ", 1)) for line in lines]


def stages():
    """Each stage's name, its base, and its instructions."""
    found = {}
    for word, text in instructions():
        if word == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", text).groups()
            found[name] = (base, [])
        else:
            found[name][1].append((word, text))
    return found


def chain(target):
    """The instructions that make a target: of the build stage, its bases and its own, with the stage's name."""
    known = stages()
    names, name = [], target
    while name in known:
        names.insert(0, name)
        name = known[name][0]
    copied = {stage for name in names for word, text in known[name][1] for stage in re.findall(r"--from=(\S+)", text)}
    return [(name, word, text) for name in [*sorted(copied), *names] for word, text in known[name][1]]


def what_is_done(word, text, binary, debian=False):
    """In a word: run, copy, enter, described, or why it is left out."""
    if word == "RUN":
        if text.startswith(OF_AN_IMAGE) and not debian:
            return "left out: it changes an image's system"
        return f"left out: {binary} is taken" if binary and text.startswith("cargo ") else "run"
    if word in ("COPY", "WORKDIR"):
        return {"COPY": "copy", "WORKDIR": "enter"}[word]
    if word in DESCRIBED:
        return "described"
    raise SystemExit(f"steps.py: container/Dockerfile has `{word} {text}`, which this script does not know")


def network():
    """The variables of this machine that reach the network."""
    return {name: os.environ[name] for name in NETWORK if name in os.environ}


class Folder:
    """The image's root in a folder, and the stage's working folder in it."""

    debian = False

    def __init__(self, root, binary):
        self.root, self.binary, self.at, self.said = Path(root), binary, Path(root), {}
        # The root of the build stage, from which files are copied.
        self.built = self.root

    def path(self, inner):
        return self.root / inner.lstrip("/") if inner.startswith("/") else self.at / inner

    def do(self, word, text):
        done = what_is_done(word, text, self.binary, self.debian)
        print(f"{done:>10}  {word} {text}", flush=True)
        if done == "run":
            self.run(text)
        elif done == "enter":
            self.at = self.path(text)
            self.at.mkdir(parents=True, exist_ok=True)
        elif done == "copy":
            self.copy(text)
        elif done == "described":
            self.said.setdefault(word, []).append(text)

    def run(self, text):
        """Runs a step's command. The build stage has the tools of its own image: here, those of this machine."""
        own = os.environ if text.startswith("cargo ") else self.environment()
        subprocess.run(["/bin/sh", "-ec", text], cwd=self.at, env={**own, "ROOT": str(self.root)}, check=True)

    def environment(self):
        """What a step and the server get: programs of the image's packages, and the way to the network."""
        programs = self.root / ".programs"
        if not programs.exists():
            programs.mkdir()
            installed = [text for _, word, text in chain("cpu") if word == "RUN" and "apt-get install" in text]
            packages = re.findall(r"[a-z][a-z0-9+.-]+", re.sub(r"^.*--no-install-recommends| &&.*$", "", installed[0]))
            if unknown := [package for package in packages if package not in PROGRAMS]:
                raise SystemExit(f"steps.py: container/Dockerfile installs {unknown}: list their programs in PROGRAMS")
            for name in [*ESSENTIAL, *(name for package in packages for name in PROGRAMS[package])]:
                if found := shutil.which(name):
                    (programs / name).symlink_to(found)
        return network() | {"PATH": str(programs), "HOME": str(self.root)}

    def command(self, words):
        """A command of the image as this machine starts it, and the variables it gets."""
        return words, self.environment()

    def inner(self, path):
        """A path of the image as a command of the image names it."""
        return f"{self.root}{path}"

    def copy(self, text):
        stage, (origin, target) = re.match(r"--from=", text), re.sub(r"--from=\S+ ", "", text).split(" ")
        if not stage:
            # What docker would be sent: the files of the repository, without what .dockerignore names.
            listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True).stdout
            for name in filter(None, listed.decode().split("\0")):
                if os.path.lexists(REPOSITORY / name):
                    (self.path(target) / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(REPOSITORY / name, self.path(target) / name, follow_symlinks=False)
            return
        origin = self.built / origin.lstrip("/")
        if self.binary and origin.name == "ltx2":
            origin = Path(self.binary)
        self.path(target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(origin, self.path(target))


class Debian(Folder):
    """A Debian system below a folder, in which every command runs by chroot, with nothing of this machine's but its network."""

    debian = True

    def __init__(self, root, binary, built):
        super().__init__(root, binary)
        self.built = built.root

    def run(self, text):
        words, environment = self.command(["/bin/sh", "-ec", f"cd {shlex.quote(self.within(self.at))}; {text}"])
        subprocess.run(words, env=environment | {"ROOT": ""}, check=True)

    def within(self, path):
        return f"/{Path(path).relative_to(self.root)}"

    def environment(self):
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        reached = network()
        # Certificate authorities of this machine's network, where a variable names them.
        for name in ("SSL_CERT_FILE", "PIP_CERT"):
            if name in reached:
                shutil.copyfile(reached[name], self.root / "tmp" / f"{name}.pem")
                reached[name] = f"/tmp/{name}.pem"
        return reached | {"PATH": path, "HOME": "/tmp", "DEBIAN_FRONTEND": "noninteractive"}

    def command(self, words):
        user = [f"--userspec={self.said['USER'][-1]}"] if "USER" in self.said else []
        return [shutil.which("chroot"), *user, str(self.root), *words], self.environment()

    def inner(self, path):
        return path


def ask(url, data=None, method=None):
    """The answer's body."""
    request = urllib.request.Request(url, data, {"content-type": "application/json"} if data else {}, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read()


class Started:
    """The entry point in the folder, with the port and paths of this machine."""

    def __init__(self, folder):
        [entry], [self.stop] = folder.said["ENTRYPOINT"], folder.said["STOPSIGNAL"]
        [health] = folder.said["HEALTHCHECK"]
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port = taken.getsockname()[1]
        [(exposed)] = folder.said["EXPOSE"]
        self.folder = folder
        mine = lambda word: folder.inner(word) if word.startswith("/") else word.replace(f":{exposed}", f":{self.port}")  # noqa: E731
        words = [mine(word) for word in json.loads(entry)]
        # Loopback alone: this machine is no container.
        words = [word.replace("0.0.0.0", "127.0.0.1") for word in words]
        words += ["-c", "nano", "--warm", "64x64x9", "--set", "sampler.steps=2"]
        own = dict(pair.split("=", 1) for pair in folder.said["ENV"])
        command, environment = folder.command(words)
        print(f"started: {shlex.join(command)}", flush=True)
        self.process = subprocess.Popen(
            command, cwd=folder.root, env=environment | {key: mine(value) for key, value in own.items()}
        )
        self.health = re.sub(r"^.*?CMD ", "", health).replace(f":{exposed}", f":{self.port}")
        self.address = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        started = time.monotonic()
        check, environment = self.folder.command(["/bin/sh", "-c", self.health])
        while subprocess.run(check, env=environment, stdout=subprocess.DEVNULL).returncode != 0:
            if self.process.poll() is not None or time.monotonic() - started > READY_SECONDS:
                self.process.kill()
                raise SystemExit("steps.py: the server did not become healthy")
            time.sleep(0.5)
        print(f"healthy after {time.monotonic() - started:.1f} s", flush=True)
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(getattr(signal, self.stop))
            code = self.process.wait(60)
            assert code == 0, f"exit code {code} behind {self.stop}"

    def finished(self, video):
        """A video once it is made."""
        end = time.monotonic() + 600
        while (now := json.loads(ask(f"{self.address}/v1/videos/{video}")))["status"] in ("queued", "in_progress"):
            assert time.monotonic() < end, now
            time.sleep(0.5)
        assert now["status"] == "completed", now
        return now


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=["cpu", "cuda"])
    parser.add_argument("--binary")
    parser.add_argument("--debian", metavar="ROOT")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    steps = chain(arguments.target)
    if arguments.list:
        for name, word, text in steps:
            print(f"{name}\t{what_is_done(word, text, arguments.binary)}\t{word} {text}")
        return
    if arguments.debian and not arguments.binary:
        parser.error("--debian needs --binary FILE: the build stage's image is another")
    with tempfile.TemporaryDirectory(prefix="ltx2-container-") as root:
        binary = arguments.binary and Path(arguments.binary).resolve()
        build = folder = Folder(root, binary)
        if arguments.debian:
            folder = Debian(Path(arguments.debian).resolve(), binary, build)
        stage = None
        for name, word, text in steps:
            if name != stage:
                system = arguments.debian or "not here: the system is this machine's"
                print(f"-- {name}, FROM {stages()[name][0]} ({system})")
                # A stage continues in its base's folder; the build stage is not a base.
                folder.at, stage = folder.root if stages()[name][0] not in stages() else folder.at, name
            (build if name == "build" else folder).do(word, text)
        assert folder.said["USER"] == ["ltx2"], "the image's user has to have no rights"
        if arguments.target == "cuda" and shutil.which("nvidia-smi") is None:
            print("steps.py: no GPU here: the server is not started")
            return
        with Started(folder) as server:
            body = json.dumps({"prompt": "a red circle", "size": "64x64", "num_frames": 9, "seed": 1}).encode()
            video = json.loads(ask(f"{server.address}/v1/videos", body))["id"]
            server.finished(video)
        with Started(folder) as server:
            assert server.finished(video)["seed"] == 1
            assert ask(f"{server.address}/v1/videos/{video}/content")[4:8] == b"ftyp"
    print(f"steps.py: {arguments.target}: every step ran; the server was healthy, made a video and kept it over a restart")


if __name__ == "__main__":
    sys.exit(main())
