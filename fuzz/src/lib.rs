//! What bytes from elsewhere go through, a function for each kind. None of them may panic, abort or ask for memory that the
//! bytes do not hold; what they answer does not matter here.
//!
//! `make fuzz` runs each under libFuzzer; `tests/it/inputs.rs` runs the same functions over seeds and their mutations.

use std::cell::OnceCell;
use std::hint::black_box;
use std::path::{Path, PathBuf};

use ltx2::analysis::{self, CHIPS, Module, Trace, XSpace};
use ltx2::config::{Given, load, parse_mesh, read_experiment};
use ltx2::hlo::Mesh;
use ltx2::media::{read_picture, read_png, read_wav};
use ltx2::models::audio_vae;
use ltx2::models::connectors::ConnectorsConfig;
use ltx2::models::gemma3::{Gemma3Config, tokenizer::Tokenizer};
use ltx2::models::transformer::TransformerConfig;
use ltx2::models::upsampler::UpsamplerConfig;
use ltx2::models::video_vae::{DecoderConfig, EncoderConfig};
use ltx2::models::vocoder::VocoderConfig;
use ltx2::pipeline::tensors;
use ltx2::runtime::Target;
use ltx2::sampling::sigmas::FlowMatch;
use ltx2::weights::{Checkpoint, LoraFile};

/// Reads bytes and forgets what they said.
pub type Reader = fn(&[u8]);

/// Every kind, with what reads it.
pub const TARGETS: [(&str, Reader); 12] = [
    ("config", config),
    ("layout", layout),
    ("experiment", experiment),
    ("safetensors", safetensors),
    ("index", index),
    ("tokenizer", tokenizer),
    ("model_config", model_config),
    ("lora", lora),
    ("module", module),
    ("trace", trace),
    ("media", media),
    ("words", words),
];

/// Holds the bytes as a file of a folder that this thread keeps.
fn as_file<T>(name: &str, bytes: &[u8], read: impl FnOnce(&Path) -> T) -> T {
    thread_local! { static FOLDER: OnceCell<tempfile::TempDir> = const { OnceCell::new() } }
    FOLDER.with(|folder| {
        let memory = Path::new("/dev/shm");
        let place = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
        let folder = folder.get_or_init(|| tempfile::tempdir_in(place).expect("a folder"));
        let path: PathBuf = folder.path().join(name);
        std::fs::write(&path, bytes).expect("a file");
        read(&path)
    })
}

/// A YAML configuration.
pub fn config(bytes: &[u8]) {
    as_file("config.yml", bytes, |path| {
        if let Ok(loaded) = load(&Given { file: Some(path.display().to_string()), ..Given::default() }) {
            black_box((loaded.to_yaml(), loaded.config.placement(8).is_ok()));
        }
    });
}

/// A sharding.
pub fn layout(bytes: &[u8]) {
    as_file("layout.yml", bytes, |path| {
        let given = Given { set: vec![format!("layout={}", path.display())], ..Given::default() };
        if let Ok(loaded) = load(&given) {
            for devices in [1, 8, 6] {
                black_box(loaded.config.placement(devices).is_ok());
            }
        }
    });
}

/// An experiment.
pub fn experiment(bytes: &[u8]) {
    as_file("experiment.yml", bytes, |path| {
        if let Ok(read) = read_experiment(path) {
            black_box(read.cases());
        }
    });
}

/// A checkpoint of one file, and the tensors that `run` and `compare` take.
pub fn safetensors(bytes: &[u8]) {
    as_file("tensors.safetensors", bytes, |path| {
        if let Ok(file) = Checkpoint::open(path) {
            for name in file.names() {
                black_box((file.get(name).is_ok(), file.get_float(name).is_ok(), file.shape(name).map(<[_]>::len)));
            }
            black_box(tensors::read(path).is_ok());
        }
    });
}

/// The index of a checkpoint of several files, one of which lies beside it.
pub fn index(bytes: &[u8]) {
    let header = br#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let shard = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
    as_file("model.safetensors", &shard, |_| ());
    as_file("model.safetensors.index.json", bytes, |path| {
        if let Ok(file) = Checkpoint::open(path) {
            black_box(file.names().count());
        }
    });
}

/// A tokenizer, and what it makes of a prompt.
pub fn tokenizer(bytes: &[u8]) {
    as_file("tokenizer.json", bytes, |path| {
        if let Ok(tokenizer) = Tokenizer::open(path.parent().expect("a folder")) {
            black_box((tokenizer.encode("A red fox, 12 times.\n", 16).is_ok(), tokenizer.vocab_size()));
        }
    });
}

/// The configuration of any component, or of the scheduler.
pub fn model_config(bytes: &[u8]) {
    let Ok(json) = serde_json::from_slice(bytes) else { return };
    let known = [
        audio_vae::DecoderConfig::from_json(&json).is_ok(),
        ConnectorsConfig::from_json(&json).is_ok(),
        Gemma3Config::from_json(&json).is_ok(),
        TransformerConfig::from_json(&json).is_ok(),
        UpsamplerConfig::from_json(&json).is_ok(),
        DecoderConfig::from_json(&json).is_ok(),
        EncoderConfig::from_json(&json).is_ok(),
        VocoderConfig::from_json(&json).is_ok(),
    ];
    black_box(known);
    if let Ok(text) = std::str::from_utf8(bytes) {
        black_box(FlowMatch::from_json(text, Path::new("scheduler_config.json")).is_ok());
    }
}

/// A LoRA's keys and shapes.
pub fn lora(bytes: &[u8]) {
    as_file("lora.safetensors", bytes, |path| {
        if let Ok(file) = LoraFile::open(&path.display().to_string()) {
            black_box(file.targets().count());
        }
    });
}

/// An optimized program, and its report.
pub fn module(bytes: &[u8]) {
    let Some((&kind, bytes)) = bytes.split_first() else { return };
    let format = if kind % 2 == 0 { "hlo_with_config" } else { "hlo" };
    if let Ok(module) = Module::decode(format, bytes) {
        let mesh = Mesh::new(&[("data", 2), ("context", 4)]);
        black_box(analysis::report(&module, &mesh, 2, CHIPS.first()));
        black_box((module.loops(), module.stored()));
    }
}

/// A recording of devices, summed up.
pub fn trace(bytes: &[u8]) {
    if let Ok(space) = XSpace::read(bytes) {
        black_box(Trace::of(&space, Some(2)).is_ok());
    }
}

/// A picture or a sound.
pub fn media(bytes: &[u8]) {
    as_file("media", bytes, |path| {
        black_box((read_picture(path).is_ok(), read_png(path).is_ok(), read_wav(path).is_ok()));
    });
}

/// The command line's own little languages: targets, meshes, settings.
pub fn words(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    black_box(text.parse::<Target>().is_ok());
    black_box(parse_mesh(text).is_ok());
    let set = Given { set: vec![text.to_string()], ..Given::default() };
    let mesh = Given { mesh: Some(text.to_string()), ..Given::default() };
    for given in [set, mesh] {
        if let Ok(loaded) = load(&given) {
            black_box(loaded.config.placement(8).is_ok());
        }
    }
}
