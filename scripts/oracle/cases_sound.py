"""Writes audio conditioning: samples to log-mel by Lightricks' `AudioProcessor`, log-mel to latents by diffusers.

For published topologies, checks that Lightricks' encoder with the same weights gives the same.
"""

import math

import torch
from ltx_core.model.audio_vae import AudioEncoder, encode_audio
from ltx_core.model.audio_vae.causality_axis import CausalityAxis
from ltx_core.model.audio_vae.ops import AudioProcessor
from ltx_core.model.common.normalization import NormType
from ltx_core.types import Audio

import models
from common import randn, relative_l2, show, write_case

OFFICIAL = ("tiny_a", "tiny_2_3")


def sound(seed, rate, samples):
    """Returns two channels: a tone and a rising tone, both with noise."""
    t = torch.arange(samples, dtype=torch.float64) / rate
    tones = torch.stack([torch.sin(2 * math.pi * 440 * t), torch.sin(2 * math.pi * (300 + 4000 * t) * t)]).float()
    return (0.3 * tones + randn(seed, "noise", 2, samples, scale=0.05))[None]


def mel():
    """Samples `[B, channels, n]` to 16 kHz and to log-mel `[B, channels, frames, 64]`."""
    rates = [(16000, 850), (44100, 1600), (48000, 1700), (22050, 750), (8000, 280)]
    for index, (rate, samples) in enumerate(rates):
        seed = 700 + index
        given = sound(seed, rate, samples)
        processor, given_audio = AudioProcessor(16000, 64, 160, 1024), Audio(given, rate)
        made, resampled = processor.waveform_to_mel(given_audio), processor.resample_audio(given_audio).waveform
        write_case(
            "mel", f"{rate}", {"samples": given}, {"mel": made, "resampled": resampled}, script=__file__, model="none", seed=seed, scalars={"rate": rate},
        )
        show(f"mel/{rate} {list(made.shape)}", made)


def _official(name, mel_bins):
    config, weights = models.AUDIO_VAE[name], models.load(name, "audio_vae").state_dict()
    encoder = AudioEncoder(
        ch=config["base_channels"], ch_mult=(1, 2, 4), num_res_blocks=config.get("num_res_blocks", 2), attn_resolutions=set(),
        in_channels=2, resolution=config["resolution"], z_channels=config["latent_channels"], double_z=True,
        mid_block_add_attention=False, norm_type=NormType.PIXEL, causality_axis=CausalityAxis.HEIGHT, sample_rate=16000,
        mel_hop_length=160, n_fft=1024, is_causal=True, mel_bins=mel_bins,
    )
    own = {key.removeprefix("encoder."): value for key, value in weights.items() if key.startswith("encoder.")}
    own |= {f"per_channel_statistics.{n}-of-means": weights[f"latents_{k}"] for n, k in (("mean", "mean"), ("std", "std"))}
    encoder.load_state_dict(own)
    return encoder.eval()


def _packed(latents):
    return latents.transpose(1, 2).flatten(2)


def audio_encoder():
    """Log-mel `[B, channels, frames, bins]` to the mean of the distribution `[B, C, L, M]`, not normalised."""
    cases = [
        ("tiny_a", "tiny_a", (1, 2, 17, 8)),
        ("tiny_a_even", "tiny_a", (2, 2, 12, 8)),
        ("tiny_b", "tiny_b", (1, 2, 9, 16)),
        ("width", "audio_width", (1, 1, 6, 14)),
        ("plain", "audio_plain", (2, 2, 8, 16)),
        ("tiny_2_3", "tiny_2_3", (1, 2, 9, 8)),
        ("tiny_2_3_one", "tiny_2_3", (1, 2, 1, 8)),
    ]
    for index, (case, name, shape) in enumerate(cases):
        spectrogram = randn(720 + index, "mel", *shape, scale=2.0) - 4.0
        vae = models.load(name, "audio_vae")
        latents = vae.encode(spectrogram).latent_dist.mode().contiguous()
        if name in OFFICIAL:
            theirs = _packed(_official(name, shape[3])(spectrogram))
            assert relative_l2(theirs, (_packed(latents) - vae.latents_mean) / vae.latents_std) < 1e-6
        write_case(
            "audio-encoder", case, {"mel": spectrogram}, {"latents": latents}, script=__file__, model=name, seed=720 + index,
        )
        show(f"audio-encoder/{case} {list(latents.shape)}", latents)


def given_sound():
    """Samples to normalised tokens `[1, L, C·M]` by Lightricks' code."""
    for index, name in enumerate(OFFICIAL):
        given = sound(740 + index, 22050, 1800)
        tokens = _packed(encode_audio(Audio(given, 22050), _official(name, models.AUDIO_VAE[name]["mel_bins"])))
        write_case(
            "given-sound", name, {"samples": given}, {"tokens": tokens.contiguous()}, script=__file__, model=name,
            seed=740 + index, scalars={"rate": 22050},
        )
        show(f"given-sound/{name} {list(tokens.shape)}", tokens)


COMPONENTS = {"mel": mel, "audio-encoder": audio_encoder, "given-sound": given_sound}
