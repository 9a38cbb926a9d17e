//! MP4 files that are written while the video is generated. Memory use does not depend on the video's length: only the
//! current frames and audio are in memory.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

use ndarray::Array2;
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use super::encoder::{Encoder, choose};
use super::error::{MediaError, Result};
use super::ffmpeg::{self, FrameSink};
use super::frames::Frames;
use super::options::Mp4Options;
use super::rate::FrameRate;
use super::samples::Samples;
use super::sound_file::SoundFile;
use super::stream::{EncodedVideo, VideoStream};
use super::wav::WavFormat;
use super::{aac, isobmff};
use ltx2_base::atomic_file;
use ltx2_base::catch_panic::panic_message;

/// An MP4 that is being written. Encoded frames and audio samples are stored in unnamed temporary files in the output
/// folder.
pub struct LongMp4 {
    path: PathBuf,
    rate: FrameRate,
    options: Mp4Options,
    video: LongVideoState,
    sound: SoundFile,
    frames: usize,
    /// Hash of the raw frames.
    hash: Sha256,
    /// The most recent frames sent to ffmpeg. They are kept because ffmpeg's output is unusable if ffmpeg fails.
    last: Option<Frames>,
}

enum LongVideoState {
    Embedded(VideoStream),
    /// A thread that sends frames to ffmpeg, which encodes them without sound.
    Ffmpeg {
        pieces: SyncSender<Frames>,
        thread: JoinHandle<Result<NamedTempFile>>,
    },
    /// The encoder has encoded all frames.
    Encoded(Encoded),
    /// The encoder failed after it had encoded these frames.
    Part(EncodedVideo),
    /// The encoder failed, and none of its output is usable.
    Lost,
}

enum Encoded {
    Embedded(EncodedVideo),
    /// A file written by ffmpeg, without sound.
    Ffmpeg(NamedTempFile),
}

/// Hashes of the raw frames and raw audio samples of a finished file.
pub struct LongHashes {
    /// SHA-256 of the raw frames.
    pub frames: String,
    /// SHA-256 of the raw samples.
    pub samples: String,
}

impl LongMp4 {
    /// Starts writing the file `path`: frames of the size of `first` at `fps` frames per second, and sound with
    /// `channels` channels at `sample_rate` Hz.
    ///
    /// # Errors
    /// Returns an error if the rate or size is invalid, if ffmpeg is requested but not available, or if the folder
    /// cannot be written to.
    pub fn start(
        path: &Path,
        first: &Frames,
        fps: f64,
        channels: usize,
        sample_rate: u32,
        options: &Mp4Options,
    ) -> Result<Self> {
        let rate = FrameRate::from_f64(fps)?;
        let encoder = choose(options)?;
        tracing::info!(path = %path.display(), %rate, "encoding with {encoder} during generation");
        let video = match encoder {
            Encoder::Embedded => {
                LongVideoState::Embedded(VideoStream::embedded(first, rate, options, Samples::on_disk(path)?)?)
            }
            Encoder::Ffmpeg(_) => by_ffmpeg(path, first, rate, options)?,
        };
        let sound = SoundFile::temporary_next_to(path, channels, sample_rate)?;
        let (path, options) = (path.into(), options.clone());
        Ok(LongMp4 { path, rate, options, video, sound, frames: 0, hash: Sha256::new(), last: None })
    }

    /// Adds frames.
    ///
    /// # Errors
    /// Returns the encoder's error, which may be about frames that were added earlier.
    pub fn push(&mut self, frames: Frames) -> Result<()> {
        self.frames += frames.count();
        frames.iter().for_each(|frame| self.hash.update(frame));
        let takes_more = match &self.video {
            LongVideoState::Embedded(stream) => stream.push(frames),
            LongVideoState::Ffmpeg { pieces, .. } => {
                self.last = Some(frames.clone());
                pieces.send(frames).is_ok()
            }
            LongVideoState::Encoded(_) | LongVideoState::Part(_) | LongVideoState::Lost => false,
        };
        if takes_more {
            return Ok(());
        }
        self.close()?;
        Err(MediaError::Container("the encoder stopped before all frames were added".into()))
    }

    /// Adds audio samples `[channels, n]`.
    ///
    /// # Errors
    /// Returns an error if the samples cannot be written, for example if the disk is full.
    pub fn push_sound(&mut self, samples: &Array2<f32>) -> Result<()> {
        self.sound.push(samples)
    }

