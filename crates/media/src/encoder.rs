//! Choice of the video encoder: ffmpeg if it is installed, otherwise the built-in encoders.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use super::error::{MediaError, Result};
use super::ffmpeg;
use super::options::{EncoderChoice, Mp4Options};

/// The encoder that wrote a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Encoder {
    /// ffmpeg, with its version line.
    Ffmpeg(String),
    /// The encoders built into this binary.
    Embedded,
}

impl std::fmt::Display for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Encoder::Ffmpeg(version) => write!(f, "ffmpeg ({version}): libx264 and aac"),
            Encoder::Embedded => f.write_str("embedded: rusty_h264 and syom AAC-LC"),
        }
    }
}

/// Path, modification time and size of a program's file.
type ProgramFile = (PathBuf, SystemTime, u64);

/// The last ffmpeg that has the encoders, and its version line. Probing it again would take 0.1 s per video.
static KNOWN: Mutex<Option<(ProgramFile, String)>> = Mutex::new(None);

/// Returns the file of `program`, a path or a name that is looked up on PATH. `None`: there is no such file.
fn program_file(program: &Path) -> Option<ProgramFile> {
    let folders = std::env::var_os("PATH").filter(|_| program.components().count() == 1);
    let in_folders = folders.iter().flat_map(std::env::split_paths).map(|folder| folder.join(program));
    let path = if folders.is_some() { in_folders.into_iter().find(|path| path.is_file())? } else { program.into() };
    let facts = path.metadata().ok()?;
    Some((path, facts.modified().ok()?, facts.len()))
}

/// Resolves the requested encoder to one that is available on this machine.
pub(super) fn choose(options: &Mp4Options) -> Result<Encoder> {
    if options.encoder == EncoderChoice::Embedded {
        return Ok(Encoder::Embedded);
    }
    let file = program_file(&options.ffmpeg);
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, version)) = known().as_ref().filter(|(known, _)| file.as_ref() == Some(known)) {
        return Ok(Encoder::Ffmpeg(version.clone()));
    }
    match ffmpeg::probe(&options.ffmpeg, &["libx264", "aac"]) {
        Ok(version) => {
            *known() = file.map(|file| (file, version.clone()));
            Ok(Encoder::Ffmpeg(version))
        }
        Err(reason) if options.encoder == EncoderChoice::Ffmpeg => Err(MediaError::FfmpegMissing { reason }),
        Err(reason) => {
            tracing::info!("{reason}; using the embedded encoder");
            Ok(Encoder::Embedded)
        }
    }
}
