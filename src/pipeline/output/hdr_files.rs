//! Files of HDR videos in addition to the SDR preview: EXR frames and a 10-bit video.

use std::fs;
use std::path::{Path, PathBuf};

use super::writer::place_of;
use crate::config::{Config, HdrVideo};
use crate::media::{self, HdrCodec, HdrFrames, HdrSignal, MediaError};
use crate::pipeline::error::Result;
use crate::pipeline::plan::overwrites::Replaceable;

/// The ffmpeg program that encodes 10-bit video.
const FFMPEG: &str = "ffmpeg";

/// Returns the path `OUTPUT` + `ending` next to the video `path`.
fn next_to(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(ending);
    path.with_file_name(name)
}

/// Returns the folder of the EXR frames of the video `path`. `several`: whether the run has several videos.
pub(in crate::pipeline) fn exr_folder(config: &Config, path: &Path, several: bool) -> PathBuf {
    let asked = config.output.save_exr.as_ref();
    asked.map_or_else(|| next_to(path, "_exr"), |asked| place_of(asked, path, "", several))
}

/// Returns the path of the 10-bit video of the video `path`; `None` if none is requested.
pub(in crate::pipeline) fn hdr_video_path(config: &Config, path: &Path) -> Option<PathBuf> {
    (config.output.hdr_video != Some(HdrVideo::None)).then(|| next_to(path, "_hdr.mp4"))
}

/// Returns whether the EXR frames of the finished video `path`, and a 10-bit video that was requested explicitly, exist.
pub(in crate::pipeline) fn exist(config: &Config, path: &Path, several: bool) -> bool {
    if !config.pipeline.spec().hdr {
        return true;
    }
    let is_frame = |entry: &fs::DirEntry| entry.path().extension().is_some_and(|extension| extension == "exr");
    let frames =
        fs::read_dir(exr_folder(config, path, several)).into_iter().flatten().flatten().filter(is_frame).count();
    let has_video =
        hdr_video_path(config, path).is_none_or(|video| video.exists() || config.output.hdr_video.is_none());
    config.request.num_frames.count().is_none_or(|most| frames >= most) && has_video
}

fn codec(config: &Config) -> HdrCodec {
    config.output.hdr_codec.unwrap_or_default()
}

/// Checks that ffmpeg can encode the 10-bit video that a configuration requests. Without `output.hdr_video`, the video is
/// optional.
///
/// # Errors
/// Returns an error that says what to install.
pub(crate) fn check_encoder(config: &Config) -> Result<()> {
    let is_asked = matches!(config.output.hdr_video, Some(HdrVideo::Hlg | HdrVideo::Pq));
    let fault =
        (config.pipeline.spec().hdr && is_asked).then(|| media::hdr_video_fault(Path::new(FFMPEG), codec(config)));
    fault.flatten().map_or(Ok(()), |fault: MediaError| Err(fault.into()))
}

/// Writes the EXR frames of the video `path`. Deletes those of an earlier video first if the run may replace the folder.
pub(in crate::pipeline) fn write_exr(
    config: &Config,
    path: &Path,
    several: bool,
    frames: &HdrFrames,
    replaceable: &Replaceable,
) -> Result<()> {
    let folder = exr_folder(config, path, several);
    if replaceable.has(&folder) {
        media::remove_exr_frames(&folder)?;
    }
    media::write_exr_frames(&folder, frames, false)?;
    tracing::info!("{}: {} EXR frames", folder.display(), frames.count());
    Ok(())
}

/// Writes the EXR frames of the video `path` to the ZIP file `OUTPUT_exr.zip`.
pub(in crate::pipeline) fn write_exr_archive(path: &Path, frames: &HdrFrames, replaceable: &Replaceable) -> Result<()> {
    let archive = next_to(path, "_exr.zip");
    Ok(media::write_exr_archive(&archive, frames, replaceable.has(&archive))?)
}

/// Writes the 10-bit video of the video `path`, with `fps` frames per second. If it is optional and ffmpeg or its encoder
/// is missing, logs the reason instead.
pub(in crate::pipeline) fn write_video(
    config: &Config,
    path: &Path,
    frames: &HdrFrames,
    fps: f64,
    replaceable: &Replaceable,
) -> Result<()> {
    let Some(target) = hdr_video_path(config, path) else { return Ok(()) };
    let program = Path::new(FFMPEG);
    let signal = match config.output.hdr_video {
        Some(HdrVideo::Pq) => HdrSignal::Pq,
        _ => HdrSignal::Hlg,
    };
    if let Some(fault) = media::hdr_video_fault(program, codec(config)).filter(|_| config.output.hdr_video.is_none()) {
        tracing::warn!("{}: not written: {fault}", target.display());
        return Ok(());
    }
    media::write_hdr_video(&target, frames, fps, signal, codec(config), program, replaceable.has(&target))?;
    tracing::info!("{}: 10-bit video", target.display());
    Ok(())
}