    /// Writes the sound added so far to a WAV file, trimmed or padded to the duration of the frames added so far. If
    /// `replace` is false, an existing file is an error.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn write_wav(&self, path: &Path, format: WavFormat, replace: bool) -> Result<()> {
        self.sound.write_wav(path, self.rate.samples(self.frames, self.sound.rate()), format, replace)
    }

    /// Returns the number of frames added so far.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// Returns the number of frames that [`LongMp4::write_to`] writes after [`LongMp4::close`]. If the encoder failed,
    /// this is less than the number of frames that were added.
    pub fn encoded_frames(&self) -> usize {
        match &self.video {
            LongVideoState::Embedded(_) | LongVideoState::Ffmpeg { .. } | LongVideoState::Encoded(_) => self.frames,
            LongVideoState::Part(part) => part.track().samples.len(),
            LongVideoState::Lost => 0,
        }
    }

    /// Returns the most recently added frames if the encoder failed and none of its output is usable.
    pub fn lost_frames(&self) -> Option<&Frames> {
        self.last.as_ref().filter(|_| matches!(self.video, LongVideoState::Lost))
    }

    /// Waits until the encoder has finished. No frames can be added afterwards.
    ///
    /// # Errors
    /// Returns the encoder's error on the first call after the failure. The sound and the frames that were encoded
    /// before the failure remain available.
    pub fn close(&mut self) -> Result<()> {
        let ended;
        (self.video, ended) = match std::mem::replace(&mut self.video, LongVideoState::Lost) {
            LongVideoState::Embedded(stream) => match stream.finish_part() {
                (Some(video), Ok(())) => (LongVideoState::Encoded(Encoded::Embedded(video)), Ok(())),
                (Some(part), failed) => (LongVideoState::Part(part), failed),
                (None, failed) => (LongVideoState::Lost, failed),
            },
            LongVideoState::Ffmpeg { pieces, thread } => {
                drop(pieces);
                let panicked = |message| MediaError::Panicked { work: "the thread that feeds ffmpeg", message };
                match thread.join().unwrap_or_else(|panic| Err(panicked(panic_message(&*panic)))) {
                    Ok(file) => (LongVideoState::Encoded(Encoded::Ffmpeg(file)), Ok(())),
                    Err(error) => (LongVideoState::Lost, Err(error)),
                }
            }
            other => (other, Ok(())),
        };
        ended
    }

    /// Returns the hashes of the frames and samples added so far.
    ///
    /// # Errors
    /// Returns an error if the samples cannot be read back.
    pub fn hashes(&self) -> Result<LongHashes> {
        Ok(LongHashes { frames: hex::encode(self.hash.clone().finalize()), samples: self.sound.sha256()? })
    }

    /// Writes the complete file atomically. The sound is trimmed, or padded with silence, to the duration of the
    /// frames.
    ///
    /// # Errors
    /// Returns an error if the encoder failed or the file cannot be written. The caller may then call
    /// [`LongMp4::write_to`] with another path.
    pub fn finish(&mut self) -> Result<()> {
        self.close()?;
        if self.encoded_frames() < self.frames {
            return Err(MediaError::Container("the encoder failed".into()));
        }
        self.write_to(&self.path, self.options.replace)
    }

    /// Writes the encoded frames and the sound to another path. After an encoder failure, writes the frames that were
    /// encoded before the failure.
    ///
    /// # Errors
    /// Returns an error if [`LongMp4::close`] was not called, if no frames are encoded, or if the file cannot be
    /// written.
    pub fn write_to(&self, path: &Path, replace: bool) -> Result<()> {
        let (sound, options) = (&self.sound, &self.options);
        let len = self.rate.samples(self.encoded_frames(), sound.rate());
        let target = match &self.video {
            LongVideoState::Encoded(Encoded::Embedded(video)) | LongVideoState::Part(video) => {
                let (channels, rate) = (sound.channels(), sound.rate());
                let samples = Samples::on_disk(path)?;
                let audio = aac::encode_blocks(sound.blocks(len), channels, rate, options.audio_bitrate, samples)?;
                let target = atomic_file::temporary_next_to(path, ".part")?;
                let mut out = BufWriter::new(target.as_file());
                isobmff::write(&[video.track(), &audio], &mut out, MediaError::io("write", path))?;
                out.flush().map_err(MediaError::io("write", path))?;
                drop(out);
                target
            }
            LongVideoState::Encoded(Encoded::Ffmpeg(video)) => {
                let mut wav = atomic_file::temporary_next_to(path, ".wav")?;
                sound.write_wav_into(wav.as_file_mut(), path, len, WavFormat::Float32)?;
                let target = atomic_file::temporary_next_to(path, ".mp4")?;
                ffmpeg::copy_with_sound(target.path(), path, video.path(), 0, wav.path(), options)?;
                target
            }
            LongVideoState::Embedded(_) | LongVideoState::Ffmpeg { .. } | LongVideoState::Lost => {
                return Err(MediaError::Container("no encoded frames are available".into()));
            }
        };
        Ok(atomic_file::persist(target, path, replace)?)
    }
}

fn by_ffmpeg(path: &Path, first: &Frames, rate: FrameRate, options: &Mp4Options) -> Result<LongVideoState> {
    let target = atomic_file::temporary_next_to(path, ".mp4")?;
    let mut sink = FrameSink::start(target.path(), path, first, rate, None, options)?;
    let (pieces, arrivals) = sync_channel::<Frames>(1);
    let work = move || {
        arrivals.iter().for_each(|piece| sink.push(&piece));
        sink.finish().map(|()| target)
    };
    let thread = Builder::new().name("encode".into()).spawn(work);
    let thread = thread.map_err(MediaError::io("start a thread to encode", path))?;
    Ok(LongVideoState::Ffmpeg { pieces, thread })
}
