"""Trains a stage of the toy model: train.py STAGE FOLDER --seconds 300.

FOLDER holds the model and the logs. A component without weights there starts from initial ones. Uses mixed precision, CUDA
graphs and averaged weights."""

import argparse
import json
import math
import pathlib
import shutil
import time
from functools import partial

import torch

import autoencoders
import model
from flow import flow

STAGES = {
    "video": (autoencoders.video, dict(batch=32, rate=1e-3, seed=1)),
    "video_decoder": (partial(autoencoders.video, decoder_only=True), dict(batch=32, rate=1e-3, seed=1)),
    "audio": (autoencoders.audio, dict(batch=16, rate=1e-3, seed=2)),
    "flow": (flow, dict(batch=256, rate=1.5e-3, seed=3)),
    "upsampler": (autoencoders.upsampler, dict(batch=128, rate=2e-3, seed=4)),
}


class Job:
    """A stage that trains components of `folder` for `seconds` or `most` steps."""

    def __init__(self, stage, folder, seconds, most, batch, rate, seed):
        self.stage, self.folder, self.seconds, self.most, self.batch, self.rate = stage, folder, seconds, most, batch, rate
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.path = pathlib.Path(folder, f"{stage}.jsonl")
        # Stages that run again draw other clips.
        self.seed = seed + 1_000_000 * (self.path.read_text().count('"done"') if self.path.exists() else 0)
        torch.manual_seed(self.seed)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True

    def half(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda)

    def log(self, **values):
        rounded = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in values.items()}
        line = json.dumps({"stage": self.stage, **rounded})
        print(line, flush=True)
        with open(self.path, "a", encoding="utf-8") as file:
            print(line, file=file)

    def train(self, modules, loss_of, feed, rate=1.0, share=1.0, every=None, decay=0.998, clip=1.0, warm=100, falls=True):
        """Trains modules for a share of the time with a multiple of the stage's rate; returns the number of steps.

        `feed()` fills the inputs in place before each step, `loss_of()` returns a dict of scalars, `loss` among them, and
        `every(step)` is called between steps. The modules end up with averaged weights."""
        parameters = [p for m in modules for p in m.parameters() if p.requires_grad]
        averages = [p.detach().clone() for p in parameters]
        matrices, others = ([p for p in parameters if (p.ndim > 1) == wide] for wide in (True, False))
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
            # A captured graph reads the rate from a tensor.
            lr=torch.tensor(0.0, device=self.device) if self.cuda else 0.0, betas=(0.9, 0.98), eps=1e-8,
            fused=self.cuda, capturable=self.cuda,
        )

        def update():
            optimizer.zero_grad(set_to_none=False)
            values = loss_of()
            values["loss"].backward()
            values["norm"] = torch.nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
            torch._foreach_lerp_(averages, [p.data for p in parameters], 1 - decay)
            return {k: v.detach() for k, v in values.items()}

        def set_rate(step, done):
            """Sets the rate: warm-up, constant for half of the time, then cosine decay unless `falls` is off."""
            fall = 0.5 + 0.5 * math.cos(math.pi * min(max(2 * done - 1, 0), 1)) if falls else 1.0
            value = rate * self.rate * min(1, (step + 1) / warm) * fall
            for group in optimizer.param_groups:
                group["lr"] = group["lr"].fill_(value) if self.cuda else value
            return value

        for p in parameters:
            p.grad = torch.zeros_like(p)
        set_rate(-1, 0.0)
        if self.cuda:
            update = _captured(update, feed)
        seconds, step, told = share * self.seconds, 0, 0
        start = shown = time.perf_counter()
        while step < self.most and (done := (time.perf_counter() - start) / seconds) < 1:
            value = set_rate(step, done)
            feed()
            values = update()
            if every:
                every(step)
            step += 1
            # Synchronises every 20 steps to keep the time limit.
            if step % 20 == 0 and self.cuda:
                torch.cuda.synchronize()
            if step in (1, 50) or time.perf_counter() - shown > max(2.0, seconds / 40) or step == self.most:
                now, values = time.perf_counter(), {k: v.item() for k, v in values.items()}
                speed = (step - told) / max(now - shown, 1e-6)
                self.log(step=step, seconds=now - start, rate=value, steps_per_second=speed, **values)
                shown, told = now, step
        with torch.no_grad():
            for p, average in zip(parameters, averages):
                p.copy_(average)
        return step


def _captured(update, feed):
    """Returns a function that replays a step (loss, gradients, update, averages) as a CUDA graph.

    These models are small: launching their kernels one by one would take longer than running them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            feed()
            update()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = update()

    def replay():
        graph.replay()
        return values

    return replay


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("stage", choices=STAGES)
parser.add_argument("folder")
parser.add_argument("--seconds", type=float, default=300.0)
parser.add_argument("--steps", type=int, default=10**9, help="limit")
parser.add_argument("--batch", type=int, help="smaller ones are for a try on a CPU")
args = parser.parse_args()
stage, options = STAGES[args.stage]
options["batch"] = args.batch or options["batch"]
shutil.copytree(model.ASSETS, args.folder, ignore=shutil.ignore_patterns("*.safetensors", "README.md"), dirs_exist_ok=True)
stage(Job(args.stage, args.folder, args.seconds, args.steps, **options))
