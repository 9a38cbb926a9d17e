//! Repositories of split files, the layout of LTX-2.5: a folder for each kind of component, a file for each component.

use std::fs;
use std::path::{Path, PathBuf};

use super::component::Component;
use super::error::WeightsError;

/// Folder of the transformers.
const TRANSFORMERS: &str = "diffusion_models";

/// Part of the file name of the video VAE with the diffusion decoder.
const DIFFUSION: &str = "video-vae-bf16";

/// For each component that has its own file, apart from the transformer: its folder and part of the file name. If a
/// component has several rows, the first row with a matching file is used.
const PARTS: [(Component, &str, &str); 8] = [
    (Component::TextEncoder, "text_encoders", "gemma4"),
    (Component::Vae, "vae", "video-vae-conv-"),
    // Both files of the video VAE contain its encoder.
    (Component::Vae, "vae", DIFFUSION),
    (Component::DiffusionDecoder, "vae", DIFFUSION),
    (Component::AudioVae, "vae", "audio-vae"),
    (Component::LatentUpsampler, "latent_upscale_models", "spatial-upscaler"),
    (Component::TemporalUpsampler, "latent_upscale_models", "temporal-upscaler"),
    (Component::DurationHead, "model_patches", "duration-head"),
];

fn name_contains(path: &Path, part: &str) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().contains(part))
}

/// Returns, in sorted order, the bf16 files of LTX-2.5 in `folder` whose names contain `word`, or the quantized ones if
/// there are no bf16 files.
fn files(folder: &Path, word: &str) -> Vec<PathBuf> {
    let is_one = |path: &PathBuf| {
        let is_weights = path.extension().is_some_and(|extension| extension == "safetensors" || extension == "gguf");
        is_weights && name_contains(path, "ltx-2.5") && name_contains(path, word)
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> = entries.filter(is_one).collect();
    if files.iter().any(|path| name_contains(path, "bf16")) {
        files.retain(|path| name_contains(path, "bf16"));
    }
    files.sort();
    files
}

/// Returns an error that lists `files`, the candidates for one component in `folder`.
fn ambiguous(folder: PathBuf, files: &[PathBuf], kind: &str) -> WeightsError {
    let names = files.iter().filter_map(|file| file.file_name()?.to_str()).collect::<Vec<_>>().join(", ");
    WeightsError::NoWeights { path: folder, reason: format!("{} {kind} ({names}): specify one of them", files.len()) }
}

/// Returns the transformer's file if `path` is a repository of split files, otherwise `path`.
///
/// # Errors
/// Returns an error if there are several transformers.
pub(super) fn transformer(path: PathBuf) -> Result<PathBuf, WeightsError> {
    let folder = path.join(TRANSFORMERS);
    match &files(&folder, "transformer")[..] {
        [] => Ok(path),
        [one] => Ok(one.clone()),
        several => Err(ambiguous(folder, several, "transformers")),
    }
}

/// Finds the file of a component in the repository that contains the transformer's file.
///
/// # Errors
/// Returns an error if there are several quantized files of the component and no bf16 file.
pub(super) fn beside(transformer: &Path, component: Component) -> Result<Option<PathBuf>, WeightsError> {
    let folder = transformer.parent().filter(|folder| folder.ends_with(TRANSFORMERS));
    let Some(root) = folder.and_then(Path::parent) else { return Ok(None) };
    for (_, name, word) in PARTS.iter().filter(|(part, ..)| *part == component) {
        let folder = root.join(name);
        let mut found = files(&folder, word);
        if found.len() > 1 && !found.iter().all(|file| name_contains(file, "bf16")) {
            return Err(ambiguous(folder, &found, &format!("files of the component {}", component.folder())));
        }
        if let Some(file) = found.pop() {
            return Ok(Some(file));
        }
    }
    Ok(None)
}
