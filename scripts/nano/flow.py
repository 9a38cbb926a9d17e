"""Training stage: text encoder, connectors and transformer by flow matching."""

import math

import torch
import torch.nn.functional as F

import model
import world
from generator import AUDIO_TOKENS, GRID, LARGE, Codec, Generator
from mel import log_mel
from words import TOKENS, captions, encode

CAPTIONS = 4
"""Paraphrases kept for every clip of the bank."""


class Bank:
    """Ring buffer of latents and captions of recent clips."""

    def __init__(self, job, codec, size, grid, seed):
        self.job, self.codec, self.size, self.scale = job, codec, size, grid[1] // GRID[1]
        self.dice, self.words, self.next = torch.Generator().manual_seed(seed), seed, 0
        self.video = torch.zeros(size, math.prod(grid), 32, device=job.device)
        self.audio = torch.zeros(size, AUDIO_TOKENS, 32, device=job.device)
        self.ids = torch.zeros(size, CAPTIONS, TOKENS, dtype=torch.long, device=job.device)

    @torch.no_grad()
    def add(self, count):
        scenes = world.sample(count, self.dice)
        texts = [captions(scenes, self.words + i) for i in range(CAPTIONS)]
        self.words += CAPTIONS
        ids = encode(self.job.folder, [t for row in zip(*texts) for t in row])[0]
        scenes = scenes.to(self.job.device)
        frames = world.render(scenes, self.scale)[0].contiguous(memory_format=torch.channels_last_3d)
        with self.job.half():
            video, audio = self.codec.pack(frames, log_mel(world.sound(scenes), world.MEL_FRAMES))
        rows = slice(self.next, self.next + count)
        self.video[rows], self.audio[rows] = video, audio
        self.ids[rows] = ids.view(count, CAPTIONS, -1).to(self.job.device, non_blocking=True)
        self.next = (self.next + count) % self.size


class Batch:
    """Latents, captions and noise of one size, redrawn in place before each step."""

    def __init__(self, count, grid, device):
        self.video = torch.randn(count, math.prod(grid), 32, device=device)
        self.audio = torch.randn(count, AUDIO_TOKENS, 32, device=device)
        self.noise = torch.randn_like(self.video), torch.randn_like(self.audio)
        self.ids = torch.zeros(count, TOKENS, dtype=torch.long, device=device)
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
        odds, wide = torch.exp(torch.randn(count, device=device) + 0.6), torch.rand(count, device=device)
        self.sigma.copy_(torch.where(chance(0.2)[:, 0], wide, odds / (1 + odds)).clamp(0.002, 1))

    def losses(self, generator, contexts):
        """Returns squared velocity errors of both streams, ignoring conditioning tokens."""
        s, free = self.sigma[:, None, None], (1 - self.kept)[..., None]
        video = self.video + s * free * (self.noise[0] - self.video)
        audio = self.audio + s * (self.noise[1] - self.audio)
        v, a = generator.velocity(video, audio, contexts, self.sigma, self.kept)
        seen = ((v.float() - self.noise[0] + self.video).square() * free).sum() / (free.sum() * v.shape[2])
        return seen, F.mse_loss(a.float(), self.noise[1] - self.audio)


def flow(job):
    generator = Generator(job.folder, job.device)
    sizes = job.batch, max(job.batch // 16, 1)
    batches = [Batch(size, grid, job.device) for size, grid in zip(sizes, (GRID, LARGE))]

    def loss_of():
        ids = torch.cat([b.ids for b in batches])
        with job.half():
            contexts = zip(*(c.split(sizes) for c in generator.context(ids, (ids != 0).long())))
            (seen, heard), (large, sound) = (b.losses(generator, c) for b, c in zip(batches, contexts))
        return {"loss": seen + heard + 0.25 * (large + sound), "video": seen, "audio": heard, "large": large}

    if job.cuda:
        generator.transformer.compile_repeated_blocks(fullgraph=False, dynamic=False)
    codec = Codec(job.folder, job.device)
    banks = [Bank(job, codec, 64 * job.batch // (1, 8)[i], grid, job.seed + i) for i, grid in enumerate((GRID, LARGE))]
    for bank, chunk in zip(banks, (job.batch, max(job.batch // 4, 1))):
        for _ in range(bank.size // chunk):
            bank.add(chunk)
    deviations = {"video": banks[0].video, "large": banks[1].video, "audio": banks[0].audio}
    job.log(bank=banks[0].size, **{f"{name}_std": latents.std().item() for name, latents in deviations.items()})

    def feed():
        for batch, bank in zip(batches, banks):
            batch.draw(bank)

    def every(step):
        if step % 32 == 31:
            for bank, size in zip(banks, sizes):
                bank.add(size)

    job.log(done=job.train([generator], loss_of, feed, every=every, decay=0.999, warm=300))
    model.save(job.folder, text_encoder=generator.text, connectors=generator.connectors, transformer=generator.transformer)
