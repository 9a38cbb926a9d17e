//! AAC-LC encoding with the built-in encoder.

use std::borrow::Borrow;

use super::audio::Audio;
use super::error::{MediaError, Result};
use super::isobmff::{Media, Mp4Track};
use super::samples::Samples;

/// Sample rates in Hz that AAC supports (ISO/IEC 14496-3, table 1.18).
pub const AAC_RATES: [u32; 13] =
    [96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000, 7350];

/// Samples per channel in an access unit.
const UNIT: u32 = 1024;

/// Encodes `sound` at about `bitrate` bits per second. Samples must be in -1..1.
///
/// The track's `skip` field holds the encoder's priming, and `last_delta` excludes the padding of the last access unit,
/// so a player presents exactly the input samples.
pub(super) fn encode(sound: &Audio, bitrate: u32) -> Result<Mp4Track> {
    let (channels, rate) = (sound.channels(), sound.rate());
    encode_blocks([Ok(sound)], channels, rate, bitrate, Samples::in_memory())
}

/// Encodes audio that arrives in blocks, like [`encode`]; appends the encoded access units to `samples`.
pub(super) fn encode_blocks<B: Borrow<Audio>>(
    blocks: impl IntoIterator<Item = Result<B>>,
    channels: usize,
    rate: u32,
    bitrate: u32,
    mut samples: Samples,
) -> Result<Mp4Track> {
    let failed = |e: syom::AacError| {
        // A caller can cause only one failure: a sample rate that is not in the standard's table.
        MediaError::Embedded { codec: "AAC", message: format!("cannot encode {channels} channels at {rate} Hz: {e}") }
    };
    // An access unit holds at most 6144 bits per channel.
    let most = 6 * rate.saturating_mul(channels as u32);
    let options = syom::EncodeOptions::raw().with_bitrate_bps(bitrate.min(most));
    let mut encoder = syom::Encoder::new(rate, channels, &options).map_err(failed)?;
    let mut kept = Ok(());
    let mut keep = |unit: syom::EncodedFrame<'_>| {
        kept = std::mem::replace(&mut kept, Ok(())).and_then(|()| samples.push(unit.payload));
        Ok(())
    };
    for block in blocks {
        encoder.feed(&block?.borrow().planes(), &mut keep).map_err(failed)?;
    }
    let info = encoder.finish(&mut keep).map_err(failed)?;
    kept?;
    let whole = u64::from(UNIT) * (samples.len() as u64).saturating_sub(1);
    let last_delta = (info.priming + info.samples).checked_sub(whole).filter(|&d| (1..=u64::from(UNIT)).contains(&d));
    let last_delta = last_delta.ok_or_else(|| MediaError::Embedded {
        codec: "AAC",
        message: format!(
            "the encoder returned {} access units, which do not match {} samples plus {} samples of priming",
            samples.len(),
            info.samples,
            info.priming
        ),
    })?;
    Ok(Mp4Track {
        media: Media::Aac { channels: channels as u16, config: encoder.asc().to_vec() },
        timescale: rate,
        samples,
        delta: UNIT,
        last_delta: last_delta as u32,
        sync: None,
        skip: info.priming as u32,
    })
}
