"""Trains the audio autoencoder and the vocoder: train_audio.py IN OUT --seconds 300."""

import os
import pathlib

import torch
import torch.nn.functional as F

import model
import world
from mel import log_mel, quicken, spectral_loss
from runtime import DECODER_ONLY, Log, Trainer, arguments, half, setup


def resampled(vocoder, low):
    """Returns the second stage's output; no gradient flows to the first stage."""
    low = low.detach()
    with torch.no_grad():
        mel = vocoder.mel_stft(low.flatten(0, 1))[0].unflatten(0, low.shape[:2]).transpose(2, 3)
        skip = vocoder.resampler(low)
    return skip + vocoder.bwe_generator(mel)


def main():
    args = arguments(__doc__, DECODER_ONLY, seconds=300.0, batch=32, rate=1e-3, seed=2)
    device = setup(args.seed)
    log = Log(args.target, "audio")
    vae = model.load(args.source, "audio_vae", device)
    vocoder = model.load(args.source, "vocoder", device)
    quicken(vocoder, device.type == "cuda" and os.environ.get("NANO_COMPILE", "1") == "1")
    if args.decoder_only:
        vae.encoder.requires_grad_(False)
    pool = world.sample(4096 if device.type == "cpu" else 400_000, torch.Generator().manual_seed(args.seed)).to(device)
    low = torch.zeros(args.batch, 2, world.SAMPLES, device=device)
    high = torch.zeros(args.batch, 2, world.SAMPLES_HIGH, device=device)
    mels = torch.zeros(args.batch, 2, world.MEL_FRAMES, 64, device=device)

    @torch.no_grad()
    def feed():
        rows = torch.randint(len(pool), (args.batch,), device=device)
        low.copy_(world.sound(pool[rows]))
        high.copy_(world.sound(pool[rows], 48_000))
        mels.copy_(log_mel(low, world.MEL_FRAMES))

    def coded(z):
        with half(device):
            return vae.decoder(z).float()

    def loss_of():
        with half(device):
            mean, logvar = vae.encoder(mels).float().chunk(2, 1)
        logvar = logvar.clamp(-12, 4)
        again = coded(mean + (0.5 * logvar).exp() * torch.randn_like(mean))
        mel = F.l1_loss(again, mels)
        rims = F.l1_loss(again.diff(dim=2), mels.diff(dim=2)) + F.l1_loss(again.diff(dim=3), mels.diff(dim=3))
        prior = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        # Half of the vocoder's inputs are autoencoded.
        some = args.batch // 2
        first = vocoder.vocoder(torch.cat([again[:some].detach(), mels[some:]]))
        one = spectral_loss(first, low, (256, 512, 1024, 2048)) + 10 * F.l1_loss(first, low)
        second = resampled(vocoder, first)
        two = spectral_loss(second, high, (512, 1024, 2048, 4096)) + 10 * F.l1_loss(second, high)
        loss = mel + 0.5 * rims + 3e-4 * prior + one + two
        return {"loss": loss, "mel": mel, "prior": prior, "logvar": logvar.mean(), "first": one, "second": two}

    trainer = Trainer([vae, vocoder], loss_of, feed, args.rate, args.seconds, log, warm=200, clip=5.0)
    steps = trainer.run(args.steps)
    trainer.settle()
    with torch.no_grad():
        count, total, square, error, waves = 0, 0, 0, [], []
        for _ in range(2 if device.type == "cpu" else 64):
            feed()
            with half(device):
                mean = vae.encoder(mels).float().chunk(2, 1)[0]
            again = coded(mean)
            error.append(F.l1_loss(again, mels).item())
            waves.append((F.mse_loss(vocoder.vocoder(again), low) / low.square().mean()).item())
            packed = mean.permute(0, 2, 1, 3).flatten(2).double()
            total, square = total + packed.sum((0, 1)), square + packed.square().sum((0, 1))
            count += packed[..., 0].numel()
        if not args.decoder_only:
            mean = total / count
            vae.latents_mean.copy_(mean)
            vae.latents_std.copy_((square / count - mean.square()).clamp(min=1e-6).sqrt())
    log(done=steps, mel=sum(error) / len(error), wave_error=sum(waves) / len(waves),
        std_low=vae.latents_std.min().item(), std_high=vae.latents_std.max().item())
    model.save(args.target, "audio_vae", vae)
    model.save(args.target, "vocoder", vocoder)
    pathlib.Path(args.target, "audio.done").touch()


if __name__ == "__main__":
    main()
