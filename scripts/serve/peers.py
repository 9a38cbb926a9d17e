#!/usr/bin/env python3
"""Runs the example clients of SGLang, vLLM-Omni and TensorRT-LLM, with another address, against `ltx2 serve` on the toy model.

    peers.py --ltx2 target/debug/ltx2 --peers FOLDER [--config FILE] [--record FILE] [--only NAME]

FOLDER has a checkout of each project, named like the project. Without FOLDER every example is ignored, or fails if LTX2_REQUIRE
has `peers`. Exit code 1 if an example fails.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import recorded
from server import Checks, Proxy, Server, equal, png

# Commits at which the examples passed last.
KNOWN = {
    "TensorRT-LLM": "async_video_gen.py at 1e720cb9, sync_video_gen.py at 222982db, delete_video.py at 9496bfa2",
    "vllm-omni": "run_curl_ltx2.sh at 884a45d0, LTX-2.md at 010bffc4",
    "sglang": "openai_api.mdx at 2b72b4cc",
}
SERVE = "examples/visual_gen/serve"
LTX2_SH = "examples/online_serving/text_to_video/run_curl_ltx2.sh"
RECIPE = "recipes/LTX/LTX-2.md"
API_PAGE = "docs_new/docs/sglang-diffusion/api/openai_api.mdx"
SECONDS = 1500


class Peers:
    """Runs the examples in a working folder, against an address."""

    def __init__(self, folder, work, port):
        self.folder, self.work, self.address = Path(folder), Path(work), f"http://127.0.0.1:{port}"

    def file(self, project, path):
        found = self.folder / project / path
        if not found.is_file():
            raise FileNotFoundError(f"not run: {project}/{path} is not in {self.folder}")
        return found

    def run(self, command, **environment):
        """Runs an example in the working folder; returns its stdout."""
        command = [str(part) for part in command]
        env = os.environ | environment
        done = subprocess.run(command, cwd=self.work, env=env, capture_output=True, text=True, timeout=SECONDS)
        said = (done.stdout + done.stderr)[-1500:]
        assert done.returncode == 0, f"exit code {done.returncode}: {said}"
        return done.stdout

    def is_video(self, name):
        file = self.work / name
        assert file.is_file(), f"no {name}"
        equal(file.read_bytes()[4:8], b"ftyp", f"the first bytes of {name}")

    def readdressed(self, text):
        """Returns text with the address of this server."""
        return re.sub(r"http://(?:localhost|127\.0\.0\.1):\d+", self.address, text)


def tensorrt(peers, script, output, *more):
    example = peers.file("TensorRT-LLM", f"{SERVE}/{script}")
    peers.run([sys.executable, example, "--base-url", f"{peers.address}/v1", *more])
    peers.is_video(output)


def from_image(output):
    return ["--mode", "ti2v", "--image", "input_image.png", "--output", output]


def tensorrt_async(peers):
    """TensorRT-LLM: async_video_gen.py, text to video"""
    tensorrt(peers, "async_video_gen.py", "output_async.mp4")


def tensorrt_async_image(peers):
    """TensorRT-LLM: async_video_gen.py, with an image"""
    tensorrt(peers, "async_video_gen.py", "ti2v_async.mp4", *from_image("ti2v_async.mp4"))


def tensorrt_sync(peers):
    """TensorRT-LLM: sync_video_gen.py, as JSON"""
    tensorrt(peers, "sync_video_gen.py", "output_sync.mp4")


def tensorrt_sync_image(peers):
    """TensorRT-LLM: sync_video_gen.py, as a form with an image"""
    tensorrt(peers, "sync_video_gen.py", "ti2v_sync.mp4", *from_image("ti2v_sync.mp4"))


def tensorrt_delete(peers):
    """TensorRT-LLM: delete_video.py"""
    said = peers.run([sys.executable, peers.file("TensorRT-LLM", f"{SERVE}/delete_video.py"), f"{peers.address}/v1"])
    assert "Unexpected error" not in said and "did not raise" not in said, said


def vllm_omni_script(peers):
    """vLLM-Omni: run_curl_ltx2.sh"""
    peers.run(["bash", peers.file("vllm-omni", LTX2_SH)], BASE_URL=peers.address)
    peers.is_video("ltx2_output.mp4")


def blocks(text, language):
    """Returns the fenced code blocks of a language."""
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```", text, re.M | re.S)


def vllm_omni_recipe(peers):
    """vLLM-Omni: the two requests of its LTX-2 recipe"""
    page = peers.file("vllm-omni", RECIPE).read_text()
    requests = [block for block in blocks(page, "bash") if "/v1/videos" in block]
    assert requests, "no request in the recipe"
    for block in requests:
        # The recipe leaves the image's path open.
        block = block.replace("/absolute/path/to/reference.png", str(peers.work / "input_image.png"))
        peers.run(["bash", "-ec", peers.readdressed(block).replace("curl ", "curl -sS --fail-with-body ", 1)])
        peers.is_video(re.search(r"-o (\S+\.mp4)", block)[1])


def videos_of_sglang(peers):
    page = peers.file("sglang", API_PAGE).read_text()
    start = page.index("### Video Generation")
    return page[start : page.index("### LoRA Management", start)]


def sglang_python(peers):
    """SGLang: the Python of its video API's page"""
    create, *rest = blocks(videos_of_sglang(peers), "python")
    # The blocks are one program; the id is left open.
    program = peers.work / "sglang_page.py"
    program.write_text(peers.readdressed("\n".join([create, "video_id = video.id", *rest])))
    said = peers.run([sys.executable, program])
    assert re.search(r"Video ID: video_\w{26}, Status: queued", said), said
    peers.is_video("output.mp4")


