//! H.264 and AAC encoding with an installed ffmpeg, which reads frames from its standard input and audio from a
//! temporary WAV file.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread::JoinHandle;

use tempfile::NamedTempFile;

use super::audio::Audio;
use super::decode::as_file;
use super::error::{MediaError, Result, no_encoder, tail};
use super::frames::Frames;
use super::options::Mp4Options;
use super::rate::FrameRate;
use super::track_times::{FfmpegListing, video_start};
use super::video_track::VideoTrack;
use super::wav::{WavFormat, wav_bytes};
use super::yuv;
use ltx2_base::catch_panic::panic_message;
use ltx2_base::{atomic_file, threads};

/// Returns the version line of the ffmpeg program at the path `program`. The error message contains the reason why
/// ffmpeg cannot be started, or the names of those `encoders` that it lacks.
pub(super) fn probe(program: &Path, encoders: &[&str]) -> std::result::Result<String, String> {
    // One call prints the encoders to stdout and the version to stderr. A second call would take another 0.1 s.
    let output = match Command::new(program).arg("-encoders").stdin(Stdio::null()).output() {
        Ok(output) if output.status.success() => output,
        Ok(output) => return Err(format!("'{} -encoders' failed ({})", program.display(), output.status)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(format!("{} is not installed", program.display()));
        }
        Err(e) => return Err(format!("cannot start {}: {e}", program.display())),
    };
    let [listed, banner] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    for wanted in encoders {
        if !listed.lines().any(|line| line.split_whitespace().nth(1) == Some(wanted)) {
            return Err(format!("{} was built without {wanted}", program.display()));
        }
    }
    Ok(banner.lines().find(|line| line.starts_with("ffmpeg version")).unwrap_or("ffmpeg").to_string())
}

/// Encodes a video into `target`, an empty file in the folder of `path`. `audio` must be as long as the video.
pub(super) fn encode(
    target: &Path,
    path: &Path,
    frames: &Frames,
    rate: FrameRate,
    audio: Option<&Audio>,
    options: &Mp4Options,
) -> Result<()> {
    let sound = audio.map(|audio| temporary_wav(path, audio)).transpose()?;
    let sound = sound.as_ref().map(NamedTempFile::path);
    let mut sink = FrameSink::start(target, path, frames, rate, sound, options)?;
    sink.push(frames);
    sink.finish()
}

fn temporary_wav(path: &Path, audio: &Audio) -> Result<NamedTempFile> {
    let mut file = atomic_file::temporary_next_to(path, ".wav")?;
    file.write_all(&wav_bytes(audio, WavFormat::Float32)?).map_err(MediaError::io("write the sound of", path))?;
    Ok(file)
}

/// A running ffmpeg process that encodes frames.
///
/// Frames are converted to YUV here instead of by ffmpeg's scaler, so that ffmpeg and the built-in encoder get
/// identical planes.
pub(super) struct FrameSink {
    child: Child,
    frames: Option<ChildStdin>,
    /// Thread that reads stderr. Without it, a full stderr pipe would block ffmpeg, and ffmpeg would block this
    /// process's writes.
    said: Option<JoinHandle<String>>,
    sent: std::io::Result<()>,
    path: PathBuf,
}

impl FrameSink {
    /// Starts ffmpeg on `target`, an empty file in the folder of `path`. All frames must have the size of `first`.
    /// `sound` is a WAV file as long as the complete video.
    pub(super) fn start(
        target: &Path,
        path: &Path,
        first: &Frames,
        rate: FrameRate,
        sound: Option<&Path>,
        options: &Mp4Options,
    ) -> Result<Self> {
        let size = format!("{}x{}", yuv::even(first.width()), yuv::even(first.height()));
        let mut command = Command::new(&options.ffmpeg);
        command.args(["-hide_banner", "-loglevel", "error", "-y"]);
        command.args(["-f", "rawvideo", "-pixel_format", "yuv420p", "-video_size", &size]);
        command.args(["-framerate", &rate.to_string(), "-i", "pipe:0"]);
        if let Some(sound) = sound {
            command.arg("-i").arg(sound).args(["-map", "0:v", "-map", "1:a"]);
            command.args(["-c:a", "aac", "-b:a", &options.audio_bitrate.to_string()]);
        }
        // The filter only sets color metadata; it does not convert.
        command.args(["-vf", "setparams=range=tv:color_primaries=bt709:color_trc=bt709:colorspace=bt709"]);
        command.args(["-c:v", "libx264", "-preset", "medium", "-crf", &options.crf.to_string(), "-pix_fmt", "yuv420p"]);
        command.args([
            "-color_range",
            "tv",
            "-color_primaries",
            "bt709",
            "-color_trc",
            "bt709",
            "-colorspace",
            "bt709",
        ]);
        command.args(["-movflags", "+faststart", "-f", "mp4"]).arg(target);
        FrameSink::spawn(command, path)
    }

