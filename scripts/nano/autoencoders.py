"""Training stages: the video autoencoder or its decoder alone, the audio autoencoder with the vocoder, the latent upsampler."""

import torch
import torch.nn.functional as F

import model
import world
from mel import log_mel, spectral_loss


def _pool(job):
    size = 400_000 if job.cuda else 4096
    pool = world.sample(size, torch.Generator().manual_seed(job.seed)).to(job.device)
    return lambda count: pool[torch.randint(size, (count,), device=job.device)]


def _edge_loss(a, b, dims):
    """Returns the distance of the differences of neighbours along `dims`."""
    return sum(F.l1_loss(a.diff(dim=dim), b.diff(dim=dim)) for dim in dims)


def _draw(mean, logvar):
    return mean + (0.5 * logvar).exp() * torch.randn_like(mean)


def _prior(mean, logvar):
    return 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()


@torch.no_grad()
def _normalise(vae, latents):
    spread, mean = torch.std_mean(torch.cat([x.flatten(0, -2) for x in latents]).double(), 0, correction=0)
    vae.latents_mean.copy_(mean)
    vae.latents_std.copy_(spread.clamp(min=1e-3))


def _done(job, vae, steps, **values):
    values = {k: sum(v) / len(v) if isinstance(v, list) else v for k, v in values.items()}
    job.log(done=steps, **values, std_low=vae.latents_std.min().item(), std_high=vae.latents_std.max().item())


class View:
    """Random windows of `height` x `width` pixels around the moving shape, of frames drawn at `scale`."""

    def __init__(self, job, vae, draw, batch, height, width, scale=1):
        self.job, self.vae, self.draw_scenes, self.scale = job, vae, draw, scale
        self.whole = (height, width) == (scale * world.HEIGHT, scale * world.WIDTH)
        clips = torch.zeros(batch, 3, world.FRAMES, height, width, device=job.device)
        self.clips = clips.to(memory_format=torch.channels_last_3d)
        self.weight = torch.zeros_like(self.clips[:, :1])

    @torch.no_grad()
    def feed(self):
        scenes = self.draw_scenes(len(self.clips))
        frames, cover = world.render(scenes, self.scale)
        if not self.whole:
            frames, cover = self._windows(scenes, frames, cover)
        self.clips.copy_(frames)
        # Weights the shape and its surroundings more than the background.
        self.weight.copy_(1 + 4 * F.max_pool3d(cover, (1, 7, 7), 1, (0, 3, 3)))

    def _windows(self, scenes, *images):
        height, width = self.clips.shape[3:]
        cx, cy = (v[:, 0] for v in world.path(scenes, torch.tensor([world.FRAMES / 2], device=self.job.device))[:2])
        shift = lambda size: (torch.rand(len(cx), device=cx.device) - 0.5) * size
        left = (cx - width / 2 + shift(width)).long().clamp(0, world.WIDTH - width)
        top = (cy - height / 2 + shift(height)).long().clamp(0, world.HEIGHT - height)
        rows = (top[:, None] + torch.arange(height, device=cx.device))[:, None, None, :, None]
        columns = (left[:, None] + torch.arange(width, device=cx.device))[:, None, None, None]
        lines = [x.gather(3, rows.expand(*x.shape[:3], -1, x.shape[4])) for x in images]
        return [x.gather(4, columns.expand(*x.shape[:3], height, -1)) for x in lines]

    def _moments(self):
        """Returns means and log variances of the latents, one variance per position."""
        mean, logvar = self.vae.encoder(self.clips).float().chunk(2, 1)
        return mean, logvar[:, :1].clamp(-12, 4)

    def losses(self):
        with self.job.half():
            mean, logvar = self._moments()
            out = self.vae.decoder(_draw(mean, logvar)).float()
        near = ((out - self.clips).abs() * self.weight).mean()
        return torch.stack([near, _edge_loss(out, self.clips, (4, 3, 2)), _prior(mean, logvar), logvar.mean()])

    @torch.no_grad()
    def measure(self):
        latents, error = [], []
        for _ in range(64 if self.job.cuda else 4):
            self.feed()
            with self.job.half():
                mean = self._moments()[0]
                out = self.vae.decoder(mean).float()
            error.append(((out.clamp(-1, 1) - self.clips) / 2).square().mean().item())
            latents.append(mean.movedim(1, -1))
        return -10 * torch.tensor(error).mean().log10().item(), latents


