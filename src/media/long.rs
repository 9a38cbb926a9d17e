//! An MP4 that is written while its frames and its sound are made, however long it gets: of both, memory holds a piece.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

use ndarray::Array2;
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use super::encoder::{Encoder, choose};
use super::error::{Error, Result};
use super::ffmpeg::{self, FrameSink};
use super::frames::Frames;
use super::options::Mp4Options;
use super::rate::FrameRate;
use super::samples::Samples;
use super::sound_file::SoundFile;
use super::stream::{EncodedVideo, VideoStream};
use super::wav::WavFormat;
use super::{aac, atomic, isobmff};
use crate::contained::panic_message;

/// An MP4 on its way. Encoded frames and samples wait in files without names in its folder.
pub struct LongMp4 {
    path: PathBuf,
    rate: FrameRate,
    options: Mp4Options,
    video: Video,
    sound: SoundFile,
    frames: usize,
    /// Of the raw frames.
    hash: Sha256,
    /// The last frames that an ffmpeg got: of its file there is nothing where it fails.
    last: Option<Frames>,
}

enum Video {
    Embedded(VideoStream),
    /// A thread that hands frames to an ffmpeg, which encodes them without sound.
    Ffmpeg {
        pieces: SyncSender<Frames>,
        thread: JoinHandle<Result<NamedTempFile>>,
    },
    /// All frames are encoded.
    Encoded(Encoded),
    /// The encoder failed after these frames.
    Part(EncodedVideo),
    /// The encoder failed, and nothing is left of what it encoded.
    Lost,
}

enum Encoded {
    Embedded(EncodedVideo),
    /// A file of ffmpeg's, without sound.
    Ffmpeg(NamedTempFile),
}

/// Hashes of the raw frames and samples of a finished file.
pub struct LongHashes {
    /// SHA-256 of the raw frames.
    pub frames: String,
    /// SHA-256 of the raw samples.
    pub samples: String,
}

