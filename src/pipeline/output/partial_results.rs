//! If a run fails after denoising, saves its results (latents, and any decoded frames and audio) to separate `.kept` or
//! temporary files, not to the requested outputs.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use ndarray::{Array4, Array5};

use super::tensors;
use crate::media::{Audio, Frames};
use crate::pipeline::error::{PipelineError, Result, one_line};
use crate::pipeline::plan::options::{FallbackLocation, RunOptions};
use crate::pipeline::stages::batch::split;
use crate::tensor::Tensor;

pub(in crate::pipeline) type NamedTensors = Vec<(String, Tensor)>;

/// Returns the first of the paths `stem` + `ending`, `stem.1` + `ending`, … that does not exist.
fn free(stem: &OsStr, ending: &str) -> PathBuf {
    let numbered = |n: usize| {
        let mut name = stem.to_owned();
        name.push(if n == 0 { ending.to_string() } else { format!(".{n}{ending}") });
        PathBuf::from(name)
    };
    (0..).map(numbered).find(|path| !path.exists()).expect("some number is free")
}

/// Calls `write` to save results of the video `path` in a file that `place` determines. Returns the path of that file.
pub(in crate::pipeline) fn store(
    place: FallbackLocation,
    path: &Path,
    ending: &str,
    write: impl Fn(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".kept");
    let to = |file: PathBuf| write(&file).map(|()| file);
    match place {
        FallbackLocation::NextToVideo => {
            beside.push(ending);
            to(beside.into())
        }
        FallbackLocation::Temporary => {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let temporary = std::env::temp_dir().join(format!("{name}.{}", std::process::id()));
            to(free(temporary.as_os_str(), ending)).or_else(|_| to(free(&beside, ending)))
        }
    }
}

/// Saves results with [`store`] after the run failed with `error`. Returns an error with the message "{error}; {what}
/// are kept in {file}", or `error` itself if the results cannot be saved.
pub(in crate::pipeline) fn keep(
    error: PipelineError,
    place: FallbackLocation,
    what: &str,
    path: &Path,
    ending: &str,
    write: impl Fn(&Path) -> Result<()>,
) -> PipelineError {
    match store(place, path, ending, write) {
        Ok(kept) => PipelineError::ResultsSaved { source: Box::new(error), what: what.into(), kept },
        Err(failed) => {
            tracing::error!("{what} are not kept: {}", one_line(&failed));
            error
        }
    }
}

pub(in crate::pipeline) fn keep_tensors(
    error: PipelineError,
    place: FallbackLocation,
    what: &str,
    path: &Path,
    ending: &str,
    tensors: &[(String, Tensor)],
) -> PipelineError {
    keep(error, place, what, path, ending, |kept| tensors::write(kept, tensors))
}

/// Returns frames, audio and latents as named tensors. Omits the frames of an audio-only result.
pub(in crate::pipeline) fn named(frames: &Frames, audio: Option<&Audio>, latents: &[(String, Tensor)]) -> NamedTensors {
    let frames = Some(frames).filter(|frames| frames.count() > 0);
    let frames = frames.map(|frames| ("frames".to_string(), Tensor::U8(frames.data().clone().into_dyn())));
    let audio = audio.map(|audio| ("audio".to_string(), Tensor::from(audio.samples().clone())));
    frames.into_iter().chain(audio).chain(latents.iter().cloned()).collect()
}

/// Splits un-normalised latents into the latents of each of `count` videos, with the tensor names of `--dump`.
pub(in crate::pipeline) fn latents(video: &Array5<f32>, audio: &Array4<f32>, count: usize) -> Vec<NamedTensors> {
    let each = split(video.clone(), count).into_iter().zip(split(audio.clone(), count));
    let named = |(video, audio): (Array5<f32>, Array4<f32>)| {
        vec![("latents.video".to_string(), video.into()), ("latents.audio".to_string(), audio.into())]
    };
    each.map(named).collect()
}

/// Saves the latents of videos after decoding failed, and the frames that were already decoded. [`RunOptions::keep`]
/// determines where the file of each video is saved; its name is derived from the video's path in
/// [`RunOptions::outputs`].
pub(in crate::pipeline) fn keep_latents(
    mut error: PipelineError,
    options: &RunOptions,
    latents: &[NamedTensors],
    frames: &[Frames],
) -> PipelineError {
    // The results of a canceled server job are not needed.
    if options.fallback == FallbackLocation::NextToVideo && matches!(error, PipelineError::Interrupted(..)) {
        return error;
    }
    let is_written = |path: &&PathBuf| path.file_name().is_some();
    for (at, (path, latents)) in options.outputs.iter().filter(is_written).zip(latents).enumerate() {
        let decoded = frames.get(at).filter(|frames| frames.count() > 0);
        let what = if decoded.is_some() { "the frames and latents" } else { "the latents" };
        let tensors = named(decoded.unwrap_or(&Frames::none()), None, latents);
        error = keep_tensors(error, options.fallback, what, path, ".latents.safetensors", &tensors);
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server job overwrites the same file on every attempt; a command never overwrites a file.
    #[test]
    fn temporary_kept_files_get_new_numbers() {
        let folder = tempfile::tempdir().expect("a folder");
        let video = folder.path().join("out.mp4");
        let write = |path: &Path| Ok(crate::atomic_file::write_atomically(path, b"kept")?);
        for _ in 0..2 {
            let kept = store(FallbackLocation::NextToVideo, &video, ".safetensors", write).expect("written");
            assert_eq!(kept, folder.path().join("out.mp4.kept.safetensors"));
        }
        let stem = folder.path().join("out.mp4.kept");
        assert_eq!(free(stem.as_os_str(), ".safetensors"), folder.path().join("out.mp4.kept.1.safetensors"));
        assert_eq!(free(stem.as_os_str(), ".json"), folder.path().join("out.mp4.kept.json"));
    }
}
