"""Shared by the training stages: options, time, learning rate, CUDA graphs, averaged weights, logs."""

import argparse
import json
import math
import os
import pathlib
import sys
import time

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import PerChannelRMSNorm
from diffusers.models.autoencoders.autoencoder_kl_ltx2_audio import LTX2AudioPixelNorm


def arguments(about, *more, **defaults):
    """Parses the options that every stage has, with a stage's defaults, and the options in `more`."""
    ask = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("source", help="model folder to start from, or an empty text")
    ask.add_argument("target", help="model folder to write")
    ask.add_argument("--steps", type=int, default=10**9)
    for name, default in defaults.items():
        ask.add_argument(f"--{name}", type=type(default), default=default)
    for name, options in more:
        ask.add_argument(name, **options)
    return ask.parse_args()


DECODER_ONLY = ("--decoder-only", dict(action="store_true", help="keep the latents as they are"))


def setup(seed):
    """Returns the device, seeded, with fast float32 matmuls."""
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    PerChannelRMSNorm.forward = lambda self, x, channel_dim=None: _rms(x, self.eps)
    LTX2AudioPixelNorm.forward = lambda self, x: _rms(x, self.eps)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _rms(x, eps):
    """Computes the autoencoders' channel norm in one pass over half-precision tensors."""
    with torch.autocast(x.device.type, enabled=False):
        norm = torch.linalg.vector_norm(x, 2, 1, keepdim=True, dtype=torch.float32)
    return x * torch.rsqrt(norm.square() / x.shape[1] + eps).to(x.dtype)


def half(device):
    """Returns mixed precision on a GPU, and elsewhere if NANO_HALF=1."""
    wanted = device.type == "cuda" or os.environ.get("NANO_HALF") == "1"
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted)


class Log:
    def __init__(self, folder, stage):
        path = pathlib.Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self.file, self.stage = open(path / f"{stage}.jsonl", "a", encoding="utf-8"), stage

    def __call__(self, **values):
        rounded = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in values.items()}
        line = json.dumps({"stage": self.stage, **rounded})
        print(line, file=self.file, flush=True)
        print(line, flush=True)


class Trainer:
    """Runs `loss_of()` and updates for a given time. `loss_of` returns a dict of scalars, `loss` among them.

    On a GPU the whole step (loss, gradients, update, averages) is captured once in a CUDA graph and replayed: these models
    are small, and launching their kernels one by one would take longer than running them. `feed()` fills the inputs in
    place before each step.
    """

    def __init__(self, modules, loss_of, feed, rate, seconds, log, decay=0.998, clip=1.0, warm=100, falls=True):
        self.parameters = [p for m in modules for p in m.parameters() if p.requires_grad]
        self.loss_of, self.feed, self.seconds, self.log, self.clip, self.warm = loss_of, feed, seconds, log, clip, warm
        self.peak, self.decay, self.falls, self.cuda = rate, decay, falls, self.parameters[0].is_cuda
        self.rate = torch.tensor(0.0, device=self.parameters[0].device)
        groups = [
            {"params": [p for p in self.parameters if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in self.parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.rate if self.cuda else 0.0, betas=(0.9, 0.98), eps=1e-8, fused=self.cuda, capturable=self.cuda
        )
        self.averages = [p.detach().clone() for p in self.parameters]

    def _step(self):
        self.optimizer.zero_grad(set_to_none=False)
        values = self.loss_of()
        values["loss"].backward()
        values["norm"] = torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        torch._foreach_lerp_(self.averages, [p.data for p in self.parameters], 1 - self.decay)
        return {k: v.detach() for k, v in values.items()}

    def _capture(self):
        """Runs three warm-up steps, then captures the graph. On failure, disables the feature and restarts the program."""
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self.feed()
                    self._step()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                values = self._step()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  whatever it was, slower ways still work
            speed = "NANO_COMPILE" if os.environ.get("NANO_COMPILE", "1") == "1" else "NANO_GRAPH"
            print(f"starting over with {speed}=0: {type(error).__name__}: {str(error)[:300]}", flush=True)
            os.environ[speed] = "0"
            os.execv(sys.executable, [sys.executable, *sys.argv])
        return graph, values

    def _set_rate(self, step, share):
        """Sets the rate: warm-up, constant for half of the time, then cosine decay unless `falls` is off."""
        fall = 0.5 + 0.5 * math.cos(math.pi * min(max(2 * share - 1, 0), 1)) if self.falls else 1.0
        rate = self.peak * min(1, (step + 1) / self.warm) * fall
        self.rate.fill_(rate)
        if not self.cuda:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        return rate

    def run(self, most=10**9, every=None):
        """Trains for the given time or `most` steps; calls `every(step, share)` between steps."""
        for p in self.parameters:
            p.grad = torch.zeros_like(p)
        graph = None
        self._set_rate(-1, 0.0)
        if self.cuda and os.environ.get("NANO_GRAPH", "1") == "1":
            graph, values = self._capture()
        start = shown = time.perf_counter()
        step = told = 0
        while step < most and (share := (time.perf_counter() - start) / self.seconds) < 1:
            rate = self._set_rate(step, share)
            self.feed()
            if graph:
                graph.replay()
            else:
                values = self._step()
            if every:
                every(step, share)
            step += 1
            # Synchronises every 20 steps to keep the time limit.
            if step % 20 == 0 and self.cuda:
                torch.cuda.synchronize()
            if step in (1, 50) or time.perf_counter() - shown > max(2.0, self.seconds / 40) or step == most:
                now = time.perf_counter()
                self.log(
                    step=step, seconds=now - start, rate=rate, steps_per_second=(step - told) / max(now - shown, 1e-6),
                    **{k: v.item() for k, v in values.items()},
                )
                shown, told = now, step
        return step

    @torch.no_grad()
    def settle(self):
        """Copies the averaged weights into the model."""
        if self.decay > 0:
            for p, a in zip(self.parameters, self.averages):
                p.copy_(a)


def edges(x):
    """Returns differences along width, height and time of [batch, channels, time, height, width]."""
    return x.diff(dim=4), x.diff(dim=3), x.diff(dim=2)


def edge_loss(a, b):
    return sum(F.l1_loss(p, q) for p, q in zip(edges(a), edges(b)))
