//! Which files of which repositories `ltx2 pull` downloads.

use ltx2_download::DownloadError;
use ltx2_download::hub::{HubFile, Listing};

use crate::cli::UsageError;
use crate::config::ic_loras::{self, PublishedIcLora};
use crate::config::presets::CONFIGS;
use crate::config::{CliOverrides, load};
use crate::weights::HubCache;
use crate::weights::published::{self, PublishedFile, PublishedModel};

/// Maximum number of similar names in an error.
const SIMILAR: usize = 3;

/// What the user wants to download.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wanted<'a> {
    /// The files of a preset.
    Preset(&'static PublishedModel),
    /// The files of a repository, and a path in it.
    Repository(&'a str, Option<&'a str>),
}

/// A file to download.
#[derive(Clone, Debug)]
pub(super) struct Selected {
    pub(super) file: HubFile,
    /// What the file is for; empty if unknown.
    pub(super) purpose: &'static str,
}

impl<'a> Wanted<'a> {
    /// Parses the name of a preset or repository.
    pub(super) fn parse(name: &'a str) -> anyhow::Result<Self> {
        if let Some(model) = PublishedModel::of_preset(name) {
            return Ok(Wanted::Preset(model));
        }
        if CONFIGS.iter().any(|(preset, _)| *preset == name) {
            let loaded = load(&CliOverrides { files: vec![name.into()], ..CliOverrides::default() })?;
            let own = PublishedModel::of_preset(loaded.preset()).filter(|own| own.model == loaded.config.model.path);
            let error = || {
                UsageError(format!(
                    "{name}: the toy model is part of the program and is not downloaded; run `ltx2 generate -c {name} -p \"a \
                     red circle bounces on blue, low beeps\"`"
                ))
            };
            return Ok(Wanted::Preset(own.ok_or_else(error)?));
        }
        if let Some(wanted) = Self::ic_lora(name)? {
            return Ok(wanted);
        }
        if HubCache::is_name(name) {
            let repository = published::repository_of(name);
            let path = name.strip_prefix(repository).and_then(|rest| rest.strip_prefix('/'));
            return Ok(Wanted::Repository(repository, path));
        }
        let presets: Vec<&str> = published::MODELS.iter().flat_map(|model| model.presets).copied().collect();
        let known = presets.iter().copied().chain(published::repositories()).chain(ic_loras::names());
        let similar = similar(name, known);
        Err(UsageError(format!(
            "'{name}' is neither a preset nor an IC-LoRA nor a repository (org/name); similar names: {similar}; presets: {}",
            presets.join(", ")
        ))
        .into())
    }

    /// Returns the file of the published IC-LoRA with this name; `None` if there is none.
    fn ic_lora(name: &str) -> Result<Option<Self>, UsageError> {
        let rows: Vec<&PublishedIcLora> = PublishedIcLora::named(name).collect();
        match rows[..] {
            [] => Ok(None),
            [row] => Ok(Some(Wanted::Repository(row.repository, row.file))),
            _ => {
                let commands = rows.iter().map(|row| format!("ltx2 pull {} (LTX-{})", row.hub_name(), row.base));
                let commands: Vec<String> = commands.collect();
                Err(UsageError(format!(
                    "{name}: several model generations have an IC-LoRA of this name; run {}",
                    commands.join(" or ")
                )))
            }
        }
    }

    /// Returns the repositories, that of the transformer first.
    pub(super) fn repositories(self) -> Vec<&'a str> {
        match self {
            Wanted::Repository(name, _) => vec![name],
            Wanted::Preset(model) => {
                let mut names: Vec<&str> = Vec::new();
                for file in model.files {
                    if !names.contains(&file.repository) {
                        names.push(file.repository);
                    }
                }
                names
            }
        }
    }

    /// Returns an error if the combination of repository and `--files` is not allowed.
    pub(super) fn check(self, parts: &[String]) -> Result<(), UsageError> {
        if parts.iter().any(|part| part.trim().is_empty()) {
            return Err(UsageError("--files contains an empty part; separate the parts by single commas".into()));
        }
        let Wanted::Repository(name, path) = self else { return Ok(()) };
        let presets = PublishedModel::presets_of(name);
        if path.is_some() && !parts.is_empty() {
            return Err(UsageError(format!("{name}: give either a path in the repository or --files, not both")));
        }
        if path.is_none() && parts.is_empty() && !presets.is_empty() {
            return Err(UsageError(format!(
                "{name} contains several models; name a preset, which selects its files ({}), or select files with \
                 --files",
                presets.join(", ")
            )));
        }
        Ok(())
    }

    /// Selects files of a listing. `parts`: the value of `--files`.
    pub(super) fn select(self, listing: &Listing, parts: &[String]) -> anyhow::Result<Vec<Selected>> {
        match self {
            Wanted::Preset(model) => {
                let own = model.files.iter().filter(|file| file.repository == listing.repository);
                let mut selected = Vec::new();
                for wanted in own {
                    selected.extend(published_file(listing, wanted, parts)?);
                }
                Ok(selected)
            }
            Wanted::Repository(_, Some(path)) => {
                let is_below = |file: &&HubFile| file.path == path || file.path.starts_with(&format!("{path}/"));
                let files = of_listing(listing.files.iter().filter(is_below));
                if files.is_empty() { Err(missing(listing, path).into()) } else { Ok(files) }
            }
            Wanted::Repository(_, None) => {
                let lower = |text: &str| text.to_lowercase();
                let has = |file: &HubFile, part: &String| lower(&file.path).contains(&lower(part));
                if let Some(part) = parts.iter().find(|part| !listing.files.iter().any(|file| has(file, part))) {
                    return Err(UsageError(format!("--files {part}: {}", missing(listing, part))).into());
                }
                let is_wanted = |file: &&HubFile| parts.is_empty() || parts.iter().any(|part| has(file, part));
                Ok(of_listing(listing.files.iter().filter(is_wanted)))
            }
        }
    }
}

