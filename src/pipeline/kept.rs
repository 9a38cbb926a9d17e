//! Results of a run that fails after denoising, kept in files of their own.

use std::path::{Path, PathBuf};

use ndarray::{Array4, Array5};

use super::batch::split;
use super::error::{PipelineError, Result, one_line};
use super::tensors;
use crate::media::{Audio, Frames};
use crate::tensor::Tensor;

/// Tensors by name.
pub(super) type Named = Vec<(String, Tensor)>;

/// A file for what is kept of the video `path`, in the folder of temporary files; no file has its name.
fn place(path: &Path, ending: &str) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let (folder, process) = (std::env::temp_dir(), std::process::id());
    let numbered = |n: usize| match n {
        0 => folder.join(format!("{name}.{process}{ending}")),
        n => folder.join(format!("{name}.{process}.{n}{ending}")),
    };
    (0..).map(numbered).find(|path| !path.exists()).expect("some number is free")
}

/// Writes what is kept of the video `path` by `write`, where temporary files go, else beside the video. The error then
/// names the file: "{error}; {what} kept in {file}".
pub(super) fn keep(
    error: PipelineError,
    what: &str,
    path: &Path,
    ending: &str,
    write: impl Fn(&Path) -> Result<()>,
) -> PipelineError {
    let temporary = place(path, ending);
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".kept{ending}"));
    let beside = PathBuf::from(beside);
    let beside = if beside.exists() { temporary.clone() } else { beside };
    match write(&temporary).map(|()| temporary).or_else(|_| write(&beside).map(|()| beside)) {
        Ok(kept) => PipelineError::Kept { source: Box::new(error), what: what.into(), kept },
        Err(failed) => {
            tracing::error!("{what} not kept either: {}", one_line(&failed));
            error
        }
    }
}

/// [`keep`] of tensors.
pub(super) fn keep_tensors(
    error: PipelineError,
    what: &str,
    path: &Path,
    ending: &str,
    tensors: &[(String, Tensor)],
) -> PipelineError {
    keep(error, what, path, ending, |kept| tensors::write(kept, tensors))
}

/// Frames, sound and latents as tensors; no frames of sound alone.
pub(super) fn named(frames: &Frames, audio: Option<&Audio>, latents: &[(String, Tensor)]) -> Named {
    let frames = Some(frames).filter(|frames| frames.count() > 0);
    let frames = frames.map(|frames| ("frames".to_string(), Tensor::U8(frames.data().clone().into_dyn())));
    let audio = audio.map(|audio| ("audio".to_string(), Tensor::from(audio.samples().clone())));
    frames.into_iter().chain(audio).chain(latents.iter().cloned()).collect()
}

/// Un-normalised latents of each of `count` videos, under the names of `--dump`.
pub(super) fn latents(video: &Array5<f32>, audio: &Array4<f32>, count: usize) -> Vec<Named> {
    let each = split(video.clone(), count).into_iter().zip(split(audio.clone(), count));
    let named = |(video, audio): (Array5<f32>, Array4<f32>)| {
        vec![("latents.video".to_string(), video.into()), ("latents.audio".to_string(), audio.into())]
    };
    each.map(named).collect()
}

/// Keeps the latents of videos that cannot be decoded, each for its file of `outputs`, and the frames of those that were.
pub(super) fn keep_latents(
    mut error: PipelineError,
    outputs: &[PathBuf],
    latents: &[Named],
    frames: &[Frames],
) -> PipelineError {
    let is_written = |path: &&PathBuf| path.file_name().is_some();
    for (at, (path, latents)) in outputs.iter().filter(is_written).zip(latents).enumerate() {
        let decoded = frames.get(at).filter(|frames| frames.count() > 0);
        let what = if decoded.is_some() { "its frames and latents are" } else { "its latents are" };
        let tensors = named(decoded.unwrap_or(&Frames::none()), None, latents);
        error = keep_tensors(error, what, path, ".latents.safetensors", &tensors);
    }
    error
}
