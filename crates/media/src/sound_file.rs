//! Stores audio that is too long for memory in unnamed files, one per channel.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use ndarray::Array2;
use sha2::{Digest, Sha256};

use super::audio::Audio;
use super::error::{MediaError, Result};
use super::samples::unnamed;
use super::wav::{WavFormat, wav_header, wav_samples};
use ltx2_base::atomic_file;

/// Number of samples per channel that are in memory at a time.
const BLOCK: usize = 1 << 16;

/// Audio that arrives in pieces.
pub(super) struct SoundFile {
    /// Path of the output file, for messages.
    path: PathBuf,
    rate: u32,
    channels: Vec<File>,
    len: usize,
}

impl SoundFile {
    /// Creates an empty store in the folder of the output file `path`.
    pub(super) fn temporary_next_to(path: &Path, channels: usize, rate: u32) -> Result<Self> {
        let channels = (0..channels).map(|_| unnamed(path)).collect::<Result<_>>()?;
        Ok(SoundFile { path: path.into(), rate, channels, len: 0 })
    }

    pub(super) fn channels(&self) -> usize {
        self.channels.len()
    }

    pub(super) fn rate(&self) -> u32 {
        self.rate
    }

    /// Appends samples `[channels, n]`.
    pub(super) fn push(&mut self, samples: &Array2<f32>) -> Result<()> {
        for (file, own) in self.channels.iter_mut().zip(samples.rows()) {
            let bytes: Vec<u8> = own.iter().flat_map(|v| v.to_le_bytes()).collect();
            file.write_all(&bytes).map_err(MediaError::io("write the sound of", &self.path))?;
        }
        self.len += samples.ncols();
        Ok(())
    }

    /// Returns the SHA-256 of the samples, computed as in [`Audio::sha256`].
    pub(super) fn sha256(&self) -> Result<String> {
        let mut hash = Sha256::new();
        for channel in 0..self.channels() {
            for at in (0..self.len).step_by(BLOCK) {
                hash.update(self.bytes(channel, at)?);
            }
        }
        Ok(hex::encode(hash.finalize()))
    }

    /// Reads the bytes of one block of a channel, starting at sample `at`.
    fn bytes(&self, channel: usize, at: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; 4 * BLOCK.min(self.len - at)];
        let mut file = &self.channels[channel];
        let mut read = || file.seek(SeekFrom::Start(4 * at as u64)).and_then(|_| file.read_exact(&mut bytes));
        read().map_err(MediaError::io("read the sound of", &self.path))?;
        Ok(bytes)
    }

    /// Iterates over the audio in blocks. The audio is trimmed, or padded with silence, to `len` samples per channel.
    pub(super) fn blocks(&self, len: usize) -> impl Iterator<Item = Result<Audio>> {
        (0..len).step_by(BLOCK).map(move |at| {
            let mut samples = Array2::zeros((self.channels(), BLOCK.min(len - at)));
            for (channel, mut own) in samples.rows_mut().into_iter().enumerate() {
                let bytes = if at < self.len { self.bytes(channel, at)? } else { Vec::new() };
                let values = bytes.as_chunks::<4>().0.iter().map(|v| f32::from_le_bytes(*v));
                own.iter_mut().zip(values).for_each(|(to, v)| *to = v);
            }
            let count = samples.ncols();
            Ok(Audio::new(samples, self.rate)?.with_length(count))
        })
    }

    /// Writes `len` samples per channel to a WAV file, atomically. If `replace` is false, an existing file is an error.
    pub(super) fn write_wav(&self, path: &Path, len: usize, format: WavFormat, replace: bool) -> Result<()> {
        let mut file = atomic_file::temporary_next_to(path, ".wav")?;
        self.write_wav_into(file.as_file_mut(), path, len, format)?;
        Ok(atomic_file::persist(file, path, replace)?)
    }

    /// Writes `len` samples per channel as WAV into an open file.
    pub(super) fn write_wav_into(
        &self,
        out: &mut impl Write,
        path: &Path,
        len: usize,
        format: WavFormat,
    ) -> Result<()> {
        let header = wav_header(self.channels(), len, self.rate, format)?;
        out.write_all(&header).map_err(MediaError::io("write", path))?;
        self.blocks(len)
            .try_for_each(|block| out.write_all(&wav_samples(&block?, format)).map_err(MediaError::io("write", path)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{read_wav, write_wav};

    #[test]
    fn audio_stored_in_pieces_round_trips() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.mp4");
        let whole = Array2::from_shape_fn((2, BLOCK + 777), |(c, n)| ((n * 7 + c) as f32 * 0.01).sin());
        let mut sound = SoundFile::temporary_next_to(&path, 2, 24000).unwrap();
        for piece in whole.axis_chunks_iter(ndarray::Axis(1), 5000) {
            sound.push(&piece.to_owned()).unwrap();
        }
        let audio = Audio::new(whole, 24000).unwrap();
        assert_eq!((sound.len, sound.sha256().unwrap()), (audio.len(), audio.sha256()));
        for len in [100, BLOCK + 777, 2 * BLOCK + 1] {
            let [one, other] = ["one.wav", "other.wav"].map(|name| folder.path().join(name));
            sound.write_wav(&one, len, WavFormat::Float32, true).unwrap();
            assert!(sound.write_wav(&one, len, WavFormat::Float32, false).is_err(), "it exists");
            write_wav(&other, &audio.with_length(len), WavFormat::Float32).unwrap();
            assert_eq!(read_wav(&one).unwrap(), read_wav(&other).unwrap(), "{len}");
        }
    }
}