impl LongMp4 {
    /// Begins the file `path` of frames like `first`, `fps` a second, and sound of so many channels at a rate.
    ///
    /// # Errors
    /// A rate or size that no video has; ffmpeg that is asked for and not there; a folder that cannot be written to.
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
        tracing::info!(path = %path.display(), %rate, "encoding with {encoder} while it is made");
        let video = match encoder {
            Encoder::Embedded => Video::Embedded(VideoStream::embedded(first, rate, options, Samples::beside(path)?)?),
            Encoder::Ffmpeg(_) => by_ffmpeg(path, first, rate, options)?,
        };
        let sound = SoundFile::beside(path, channels, sample_rate)?;
        let (path, options) = (path.into(), options.clone());
        Ok(LongMp4 { path, rate, options, video, sound, frames: 0, hash: Sha256::new(), last: None })
    }

    /// Adds the next frames.
    ///
    /// # Errors
    /// The encoder's, of earlier frames.
    pub fn push(&mut self, frames: Frames) -> Result<()> {
        self.frames += frames.count();
        frames.iter().for_each(|frame| self.hash.update(frame));
        let takes_more = match &self.video {
            Video::Embedded(stream) => stream.push(frames),
            Video::Ffmpeg { pieces, .. } => {
                self.last = Some(frames.clone());
                pieces.send(frames).is_ok()
            }
            Video::Encoded(_) | Video::Part(_) | Video::Lost => false,
        };
        if takes_more {
            return Ok(());
        }
        self.close()?;
        Err(Error::Container("its encoder ended before its frames did".into()))
    }

    /// Adds the next samples `[channels, n]`.
    ///
    /// # Errors
    /// A disk that is full.
    pub fn push_sound(&mut self, samples: &Array2<f32>) -> Result<()> {
        self.sound.push(samples)
    }

    /// Writes the sound as a WAV file too, as long as the frames so far. Without `replace` a file of that name stays and is an
    /// error.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write_wav(&self, path: &Path, format: WavFormat, replace: bool) -> Result<()> {
        self.sound.write_wav(path, self.rate.samples(self.frames, self.sound.rate()), format, replace)
    }

    /// Frames so far.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// Frames that [`LongMp4::write_to`] writes once the encoder has ended: fewer than were added where it failed.
    pub fn encoded_frames(&self) -> usize {
        match &self.video {
            Video::Embedded(_) | Video::Ffmpeg { .. } | Video::Encoded(_) => self.frames,
            Video::Part(part) => part.track().samples.len(),
            Video::Lost => 0,
        }
    }

    /// The last frames that were added, where the encoder failed and left nothing.
    pub fn lost_frames(&self) -> Option<&Frames> {
        self.last.as_ref().filter(|_| matches!(self.video, Video::Lost))
    }

    /// Waits for the encoder. No frames can be added after it.
    ///
    /// # Errors
    /// The encoder's, once. The sound and the frames that were encoded before the failure are still there.
    pub fn close(&mut self) -> Result<()> {
        let ended;
        (self.video, ended) = match std::mem::replace(&mut self.video, Video::Lost) {
            Video::Embedded(stream) => match stream.finish_part() {
                (Some(video), Ok(())) => (Video::Encoded(Encoded::Embedded(video)), Ok(())),
                (Some(part), failed) => (Video::Part(part), failed),
                (None, failed) => (Video::Lost, failed),
            },
            Video::Ffmpeg { pieces, thread } => {
                drop(pieces);
                let panicked = |message| Error::Panicked { work: "the thread that feeds ffmpeg", message };
                match thread.join().unwrap_or_else(|panic| Err(panicked(panic_message(&*panic)))) {
                    Ok(file) => (Video::Encoded(Encoded::Ffmpeg(file)), Ok(())),
                    Err(error) => (Video::Lost, Err(error)),
                }
            }
            other => (other, Ok(())),
        };
        ended
    }

    /// Hashes of the frames and samples so far.
    ///
    /// # Errors
    /// Samples that cannot be read back.
    pub fn hashes(&self) -> Result<LongHashes> {
        Ok(LongHashes { frames: hex::encode(self.hash.clone().finalize()), samples: self.sound.sha256()? })
    }

    /// Writes the file, whole or not at all. The sound is trimmed or padded with silence to the frames' length.
    ///
    /// # Errors
    /// The encoder's; a file that cannot be written. The same may be tried at another place.
    pub fn finish(&mut self) -> Result<()> {
        self.close()?;
        if self.encoded_frames() < self.frames {
            return Err(Error::Container("its encoder failed".into()));
        }
        self.write_to(&self.path, self.options.replace)
    }

    /// Writes what was encoded to another file than its own: where the encoder failed, the frames before.
    ///
    /// # Errors
    /// [`LongMp4::close`] was not called, or nothing is encoded; a file that cannot be written.
    pub fn write_to(&self, path: &Path, replace: bool) -> Result<()> {
        let (sound, options) = (&self.sound, &self.options);
        let len = self.rate.samples(self.encoded_frames(), sound.rate());
        let target = match &self.video {
            Video::Encoded(Encoded::Embedded(video)) | Video::Part(video) => {
                let (channels, rate) = (sound.channels(), sound.rate());
                let samples = Samples::beside(path)?;
                let audio = aac::encode_blocks(sound.blocks(len), channels, rate, options.audio_bitrate, samples)?;
                let target = atomic::beside(path, ".part")?;
                let mut out = BufWriter::new(target.as_file());
                isobmff::write(&[video.track(), &audio], &mut out, Error::io("write", path))?;
                out.flush().map_err(Error::io("write", path))?;
                drop(out);
                target
            }
            Video::Encoded(Encoded::Ffmpeg(video)) => {
                let mut wav = atomic::beside(path, ".wav")?;
                sound.write_wav_into(wav.as_file_mut(), path, len, WavFormat::Float32)?;
                let target = atomic::beside(path, ".mp4")?;
                ffmpeg::copy_with_sound(target.path(), path, video.path(), 0, wav.path(), options)?;
                target
            }
            Video::Embedded(_) | Video::Ffmpeg { .. } | Video::Lost => {
                return Err(Error::Container("its frames are not encoded".into()));
            }
        };
        atomic::persist(target, path, replace)
    }
}

fn by_ffmpeg(path: &Path, first: &Frames, rate: FrameRate, options: &Mp4Options) -> Result<Video> {
    let target = atomic::beside(path, ".mp4")?;
    let mut sink = FrameSink::start(target.path(), path, first, rate, None, options)?;
    let (pieces, arrivals) = sync_channel::<Frames>(1);
    let work = move || {
        arrivals.iter().for_each(|piece| sink.push(&piece));
        sink.finish().map(|()| target)
    };
    let thread = Builder::new().name("encode".into()).spawn(work);
    let thread = thread.map_err(|e| Error::FfmpegMissing { reason: format!("no thread for it: {e}") })?;
    Ok(Video::Ffmpeg { pieces, thread })
}
