//! The weights of a folder: its index or its file.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::WeightsError;

/// What to do about weights in FlashPack's format.
pub(super) const FLASHPACK: &str = "FlashPack weights, which this program does not read; get the model's safetensors \
                                    files, or load it with the tool that packed it and save it as safetensors";

pub(super) fn is_flashpack(name: &Path) -> bool {
    name.extension().is_some_and(|extension| extension == "flashpack")
}

/// Picks a folder's index or weight file.
pub(super) fn find_weights(folder: &Path) -> Result<PathBuf, WeightsError> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(folder).map_err(WeightsError::io(folder, "cannot list"))? {
        let entry = entry.map_err(WeightsError::io(folder, "cannot list"))?;
        names.insert(entry.file_name().to_string_lossy().into_owned());
    }
    for variant in ["", ".bf16", ".fp16"] {
        for stem in ["diffusion_pytorch_model", "model"] {
            // diffusers puts the variant last in an index' name, older versions before `safetensors`.
            let candidates = [
                format!("{stem}.safetensors.index{variant}.json"),
                format!("{stem}{variant}.safetensors.index.json"),
                format!("{stem}{variant}.safetensors"),
            ];
            if let Some(name) = candidates.into_iter().find(|c| names.contains(c)) {
                return Ok(folder.join(name));
            }
        }
    }
    let only = |matches: Vec<&String>| match matches[..] {
        [name] => Some(folder.join(name)),
        _ => None,
    };
    let indices = names.iter().filter(|n| n.ends_with(".safetensors.index.json")).collect();
    let files: Vec<_> = names.iter().filter(|n| n.ends_with(".safetensors")).collect();
    if let Some(path) = only(indices).or_else(|| only(files.clone())) {
        return Ok(path);
    }
    let reason = if files.len() > 1 {
        let names: Vec<_> = files.iter().map(|n| n.as_str()).collect();
        format!("{} safetensors files without an index ({}): name one of them", files.len(), names.join(", "))
    } else if names.iter().any(|n| n.ends_with(".bin") || n.ends_with(".ckpt") || n.ends_with(".pt")) {
        "only pickled weights; convert them to safetensors".into()
    } else if let Some(name) = names.iter().find(|name| is_flashpack(Path::new(name))) {
        format!("{name} holds {FLASHPACK}")
    } else {
        "no safetensors file in this folder".into()
    };
    Err(WeightsError::NoWeights { path: folder.to_path_buf(), reason })
}
