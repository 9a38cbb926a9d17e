"""Trains text encoder, connectors and transformer by flow matching: train_flow.py IN OUT --seconds 300 [--wait DIR]."""

import math
import os
import pathlib
import sys
import time

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import model
import world
from flow import AUDIO_TOKENS, GRID, LARGE, Codec, Generator
from mel import log_mel
from runtime import Log, Trainer, arguments, half, setup
from words import captions, encode

CAPTIONS = 4
"""Paraphrases kept for every clip of the bank."""

class Bank:
    """Ring buffer of latents and captions of recent clips."""

    def __init__(self, size, grid, codec, tokenizer, device, seed):
        self.size, self.codec, self.tokenizer, self.device = size, codec, tokenizer, device
        self.scale = grid[1] // GRID[1]
        self.dice, self.words, self.next = torch.Generator().manual_seed(seed), seed, 0
        self.video = torch.zeros(size, math.prod(grid), 32, device=device)
        self.audio = torch.zeros(size, AUDIO_TOKENS, 32, device=device)
        self.ids = torch.zeros(size, CAPTIONS, model.TOKENS, dtype=torch.long, device=device)

    @torch.no_grad()
    def add(self, count):
        scenes = world.sample(count, self.dice)
        texts = []
        for _ in range(CAPTIONS):
            texts.append(captions(scenes, self.words))
            self.words += 1
        ids = torch.tensor(encode(self.tokenizer, [t for row in zip(*texts) for t in row], model.TOKENS)[0])
        scenes = scenes.to(self.device)
        frames = world.render(scenes, scale=self.scale)[0].contiguous(memory_format=torch.channels_last_3d)
        with half(self.device):
            video, audio = self.codec.pack(frames, log_mel(world.sound(scenes), world.MEL_FRAMES))
        rows = slice(self.next, self.next + count)
        self.video[rows], self.audio[rows] = video, audio
        self.ids[rows] = ids.view(count, CAPTIONS, -1).to(self.device, non_blocking=True)
        self.next = (self.next + count) % self.size


class Batch:
    """Latents, captions and noise of one size, redrawn in place before each step."""

    def __init__(self, count, grid, device):
        self.video = torch.randn(count, math.prod(grid), 32, device=device)
        self.audio = torch.randn(count, AUDIO_TOKENS, 32, device=device)
        self.noise = torch.randn_like(self.video), torch.randn_like(self.audio)
        self.ids = torch.zeros(count, model.TOKENS, dtype=torch.long, device=device)
        self.ids[:, -1] = 2
        self.nothing = self.ids[:1].clone()
        self.sigma = torch.full((count,), 0.5, device=device)
        self.kept = torch.zeros(count, math.prod(grid), device=device)
        self.first = (torch.arange(math.prod(grid), device=device) < grid[1] * grid[2]).float()

    @torch.no_grad()
    def draw(self, bank):
        count, device = len(self.video), self.video.device
        chance = lambda p: torch.rand(count, 1, device=device) < p
        rows = torch.randint(bank.size, (count,), device=device)
        self.video.copy_(bank.video[rows])
        self.audio.copy_(bank.audio[rows])
        which = torch.randint(CAPTIONS, (count,), device=device)
        self.ids.copy_(torch.where(chance(0.12), self.nothing, bank.ids[rows, which]))
        self.noise[0].normal_(), self.noise[1].normal_()
        # 15 % of clips have a clean first frame, for image_to_video.
        self.kept.copy_(chance(0.15) * self.first)
        # Logit-normal noise levels, shifted towards noise like the schedule.
        odds = torch.exp(torch.randn(count, device=device) + 0.6)
        wide = torch.rand(count, device=device)
        self.sigma.copy_(torch.where(chance(0.2)[:, 0], wide, odds / (1 + odds)).clamp(0.002, 1))

    def losses(self, generator, contexts):
        """Returns squared velocity errors of both streams, ignoring conditioning tokens."""
        s = self.sigma[:, None, None]
        free = (1 - self.kept)[..., None]
        video = self.video + s * free * (self.noise[0] - self.video)
        audio = self.audio + s * (self.noise[1] - self.audio)
        v, a = generator.velocity(video, audio, contexts, self.sigma, self.kept)
        seen = ((v.float() - self.noise[0] + self.video).square() * free).sum() / (free.sum() * v.shape[2])
        return seen, F.mse_loss(a.float(), self.noise[1] - self.audio)


def main():
    args = arguments(
        __doc__, ("--until", dict(type=float, help="stop at this Unix time instead of after --seconds")),
        ("--wait", dict(help="folder whose autoencoders another process is still training")),
        seconds=300.0, batch=256, large=16, bank=16_384, rate=1.5e-3, seed=3,
    )
    device = setup(args.seed)
    log = Log(args.target, "flow")
    model.save_frame(args.target)
    generator = Generator(args.source, device)
    compiled = device.type == "cuda" and os.environ.get("NANO_COMPILE", "1") == "1"
    batches = [Batch(args.batch, GRID, device), Batch(args.large, LARGE, device)]

    def loss_of():
        ids = torch.cat([b.ids for b in batches])
        with half(device):
            contexts = zip(*(c.split([args.batch, args.large]) for c in generator.context(ids, (ids != 0).long())))
            (seen, heard), (large, sound) = (b.losses(generator, c) for b, c in zip(batches, contexts))
        return {"loss": seen + heard + 0.25 * (large + sound), "video": seen, "audio": heard, "large": large}

    if compiled:
        start = time.time()
        try:
            generator.transformer.compile_repeated_blocks(fullgraph=False, dynamic=False)
            loss_of()["loss"].backward()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  the plain blocks compute the same
            print(f"not compiled ({type(error).__name__}: {str(error)[:300]})", flush=True)
            os.environ["NANO_COMPILE"] = "0"
            os.execv(sys.executable, [sys.executable, *sys.argv])
        log(compiled=time.time() - start)
    while args.wait and not all(pathlib.Path(args.wait, name).exists() for name in ("vae.done", "audio.done")):
        time.sleep(0.2)
    codec = Codec(args.wait or args.source, device)
    tokenizer = Tokenizer.from_file(f"{args.target}/tokenizer/tokenizer.json")
    # Later slices draw other clips.
    before = pathlib.Path(args.target, "flow.jsonl").read_text().count('"done"')
    seed = args.seed + 1_000_000 * before
    banks = [
        Bank(size, grid, codec, tokenizer, device, seed + i) for i, (size, grid) in enumerate([(args.bank, GRID), (args.bank // 8, LARGE)])
    ]
    start = time.time()
    for bank, chunk in zip(banks, (256, 64)):
        for _ in range(bank.size // chunk or 1):
            bank.add(min(chunk, bank.size))
    log(bank=args.bank, seconds=time.time() - start, video_std=banks[0].video.std().item(),
        large_std=banks[1].video.std().item(), audio_std=banks[0].audio.std().item())

    def feed():
        for batch, bank in zip(batches, banks):
            batch.draw(bank)

    def every(step, share):
        if step % 32 == 31 and args.bank > 256:
            banks[0].add(256)
            banks[1].add(16)

    seconds = args.until - time.time() if args.until else args.seconds
    trainer = Trainer([generator], loss_of, feed, args.rate, seconds, log, decay=0.999, warm=300)
    steps = trainer.run(args.steps, every)
    trainer.settle()
    log(done=steps)
    for part, module in (
        ("text_encoder", generator.text), ("connectors", generator.connectors), ("transformer", generator.transformer),
    ):
        model.save(args.target, part, getattr(module, "_orig_mod", module))


if __name__ == "__main__":
    main()
