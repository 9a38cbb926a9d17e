"""Stage: the latent upsampler, on pairs of latents of one clip drawn small and drawn with twice the pixels each way.

    python train_upsampler.py IN OUT --seconds 30
"""

import argparse

import torch
import torch.nn.functional as F

import model
import world
from runtime import Log, Trainer, half, setup


def main():
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("source"), ask.add_argument("target")
    ask.add_argument("--seconds", type=float, default=30)
    ask.add_argument("--steps", type=int, default=10**9)
    ask.add_argument("--batch", type=int, default=128)
    ask.add_argument("--bank", type=int, default=8192)
    ask.add_argument("--rate", type=float, default=2e-3)
    ask.add_argument("--seed", type=int, default=4)
    args = ask.parse_args()
    device = setup(args.seed)
    log = Log(args.target, "upsampler")
    vae = model.load(args.source, "vae", device).requires_grad_(False).to(memory_format=torch.channels_last_3d)
    upsampler = model.load(args.source, "latent_upsampler", device)
    scenes = world.sample(args.bank, torch.Generator().manual_seed(args.seed)).to(device)

    @torch.no_grad()
    def encoded(scale):
        latents = []
        for rows in torch.arange(args.bank, device=device).split(64):
            with half(device):
                latents.append(vae.encoder(world.render(scenes[rows], scale=scale)[0])[:, : vae.config.latent_channels].float())
        return torch.cat(latents)

    small, large = encoded(1), encoded(2)
    given, wanted = small[: args.batch].clone(), large[: args.batch].clone()
    spread = vae.latents_std.view(1, -1, 1, 1, 1)

    @torch.no_grad()
    def feed():
        rows = torch.randint(args.bank, (args.batch,), device=device)
        given.copy_(small[rows])
        wanted.copy_(large[rows])

    def loss_of():
        return {"loss": F.mse_loss(upsampler(given) / spread, wanted / spread)}

    trainer = Trainer([upsampler], loss_of, feed, args.rate, args.seconds, log)
    steps = trainer.run(args.steps)
    trainer.settle()
    log(done=steps)
    model.save(args.target, "latent_upsampler", upsampler)


if __name__ == "__main__":
    main()
