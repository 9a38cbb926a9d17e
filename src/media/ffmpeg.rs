//! H.264 and AAC by an installed ffmpeg: video through its standard input, audio from a temporary WAV file.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use super::atomic;
use super::audio::Audio;
use super::error::{Error, Result};
use super::frames::Frames;
use super::options::Mp4Options;
use super::rate::FrameRate;
use super::wav::{WavFormat, wav_bytes};
use super::yuv;

/// The version line of the ffmpeg at `program`, or why it cannot encode with all of `encoders`.
pub(super) fn probe(program: &Path, encoders: &[&str]) -> std::result::Result<String, String> {
    let ask = |argument: &str| {
        let output = Command::new(program).args(["-hide_banner", argument]).stdin(Stdio::null()).output();
        match output {
            Ok(o) if o.status.success() => Ok(String::from_utf8_lossy(&o.stdout).into_owned()),
            Ok(o) => Err(format!("'{} {argument}' ended with {}", program.display(), o.status)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                Err(format!("{} is not installed", program.display()))
            }
            Err(e) => Err(format!("{} does not start: {e}", program.display())),
        }
    };
    let has = ask("-encoders")?;
    for wanted in encoders {
        if !has.lines().any(|line| line.split_whitespace().nth(1) == Some(wanted)) {
            return Err(format!("{} was built without {wanted}", program.display()));
        }
    }
    Ok(ask("-version")?.lines().next().unwrap_or("ffmpeg").to_string())
}

/// Encodes into `target`, an empty file in the folder of `path`; `audio` is as long as the video.
///
/// The frames are converted here, not by ffmpeg's scaler, so that both encoders are given the same planes.
pub(super) fn encode(
    target: &Path,
    path: &Path,
    frames: &Frames,
    rate: FrameRate,
    audio: Option<&Audio>,
    options: &Mp4Options,
) -> Result<()> {
    let sound = match audio {
        Some(audio) => {
            let mut file = atomic::beside(path, ".wav")?;
            file.write_all(&wav_bytes(audio, WavFormat::Float32)?).map_err(Error::io("write the sound of", path))?;
            Some(file)
        }
        None => None,
    };

    let size = format!("{}x{}", yuv::even(frames.width()), yuv::even(frames.height()));
    let mut command = Command::new(&options.ffmpeg);
    command.args(["-hide_banner", "-loglevel", "error", "-y"]);
    command.args(["-f", "rawvideo", "-pixel_format", "yuv420p", "-video_size", &size]);
    command.args(["-framerate", &rate.to_string(), "-i", "pipe:0"]);
    if let Some(sound) = &sound {
        command.arg("-i").arg(sound.path()).args(["-map", "0:v", "-map", "1:a"]);
        command.args(["-c:a", "aac", "-b:a", &options.audio_bitrate.to_string()]);
    }
    // The filter only labels the planes; it converts nothing.
    command.args(["-vf", "setparams=range=tv:color_primaries=bt709:color_trc=bt709:colorspace=bt709"]);
    command.args(["-c:v", "libx264", "-preset", "medium", "-crf", &options.crf.to_string(), "-pix_fmt", "yuv420p"]);
    command.args(["-color_range", "tv", "-color_primaries", "bt709", "-color_trc", "bt709", "-colorspace", "bt709"]);
    command.args(["-movflags", "+faststart", "-f", "mp4"]).arg(target);
    tracing::debug!(?command, "ffmpeg");

    let start = |e: std::io::Error| Error::FfmpegMissing { reason: format!("it does not start: {e}") };
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().map_err(start)?;
    let (stdin, stderr) = (child.stdin.take(), child.stderr.take());
    // stderr is read beside the writing: a full pipe would stop ffmpeg, and ffmpeg would stop us.
    let (sent, said) = std::thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let mut said = Vec::new();
            // What could be read is enough for a message.
            let _ = stderr.map(|mut s| s.read_to_end(&mut said));
            String::from_utf8_lossy(&said).into_owned()
        });
        let sent = stdin.map_or(Ok(()), |mut stdin| {
            for rgb in frames.iter() {
                let yuv::Planes { y, u, v } = yuv::planes(rgb, frames.width(), frames.height());
                for plane in [y, u, v] {
                    stdin.write_all(&plane)?;
                }
            }
            Ok(())
        });
        (sent, reader.join().expect("reading does not panic"))
    });
    let status = child.wait().map_err(Error::io("wait for ffmpeg on", path))?;
    if status.success() {
        return sent.map_err(Error::io("send frames to ffmpeg for", path));
    }
    Err(Error::Ffmpeg { path: path.to_path_buf(), status: status.to_string(), tail: tail(&said) })
}

/// Writes the pictures of `source` as they are stored there into `target`, an empty file in the folder of `path`, with `audio`.
pub(super) fn copy_pictures(
    target: &Path,
    path: &Path,
    source: &Path,
    audio: &Audio,
    options: &Mp4Options,
) -> Result<()> {
    let mut sound = atomic::beside(path, ".wav")?;
    sound.write_all(&wav_bytes(audio, WavFormat::Float32)?).map_err(Error::io("write the sound of", path))?;
    let mut command = Command::new(&options.ffmpeg);
    command.args(["-hide_banner", "-loglevel", "error", "-y", "-i"]).arg(source).arg("-i").arg(sound.path());
    command.args(["-map", "0:v:0", "-map", "1:a:0", "-c:v", "copy", "-c:a", "aac", "-b:a"]);
    command.arg(options.audio_bitrate.to_string()).args(["-movflags", "+faststart", "-f", "mp4"]).arg(target);
    let start = |e: std::io::Error| Error::FfmpegMissing { reason: format!("it does not start: {e}") };
    let output = command.stdin(Stdio::null()).output().map_err(start)?;
    if output.status.success() {
        return Ok(());
    }
    let said = tail(&String::from_utf8_lossy(&output.stderr));
    Err(Error::Ffmpeg { path: path.to_path_buf(), status: output.status.to_string(), tail: said })
}

/// The last lines of a program's complaints, on one line.
pub(super) fn tail(said: &str) -> String {
    let lines: Vec<&str> = said.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    match lines.len() {
        0 => "it said nothing".to_string(),
        n => lines[n.saturating_sub(6)..].join(" | "),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn tail_is_the_end_on_one_line() {
        assert_eq!(tail(""), "it said nothing");
        assert_eq!(tail("a\n\nb\n c\nd\ne\nf\ng\n"), "b | c | d | e | f | g");
    }

    #[test]
    fn a_missing_program_is_said() {
        let why = probe(Path::new("/nowhere/ffmpeg"), &["libx264"]).unwrap_err();
        assert_eq!(why, "/nowhere/ffmpeg is not installed");
    }
}
