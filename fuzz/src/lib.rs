//! Fuzz targets: one function per kind of untrusted input. No input may cause a panic, an abort or an allocation that
//! its size does not justify. The result is only checked for seeds: a seed that fails early would not exercise the
//! reader.
//!
//! `make fuzz` runs each target under libFuzzer; `tests/it/fuzz_regression.rs` runs the same functions on seeds and
//! mutations of them.

use std::cell::OnceCell;
use std::error::Error;
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRequest, Multipart};
use axum::http::Request;
use ltx2::analysis::{self, Chip, Module, Trace, XSpace};
use ltx2::config::{CliOverrides, load, parse_mesh, presets, read_experiment};
use ltx2::hlo::DeviceMesh;
use ltx2::media::{probe_clip, read_image_with, read_png, read_sound, read_wav};
use ltx2::models::audio_vae;
use ltx2::models::connectors::ConnectorsConfig;
use ltx2::models::diffusion_decoder::DiffusionDecoderConfig;
use ltx2::models::duration_head::DurationHeadConfig;
use ltx2::models::families;
use ltx2::models::presets::Preset;
use ltx2::models::tokenizer::{GEMMA, Tokenizer};
use ltx2::models::transformer::TransformerConfig;
use ltx2::models::upsampler::UpsamplerConfig;
use ltx2::models::video_vae::VideoVaeConfig;
use ltx2::models::vocoder::VocoderConfig;
use ltx2::pipeline::output::tensors;
use ltx2::pipeline::plan::derive::derive;
use ltx2::pipeline::programs::configs::ModelConfigs;
use ltx2::runtime::Target;
use ltx2::sampling::sigmas::FlowMatch;
use ltx2::serve::descriptors::Descriptors;
use ltx2::serve::fields::Fields;
use ltx2::serve::form::Form;
use ltx2::serve::generator::{Endpoint, Generator};
use ltx2::serve::id::Ids;
use ltx2::serve::inputs::InputStore;
use ltx2::serve::jobs::Caller;
use ltx2::serve::query::list_query;
use ltx2::weights::lora::updates;
use ltx2::weights::lora_merge::merge;
use ltx2::weights::{Checkpoint, Component, LoraFile, MergeOrder, ModelSource, Overrides, ScaledLora};

/// Success, or why the input was rejected.
pub type Read = Result<(), Box<dyn Error>>;

/// A fuzz target.
pub type Reader = fn(&[u8]) -> Read;

/// The fuzz targets by name.
pub const TARGETS: [(&str, Reader); 17] = [
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
    ("request", request),
    ("mp4", mp4),
    ("form", form),
    ("query", query),
    ("data_url", data_url),
];

/// Creates a temporary folder with the shipped configurations, which inputs may extend.
fn folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let place = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
    let folder = tempfile::tempdir_in(place).expect("a folder");
    for below in [BELOW, "tpu"] {
        std::fs::create_dir(folder.path().join(below)).expect("a folder");
    }
    for (name, text) in presets::CONFIGS {
        std::fs::write(folder.path().join(format!("{name}.yml")), text).expect("a file");
    }
    folder
}

/// Subfolder for inputs that may extend files of the parent folder.
const BELOW: &str = "below";

/// Writes the bytes to a file in this thread's folder and calls `read` with its path.
fn as_file<T>(name: &str, bytes: &[u8], read: impl FnOnce(&Path) -> T) -> T {
    thread_local! { static FOLDER: OnceCell<tempfile::TempDir> = const { OnceCell::new() } }
    FOLDER.with(|kept| {
        let path = kept.get_or_init(folder).path().join(name);
        std::fs::write(&path, bytes).expect("a file");
        read(&path)
    })
}

/// Succeeds if any of the readers accepted the bytes.
fn any(read: &[bool]) -> Read {
    if black_box(read).contains(&true) { Ok(()) } else { Err("nothing reads it".into()) }
}

/// Reads a YAML configuration and the files it extends.
pub fn config(bytes: &[u8]) -> Read {
    as_file(&format!("{BELOW}/config.yml"), bytes, |path| {
        let loaded = load(&CliOverrides { files: vec![path.display().to_string()], ..CliOverrides::default() })?;
        black_box((loaded.to_yaml(), loaded.config.placement(8).is_ok()));
        Ok(())
    })
}

/// Reads a layout file and applies it.
pub fn layout(bytes: &[u8]) -> Read {
    as_file("layout.yml", bytes, |path| {
        let given = CliOverrides { set: vec![format!("layout={}", path.display())], ..CliOverrides::default() };
        let loaded = load(&given)?;
        any(&[1, 8, 6].map(|devices| loaded.config.placement(devices).is_ok()))
    })
}

/// Reads an experiment file and its cases.
pub fn experiment(bytes: &[u8]) -> Read {
    as_file("experiment.yml", bytes, |path| {
        black_box(read_experiment(path)?.cases());
        Ok(())
    })
}

