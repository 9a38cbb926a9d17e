//! Models of random requests: each version in each storage format, intact or with one damaged component.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use ltx2::weights::Component;
use safetensors::Dtype;
use serde_json::{Value, json};

use super::draws::Draws;
use crate::support::drawn::{with_diffusion_decoder, write_upsampler};
use crate::support::single_file::{self, IN_FILE, TINY, TINY_2_3, header, header_2_3, header_2_5_whole};

const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models");

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generation {
    V2_0,
    V2_3,
    V2_5,
}

/// Storage format of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Diffusers folder.
    Folder,
    /// Lightricks' single file plus folders of the components that it lacks; for LTX-2.5, a repository of split files.
    Files,
}

/// Damage of a component.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    Removed,
    Renamed,
    /// The weights file is missing.
    NoWeights,
    EmptyWeights,
    HeaderCut,
    DataCut,
    /// A tensor has an integer type.
    OtherType,
    OtherShape,
    TensorMissing,
    TensorAdded,
    NoConfig,
    EmptyConfig,
    NoJson,
    /// A configuration key that no version of the format has.
    KeyInvented,
}

const OF_FILES: [Damage; 9] = [
    Damage::Removed,
    Damage::Renamed,
    Damage::EmptyWeights,
    Damage::HeaderCut,
    Damage::DataCut,
    Damage::OtherType,
    Damage::OtherShape,
    Damage::TensorMissing,
    Damage::TensorAdded,
];
const OF_WEIGHTS: [Damage; 8] = [
    Damage::NoWeights,
    Damage::EmptyWeights,
    Damage::HeaderCut,
    Damage::DataCut,
    Damage::OtherType,
    Damage::OtherShape,
    Damage::TensorMissing,
    Damage::TensorAdded,
];
const OF_CONFIGS: [Damage; 6] =
    [Damage::Removed, Damage::Renamed, Damage::NoConfig, Damage::EmptyConfig, Damage::NoJson, Damage::KeyInvented];

/// Model of a request, and the settings that select it.
pub struct Model {
    pub set: Vec<String>,
    /// Damaged component, relative to the model's folder.
    pub damage: Option<(PathBuf, Damage)>,
    /// Argument of `ltx2 check`.
    pub path: String,
}

/// Intact models, which requests link to.
pub struct Models {
    root: PathBuf,
}

fn text(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_string()
}

/// Returns the entries of a folder, sorted by name.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()).collect();
    all.sort();
    all
}

/// Links the entries of one folder into another.
fn link_all(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in entries(from) {
        let target = fs::canonicalize(&entry).expect("a path");
        symlink(target, to.join(entry.file_name().expect("a name"))).expect("a link");
    }
}

/// Replaces a link by a copy of its target.
fn copy_over(link: &Path) {
    let target = fs::canonicalize(link).expect("a path");
    fs::remove_file(link).expect("a link");
    if target.is_file() {
        fs::copy(&target, link).expect("copied");
        return;
    }
    fs::create_dir(link).expect("a folder");
    for file in entries(&target) {
        fs::copy(&file, link.join(file.file_name().expect("a name"))).expect("copied");
    }
}

fn set_key(file: &Path, key: &str, value: Value) {
    let mut json: Value = serde_json::from_slice(&fs::read(file).expect("bytes")).expect("JSON");
    json[key] = value;
    fs::write(file, json.to_string()).expect("written");
}

impl Models {
    pub fn new(root: &Path) -> Self {
        let models = Models { root: root.to_path_buf() };
        let part = |model: &str, name: &str| Path::new(MODELS).join(model).join(name);
        let folder = |generation| models.folder(generation, Layout::Folder);
        for (generation, model, upsampler) in
            [(Generation::V2_0, TINY, "upsampler_rational"), (Generation::V2_3, TINY_2_3, "upsampler_plain")]
        {
            link_all(Path::new(model), &folder(generation));
            symlink(part(upsampler, "latent_upsampler"), folder(generation).join("latent_upsampler")).expect("a link");
        }
        let newest = folder(Generation::V2_5);
        fs::create_dir_all(&newest).expect("a folder");
        with_diffusion_decoder(&newest);
        let in_time = "temporal_latent_upsampler";
        let config = fs::read_to_string(part("dfr_temporal", in_time).join("config.json")).expect("a file");
        write_upsampler(&newest.join(in_time), &serde_json::from_str(&config).expect("JSON"), "in_time");
        models.write_files();
        models
    }

