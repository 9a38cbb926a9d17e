//! Repositories of split files, as LTX-2.5 is published: a folder for each kind of part, a file for each part.

use std::fs;
use std::path::{Path, PathBuf};

use super::component::Component;
use super::error::WeightsError;

/// The folder of transformers.
const TRANSFORMERS: &str = "diffusion_models";

/// In the name of the video VAE's file with the diffusion decoder.
const DIFFUSION: &str = "video-vae-bf16";

/// Folder and words of the file name of each other part; of several for one part, the first that is there.
const PARTS: [(Component, &str, &str); 8] = [
    (Component::TextEncoder, "text_encoders", "gemma4"),
    (Component::Vae, "vae", "video-vae-conv-"),
    // Both files of the video VAE hold its encoder.
    (Component::Vae, "vae", DIFFUSION),
    (Component::DiffusionDecoder, "vae", DIFFUSION),
    (Component::AudioVae, "vae", "audio-vae"),
    (Component::LatentUpsampler, "latent_upscale_models", "spatial-upscaler"),
    (Component::TemporalUpsampler, "latent_upscale_models", "temporal-upscaler"),
    (Component::DurationHead, "model_patches", "duration-head"),
];

/// Files of a folder that are of LTX-2.5, in bf16, with `word` in their names; sorted.
fn files(folder: &Path, word: &str) -> Vec<PathBuf> {
    let is_one =
        |name: &str| name.ends_with(".safetensors") && ["ltx-2.5", "bf16", word].iter().all(|part| name.contains(part));
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(is_one)).collect();
    files.sort();
    files
}

/// The transformer of a repository of split files, any other path itself.
///
/// # Errors
/// Several transformers, by name.
pub(super) fn transformer(path: PathBuf) -> Result<PathBuf, WeightsError> {
    let folder = path.join(TRANSFORMERS);
    match &files(&folder, "transformer")[..] {
        [] => Ok(path),
        [one] => Ok(one.clone()),
        several => {
            let names = several.iter().filter_map(|file| file.file_name()?.to_str()).collect::<Vec<_>>().join(", ");
            let reason = format!("{} transformers ({names}): name one of them", several.len());
            Err(WeightsError::NoWeights { path: folder, reason })
        }
    }
}

/// The file of a part in the repository that a transformer's file is of.
pub(super) fn beside(transformer: &Path, component: Component) -> Option<PathBuf> {
    let folder = transformer.parent().filter(|folder| folder.ends_with(TRANSFORMERS))?;
    let root = folder.parent()?;
    let mut parts = PARTS.iter().filter(|(part, ..)| *part == component);
    parts.find_map(|(_, name, word)| files(&root.join(name), word).pop())
}
