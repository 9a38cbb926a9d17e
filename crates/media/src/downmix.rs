//! Downmix of multichannel audio to stereo (ITU-R BS.775): keeps front left and right at full level, adds center and
//! surrounds at -3 dB and a single rear center at -6 dB, and drops low-frequency effects. The result is scaled so that
//! it cannot clip.

use std::f32::consts::FRAC_1_SQRT_2;

use ndarray::Array2;
use symphonia::core::audio::{Channels, Position};

/// Returns a speaker's gains in the left and the right output channel.
fn shares(speaker: Position) -> [f32; 2] {
    const LEFT: Position = Position::REAR_LEFT
        .union(Position::SIDE_LEFT)
        .union(Position::FRONT_LEFT_CENTER)
        .union(Position::FRONT_LEFT_WIDE);
    const RIGHT: Position = Position::REAR_RIGHT
        .union(Position::SIDE_RIGHT)
        .union(Position::FRONT_RIGHT_CENTER)
        .union(Position::FRONT_RIGHT_WIDE);
    match speaker {
        Position::FRONT_LEFT => [1.0, 0.0],
        Position::FRONT_RIGHT => [0.0, 1.0],
        Position::FRONT_CENTER => [FRAC_1_SQRT_2; 2],
        // A single rear speaker replaces both surrounds.
        Position::REAR_CENTER => [0.5; 2],
        side if LEFT.contains(side) => [FRAC_1_SQRT_2, 0.0],
        side if RIGHT.contains(side) => [0.0, FRAC_1_SQRT_2],
        _ => [0.0; 2],
    }
}

/// Mixes audio to at most two channels and returns an array `[channels, samples]`. Keeps mono and stereo, and mixes
/// more channels to stereo. If the speaker positions are unknown, keeps only the first two channels.
pub(super) fn stereo(planes: Vec<Vec<f32>>, channels: &Channels) -> Array2<f32> {
    if planes.len() <= 2 {
        return array(&planes);
    }
    let places: Vec<Position> = match channels {
        Channels::Positioned(all) if all.iter().count() == planes.len() => all.iter().collect(),
        _ => return array(&planes[..2]),
    };
    mixed(&planes, &places.into_iter().map(shares).collect::<Vec<_>>())
}

fn array(planes: &[Vec<f32>]) -> Array2<f32> {
    let samples = planes.iter().map(Vec::len).min().unwrap_or(0);
    Array2::from_shape_fn((planes.len(), samples), |(channel, at)| planes[channel][at])
}

fn mixed(planes: &[Vec<f32>], shares: &[[f32; 2]]) -> Array2<f32> {
    let sum = |side: usize| shares.iter().map(|share| share[side]).sum::<f32>();
    let scale = 1.0 / sum(0).max(sum(1)).max(1.0);
    let samples = planes.iter().map(Vec::len).min().unwrap_or(0);
    Array2::from_shape_fn((2, samples), |(side, at)| {
        planes.iter().zip(shares).map(|(plane, share)| plane[at] * share[side] * scale).sum()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn surround_is_downmixed_to_stereo_without_clipping() {
        let speakers = Position::FRONT_LEFT
            | Position::FRONT_RIGHT
            | Position::FRONT_CENTER
            | Position::LFE1
            | Position::REAR_LEFT
            | Position::REAR_RIGHT;
        let of = |planes: Vec<Vec<f32>>, channels: &Channels| stereo(planes, channels).into_raw_vec_and_offset().0;
        let scale = 1.0 / (1.0 + 2.0 * FRAC_1_SQRT_2);
        for (loud, want) in [
            (0, [1.0, 0.0]),
            (1, [0.0, 1.0]),
            (2, [FRAC_1_SQRT_2; 2]),
            (3, [0.0; 2]),
            (4, [FRAC_1_SQRT_2, 0.0]),
            (5, [0.0, FRAC_1_SQRT_2]),
        ] {
            let planes = (0..6).map(|channel| vec![f32::from(channel == loud)]).collect();
            assert_eq!(of(planes, &Channels::Positioned(speakers)), want.map(|w| w * scale), "channel {loud}");
        }
        // If all channels are at full scale, so is the result.
        let full = of(vec![vec![1.0]; 6], &Channels::Positioned(speakers));
        assert!(full.iter().all(|v| (v - 1.0).abs() < 1e-6), "{full:?}");
        let unknown = (0..4).map(|c| vec![c as f32]).collect();
        assert_eq!(of(unknown, &Channels::Discrete(4)), [0.0, 1.0]);
        assert_eq!(of(vec![vec![0.5]], &Channels::Discrete(1)), [0.5]);
    }
}
