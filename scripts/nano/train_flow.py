"""Stage: text encoder, connectors and transformer together, by flow matching on latents of clips drawn on the device.

    python train_flow.py IN OUT --seconds 300 [--wait DIR]
"""

import argparse
import os
import pathlib
import random
import sys
import time

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import model
import world
from flow import AUDIO_TOKENS, GRID, Codec, Generator
from mel import log_mel
from runtime import Log, Trainer, half, setup
from words import captions, encode

CAPTIONS = 4
"""Paraphrases kept for every clip of the bank."""


class Bank:
    """Latents and captions of the latest clips, overwritten in a ring while training goes on."""

    def __init__(self, size, codec, tokenizer, device, seed):
        self.size, self.codec, self.tokenizer, self.device = size, codec, tokenizer, device
        self.dice, self.words, self.next = torch.Generator().manual_seed(seed), seed, 0
        self.video = torch.zeros(size, GRID[0] * GRID[1] * GRID[2], 32, device=device)
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
        frames = world.render(scenes)[0].contiguous(memory_format=torch.channels_last_3d)
        with half(self.device):
            video, audio = self.codec.pack(frames, log_mel(world.sound(scenes), world.MEL_FRAMES))
        rows = slice(self.next, self.next + count)
        self.video[rows], self.audio[rows] = video, audio
        self.ids[rows] = ids.view(count, CAPTIONS, -1).to(self.device, non_blocking=True)
        self.next = (self.next + count) % self.size


def main():
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("source"), ask.add_argument("target")
    ask.add_argument("--seconds", type=float, default=300)
    ask.add_argument("--until", type=float, help="stop at this time of the clock instead, in seconds since 1970")
    ask.add_argument("--steps", type=int, default=10**9)
    ask.add_argument("--batch", type=int, default=256)
    ask.add_argument("--bank", type=int, default=16_384)
    ask.add_argument("--rate", type=float, default=1.5e-3)
    ask.add_argument("--seed", type=int, default=3)
    ask.add_argument("--wait", help="folder whose autoencoders another process is still training")
    args = ask.parse_args()
    device = setup(args.seed)
    log = Log(args.target, "flow")
    model.save_frame(args.target)
    generator = Generator(args.source, device)
    compiled = device.type == "cuda" and os.environ.get("NANO_COMPILE", "1") == "1"
    video = torch.randn(args.batch, GRID[0] * GRID[1] * GRID[2], 32, device=device)
    audio = torch.randn(args.batch, AUDIO_TOKENS, 32, device=device)
    ids = torch.zeros(args.batch, model.TOKENS, dtype=torch.long, device=device)
    ids[:, -1] = 2
    sigma = torch.full((args.batch,), 0.5, device=device)
    noise = (torch.randn_like(video), torch.randn_like(audio))
    nothing = ids[:1].clone()

    def loss_of():
        s = sigma[:, None, None]
        with half(device):
            contexts = generator.context(ids, (ids != 0).long())
            v, a = generator.velocity(video + s * (noise[0] - video), audio + s * (noise[1] - audio), contexts, sigma)
        seen, heard = F.mse_loss(v.float(), noise[0] - video), F.mse_loss(a.float(), noise[1] - audio)
        return {"loss": seen + heard, "video": seen, "audio": heard}

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
    bank = Bank(args.bank, codec, tokenizer, device, args.seed + (random.SystemRandom().getrandbits(20) if args.source else 0))
    start = time.time()
    for _ in range(args.bank // 256 or 1):
        bank.add(min(256, args.bank))
    log(bank=args.bank, seconds=time.time() - start, video_std=bank.video.std().item(), audio_std=bank.audio.std().item())

    @torch.no_grad()
    def feed():
        rows = torch.randint(bank.size, (args.batch,), device=device)
        video.copy_(bank.video[rows])
        audio.copy_(bank.audio[rows])
        which = torch.randint(CAPTIONS, (args.batch,), device=device)
        drop = torch.rand(args.batch, 1, device=device) < 0.12
        ids.copy_(torch.where(drop, nothing, bank.ids[rows, which]))
        noise[0].normal_(), noise[1].normal_()
        # Most where the schedule spends its steps: a logit-normal draw, shifted towards noise.
        odds = torch.exp(torch.randn(args.batch, device=device) + 0.6)
        wide = torch.rand(args.batch, device=device)
        sigma.copy_(torch.where(torch.rand(args.batch, device=device) < 0.2, wide, odds / (1 + odds)).clamp(0.002, 1))

    def every(step, share):
        if step % 32 == 31 and args.bank > 256:
            bank.add(256)

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