/// Reads a single-file checkpoint, also as the tensor file of `run` and `compare`.
pub fn safetensors(bytes: &[u8]) -> Read {
    as_file("tensors.safetensors", bytes, |path| {
        let file = Checkpoint::open(path)?;
        for name in file.names() {
            black_box((file.get_float(name).is_ok(), file.shape(name).map(<[_]>::len)));
            file.get(name)?;
        }
        black_box(tensors::read(path).is_ok());
        Ok(())
    })
}

/// Reads the index of a sharded checkpoint; one shard exists.
pub fn index(bytes: &[u8]) -> Read {
    let header = br#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let shard = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
    as_file("model.safetensors", &shard, |_| ());
    as_file("model.safetensors.index.json", bytes, |path| {
        black_box(Checkpoint::open(path)?.names().count());
        Ok(())
    })
}

/// Reads a tokenizer and encodes a prompt.
pub fn tokenizer(bytes: &[u8]) -> Read {
    as_file("tokenizer.json", bytes, |path| {
        let tokenizer = Tokenizer::open(path.parent().expect("a folder"), &GEMMA)?;
        black_box((tokenizer.encode("A red fox, 12 times.\n", 16)?, tokenizer.vocab_size()));
        Ok(())
    })
}

/// Reads the configuration of any component or of the scheduler, and derives sizes, host tables and the smallest
/// program that declares all parameters.
pub fn model_config(bytes: &[u8]) -> Read {
    thread_local! { static MODEL: Preset = Preset::named("nano_2_5").expect("a preset") }
    let json: serde_json::Value = serde_json::from_slice(bytes)?;
    let schedule = FlowMatch::from_json(std::str::from_utf8(bytes)?, Path::new("scheduler_config.json"));
    let encoder = families::text_encoder(&json).is_ok();
    let upsampler = UpsamplerConfig::from_json(&json).is_ok();
    // Only build programs for configurations that were accepted: most damaged ones are rejected before.
    let read = [
        (Component::AudioVae, audio_vae::AudioVaeConfig::from_json(&json).is_ok()),
        (Component::Connectors, ConnectorsConfig::from_json(&json).is_ok()),
        (Component::DiffusionDecoder, DiffusionDecoderConfig::from_json(&json).is_ok()),
        (Component::DurationHead, DurationHeadConfig::from_json(&json).is_ok()),
        (Component::TextEncoder, encoder),
        (Component::Transformer, TransformerConfig::from_json(&json).is_ok()),
        (Component::LatentUpsampler, upsampler),
        (Component::TemporalUpsampler, upsampler),
        (Component::Vae, VideoVaeConfig::from_json(&json).is_ok()),
        (Component::Vocoder, VocoderConfig::from_json(&json).is_ok()),
        (Component::Scheduler, schedule.is_ok()),
    ];
    let derived = read.map(|(component, read)| {
        let model = || MODEL.with(|model| model.clone().with(component.folder(), json.clone()));
        read && derive(&ModelConfigs::of_preset(model()), component).is_ok()
    });
    any(&derived)
}

/// Reads a LoRA and merges it into the weights of a small model.
pub fn lora(bytes: &[u8]) -> Read {
    thread_local! { static MODEL: OnceCell<ModelSource> = const { OnceCell::new() } }
    as_file("lora.safetensors", bytes, |path| {
        let file = Arc::new(LoraFile::open(&path.display().to_string())?);
        MODEL.with(|kept| {
            let model = kept.get_or_init(small_model);
            file.check(model)?;
            let loras = [ScaledLora { file: file.clone(), strength: 0.5 }];
            for (component, name) in file.targets() {
                let weight = model.checkpoint(component)?.get_float(name)?;
                for order in [MergeOrder::Official, MergeOrder::Diffusers, MergeOrder::Exact] {
                    black_box(merge(&weight, None, order, &updates(&loras, component, name))?.as_ref());
                }
            }
            Ok(())
        })
    })
}

/// Opens the fixture whose modules the LoRA seeds adapt. This file is compiled in two packages.
fn small_model() -> ModelSource {
    let mut folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|f| f.join("tests/fixtures/models/tiny_a"));
    let model = folders.find(|f| f.is_dir()).expect("the repository");
    ModelSource::open(&model.display().to_string(), &Overrides::default()).expect("a model")
}

/// Decodes an optimized program and reports on it. The first byte selects the format and the chip, if any.
pub fn module(bytes: &[u8]) -> Read {
    let (&kind, bytes) = bytes.split_first().ok_or("nothing")?;
    let format = if kind.is_multiple_of(2) { "hlo_with_config" } else { "hlo" };
    let chip = Chip::all().get(usize::from(kind / 2));
    let module = Module::decode(format, bytes)?;
    let mesh = DeviceMesh::new(&[("data", 2), ("context", 4)]);
    black_box(analysis::report(&module, &mesh.axes, &[2], chip));
    black_box((
        module.loops(),
        module.stored_arrays(),
        module.purposes(),
        module.listing(),
        module.is_bound_to_device(),
    ));
    Ok(())
}

