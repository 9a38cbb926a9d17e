"""Log-mel spectrograms of LTX-2's audio encoder, and the fixed bases of its vocoder."""

import functools
import math

import torch
import torch.nn.functional as F

RATE, HOP, WINDOW, BINS = 16_000, 160, 1024, 64


def slaney_filters(bins, transform, rate, top):
    """Returns triangular filters of unit area on the Slaney scale, [bins, transform // 2 + 1]."""

    def mel(hz):
        hz = torch.as_tensor(hz, dtype=torch.float64)
        return torch.where(hz < 1000, hz / (200 / 3), 15 + (hz.clamp(min=1e-9) / 1000).log() * 27 / math.log(6.4))

    def hertz(m):
        return torch.where(m < 15, m * (200 / 3), 1000 * ((m - 15) * math.log(6.4) / 27).exp())

    edges = hertz(torch.linspace(0, float(mel(top)), bins + 2, dtype=torch.float64))
    lines = torch.linspace(0, rate / 2, transform // 2 + 1, dtype=torch.float64)
    width = edges.diff()
    ramps = edges[:, None] - lines[None]
    filters = torch.minimum(-ramps[:-2] / width[:-1, None], ramps[2:] / width[1:, None]).clamp(min=0)
    return (filters * (2 / (edges[2:] - edges[:-2]))[:, None]).float()


@functools.cache
def _tables(device):
    return torch.hann_window(WINDOW, device=device), slaney_filters(BINS, WINDOW, RATE, RATE / 2).to(device)


def log_mel(wave, frames):
    """[..., samples] at 16 kHz to [..., frames, 64]: magnitudes of centred frames, natural logarithm, floor 1e-5."""
    window, filters = _tables(wave.device)
    flat = wave.reshape(-1, wave.shape[-1]).float()
    spectrum = torch.stft(flat, WINDOW, HOP, window=window, center=True, pad_mode="reflect", return_complex=True)
    mel = (filters @ spectrum.abs()).clamp(min=1e-5).log().transpose(1, 2)[:, :frames]
    return mel.reshape(*wave.shape[:-1], frames, BINS)


@torch.no_grad()
def fill_stft(vocoder):
    """Fills the vocoder's Fourier bases and mel filters, which diffusers initialises to zero."""
    config = vocoder.config
    length, stft = config.filter_length, vocoder.mel_stft.stft_fn
    n = torch.arange(length, dtype=torch.float64)
    angle = 2 * math.pi * n[None] * torch.arange(length // 2 + 1, dtype=torch.float64)[:, None] / length
    window = torch.hann_window(config.window_length, dtype=torch.float64)
    window = F.pad(window, ((length - len(window)) // 2, (length - len(window) + 1) // 2))
    basis = torch.cat([angle.cos(), -angle.sin()]) * window
    # Rounded like the stored bfloat16 values.
    stft.forward_basis.copy_(basis[:, None].bfloat16())
    stft.inverse_basis.copy_(torch.linalg.pinv(basis).T[:, None].bfloat16())
    rate = config.input_sampling_rate
    vocoder.mel_stft.mel_basis.copy_(slaney_filters(config.num_mel_channels, length, rate, rate / 2).bfloat16())


def spectral_loss(got, wanted, windows):
    """Returns the mean distance of magnitudes and log magnitudes over several window lengths."""
    got, wanted = got.reshape(-1, got.shape[-1]), wanted.reshape(-1, wanted.shape[-1])
    total = 0.0
    for length in windows:
        window = torch.hann_window(length, device=got.device)
        a, b = (
            torch.stft(x, length, length // 4, window=window, center=True, return_complex=True).abs() for x in (got, wanted)
        )
        # A floor below -60 dB would make the loss mostly about silence.
        floor = 1e-4 * length
        ratio = a.clamp(min=floor).log() - b.clamp(min=floor).log()
        total = total + (a - b).abs().mean() / b.mean().clamp(min=floor) + 0.5 * ratio.abs().mean()
    return total / len(windows)


def _antialiased(x, alpha, beta, up, down):
    """A periodic activation between doubling and halving the rate, as sums of shifted copies: [batch, channels, time].

    The same numbers as diffusers' AntiAliasAct1d of ratio 2 and 12 taps, whose grouped convolutions of one channel each
    take most of a vocoder's time. Written like this it compiles to a few kernels.
    """
    n = x.shape[-1]
    padded = torch.cat([x[..., :1].expand(-1, -1, 5), x, x[..., -1:].expand(-1, -1, 5)], -1)
    even = 2 * sum(up[2 * j + 1] * padded[..., 7 - j : 7 - j + n] for j in range(6))
    odd = 2 * sum(up[2 * j] * padded[..., 8 - j : 8 - j + n] for j in range(6))
    scale, height = alpha.exp()[:, None], 1 / (beta.exp() + 1e-9)[:, None]
    even = even + height * (even * scale).sin().square()
    odd = odd + height * (odd * scale).sin().square()
    first, last = even[..., :1], odd[..., -1:]
    even = torch.cat([first, first, even, last, last, last], -1)
    odd = torch.cat([first, first, first, odd, last, last], -1)
    return sum(down[2 * j + 1] * even[..., j : j + n] + down[2 * j] * odd[..., j : j + n] for j in range(6))


def quicken(vocoder, compiled):
    """Replaces a vocoder's activations by equal, faster ones for training."""
    kernel = torch.compile(_antialiased, dynamic=True) if compiled else _antialiased
    for module in vocoder.modules():
        if type(module).__name__ == "AntiAliasAct1d":
            up, down = module.upsample.filter.flatten(), module.downsample.filter.flatten()
            module.forward = lambda x, m=module, up=up, down=down: kernel(x, m.act.alpha, m.act.beta, up, down)
