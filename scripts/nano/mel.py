"""Log-mel spectrograms of LTX-2's audio encoder, and the fixed bases of its vocoder."""

import functools
import math

import torch
import torch.nn.functional as F
from transformers.audio_utils import mel_filter_bank

RATE, HOP, WINDOW, BINS = 16_000, 160, 1024, 64


def slaney_filters(bins, transform, rate):
    """Returns triangular filters of unit area on the Slaney scale, [bins, transform // 2 + 1]."""
    filters = mel_filter_bank(transform // 2 + 1, bins, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    return torch.from_numpy(filters).T.float()


@functools.cache
def _tables(device):
    return torch.hann_window(WINDOW, device=device), slaney_filters(BINS, WINDOW, RATE).to(device)


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
    vocoder.mel_stft.mel_basis.copy_(slaney_filters(config.num_mel_channels, length, config.input_sampling_rate).bfloat16())


def spectral_loss(got, wanted, windows):
    """Returns the mean distance of magnitudes and log magnitudes over several window lengths."""
    got, wanted = got.reshape(-1, got.shape[-1]), wanted.reshape(-1, wanted.shape[-1])
    total = 0.0
    for length in windows:
        options = dict(window=torch.hann_window(length, device=got.device), center=True, return_complex=True)
        a, b = (torch.stft(x, length, length // 4, **options).abs() for x in (got, wanted))
        # A floor below -60 dB would make the loss mostly about silence.
        floor = 1e-4 * length
        ratio = a.clamp(min=floor).log() - b.clamp(min=floor).log()
        total = total + (a - b).abs().mean() / b.mean().clamp(min=floor) + 0.5 * ratio.abs().mean()
    return total / len(windows)