/// Reads and summarizes a profiler trace.
pub fn trace(bytes: &[u8]) -> Read {
    black_box(Trace::from_space(&XSpace::read(bytes)?, Some(2))?);
    Ok(())
}

/// Only this binary's readers are fuzzed, not ffmpeg.
const NO_FFMPEG: &str = "/nowhere/ffmpeg";

/// Reads the tables of a video file, and its audio with its edit list.
pub fn mp4(bytes: &[u8]) -> Read {
    as_file("clip.mp4", bytes, |path| {
        black_box(read_sound(path, Path::new(NO_FFMPEG), Some(1.0)).is_ok());
        black_box(probe_clip(path, Path::new(NO_FFMPEG))?);
        Ok(())
    })
}

/// Reads an image or an audio file.
pub fn media(bytes: &[u8]) -> Read {
    as_file("media", bytes, |path| {
        let sound = read_sound(path, Path::new(NO_FFMPEG), Some(1.0));
        any(&[
            read_image_with(path, Path::new(NO_FFMPEG)).is_ok(),
            read_png(path).is_ok(),
            read_wav(path).is_ok(),
            sound.is_ok(),
        ])
    })
}

/// Parses command-line syntax: targets, meshes, settings.
pub fn words(bytes: &[u8]) -> Read {
    let text = std::str::from_utf8(bytes)?;
    let set = CliOverrides { set: vec![text.to_string()], ..CliOverrides::default() };
    let mesh = CliOverrides { mesh: Some(text.to_string()), ..CliOverrides::default() };
    let loads = |given: &CliOverrides| {
        let loaded = load(given);
        black_box(loaded.as_ref().is_ok_and(|l| l.config.placement(8).is_ok()));
        loaded.is_ok()
    };
    any(&[text.parse::<Target>().is_ok(), parse_mesh(text).is_ok(), loads(&set), loads(&mesh)])
}

/// Parses a JSON body as a server request.
pub fn request(bytes: &[u8]) -> Read {
    accept(|_, _| Ok(Form::json(bytes)?))
}

/// Parses a multipart form as a server request: a line with the content type, then the body.
pub fn form(bytes: &[u8]) -> Read {
    thread_local! {
        static RUNTIME: tokio::runtime::Runtime =
            tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    }
    let end = bytes.iter().position(|byte| *byte == b'\n').ok_or("no type")?;
    let request =
        Request::post("/").header("content-type", &bytes[..end]).body(Body::from(bytes[end + 1..].to_vec()))?;
    accept(|fields, folder| {
        RUNTIME.with(|runtime| {
            runtime.block_on(async {
                let body = Multipart::from_request(request, &()).await?;
                Ok(Form::multipart(body, folder, Descriptors::raise(), &|name| fields.takes_file(name)).await?)
            })
        })
    })
}

/// Parses a file in a request: a data URL or base64.
pub fn data_url(bytes: &[u8]) -> Read {
    let text = std::str::from_utf8(bytes)?;
    let fields = [("prompt", "a"), ("input_reference", text)].map(|(name, text)| (name.to_string(), text.into()));
    accept(|_, _| Ok(Form { fields: fields.into_iter().collect(), ..Form::default() }))
}

/// Parses the query of the video list.
pub fn query(bytes: &[u8]) -> Read {
    black_box(list_query(Some(std::str::from_utf8(bytes)?))?);
    Ok(())
}

/// Accepts a form as a job; its file parts go to a folder.
fn accept(form: impl FnOnce(&Fields, &Path) -> Result<Form, Box<dyn Error>>) -> Read {
    thread_local! { static SERVER: (Fields, Ids, tempfile::TempDir) = server() }
    let caller = Caller { name: String::new(), sees_all: true };
    SERVER.with(|(fields, ids, folder)| {
        fields.accept(form(fields, folder.path())?, Endpoint::Create, &caller, ids)?;
        Ok(())
    })
}

/// Creates the request fields of a server that stores input files in its own folder.
fn server() -> (Fields, Ids, tempfile::TempDir) {
    let given = CliOverrides { files: vec!["nano".into()], ..CliOverrides::default() };
    let folder = folder();
    let inputs = InputStore::open(folder.path().join("inputs")).expect("a folder");
    let loaded = load(&given).expect("a configuration");
    let served = loaded.config.served_pipelines().expect("known pipelines");
    let fields = Fields::new(loaded, served, Arc::new(inputs));
    (fields, Ids::after(None), folder)
}
