//! WAV files: RIFF with PCM or float samples.

use std::path::Path;

use super::atomic::write_atomically;
use super::audio::Audio;
use super::error::{Error, Result};

/// How samples are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WavFormat {
    /// 16-bit integers, limited to -1..1.
    #[default]
    Pcm16,
    /// The floats themselves.
    Float32,
}

/// Writes `audio` as a WAV file; parents are created.
pub fn write_wav(path: &Path, audio: &Audio, format: WavFormat) -> Result<()> {
    write_atomically(path, &wav_bytes(audio, format)?)
}

/// The bytes of the file.
pub(super) fn wav_bytes(audio: &Audio, format: WavFormat) -> Result<Vec<u8>> {
    let (channels, rate) = (audio.channels() as u32, audio.rate());
    let (tag, width): (u16, u32) = match format {
        WavFormat::Pcm16 => (1, 2),
        WavFormat::Float32 => (3, 4),
    };
    let block = channels * width;
    // RIFF counts bytes in 32 bits; the header after the size takes less than 100.
    let data = u32::try_from(audio.len() as u64 * u64::from(block)).ok().filter(|&n| n < u32::MAX - 100);
    let (Some(data), Some(second)) = (data, rate.checked_mul(block)) else {
        let reason = format!("{} samples a channel do not fit the 4 GiB of a WAV file", audio.len());
        return Err(Error::Audio { channels: audio.channels(), rate, reason });
    };
    // Formats other than plain PCM carry an (empty) extension and a `fact` chunk with the sample count.
    let float = format == WavFormat::Float32;
    let header: u32 = if float { 4 + 8 + 18 + 8 + 4 + 8 } else { 4 + 8 + 16 + 8 };
    let mut out = Vec::with_capacity((header + data) as usize + 8);
    out.extend(b"RIFF");
    out.extend((header + data).to_le_bytes());
    out.extend(b"WAVEfmt ");
    out.extend((if float { 18u32 } else { 16 }).to_le_bytes());
    out.extend(tag.to_le_bytes());
    out.extend((channels as u16).to_le_bytes());
    out.extend(rate.to_le_bytes());
    out.extend(second.to_le_bytes());
    out.extend((block as u16).to_le_bytes());
    out.extend((8 * width as u16).to_le_bytes());
    if float {
        out.extend(0u16.to_le_bytes());
        out.extend(b"fact");
        out.extend(4u32.to_le_bytes());
        out.extend((audio.len() as u32).to_le_bytes());
    }
    out.extend(b"data");
    out.extend(data.to_le_bytes());
    for instant in audio.samples().columns() {
        for &v in instant {
            match format {
                WavFormat::Pcm16 => {
                    // Not-a-number becomes 0 by the cast.
                    let v = (v.clamp(-1.0, 1.0) * 32767.0).round() as i16;
                    out.extend(v.to_le_bytes());
                }
                WavFormat::Float32 => out.extend(v.to_le_bytes()),
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use ndarray::array;

    #[test]
    fn header_and_interleaving() {
        let audio = Audio::new(array![[0.0, 1.0, -1.0], [0.5, 2.0, f32::NAN]], 24000).unwrap();
        let pcm = wav_bytes(&audio, WavFormat::Pcm16).unwrap();
        assert_eq!(pcm.len(), 44 + 12);
        assert_eq!(&pcm[..4], b"RIFF");
        assert_eq!(u32::from_le_bytes(pcm[4..8].try_into().unwrap()) as usize, pcm.len() - 8);
        assert_eq!(u32::from_le_bytes(pcm[24..28].try_into().unwrap()), 24000);
        let samples: Vec<i16> = pcm[44..].chunks(2).map(|b| i16::from_le_bytes([b[0], b[1]])).collect();
        assert_eq!(samples, [0, 16384, 32767, 32767, -32767, 0]);

        let float = wav_bytes(&audio, WavFormat::Float32).unwrap();
        assert_eq!(u32::from_le_bytes(float[4..8].try_into().unwrap()) as usize, float.len() - 8);
        assert_eq!(float.len(), 58 + 24);
        assert_eq!(f32::from_le_bytes(float[62..66].try_into().unwrap()), 0.5);
    }

    #[test]
    fn parents_are_created_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/sound.wav");
        write_wav(&path, &Audio::new(array![[0.0f32]], 8000).unwrap(), WavFormat::Pcm16).unwrap();
        let names: Vec<_> =
            std::fs::read_dir(dir.path().join("a/b")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["sound.wav"]);
    }
}
