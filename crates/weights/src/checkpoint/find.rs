//! Finds the weights in a folder: its index, weight file or shards.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::WeightsError;

/// Error message for weights in FlashPack's format.
pub(super) const FLASHPACK: &str = "FlashPack weights, which this program does not read; get the model's safetensors \
                                    files, or convert the weights with the tool that packed them";

/// Maximum number of missing shards that an error lists.
const MAX_LISTED: usize = 3;

/// Names of weight files without variant and extension, in the order in which they are tried.
const STEMS: [&str; 2] = ["diffusion_pytorch_model", "model"];

/// Stem, number and count from a shard's file name.
type ShardName = (String, usize, usize);

/// Parses a name such as `model-00001-of-00004.safetensors`.
fn shard_of(name: &str) -> Option<ShardName> {
    let (rest, count) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    Some((stem.to_string(), number.parse().ok()?, count.parse().ok().filter(|count| *count < 1000)?))
}

/// Returns whether a file name is that of one of several shards.
pub(crate) fn is_shard(name: &str) -> bool {
    shard_of(name).is_some_and(|(_, _, count)| count != 1)
}

/// Splits a variant at commas and spaces.
pub(crate) fn variant_parts(variant: &str) -> impl Iterator<Item = &str> {
    variant.split([',', ' ']).filter(|part| !part.is_empty())
}

/// Returns the variants of a folder's weights, such as `fp8` of `diffusion_pytorch_model.fp8.safetensors`.
pub(crate) fn variants(folder: &Path) -> BTreeSet<String> {
    let variant = |name: String| {
        let name = shard_of(&name).map_or(name, |(stem, ..)| stem + ".safetensors");
        let rest = STEMS.iter().find_map(|stem| name.strip_prefix(stem))?;
        let index = || rest.strip_prefix(".safetensors.index")?.strip_suffix(".json");
        let file = || rest.strip_suffix(".safetensors.index.json").or_else(|| rest.strip_suffix(".safetensors"));
        Some(index().or_else(file)?.strip_prefix('.')?.to_string())
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| variant(entry.file_name().to_string_lossy().into_owned())).collect()
}

pub(super) fn is_flashpack(name: &Path) -> bool {
    name.extension().is_some_and(|extension| extension == "flashpack")
}

/// The weights of a folder.
pub(super) enum WeightFiles {
    /// An index or a weight file.
    File(PathBuf),
    /// All files of a set of shards without an index, in order.
    Shards(Vec<PathBuf>),
}

/// Selects a folder's index, weight file, or set of shards. `variant`: parts of file names, separated by commas or
/// spaces, that are tried before the usual variants.
pub(super) fn find_weights(folder: &Path, variant: Option<&str>) -> Result<WeightFiles, WeightsError> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(folder).map_err(WeightsError::io(folder, "cannot list"))? {
        let entry = entry.map_err(WeightsError::io(folder, "cannot list"))?;
        names.insert(entry.file_name().to_string_lossy().into_owned());
    }
    let requested = variant.into_iter().flat_map(variant_parts).map(|part| format!(".{part}"));
    for variant in requested.chain(["", ".bf16", ".fp16"].map(String::from)) {
        for stem in STEMS {
            // Current versions of diffusers put the variant at the end of an index's name, older ones before
            // `safetensors`.
            let candidates = [
                format!("{stem}.safetensors.index{variant}.json"),
                format!("{stem}{variant}.safetensors.index.json"),
                format!("{stem}{variant}.safetensors"),
            ];
            if let Some(name) = candidates.into_iter().find(|c| names.contains(c)) {
                return Ok(WeightFiles::File(folder.join(name)));
            }
        }
    }
    let only = |matches: Vec<&String>| match matches[..] {
        [name] => Some(folder.join(name)),
        _ => None,
    };
    let indices = names.iter().filter(|n| n.ends_with(".safetensors.index.json")).collect();
    let files: Vec<_> = names.iter().filter(|n| n.ends_with(".safetensors")).collect();
    // A single shard of several is not a complete model.
    let lone =
        only(files.clone()).filter(|path| shard_of(&path.to_string_lossy()).is_none_or(|(_, _, count)| count == 1));
    if let Some(path) = only(indices).or(lone) {
        return Ok(WeightFiles::File(path));
    }
    let shards: Vec<ShardName> = files.iter().filter_map(|name| shard_of(name)).collect();
    let is_one_set = shards.iter().all(|(stem, _, count)| (stem, count) == (&shards[0].0, &shards[0].2));
    if let Some((stem, _, count)) = shards.first().filter(|_| is_one_set && shards.len() == files.len()) {
        let missing: Vec<String> = (1..=*count)
            .filter(|number| !shards.iter().any(|(_, own, _)| own == number))
            .take(MAX_LISTED)
            .map(|number| format!("{stem}-{number:05}-of-{count:05}.safetensors"))
            .collect();
        if missing.is_empty() && shards.len() == *count {
            return Ok(WeightFiles::Shards(files.into_iter().map(|name| folder.join(name)).collect()));
        }
        let (got, missing) = (shards.len(), missing.join(", "));
        let reason =
            format!("{got} of {count} shards and no index; {missing} and {stem}.safetensors.index.json are missing");
        return Err(WeightsError::NoWeights { path: folder.to_path_buf(), reason: reason + "; download them" });
    }
    let ggufs: Vec<_> = names.iter().filter(|name| name.ends_with(".gguf")).collect();
    if let Some(path) = only(ggufs.clone()).filter(|_| files.is_empty()) {
        return Ok(WeightFiles::File(path));
    }
    let several = |files: &[&String], kind: &str| {
        let names: Vec<_> = files.iter().map(|n| n.as_str()).collect();
        format!("{} {kind} files without an index ({}): specify one of them", files.len(), names.join(", "))
    };
    let reason = if files.len() > 1 {
        several(&files, "safetensors")
    } else if ggufs.len() > 1 {
        several(&ggufs, "GGUF")
    } else if names.iter().any(|n| n.ends_with(".bin") || n.ends_with(".ckpt") || n.ends_with(".pt")) {
        "only pickled weights; convert them with safetensors.torch.save_file".into()
    } else if let Some(name) = names.iter().find(|name| is_flashpack(Path::new(name))) {
        format!("{name} holds {FLASHPACK}")
    } else {
        "no safetensors or GGUF file in this folder; download the model's files with `ltx2 pull`".into()
    };
    Err(WeightsError::NoWeights { path: folder.to_path_buf(), reason })
}
