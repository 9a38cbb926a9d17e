"""Writes audio conditioning: samples to log-mel by Lightricks' `AudioProcessor`, log-mel to latents by diffusers.

For published topologies, checks that Lightricks' encoder with the same weights gives the same."""

import math

import torch
from ltx_core.model.audio_vae import AudioEncoderConfigurator, encode_audio
from ltx_core.model.audio_vae.ops import AudioProcessor
from ltx_core.types import Audio

import models
from common import randn, relative_l2, write_case as write
from official_file import STATISTICS, audio_header

OFFICIAL = ("tiny_a", "tiny_2_3")


def sound(seed, rate, samples):
    """Returns two channels: a tone and a rising tone, both with noise."""
    t = torch.arange(samples, dtype=torch.float64) / rate
    tones = torch.stack([torch.sin(2 * math.pi * 440 * t), torch.sin(2 * math.pi * (300 + 4000 * t) * t)]).float()
    return (0.3 * tones + randn(seed, "noise", 2, samples, scale=0.05))[None]


def mel():
    """Samples `[B, channels, n]` to 16 kHz and to log-mel `[B, channels, frames, 64]`."""
    for seed, (rate, samples) in enumerate([(16000, 850), (44100, 1600), (48000, 1700), (22050, 750), (8000, 280)], 700):
        audio, processor = Audio(sound(seed, rate, samples), rate), AudioProcessor(16000, 64, 160, 1024)
        outputs = {"mel": processor.waveform_to_mel(audio), "resampled": processor.resample_audio(audio).waveform}
        write("mel", f"{rate}", {"samples": audio.waveform}, outputs, seed=seed, scalars={"rate": rate})


def _official(name):
    config, weights = models.config(name, "audio_vae"), models.load(name, "audio_vae").state_dict()
    encoder = AudioEncoderConfigurator.from_config({"audio_vae": audio_header(config)})
    named = {STATISTICS.get(key, key.removeprefix("encoder.")): value for key, value in weights.items()}
    encoder.load_state_dict({key: value for key, value in named.items() if not key.startswith("decoder.")})
    return encoder.eval()


def _packed(latents):
    return latents.transpose(1, 2).flatten(2)


def audio_encoder():
    """Log-mel `[B, channels, frames, bins]` to the mean of the distribution `[B, C, L, M]`, not normalised."""
    cases = [
        ("tiny_a", "tiny_a", (1, 2, 17, 8)), ("tiny_a_even", "tiny_a", (2, 2, 12, 8)), ("tiny_b", "tiny_b", (1, 2, 9, 16)),
        ("width", "audio_width", (1, 1, 6, 14)), ("plain", "audio_plain", (2, 2, 8, 16)),
        ("tiny_2_3", "tiny_2_3", (1, 2, 9, 8)), ("tiny_2_3_one", "tiny_2_3", (1, 2, 1, 8)),
    ]
    for seed, (case, name, shape) in enumerate(cases, 720):
        spectrogram, vae = randn(seed, "mel", *shape, scale=2.0) - 4.0, models.load(name, "audio_vae")
        latents = vae.encode(spectrogram).latent_dist.mode()
        if name in OFFICIAL:
            theirs = _packed(_official(name)(spectrogram))
            assert relative_l2(theirs, (_packed(latents) - vae.latents_mean) / vae.latents_std) < 1e-6
        write("audio-encoder", case, {"mel": spectrogram}, {"latents": latents}, model=name, seed=seed)


def given_sound():
    """Samples to normalised tokens `[1, L, C·M]` by Lightricks' code."""
    for seed, name in enumerate(OFFICIAL, 740):
        given = sound(seed, 22050, 1800)
        tokens = _packed(encode_audio(Audio(given, 22050), _official(name)))
        write("given-sound", name, {"samples": given}, {"tokens": tokens}, model=name, seed=seed, scalars={"rate": 22050})