    /// Starts an ffmpeg command that reads raw frames from its standard input and writes the file `path`.
    pub(super) fn spawn(mut command: Command, path: &Path) -> Result<Self> {
        tracing::debug!(?command, "ffmpeg");
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = piped.spawn().map_err(no_encoder(path))?;
        let stderr = child.stderr.take();
        let said = std::thread::spawn(move || {
            let mut said = Vec::new();
            // A partial read is enough for the error message.
            let _ = stderr.map(|mut s| s.read_to_end(&mut said));
            String::from_utf8_lossy(&said).into_owned()
        });
        Ok(FrameSink { frames: child.stdin.take(), child, said: Some(said), sent: Ok(()), path: path.into() })
    }

    /// Adds frames. After a failure, frames are dropped and [`FrameSink::finish`] returns the error.
    pub(super) fn push(&mut self, frames: &Frames) {
        let all: Vec<&[u8]> = frames.iter().collect();
        self.push_converted(&all, |rgb| {
            let planes = yuv::planes(rgb, frames.width(), frames.height());
            [planes.y, planes.u, planes.v].concat()
        });
    }

    /// Adds frames like [`FrameSink::push`]. `convert` returns the raw bytes of a frame.
    pub(super) fn push_converted<T: Sync>(&mut self, frames: &[T], convert: impl Fn(&T) -> Vec<u8> + Sync) {
        let Some(stdin) = self.frames.as_mut().filter(|_| self.sent.is_ok()) else { return };
        let cores = threads::cores();
        // On many cores, one thread would convert frames more slowly than ffmpeg encodes them.
        self.sent = frames.chunks(cores).try_for_each(|some| {
            let converted = threads::in_order(some, cores, &convert);
            converted.iter().try_for_each(|bytes| stdin.write_all(bytes))
        });
    }

    /// Waits until all frames are encoded.
    pub(super) fn finish(mut self) -> Result<()> {
        drop(self.frames.take());
        let said = match self.said.take() {
            Some(said) => said.join().unwrap_or_else(|panic| panic_message(&*panic)),
            None => String::new(),
        };
        let status = self.child.wait().map_err(MediaError::io("wait for ffmpeg on", &self.path))?;
        if status.success() {
            let sent = std::mem::replace(&mut self.sent, Ok(()));
            return sent.map_err(MediaError::io("send frames to ffmpeg for", &self.path));
        }
        Err(MediaError::Ffmpeg { path: self.path.clone(), status: status.to_string(), tail: tail(&said) })
    }
}

impl Drop for FrameSink {
    /// Stops ffmpeg if it is still running, because a partial file is useless.
    fn drop(&mut self) {
        // Fails harmlessly if ffmpeg has already exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Copies the video track of `source` without re-encoding into `target`, an empty file in the folder of `path`. `audio`
/// becomes the sound.
pub(super) fn copy_frames(
    target: &Path,
    path: &Path,
    source: &Path,
    audio: &Audio,
    options: &Mp4Options,
) -> Result<()> {
    let track = VideoTrack::of_file(source, &options.ffmpeg, &[])?.map_or(0, |track| track.index);
    copy_with_sound(target, path, source, track, temporary_wav(path, audio)?.path(), options)
}

/// Copies video track `track` like [`copy_frames`], and adds the sound of a WAV file.
pub(super) fn copy_with_sound(
    target: &Path,
    path: &Path,
    source: &Path,
    track: usize,
    sound: &Path,
    options: &Mp4Options,
) -> Result<()> {
    // Aligns the sound to the first frame, whose time in the source may not be 0.
    let first = video_start(source, &options.ffmpeg, track);
    let shift = first.map_or(0.0, |first| FfmpegListing::read(source, &options.ffmpeg).start - first).to_string();
    let mut command = Command::new(&options.ffmpeg);
    command.args(["-hide_banner", "-loglevel", "error", "-y", "-itsoffset", &shift, "-i"]).arg(as_file(source));
    command.arg("-i").arg(as_file(sound));
    let map = format!("0:{track}");
    command.args(["-map", &map, "-map", "1:a:0", "-c:v", "copy", "-c:a", "aac", "-b:a"]);
    command.arg(options.audio_bitrate.to_string()).args(["-movflags", "+faststart", "-f", "mp4"]).arg(target);
    let output = command.stdin(Stdio::null()).output().map_err(no_encoder(path))?;
    if output.status.success() {
        return Ok(());
    }
    let said = tail(&String::from_utf8_lossy(&output.stderr));
    Err(MediaError::Ffmpeg { path: path.to_path_buf(), status: output.status.to_string(), tail: said })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn missing_program_is_reported() {
        let why = probe(Path::new("/nowhere/ffmpeg"), &["libx264"]).unwrap_err();
        assert_eq!(why, "/nowhere/ffmpeg is not installed");
    }
}
