//! WAV files: RIFF with PCM or float samples.

use std::path::Path;

use super::audio::Audio;
use super::error::{MediaError, Result};
use ltx2_base::atomic_file::write_file;

/// Sample format of a WAV file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WavFormat {
    /// 16-bit integers; samples are clamped to -1..1.
    #[default]
    Pcm16,
    /// 32-bit floats, unchanged.
    Float32,
}

/// Writes `audio` as a WAV file. Creates missing parent folders and replaces an existing file.
///
/// # Errors
/// Returns an error if the audio exceeds 4 GiB or the file cannot be written.
pub fn write_wav(path: &Path, audio: &Audio, format: WavFormat) -> Result<()> {
    write_wav_file(path, audio, format, true)
}

/// Writes a WAV file like [`write_wav`]. If `replace` is false, an existing file is an error.
pub fn write_wav_file(path: &Path, audio: &Audio, format: WavFormat, replace: bool) -> Result<()> {
    Ok(write_file(path, &wav_bytes(audio, format)?, replace)?)
}

/// Reads a WAV file of 16-, 24- or 32-bit integers (scaled to -1..1) or 32-bit floats.
///
/// # Errors
/// Returns an error if the file cannot be read or is in another format.
pub fn read_wav(path: &Path) -> Result<Audio> {
    let bytes = std::fs::read(path).map_err(MediaError::io("read", path))?;
    parse_wav(&bytes).map_err(|reason| MediaError::Wav { path: path.to_path_buf(), reason })
}

/// Parses the bytes of a WAV file. The last chunk may be shorter than its size field states, because a program that
/// writes to a pipe does not know the size in advance.
pub(super) fn parse_wav(bytes: &[u8]) -> std::result::Result<Audio, String> {
    let short = || "the file is truncated".to_string();
    let word = |b: &[u8], at: usize| b.get(at..at + 2).map(|b| u16::from_le_bytes([b[0], b[1]])).ok_or_else(short);
    let long =
        |b: &[u8], at: usize| b.get(at..at + 4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).ok_or_else(short);
    if bytes.get(..4) != Some(b"RIFF") || bytes.get(8..12) != Some(b"WAVE") {
        return Err("not a RIFF WAVE file".into());
    }
    let (mut at, mut form) = (12, None);
    while let Some(name) = bytes.get(at..at + 4) {
        let size = long(bytes, at + 4)? as usize;
        let body = &bytes[at + 8..bytes.len().min(at.saturating_add(8).saturating_add(size))];
        match (name, form) {
            (b"fmt ", _) => {
                // The first bytes of the sub-format of WAVE_FORMAT_EXTENSIBLE are the actual format tag.
                let tag = match word(body, 0)? {
                    0xfffe => word(body, 24)?,
                    tag => tag,
                };
                form = Some((tag, usize::from(word(body, 2)?), long(body, 4)?, word(body, 14)?));
            }
            (b"data", Some((tag, channels, rate, bits))) => {
                let width = usize::from(bits / 8).max(1);
                let values: Vec<f32> = match (tag, bits) {
                    (1, 16 | 24 | 32) => body.chunks_exact(width).map(integer).collect(),
                    (3, 32) => body.as_chunks::<4>().0.iter().map(|c| f32::from_le_bytes(*c)).collect(),
                    _ => {
                        return Err(format!(
                            "format tag {tag} with {bits} bits is not supported; convert the file to 16-, 24- or 32-bit integers (tag 1) or 32-bit floats (tag 3)"
                        ));
                    }
                };
                let count = values.len() / channels.max(1);
                let samples = ndarray::Array2::from_shape_fn((channels, count), |(c, i)| values[i * channels + c]);
                return Audio::new(samples, rate).map_err(|e| e.to_string());
            }
            _ => {}
        }
        at = at.saturating_add(8).saturating_add(size).saturating_add(size % 2);
    }
    Err("the file has no samples".into())
}

/// Converts a little-endian signed integer of any byte width to -1..1.
fn integer(bytes: &[u8]) -> f32 {
    let mut word = [0u8; 4];
    word[4 - bytes.len()..].copy_from_slice(bytes);
    i32::from_le_bytes(word) as f32 / 2f32.powi(31)
}