/// Returns an error if a part of `--files` occurs in none of the files selected for a preset.
pub(super) fn check_parts<'a>(
    preset: &str,
    parts: &[String],
    selected: impl Iterator<Item = &'a Selected> + Clone,
) -> Result<(), UsageError> {
    let is_used = |part: &str| selected.clone().any(|one| one.file.path.to_lowercase().contains(&part.to_lowercase()));
    match parts.iter().find(|part| !is_used(part)) {
        Some(part) => {
            Err(UsageError(format!("--files {part}: the repository has no such variant of a file that {preset} needs")))
        }
        None => Ok(()),
    }
}

fn of_listing<'a>(files: impl Iterator<Item = &'a HubFile>) -> Vec<Selected> {
    files.map(|file| Selected { file: file.clone(), purpose: "" }).collect()
}

/// Returns the error for a file that a repository does not have.
fn missing(listing: &Listing, path: &str) -> DownloadError {
    let similar = similar(path, listing.files.iter().map(|file| &*file.path));
    let reason = format!("the repository has no such file; similar names: {similar}");
    DownloadError::NotFound { name: format!("{}/{path}", listing.repository), reason }
}

/// Returns the names, other than `name` itself, that are most similar to it, separated by commas.
fn similar<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> String {
    let mut names: Vec<(f64, &str)> =
        names.filter(|own| *own != name).map(|own| (strsim::jaro_winkler(own, name), own)).collect();
    names.sort_by(|a, b| b.0.total_cmp(&a.0));
    names.iter().take(SIMILAR).map(|(_, own)| *own).collect::<Vec<_>>().join(", ")
}

/// Returns the files of a listing for an entry of a preset. With `parts`, these are the variants of the entry with most
/// of the parts in their names, if it has such variants.
fn published_file(listing: &Listing, wanted: &PublishedFile, parts: &[String]) -> anyhow::Result<Vec<Selected>> {
    let selected = |file: &HubFile| Selected { file: file.clone(), purpose: wanted.purpose };
    if wanted.path.is_empty() || wanted.path.ends_with('/') {
        let below = listing.files.iter().filter(|file| file.path.starts_with(wanted.path));
        let below: Vec<Selected> = below.map(selected).collect();
        return if below.is_empty() { Err(missing(listing, wanted.path).into()) } else { Ok(below) };
    }
    let stem = wanted.path.strip_suffix(".safetensors").unwrap_or(wanted.path);
    let stem = stem.strip_suffix("bf16").unwrap_or(stem);
    let count = |file: &HubFile| match file.path.strip_prefix(stem).map(str::to_lowercase) {
        Some(rest) if rest.ends_with(".safetensors") => {
            parts.iter().filter(|part| rest.contains(&part.to_lowercase())).count()
        }
        _ => 0,
    };
    let most = listing.files.iter().map(count).max().unwrap_or_default();
    if most > 0 {
        let best: Vec<&HubFile> = listing.files.iter().filter(|file| count(file) == most).collect();
        if let [one] = best[..] {
            return Ok(vec![selected(one)]);
        }
        let names: Vec<&str> = best.iter().map(|file| &*file.path).collect();
        let parts = parts.join(",");
        return Err(
            UsageError(format!("--files {parts}: several files match ({}); add a part", names.join(", "))).into()
        );
    }
    let default = listing.files.iter().find(|file| file.path == wanted.path);
    Ok(vec![selected(default.ok_or_else(|| missing(listing, wanted.path))?)])
}

#[cfg(test)]
mod tests {
    use ltx2_download::Checksum;

    use super::*;

    fn listing(repository: &str, paths: &[&str]) -> Listing {
        let file = |path: &&str| HubFile { path: (*path).into(), size: 1, checksum: Checksum::Sha256("0".repeat(64)) };
        let files = paths.iter().map(file).collect();
        Listing { repository: repository.into(), commit: "c0".into(), is_gated: false, licence: None, files }
    }

    fn selected(name: &str, listing: &Listing, parts: &[&str]) -> Result<Vec<String>, String> {
        let parts: Vec<String> = parts.iter().map(ToString::to_string).collect();
        let wanted = Wanted::parse(name).map_err(|error| error.to_string())?;
        wanted.check(&parts).map_err(|error| error.to_string())?;
        let selected = wanted.select(listing, &parts).map_err(|error| error.to_string())?;
        Ok(selected.into_iter().map(|one| one.file.path).collect())
    }

