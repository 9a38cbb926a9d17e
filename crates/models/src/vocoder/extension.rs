//! Bandwidth extension of LTX-2.3: a second generator computes, from the waveform's spectrogram, the high frequencies
//! that the waveform lacks at the higher sampling rate.

use super::config::{BandwidthExtension, Spectrogram};
use super::generator::generate;
use ltx2_nn::{Axis, Init, Params, linear_nd};
use ltx2_stablehlo::{Conv, Value};

/// Lower bound of the magnitude of a mel bin.
const SILENCE: f64 = 1e-5;

/// Extends a waveform `[b, channels, samples]` to `[b, channels, samples · ratio]` and clamps it to -1..1.
pub(super) fn extend(p: &Params, e: &BandwidthExtension, wave: &Value) -> Value {
    let samples = wave.dim(2);
    let wave = if e.clamp { wave.clamp(-1.0, 1.0) } else { wave.clone() };
    let hop = e.spectrogram.hop_length;
    let wave = wave.pad(2, 0, samples.next_multiple_of(hop) - samples, 0.0);
    let mel = log_mel(&p.pp("mel_stft"), &e.spectrogram, &wave);
    let missing = generate(&p.pp("bwe_generator"), &e.generator, &mel);
    let y = (missing + e.resampler.apply(&wave)).clamp(-1.0, 1.0);
    y.slice(2, 0, samples * e.resampler.ratio)
}

/// Computes the log-mel spectrogram `[b, channels, frames, bins]` of a waveform whose length is a multiple of the hop
/// length. The Fourier and mel bases are loaded from the checkpoint.
fn log_mel(p: &Params, s: &Spectrogram, wave: &Value) -> Value {
    let _scope = p.scope();
    let (b, channels, frequencies) = (wave.dim(0), wave.dim(1), s.frequencies());
    let basis = p.pp("stft_fn").get(
        "forward_basis",
        &[2 * frequencies, 1, s.filter_length],
        &[Axis::Replicated; 3],
        Init::normal((s.filter_length as f32).sqrt().recip()),
    );
    let wave = wave.reshape(vec![b * channels, 1, wave.dim(2)]).pad(2, s.lead(), 0, 0.0);
    let parts = wave.builder().convolution(&wave, &basis, &Conv::new(1).stride(&[s.hop_length]));
    let (real, imaginary) = (parts.slice(1, 0, frequencies), parts.slice(1, frequencies, 2 * frequencies));
    let magnitude = (real.square() + imaginary.square()).sqrt();
    let weight = p.get(
        "mel_basis",
        &[s.num_mel_channels, frequencies],
        &[Axis::Replicated; 2],
        Init { mean: (frequencies as f32).recip(), std: 0.0 },
    );
    let mel = linear_nd(p, &magnitude.swap(1, 2), &weight);
    let frames = mel.dim(1);
    mel.maximum(&mel.like(SILENCE)).log().reshape(vec![b, channels, frames, s.num_mel_channels])
}