    fn folder(&self, generation: Generation, layout: Layout) -> PathBuf {
        self.root.join(format!("{generation:?}_{layout:?}").to_lowercase())
    }

    /// Writes the single-file formats.
    fn write_files(&self) {
        for generation in [Generation::V2_0, Generation::V2_3, Generation::V2_5] {
            let (from, to) = (self.folder(generation, Layout::Folder), self.folder(generation, Layout::Files));
            fs::create_dir_all(&to).expect("a folder");
            for name in ["text_encoder", "tokenizer", "latent_upsampler"] {
                let target = fs::canonicalize(from.join(name)).expect("a path");
                symlink(target, to.join(name)).expect("a link");
            }
            let write = |name: &str, model: &Path, parts: &[Component], header: &Value| {
                let file = to.join(name);
                fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
                let tensors = single_file::combined_parts(&text(model), parts);
                single_file::write(&file, &tensors, Some(header));
            };
            match generation {
                Generation::V2_0 => write(FILE, &from, &IN_FILE, &header()),
                Generation::V2_3 => write(FILE, &from, &IN_FILE, &header_2_3()),
                Generation::V2_5 => {
                    // With a transformer file, the text encoder must state its model version.
                    copy_over(&to.join("text_encoder"));
                    let config = to.join("text_encoder/config.json");
                    set_key(&config, "gemma_version", json!("gemma4-12b-ltx-v1"));
                    let [vae, sound] = [&["vae"][..], &["audio_vae", "vocoder"]].map(|sections| {
                        let all = header_2_3();
                        sections.iter().map(|name| ((*name).to_string(), all[*name].clone())).collect::<Value>()
                    });
                    write(SPLIT, &from, &IN_FILE[..2], &header_2_5_whole());
                    write("vae/ltx-2.5-tiny-video-vae-conv-bf16.safetensors", &from, &[Component::Vae], &vae);
                    let parts = [Component::AudioVae, Component::Vocoder];
                    write("vae/ltx-2.5-tiny-audio-vae-bf16.safetensors", &from, &parts, &sound);
                }
            }
        }
    }

    /// Links a model into a folder and, with `damaged`, damages one of its components.
    pub fn link(&self, draws: Draws, generation: Generation, layout: Layout, damaged: bool, into: &Path) -> Model {
        let model = into.join("model");
        link_parts(&self.folder(generation, layout), &model);
        let here = |name: &str| text(&model.join(name));
        let set = match (layout, generation) {
            (Layout::Folder, _) => vec![format!("model.path={}", text(&model))],
            (Layout::Files, Generation::V2_5) => {
                let encoder = format!("model.text_encoder={}", here("text_encoder"));
                let upsampler = format!("model.upsampler={}", here("latent_upsampler"));
                vec![format!("model.path={}", text(&model)), encoder, upsampler]
            }
            (Layout::Files, _) => {
                let encoder = format!("model.text_encoder={}", here("text_encoder"));
                let upsampler = format!("model.upsampler={}", here("latent_upsampler"));
                vec![format!("model.path={}", here(FILE)), encoder, upsampler]
            }
        };
        let damage = damaged.then(|| damage(draws, &model));
        let path = set[0].split_once('=').expect("a pair").1.to_string();
        Model { set, damage, path }
    }
}

/// Name of the single model file.
const FILE: &str = "ltx-2-tiny-dev.safetensors";
/// Name of the file with LTX-2.5's transformer and connectors.
const SPLIT: &str = "diffusion_models/ltx-2.5-tiny-transformer-bf16.safetensors";

/// Returns whether an entry is a folder of folders or of several weight files, rather than a component.
fn is_group(path: &Path) -> bool {
    path.is_dir()
        && ["diffusion_models", "vae"].iter().any(|name| path.ends_with(name))
        && !path.join("config.json").exists()
}