    const LTX_2_5: [&str; 8] = [
        "diffusion_models/ltx-2.5-22b-dev-transformer-bf16.safetensors",
        "diffusion_models/ltx-2.5-22b-dev-transformer-comfy-int8-convrot.safetensors",
        "text_encoders/gemma4-12b-with-proj-ltx-2.5-bf16.safetensors",
        "text_encoders/gemma4-12b-with-proj-ltx-2.5-comfy-int8-convrot.safetensors",
        "vae/ltx-2.5-video-vae-bf16.safetensors",
        "vae/ltx-2.5-audio-vae-bf16.safetensors",
        "model_patches/ltx-2.5-duration-head-bf16.safetensors",
        "README.md",
    ];

    #[test]
    fn preset_selects_its_files_and_their_variants() {
        let all = listing("Lightricks/LTX-2.5", &LTX_2_5);
        assert_eq!(selected("ltx2_5", &all, &[]).unwrap(), [0, 2, 4, 5, 6].map(|at| LTX_2_5[at]));
        assert_eq!(selected("ltx2_5", &all, &["INT8"]).unwrap(), [1, 3, 4, 5, 6].map(|at| LTX_2_5[at]));
        let some = listing("Lightricks/LTX-2.5", &LTX_2_5[1..]);
        let error = selected("ltx2_5", &some, &[]).unwrap_err();
        assert!(error.starts_with(&format!("Lightricks/LTX-2.5/{}: the repository has no such file", LTX_2_5[0])));
        assert!(error.contains(LTX_2_5[1]), "{error}");
    }

    #[test]
    fn repository_selects_by_parts_of_paths() {
        let all = listing("Lightricks/LTX-2.5", &LTX_2_5);
        let int8 = selected("Lightricks/LTX-2.5", &all, &["int8"]).unwrap();
        assert_eq!(int8, [LTX_2_5[1], LTX_2_5[3]]);
        assert_eq!(selected("Lightricks/LTX-2.5", &all, &["vae/", "readme"]).unwrap().len(), 3);
        assert_eq!(selected("Lightricks/LTX-2.5/vae", &all, &[]).unwrap(), LTX_2_5[4..6]);
        let one = format!("Lightricks/LTX-2.5/{}", LTX_2_5[6]);
        assert_eq!(selected(&one, &all, &[]).unwrap(), [LTX_2_5[6]]);
        let error = selected("Lightricks/LTX-2.5", &all, &["int7"]).unwrap_err();
        assert!(error.starts_with("--files int7: Lightricks/LTX-2.5/int7: the repository has no such file"), "{error}");
        let error = selected("Lightricks/LTX-2.5", &all, &[]).unwrap_err();
        assert!(error.contains("contains several models; name a preset") && error.contains("ltx2_5_dfr"), "{error}");
        let other = listing("Org/Name", &["a.safetensors", "b.json"]);
        assert_eq!(selected("Org/Name", &other, &[]).unwrap(), ["a.safetensors", "b.json"]);
    }

    #[test]
    fn ic_lora_selects_its_file() {
        let repository = "Lightricks/LTX-2.3-22b-IC-LoRA-Motion-Track-Control";
        let file = "ltx-2.3-22b-ic-lora-motion-track-control-ref0.5.safetensors";
        assert_eq!(Wanted::parse("motion-track-control").unwrap().repositories(), [repository]);
        let all = listing(repository, &[file, "README.md"]);
        assert_eq!(selected("motion-track-control", &all, &[]).unwrap(), [file]);
        let error = selected("deblur", &all, &[]).unwrap_err();
        let commands = "run ltx2 pull Lightricks/LTX-2.3-22b-IC-LoRA-Deblur/ltx-2.3-22b-ic-lora-deblur-0.9.safetensors \
                        (LTX-2.3) or ltx2 pull Lightricks/LTX-2.5-22b-IC-LoRA-Deblur (LTX-2.5)";
        assert!(error.ends_with(commands), "{error}");
        assert!(Wanted::parse("union-contrl").unwrap_err().to_string().contains("similar names: union-control"));
    }

    #[test]
    fn every_shipped_configuration_of_a_published_model_can_be_pulled() {
        for (name, _) in CONFIGS {
            match Wanted::parse(name) {
                Ok(Wanted::Preset(model)) => assert!(!name.starts_with("nano"), "{name}: {model:?}"),
                Ok(other) => panic!("{name}: {other:?}"),
                Err(error) => {
                    assert!(
                        name.starts_with("nano")
                            && error.to_string().ends_with(&format!("not downloaded; run `ltx2 generate -c {name} -p \"a red circle bounces on blue, low beeps\"`")),
                        "{name}: {error}"
                    );
                }
            }
        }
        let error = Wanted::parse("ltx25_distilled").unwrap_err().to_string();
        assert!(
            error.contains("neither a preset nor an IC-LoRA nor a repository") && error.contains("ltx2_5_distilled,"),
            "{error}"
        );
    }
}
