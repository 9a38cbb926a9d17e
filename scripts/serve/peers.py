"""Runs the example clients of SGLang, vLLM-Omni and TensorRT-LLM, with another address, against `ltx2 serve` on the toy model.

    peers.py --ltx2 target/debug/ltx2 --peers FOLDER [--record FILE] [--only WORD]

FOLDER has a checkout of each project, named like the project. Without FOLDER every example is ignored, or fails if LTX2_REQUIRE
has `peers`. Exit code 1 if an example fails. Commits at which the examples passed last:

    TensorRT-LLM  async_video_gen.py at 1e720cb9, sync_video_gen.py at 222982db, delete_video.py at 9496bfa2
    vllm-omni     run_curl_ltx2.sh at 884a45d0, LTX-2.md at 010bffc4
    sglang        openai_api.mdx at 2b72b4cc"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from clients import Client, Run, cases_of
from server import equal, png

SECONDS = 1500
# The examples name their own models. Their sizes take minutes on a CPU.
FLAGS = ["--any-model", "--warm", "none", "--set", "sampler.steps=4", "--sync-timeout", f"{SECONDS}s"]


def blocks(text, language):
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```", text, re.M | re.S)


class Peers(Client):
    folder = Path()

    def __init__(self, server, proxy):
        super().__init__(server, proxy)
        self.work /= "work"
        self.work.mkdir()
        (self.work / "input_image.png").write_bytes(png(64, 64))

    def file(self, path):
        found = self.folder / path
        if not found.is_file():
            raise FileNotFoundError(f"not run: {path} is not in {self.folder}")
        return found

    def run(self, *command, **environment):
        env = os.environ | environment
        done = subprocess.run(command, timeout=SECONDS, cwd=self.work, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"exit code {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
        return done.stdout

    def bash(self, text):
        return self.run("bash", "-ec", self.readdressed(text))

    def is_video(self, name):
        file = self.work / name
        assert file.is_file(), f"no {name}"
        equal(file.read_bytes()[4:8], b"ftyp", f"the first bytes of {name}")

    def readdressed(self, text):
        return re.sub(r"http://(?:localhost|127\.0\.0\.1):\d+", self.address, text)

    def tensorrt(self, script, *more):
        return self.run(sys.executable, self.file(f"TensorRT-LLM/examples/visual_gen/serve/{script}"), *more)

    def tensorrt_video(self, script, output, has_image=False):
        image = ["--mode", "ti2v", "--image", "input_image.png", "--output", output] if has_image else []
        self.tensorrt(script, "--base-url", f"{self.address}/v1", *image)
        self.is_video(output)

    def videos_of_sglang(self, language):
        page = self.file("sglang/docs_new/docs/sglang-diffusion/api/openai_api.mdx").read_text()
        start = page.index("### Video Generation")
        return blocks(page[start : page.index("### LoRA Management", start)], language)


class Examples(Peers):
    def tensorrt_async(self):
        """TensorRT-LLM: async_video_gen.py, text to video"""
        self.tensorrt_video("async_video_gen.py", "output_async.mp4")

    def tensorrt_async_image(self):
        """TensorRT-LLM: async_video_gen.py, with an image"""
        self.tensorrt_video("async_video_gen.py", "ti2v_async.mp4", has_image=True)

    def tensorrt_sync(self):
        """TensorRT-LLM: sync_video_gen.py, as JSON"""
        self.tensorrt_video("sync_video_gen.py", "output_sync.mp4")

    def tensorrt_sync_image(self):
        """TensorRT-LLM: sync_video_gen.py, as a form with an image"""
        self.tensorrt_video("sync_video_gen.py", "ti2v_sync.mp4", has_image=True)

    def tensorrt_delete(self):
        """TensorRT-LLM: delete_video.py"""
        said = self.tensorrt("delete_video.py", f"{self.address}/v1")
        assert "Unexpected error" not in said and "did not raise" not in said, said

    def vllm_omni_script(self):
        """vLLM-Omni: run_curl_ltx2.sh"""
        self.run("bash", self.file("vllm-omni/examples/online_serving/text_to_video/run_curl_ltx2.sh"), BASE_URL=self.address)
        self.is_video("ltx2_output.mp4")

    def vllm_omni_recipe(self):
        """vLLM-Omni: the two requests of its LTX-2 recipe"""
        page = self.file("vllm-omni/recipes/LTX/LTX-2.md").read_text()
        requests = [block for block in blocks(page, "bash") if "/v1/videos" in block]
        assert requests, "no request in the recipe"
        for block in requests:
            # The recipe leaves the image's path open.
            block = block.replace("/absolute/path/to/reference.png", str(self.work / "input_image.png"))
            self.bash(block.replace("curl ", "curl -sS --fail-with-body ", 1))
            self.is_video(re.search(r"-o (\S+\.mp4)", block)[1])

    def sglang_python(self):
        """SGLang: the Python of its video API's page"""
        create, *rest = self.videos_of_sglang("python")
        # The blocks are one program; the id is left open.
        program = self.work / "sglang_page.py"
        program.write_text(self.readdressed("\n".join([create, "video_id = video.id", *rest])))
        said = self.run(sys.executable, program)
        assert re.search(r"Video ID: video_\w{26}, Status: queued", said), said
        self.is_video("output.mp4")

    def sglang_curl(self):
        """SGLang: the curl commands of its video API's page"""
        commands = self.videos_of_sglang("bash")
        assert len(commands) >= 5, commands
        is_create = lambda command: "POST" in command and "cancel" not in command  # noqa: E731
        made = []
        # The page cancels and deletes before it downloads.
        for command in sorted(commands, key=lambda c: 0 if is_create(c) else 1 if "/content" in c else 2):
            command = command.replace("<VIDEO_ID>", made[0 if "/content" in command else -1] if made else "<VIDEO_ID>")
            if "/content" in command:
                ask = command.replace("/content", "").split(" -o ")[0].rstrip("\\ \n")
                wait = f'for _ in $(seq 600); do {ask} | grep -q \'"status": *"completed"\' && break; sleep 1; done\n'
                self.bash(wait + command)
                continue
            answer = self.bash(command)
            said = json.loads(answer)
            # ltx2 does not fetch remote images: it must refuse this request with a reason.
            if "https://" in command:
                equal(said["error"]["param"], "reference_url", "the field of a remote image")
                continue
            assert "error" not in said or said["error"] is None or "cancel" in command, f"{shlex.quote(command)}: {answer}"
            if is_create(command):
                made.append(said["id"])
        assert len(made) >= 2, made
        self.is_video("output.mp4")


run = Run("peers", __doc__, peers="folder of the projects' checkouts")
Peers.folder = Path(run.arguments.peers)
if run.arguments.peers:
    run.group(Examples, *FLAGS)
    run.end("examples of SGLang, vLLM-Omni and TensorRT-LLM")
is_required = "peers" in os.environ.get("LTX2_REQUIRE", "").split(",")
for case in cases_of(Examples):
    project = case.__doc__.split(":")[0]
    ended = "FAILED" if is_required else f"ignored, no checkout of {project}: PEERS=FOLDER names them"
    print(f"test peers::{case.__name__} ... {ended}")
sys.exit(is_required)