def video(job, decoder_only=False):
    """Trains the video autoencoder, or its decoder alone on fixed latents of both sizes."""
    vae = model.load(job.folder, "vae", job.device).to(memory_format=torch.channels_last_3d)
    draw = _pool(job)

    def phase(views, **options):
        def loss_of():
            near, rims, prior, logvar = sum(view.losses() for view in views) / len(views)
            return dict(loss=near + 0.5 * rims + 1e-4 * prior, near=near, rims=rims, prior=prior, logvar=logvar)

        return job.train([vae], loss_of, lambda: [view.feed() for view in views], warm=200, **options)

    whole = View(job, vae, draw, job.batch, world.HEIGHT, world.WIDTH)
    if decoder_only:
        vae.encoder.requires_grad_(False)
        large = View(job, vae, draw, max(job.batch // 8, 1), 2 * world.HEIGHT, 2 * world.WIDTH, 2)
        steps = phase([whole, large], rate=0.7)
        _done(job, vae, steps, psnr=whole.measure()[0], psnr_large=large.measure()[0])
    else:
        # Windows around the shape train three times as fast; full frames follow.
        steps = phase([View(job, vae, draw, min(64, job.batch * 2), 64, 64)], share=0.55, falls=False)
        steps += phase([whole], share=0.45, rate=0.7)
        psnr, latents = whole.measure()
        _normalise(vae, latents)
        _done(job, vae, steps, psnr=psnr)
    model.save(job.folder, vae=vae)


def audio(job):
    vae, vocoder = (model.load(job.folder, part, job.device) for part in ("audio_vae", "vocoder"))
    draw, low = _pool(job), torch.zeros(job.batch, 2, world.SAMPLES, device=job.device)
    high = torch.zeros(job.batch, 2, world.SAMPLES_HIGH, device=job.device)
    mels = torch.zeros(job.batch, 2, world.MEL_FRAMES, 64, device=job.device)

    @torch.no_grad()
    def feed():
        scenes = draw(job.batch)
        low.copy_(world.sound(scenes))
        high.copy_(world.sound(scenes, 48_000))
        mels.copy_(log_mel(low, world.MEL_FRAMES))

    def autoencoded(choose):
        """Returns means and log variances of the latents, and the decoded spectrograms of what `choose` makes of them."""
        with job.half():
            mean, logvar = vae.encoder(mels).float().chunk(2, 1)
            logvar = logvar.clamp(-12, 4)
            return mean, logvar, vae.decoder(choose(mean, logvar)).float()

    def loss_of():
        mean, logvar, again = autoencoded(_draw)
        mel, prior = F.l1_loss(again, mels), _prior(mean, logvar)
        # Half of the vocoder's inputs are autoencoded.
        some = job.batch // 2
        first = vocoder.vocoder(torch.cat([again[:some].detach(), mels[some:]]))
        one = spectral_loss(first, low, (256, 512, 1024, 2048)) + 10 * F.l1_loss(first, low)
        # No gradient flows from the second stage to the first.
        with torch.no_grad():
            given = vocoder.mel_stft(first.flatten(0, 1))[0].unflatten(0, first.shape[:2]).transpose(2, 3)
            skip = vocoder.resampler(first)
        second = skip + vocoder.bwe_generator(given)
        two = spectral_loss(second, high, (512, 1024, 2048, 4096)) + 10 * F.l1_loss(second, high)
        loss = mel + 0.5 * _edge_loss(again, mels, (2, 3)) + 3e-4 * prior + one + two
        return {"loss": loss, "mel": mel, "prior": prior, "logvar": logvar.mean(), "first": one, "second": two}

    steps = job.train([vae, vocoder], loss_of, feed, warm=200, clip=5.0)
    latents, error, waves = [], [], []
    with torch.no_grad():
        for _ in range(64 if job.cuda else 2):
            feed()
            mean, _, again = autoencoded(lambda mean, _: mean)
            error.append(F.l1_loss(again, mels).item())
            waves.append((F.mse_loss(vocoder.vocoder(again), low) / low.square().mean()).item())
            latents.append(mean.permute(0, 2, 1, 3).flatten(2))
    _normalise(vae, latents)
    _done(job, vae, steps, mel=error, wave_error=waves)
    model.save(job.folder, audio_vae=vae, vocoder=vocoder)


def upsampler(job):
    vae = model.load(job.folder, "vae", job.device).requires_grad_(False).to(memory_format=torch.channels_last_3d)
    network = model.load(job.folder, "latent_upsampler", job.device)
    bank = 64 * job.batch
    scenes = world.sample(bank, torch.Generator().manual_seed(job.seed)).to(job.device)

    @torch.no_grad()
    def encoded(scale):
        latents = []
        for rows in torch.arange(bank, device=job.device).split(64):
            with job.half():
                latents.append(vae.encoder(world.render(scenes[rows], scale)[0])[:, : vae.config.latent_channels].float())
        return torch.cat(latents)

    small, large = encoded(1), encoded(2)
    given, wanted = small[: job.batch].clone(), large[: job.batch].clone()
    spread = vae.latents_std.view(1, -1, 1, 1, 1)

    @torch.no_grad()
    def feed():
        rows = torch.randint(bank, (job.batch,), device=job.device)
        given.copy_(small[rows])
        wanted.copy_(large[rows])

    job.log(done=job.train([network], lambda: {"loss": F.mse_loss(network(given) / spread, wanted / spread)}, feed))
    model.save(job.folder, latent_upsampler=network)
