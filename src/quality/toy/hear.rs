//! Analyzes the sound of a toy clip: pitch class and onsets.

use std::f64::consts::TAU;

use ndarray::Array2;

/// Fundamental frequencies of the toy clips in Hz, lowest first.
const PITCHES: [(&str, f64); 3] = [("low", 400.0), ("middle", 800.0), ("high", 1600.0)];

/// Pitch class and onsets of a clip.
#[derive(Debug)]
pub struct Heard {
    /// `low`, `middle`, `high` or `silent`.
    pub pitch: &'static str,
    /// Onset times in seconds.
    pub onsets: Vec<f64>,
}

/// Analyzes samples `[channels, n]`.
pub fn hear(samples: &Array2<f32>, rate: usize) -> Heard {
    let mono: Vec<f64> = samples.columns().into_iter().map(|c| f64::from(c.sum()) / c.len() as f64).collect();
    let block = rate / 200;
    let power = |b: &[f64]| (b.iter().map(|v| v * v).sum::<f64>() / b.len() as f64).sqrt();
    let loud: Vec<f64> = mono.chunks_exact(block).map(power).collect();
    let loudest = loud.iter().copied().fold(0.0, f64::max);
    if loudest < 0.012 {
        return Heard { pitch: "silent", onsets: Vec::new() };
    }
    // Slightly detuned pitches belong to the same class.
    let tunings = (-6..=6).map(|step| 1.0 + 0.02 * f64::from(step));
    let strengths =
        PITCHES.map(|(_, pitch)| tunings.clone().map(|t| strength(&mono, rate, t * pitch)).fold(0.0, f64::max));
    let strongest = strengths.iter().copied().fold(0.0, f64::max);
    // Overtones of a low pitch coincide with higher classes, so the lowest strong pitch is taken.
    let lowest = strengths.iter().position(|s| *s > 0.5 * strongest).expect("the strongest itself");
    let (mut onsets, mut ready) = (Vec::new(), true);
    for (i, level) in loud.iter().enumerate() {
        if ready && *level > 0.4 * loudest {
            onsets.push(i as f64 * block as f64 / rate as f64);
            ready = false;
        } else if *level < 0.2 * loudest {
            ready = true;
        }
    }
    Heard { pitch: PITCHES[lowest].0, onsets }
}

/// Returns the magnitude of the spectrum at one frequency, with a Hann window.
fn strength(mono: &[f64], rate: usize, hertz: f64) -> f64 {
    let length = mono.len() as f64;
    let (mut re, mut im) = (0.0, 0.0);
    for (i, value) in mono.iter().enumerate() {
        let i = i as f64;
        let windowed = value * (0.5 - 0.5 * (TAU * i / length).cos());
        let (sine, cosine) = (TAU * hertz * i / rate as f64).sin_cos();
        re += windowed * cosine;
        im += windowed * sine;
    }
    re.hypot(im)
}