/// Links the components of a model; files of grouping folders are linked separately.
fn link_parts(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in entries(from) {
        let target = to.join(entry.file_name().expect("a name"));
        match is_group(&entry) {
            true => link_all(&entry, &target),
            false => symlink(fs::canonicalize(&entry).expect("a path"), target).expect("a link"),
        }
    }
}

/// Damages a component of a model.
fn damage(draws: Draws, model: &Path) -> (PathBuf, Damage) {
    let all = entries(model).into_iter().flat_map(|path| if is_group(&path) { entries(&path) } else { vec![path] });
    let all: Vec<PathBuf> = all.collect();
    let part = &all[draws.below("part", all.len())];
    copy_over(part);
    let is_safetensors = |path: &Path| path.extension().is_some_and(|end| end == "safetensors");
    let files = if part.is_dir() { entries(part) } else { vec![part.clone()] };
    let weights = files.iter().find(|file| is_safetensors(file));
    let config = files.iter().find(|file| file.extension().is_some_and(|end| end == "json"));
    let choices = match (part.is_dir(), weights) {
        (true, Some(_)) => [&OF_CONFIGS[..], &OF_WEIGHTS].concat(),
        (true, None) => OF_CONFIGS.to_vec(),
        (false, Some(_)) => OF_FILES.to_vec(),
        (false, None) => {
            vec![Damage::Removed, Damage::Renamed, Damage::EmptyConfig, Damage::NoJson, Damage::KeyInvented]
        }
    };
    let damage = choices[draws.below("damage", choices.len())];
    apply(draws, damage, part, weights.map(PathBuf::as_path), config.map(PathBuf::as_path));
    (part.strip_prefix(model).expect("a part").to_path_buf(), damage)
}

fn remove(path: &Path) {
    if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.expect("removed");
}

fn apply(draws: Draws, damage: Damage, part: &Path, weights: Option<&Path>, config: Option<&Path>) {
    let weights = || weights.expect("weights");
    let config = || config.expect("a configuration");
    let cut = |path: &Path, length: &dyn Fn(usize) -> usize| {
        let bytes = fs::read(path).expect("bytes");
        fs::write(path, &bytes[..length(bytes.len())]).expect("written");
    };
    match damage {
        Damage::Removed => remove(part),
        Damage::Renamed => {
            let name = part.file_name().expect("a name").to_str().expect("UTF-8");
            fs::rename(part, part.with_file_name(format!("old_{name}"))).expect("renamed");
        }
        Damage::NoWeights => remove(weights()),
        Damage::EmptyWeights => cut(weights(), &|_| 0),
        Damage::HeaderCut => cut(weights(), &|_| 100),
        Damage::DataCut => cut(weights(), &|length| length - 9),
        Damage::NoConfig => remove(config()),
        Damage::EmptyConfig => cut(config(), &|_| 0),
        Damage::NoJson => fs::write(config(), "{\"a\": [1, }").expect("written"),
        Damage::KeyInvented => set_key(config(), "invented_factor", json!(7)),
        Damage::OtherType | Damage::OtherShape | Damage::TensorMissing | Damage::TensorAdded => {
            change_tensors(draws, damage, weights());
        }
    }
}

fn change_tensors(draws: Draws, damage: Damage, file: &Path) {
    let bytes = fs::read(file).expect("bytes");
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).expect("safetensors");
    let config = metadata.metadata().as_ref().and_then(|all| all.get("config"));
    let config = config.map(|text| serde_json::from_str::<Value>(text).expect("JSON"));
    let mut tensors = single_file::read(file);
    let names: Vec<String> = tensors.keys().cloned().collect();
    let name = &names[draws.below("tensor", names.len())];
    match damage {
        Damage::OtherType => {
            let tensor = tensors.get_mut(name).expect("a tensor");
            tensor.0 = if tensor.0 == Dtype::F32 { Dtype::I32 } else { Dtype::I16 };
        }
        Damage::OtherShape => {
            let tensor = tensors.get_mut(name).expect("a tensor");
            tensor.1.push(1);
        }
        Damage::TensorMissing => drop(tensors.remove(name)),
        _ => drop(tensors.insert("invented.weight".into(), (Dtype::F32, vec![1], vec![0; 4]))),
    }
    single_file::write(file, &tensors, config.as_ref());
}