/// Encodes a complete WAV file.
pub(super) fn wav_bytes(audio: &Audio, format: WavFormat) -> Result<Vec<u8>> {
    let mut bytes = wav_header(audio.channels(), audio.len(), audio.rate(), format)?;
    bytes.extend(wav_samples(audio, format));
    Ok(bytes)
}

/// Encodes the header, which precedes the samples; `len` is the number of samples per channel.
pub(super) fn wav_header(channels: usize, len: usize, rate: u32, format: WavFormat) -> Result<Vec<u8>> {
    let channels = channels as u32;
    let (tag, width): (u16, u32) = match format {
        WavFormat::Pcm16 => (1, 2),
        WavFormat::Float32 => (3, 4),
    };
    let block = channels * width;
    // RIFF sizes have 32 bits. The header that follows the size field takes less than 100 bytes.
    let data = u32::try_from(len as u64 * u64::from(block)).ok().filter(|&n| n < u32::MAX - 100);
    let (Some(data), Some(second)) = (data, rate.checked_mul(block)) else {
        let reason = format!("{len} samples per channel exceed the 4 GiB limit of WAV files");
        return Err(MediaError::Audio { channels: channels as usize, rate, reason });
    };
    // Formats other than PCM have an (empty) extension and a `fact` chunk with the sample count.
    let float = format == WavFormat::Float32;
    let header: u32 = if float { 4 + 8 + 18 + 8 + 4 + 8 } else { 4 + 8 + 16 + 8 };
    let mut out = Vec::with_capacity(header as usize + 8);
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
        out.extend((len as u32).to_le_bytes());
    }
    out.extend(b"data");
    out.extend(data.to_le_bytes());
    Ok(out)
}

/// Encodes the samples, with channels interleaved.
pub(super) fn wav_samples(audio: &Audio, format: WavFormat) -> Vec<u8> {
    let mut out = Vec::with_capacity(4 * audio.channels() * audio.len());
    for instant in audio.samples().columns() {
        for &v in instant {
            match format {
                WavFormat::Pcm16 => {
                    // The cast converts NaN to 0.
                    let v = (v.clamp(-1.0, 1.0) * 32767.0).round() as i16;
                    out.extend(v.to_le_bytes());
                }
                WavFormat::Float32 => out.extend(v.to_le_bytes()),
            }
        }
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use ndarray::array;

    #[test]
    fn wav_bytes_have_header_and_interleaved_samples() {
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
    fn wav_round_trips_samples() {
        let audio = Audio::new(array![[0.0, 0.5, -1.0], [0.25, 1.0, -0.75]], 24000).unwrap();
        assert_eq!(parse_wav(&wav_bytes(&audio, WavFormat::Float32).unwrap()).unwrap(), audio);
        let pcm = wav_bytes(&audio, WavFormat::Pcm16).unwrap();
        let back = parse_wav(&pcm).unwrap();
        assert!(back.samples().iter().zip(audio.samples()).all(|(a, b)| (a - b).abs() < 1e-4));
        // A program that writes to a pipe cannot fill in the size field.
        let mut open = pcm.clone();
        open[40..44].fill(0xff);
        assert_eq!(parse_wav(&open).unwrap(), back);
        assert_eq!([integer(&[0, 0, 0x40]), integer(&[0, 0x80])], [0.5, -1.0]);
        for (bytes, why) in [(&pcm[..20], "truncated"), (&pcm[..36], "no samples"), (&b"RIFX"[..], "not a RIFF")] {
            let message = parse_wav(bytes).unwrap_err();
            assert!(message.contains(why), "{message}");
        }
    }

    #[test]
    fn parent_folders_are_created_without_leftovers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/sound.wav");
        write_wav(&path, &Audio::new(array![[0.0f32]], 8000).unwrap(), WavFormat::Pcm16).unwrap();
        let names: Vec<_> =
            std::fs::read_dir(dir.path().join("a/b")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["sound.wav"]);
    }
}