def sglang_curl(peers):
    """SGLang: the curl commands of its video API's page"""
    commands = blocks(videos_of_sglang(peers), "bash")
    assert len(commands) >= 5, commands
    made, order = [], []
    # The page cancels and deletes before it downloads.
    for command in commands:
        order.append((0 if "POST" in command and "cancel" not in command else 1 if "/content" in command else 2, command))
    for _, command in sorted(order, key=lambda pair: pair[0]):
        # ltx2 does not fetch remote images: it must refuse this request with a reason.
        is_remote = "https://" in command
        if "<VIDEO_ID>" in command:
            command = command.replace("<VIDEO_ID>", made[0] if "/content" in command else made[-1])
        if "/content" in command:
            ask = command.replace("/content", "").split(" -o ")[0].rstrip("\\ \n")
            wait = f'for _ in $(seq 600); do {ask} | grep -q \'"status": *"completed"\' && break; sleep 1; done\n'
            command = wait + command
        answer = peers.run(["bash", "-ec", peers.readdressed(command)])
        if "/content" in command:
            continue
        said = json.loads(answer)
        if is_remote:
            equal(said["error"]["param"], "reference_url", "the field of a remote image")
            continue
        assert "error" not in said or said["error"] is None or "cancel" in command, f"{shlex.quote(command)}: {answer}"
        if "POST" in command and "cancel" not in command:
            made.append(said["id"])
    assert len(made) >= 2, made
    peers.is_video("output.mp4")


CHECKS = [tensorrt_async, tensorrt_async_image, tensorrt_sync, tensorrt_sync_image, tensorrt_delete]
CHECKS += [vllm_omni_script, vllm_omni_recipe, sglang_python, sglang_curl]


def without_peers():
    """Prints each example as ignored, in the form that `scripts/tests/tier.py` counts; returns the exit code."""
    is_required = "peers" in os.environ.get("LTX2_REQUIRE", "").split(",")
    for check in CHECKS:
        project = check.__doc__.split(":")[0]
        ended = "FAILED" if is_required else f"ignored, no checkout of {project}: PEERS=FOLDER names them"
        print(f"test peers::{check.__name__} ... {ended}")
    return int(is_required)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ltx2", required=True)
    parser.add_argument("--peers", default="", help="folder of the projects' checkouts")
    parser.add_argument("--config", default="nano", help="the server's; with a smaller model, examples that wait a minute have time")
    parser.add_argument("--record", help="writes the requests of these examples")
    parser.add_argument("--only", help="examples whose names have this in them")
    arguments = parser.parse_args()
    if not arguments.peers:
        return without_peers()
    for project, commit in KNOWN.items():
        print(f"{project}: last run with {commit}")
    checks, calls = Checks(), []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        work.mkdir()
        (work / "input_image.png").write_bytes(png(64, 64))
        # The examples name their own models. Their sizes take minutes on a CPU.
        flags = ["--any-model", "--warm", "none", "--set", "sampler.steps=4", "--sync-timeout", f"{SECONDS}s"]
        with Server(arguments.ltx2, folder, *flags, config=arguments.config) as server, Proxy(server.port) as proxy:
            peers = Peers(arguments.peers, work, proxy.port)
            for check in CHECKS:
                if arguments.only and arguments.only not in check.__name__:
                    continue
                start = len(proxy.calls)
                checks.run(check, peers)
                calls.append((check.__name__, proxy.calls[start:]))
            if checks.failed:
                print(server.tail())
    if arguments.record:
        recorded.write(arguments.record, "examples of SGLang, vLLM-Omni and TensorRT-LLM", calls)
    return checks.end("peers")


if __name__ == "__main__":
    sys.exit(main())
