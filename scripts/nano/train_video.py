"""Trains the video autoencoder: train_video.py IN OUT --seconds 300."""

import pathlib

import torch
import torch.nn.functional as F

import model
import world
from runtime import DECODER_ONLY, Log, Trainer, arguments, edge_loss, half, setup


def moments(vae, clips):
    """Returns means and log variances of the latents, one variance per position."""
    mean, logvar = vae.encoder(clips).float().chunk(2, 1)
    return mean, logvar[:, :1].clamp(-12, 4)


def windows(scenes, height, width, *images):
    """Crops a random window around each clip's moving shape."""
    cx, cy = (v[:, 0] for v in world.path(scenes, torch.tensor([world.FRAMES / 2], device=scenes.dice.device))[:2])
    shift = lambda size: (torch.rand(len(scenes), device=cx.device) - 0.5) * size
    left = (cx - width / 2 + shift(width)).long().clamp(0, world.WIDTH - width)
    top = (cy - height / 2 + shift(height)).long().clamp(0, world.HEIGHT - height)
    rows = (top[:, None] + torch.arange(height, device=cx.device))[:, None, None, :, None]
    columns = (left[:, None] + torch.arange(width, device=cx.device))[:, None, None, None]
    return [
        x.gather(3, rows.expand(*x.shape[:3], -1, x.shape[4])).gather(4, columns.expand(*x.shape[:3], height, -1)) for x in images
    ]


def main():
    args = arguments(__doc__, DECODER_ONLY, seconds=300.0, batch=32, rate=1e-3, seed=1)
    device = setup(args.seed)
    log = Log(args.target, "vae")
    vae = model.load(args.source, "vae", device)
    vae.to(memory_format=torch.channels_last_3d)
    if args.decoder_only:
        vae.encoder.requires_grad_(False)
    pool = world.sample(4096 if device.type == "cpu" else 400_000, torch.Generator().manual_seed(args.seed)).to(device)

    class View:
        """Random windows of `height` x `width` pixels around the moving shape, of frames drawn at `scale`."""

        def __init__(self, batch, height, width, scale=1):
            self.whole, self.scale = (height, width) == (scale * world.HEIGHT, scale * world.WIDTH), scale
            clips = torch.zeros(batch, 3, world.FRAMES, height, width, device=device)
            self.clips = clips.to(memory_format=torch.channels_last_3d)
            self.weight = torch.zeros_like(self.clips[:, :1])

        @torch.no_grad()
        def draw(self):
            scenes = pool[torch.randint(len(pool), (len(self.clips),), device=device)]
            frames, cover = world.render(scenes, scale=self.scale)
            if not self.whole:
                frames, cover = windows(scenes, *self.clips.shape[3:], frames, cover)
            self.clips.copy_(frames)
            # Weights the shape and its surroundings more than the background.
            self.weight.copy_(1 + 4 * F.max_pool3d(cover, (1, 7, 7), 1, (0, 3, 3)))

        def losses(self):
            with half(device):
                mean, logvar = moments(vae, self.clips)
                out = vae.decoder(mean + (0.5 * logvar).exp() * torch.randn_like(mean)).float()
            near = ((out - self.clips).abs() * self.weight).mean()
            prior = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
            return torch.stack([near, edge_loss(out, self.clips), prior, logvar.mean()])

    def phase(views, rate, seconds, falls, most):
        def loss_of():
            near, rims, prior, logvar = sum(view.losses() for view in views) / len(views)
            loss = near + 0.5 * rims + 1e-4 * prior
            return {"loss": loss, "near": near, "rims": rims, "prior": prior, "logvar": logvar}

        trainer = Trainer([vae], loss_of, lambda: [view.draw() for view in views], rate, seconds, log, warm=200, falls=falls)
        steps = trainer.run(most)
        trainer.settle()
        return steps

    @torch.no_grad()
    def measure(view):
        """Returns the PSNR of frames, and mean and deviation of their latents."""
        count, total, square, error = 0, 0, 0, []
        for _ in range(4 if device.type == "cpu" else 64):
            view.draw()
            with half(device):
                mean = moments(vae, view.clips)[0]
                out = vae.decoder(mean).float()
            error.append(((out.clamp(-1, 1) - view.clips) / 2).square().mean().item())
            total, square = total + mean.double().sum((0, 2, 3, 4)), square + mean.double().square().sum((0, 2, 3, 4))
            count += mean[:, 0].numel()
        mean = total / count
        return -10 * torch.tensor(error).mean().log10().item(), mean, (square / count - mean.square()).clamp(min=1e-6).sqrt()

    whole = View(args.batch, world.HEIGHT, world.WIDTH)
    if args.decoder_only:
        # Also trains on the second stage's size.
        large = View(max(args.batch // 8, 1), 2 * world.HEIGHT, 2 * world.WIDTH, 2)
        steps = phase([whole, large], 0.7 * args.rate, args.seconds, True, args.steps)
        psnr = {"psnr": measure(whole)[0], "psnr_large": measure(large)[0]}
    else:
        # Windows around the shape train three times as fast; full frames follow.
        small = View(min(64, args.batch * 2), 64, 64)
        steps = phase([small], args.rate, 0.55 * args.seconds, False, args.steps)
        steps += phase([whole], 0.7 * args.rate, 0.45 * args.seconds, True, args.steps)
        psnr, mean, spread = measure(whole)
        vae.latents_mean.copy_(mean)
        vae.latents_std.copy_(spread)
        psnr = {"psnr": psnr}
    log(done=steps, **psnr, std_low=vae.latents_std.min().item(), std_high=vae.latents_std.max().item())
    model.save(args.target, "vae", vae)
    pathlib.Path(args.target, "vae.done").touch()


if __name__ == "__main__":
    main()
