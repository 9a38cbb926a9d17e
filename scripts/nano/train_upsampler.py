"""Trains the latent upsampler on clips drawn at both sizes: train_upsampler.py IN OUT --seconds 30."""

import torch
import torch.nn.functional as F

import model
import world
from runtime import Log, Trainer, arguments, half, setup


def main():
    args = arguments(__doc__, seconds=30.0, batch=128, bank=8192, rate=2e-3, seed=4)
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
