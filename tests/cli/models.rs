//! A model gives the same results in three forms: diffusers folder, Lightricks' single file (with its own tensor names
//! and configuration), and Hugging Face cache. Damaged files make a run fail with a single error line that lists file
//! and tensor.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Output;

use crate::support::single_file::{
    IN_FILE, TINY, TINY_2_3, TensorData, combined, combined_of, combined_parts, header, header_2_3, read, write,
};
use crate::support::{self, full, needs};
use ltx2::pipeline::output::tensors;
use ltx2::tensor::Tensor;
use ltx2::weights::{Component, HubCache, ModelSource, Overrides};
use safetensors::Dtype;
use serde_json::{Value, json};
use tempfile::TempDir;

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn path(p: &Path) -> &str {
    p.to_str().expect("UTF-8")
}

/// Runs `ltx2` with a Hugging Face home.
fn ltx2(home: &Path, arguments: &[&str]) -> Output {
    let mut command = support::ltx2();
    command.env_remove("HF_HUB_CACHE").env_remove("HUGGINGFACE_HUB_CACHE").env("HF_HOME", home);
    // Results that a failed run keeps.
    command.env("TMPDIR", env!("CARGO_TARGET_TMPDIR"));
    command.args(arguments).output().expect("the binary runs")
}

/// Runs a short guided generation into the folder `out` with the model's own schedule, without compiler optimizations,
/// which take longer than the run.
fn run(home: &Path, model: &[&str], out: &Path) -> Output {
    let (mp4, dump) = (out.join("a.mp4"), out.join("a.safetensors"));
    run_into(home, model, &["-o", path(&mp4), "--dump", path(&dump)])
}

fn run_into(home: &Path, model: &[&str], out: &[&str]) -> Output {
    let base = ["generate", "-c", "nano_2_0", "--platform", "cpu", "-p", "a red ball", "--negative-prompt", "blurry"];
    let size = ["--width", "64", "--height", "96", "--num-frames", "9", "--steps", "2", "--max-sequence-length", "64"];
    let more = ["--reference", "diffusers", "--set", "runtime.xla_flags.xla_backend_optimization_level=0"];
    ltx2(home, &[&base[..], &size, &more, out, &["--model"], model].concat())
}

/// Returns the dumped tensors and the sidecar of a run.
fn generate(home: &Path, model: &[&str]) -> (BTreeMap<String, TensorData>, Value) {
    let out = TempDir::new().expect("a folder");
    let done = run(home, model, out.path());
    assert!(done.status.success(), "{model:?}: {}", text(&done.stderr));
    let sidecar = fs::read(out.path().join("a.json")).expect("a sidecar");
    (read(&out.path().join("a.safetensors")), serde_json::from_slice(&sidecar).expect("JSON"))
}

fn ready(home: &Path, model: &[&str]) {
    let out = ltx2(home, &[&["check"], model].concat());
    let said = text(&out.stdout);
    assert!(out.status.success() && said.contains("LTX-2.0") && said.contains("text_to_video: ready"), "{said}");
}

/// Creates a repository in the Hugging Face cache: blobs by content hash, and a snapshot of links.
fn cache(home: &Path, folder: &Path, name: &str) {
    fn link(from: &Path, to: &Path, blobs: &Path, up: &str) {
        fs::create_dir_all(to).expect("a folder");
        for entry in fs::read_dir(from).expect("a folder").map(|e| e.expect("an entry")) {
            let (name, target) = (entry.file_name(), to.join(entry.file_name()));
            if entry.path().is_dir() {
                link(&entry.path(), &target, blobs, &format!("../{up}"));
                continue;
            }
            let blob = format!("{}-{}", fs::read_dir(blobs).expect("blobs").count(), name.len());
            fs::copy(entry.path(), blobs.join(&blob)).expect("copied");
            symlink(format!("{up}/blobs/{blob}"), target).expect("a link");
        }
    }
    let repository = home.join("hub").join(format!("models--{}", name.replace('/', "--")));
    let revision = "0123456789abcdef0123456789abcdef01234567";
    fs::create_dir_all(repository.join("blobs")).expect("a folder");
    fs::create_dir_all(repository.join("refs")).expect("a folder");
    fs::write(repository.join("refs/main"), revision).expect("written");
    link(folder, &repository.join("snapshots").join(revision), &repository.join("blobs"), "../..");
}

/// Compares configurations; integers equal floats of the same value.
fn same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| a == b)
}

#[needs(cpu)]
fn single_file_configurations_equal_those_of_folder() {
    let dir = TempDir::new().expect("a folder");
    let file = dir.path().join("ltx-2-tiny-dev.safetensors");
    write(&file, &combined(), Some(&header()));
    let encoder = format!("{TINY}/text_encoder");
    let overrides = Overrides { text_encoder: Some(encoder.clone()), ..Overrides::default() };
    let single = ModelSource::open(path(&file), &overrides).expect("opens");
    let folder = ModelSource::open(TINY, &Overrides::default()).expect("opens");
    single.refuse_unread().expect("statistics of training are no error");
    // LTX-2.0 reads neither width. The other keys are metadata of the reference, or false in every published model.
    let unread = ["video_hidden_dim", "audio_hidden_dim", "_diffusers_version"];
    for c in [&IN_FILE[..], &[Component::Scheduler]].concat() {
        let (derived, own) = (single.config(c).expect("derived"), folder.config(c).expect("its own"));
        for (key, want) in own.as_object().expect("an object") {
            let off = c == Component::Scheduler && *want == json!(false) && derived.get(key).is_none();
            if !off && !unread.contains(&key.as_str()) {
                assert!(same(&derived[key], want), "{c}: {key} is {}, not {want}", derived[key]);
            }
        }
        let more = derived.as_object().expect("an object").keys().find(|k| own.get(k).is_none());
        assert_eq!(more, None, "{c} has a key of its own");
    }
    assert!(single.has(Component::Tokenizer), "the text encoder's folder brings it");
    ready(dir.path(), &[path(&file), "--text-encoder", &encoder]);
}

#[needs(cpu)]
fn three_model_formats_give_identical_results() {
    let dir = TempDir::new().expect("a folder");
    let home = dir.path().join("hf");
    let file = dir.path().join("single/ltx-2-tiny-dev.safetensors");
    fs::create_dir(dir.path().join("single")).expect("a folder");
    write(&file, &combined(), Some(&header()));
    cache(&home, Path::new(TINY), "org/tiny");
    cache(&home, file.parent().expect("a folder"), "org/single");

    let hub = HubCache::at(home.join("hub"));
    let open = |name: &str, hub| ModelSource::open_in(name, &Overrides::default(), hub).expect("opens");
    let prints =
        [open("org/tiny", &hub), open(TINY, &hub)].map(|s| s.fingerprint(Component::Transformer).expect("readable"));
    assert_eq!(prints[0], prints[1], "links change nothing");
    ready(&home, &["org/tiny"]);
    ready(&home, &["org/single", "--text-encoder", "org/tiny"]);

    let (want, told) = generate(&home, &[TINY]);
    for name in ["latents.video", "latents.audio", "video", "audio", "negative_prompt_embeds"] {
        assert!(want.contains_key(name), "{name}");
    }
    for model in [&["org/tiny"][..], &[path(&file), "--text-encoder", "org/tiny"]] {
        let (got, sidecar) = generate(&home, model);
        assert_eq!(sidecar["programs"], told["programs"], "{model:?}");
        assert_eq!(sidecar["sha256"], told["sha256"], "{model:?}");
        assert!(got.keys().eq(want.keys()));
        got.iter().for_each(|(k, t)| assert!(*t == want[k], "{model:?}: {k}"));
        let (a, b) = (&sidecar["model"]["fingerprint"], &told["model"]["fingerprint"]);
        assert_eq!(a == b, model[0] == "org/tiny", "a fingerprint is of the files");
    }
}

#[needs(cpu)]
fn ltx_2_3_single_file_equals_its_folder() {
    let dir = TempDir::new().expect("a folder");
    let file = dir.path().join("ltx-2.3-tiny-dev.safetensors");
    write(&file, &combined_of(TINY_2_3), Some(&header_2_3()));
    let open = |name: &str| ModelSource::open(name, &Overrides::default()).expect("opens");
    let (single, folder) = (open(path(&file)), open(TINY_2_3));
    for c in IN_FILE {
        let (got, want) = (single.config(c).expect("a configuration"), folder.config(c).expect("a configuration"));
        // The folder's configuration also has default values of the class and metadata of the reference.
        for (key, value) in got.as_object().expect("an object") {
            // Keys of LTX-2.5 that the reference does not have yet, and a key that affects no size.
            let known = want.get(key).filter(|_| key != "resolution");
            let same = |a: &Value, b: &Value| a == b || a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| a == b);
            assert!(known.is_none_or(|w| same(value, w)), "{c} {key}: {value} of {known:?}");
        }
        let names = |s: &ModelSource| {
            let checkpoint = s.checkpoint(c).expect("weights");
            checkpoint.names().map(|n| (n.to_string(), checkpoint.shape(n).map(<[usize]>::to_vec))).collect::<Vec<_>>()
        };
        assert_eq!(names(&single), names(&folder), "{c}");
    }
    let text_encoder = format!("{TINY_2_3}/text_encoder");
    let checked = ltx2(dir.path(), &["check", path(&file), "--text-encoder", &text_encoder]);
    let said = text(&checked.stdout);
    assert!(said.contains("LTX-2.3"), "{said}{}", text(&checked.stderr));
    assert!(!said.contains("wrong") && !said.contains("unsupported"), "{said}");
}

/// Writes a model as single files in `root`: Kijai's files of LTX-2.0 and LTX-2.3, of which LTX-2.3's connectors are in
/// the transformer's file except for the text projections, and ComfyUI's Gemma 3.
fn write_single_files(root: &Path, model: &str, config: &Value) {
    let file = |name: &str| {
        let path = root.join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        path
    };
    let tensors = combined_parts(model, &[Component::Transformer, Component::Connectors]);
    let is_newer = model == TINY_2_3;
    let in_transformer = |key: &str| {
        let blocks = is_newer && !key.starts_with("text_embedding_projection.");
        blocks || !key.contains("_embeddings_connector.") && !key.starts_with("text_embedding_projection.")
    };
    let (transformer, connectors): (BTreeMap<_, _>, BTreeMap<_, _>) =
        tensors.into_iter().partition(|(key, _)| in_transformer(key));
    let version = if is_newer { "ltx-2.3-22b" } else { "ltx-2-19b" };
    let transformer_file = file(&format!("diffusion_models/{version}-dev_transformer_only_bf16.safetensors"));
    write(&transformer_file, &transformer, Some(config));
    write(&file("text_encoders/connectors_dev_bf16.safetensors"), &connectors, None);
    write(&file("vae/LTX_video_vae_bf16.safetensors"), &combined_parts(model, &[Component::Vae]), Some(config));
    let sound = combined_parts(model, &[Component::AudioVae, Component::Vocoder]);
    write(&file("vae/LTX_audio_vae_bf16.safetensors"), &sound, Some(config));
    let gemma = read(&Path::new(model).join("text_encoder/model.safetensors"));
    let renamed = |(key, tensor): (String, TensorData)| {
        let name = key.rsplit_once("language_model.").map(|(_, rest)| rest.replacen("model.", "", 1));
        (name.map_or(key, |rest| format!("model.{rest}")), tensor)
    };
    let mut gemma: BTreeMap<String, TensorData> = gemma.into_iter().map(renamed).collect();
    let pieces = fs::read("tests/fixtures/tokenizer/spiece/tokenizer.model").expect("a fixture");
    gemma.insert("spiece_model".into(), (Dtype::U8, vec![pieces.len()], pieces));
    gemma.insert("vision_model.embeddings.weight".into(), (Dtype::BF16, vec![1], vec![0; 2]));
    write(&file("split_files/text_encoders/gemma_3_12B_it.safetensors"), &gemma, None);
}

#[needs(cpu)]
fn single_files_of_components_give_the_results_of_their_folder() {
    let dir = TempDir::new().expect("a folder");
    let root = dir.path().join("files");
    write_single_files(&root, TINY, &header());
    ready(dir.path(), &[path(&root)]);
    // Gemma's file states no configuration, so the folder has that of Gemma 3 12B, apart from sizes.
    let folder = dir.path().join("folder");
    fs::create_dir_all(folder.join("text_encoder")).expect("a folder");
    for entry in fs::read_dir(TINY).expect("a folder").map(|e| e.expect("an entry")) {
        if entry.file_name() != "text_encoder" {
            symlink(entry.path(), folder.join(entry.file_name())).expect("a link");
        }
    }
    let encoder = Path::new(TINY).join("text_encoder");
    symlink(encoder.join("model.safetensors"), folder.join("text_encoder/model.safetensors")).expect("a link");
    let mut config: Value =
        serde_json::from_slice(&fs::read(encoder.join("config.json")).expect("a file")).expect("JSON");
    config["text_config"]["sliding_window"] = json!(1024);
    config["text_config"]["query_pre_attn_scalar"] = config["text_config"]["head_dim"].clone();
    fs::write(folder.join("text_encoder/config.json"), config.to_string()).expect("written");
    let (want, told) = generate(dir.path(), &[path(&folder)]);
    // Gemma's file also contains a tokenizer, with other tokens than the folder's.
    let tokenizer = format!("{TINY}/tokenizer");
    let transformer = root.join("diffusion_models/ltx-2-19b-dev_transformer_only_bf16.safetensors");
    let alone = dir.path().join("alone.safetensors");
    fs::copy(&transformer, &alone).expect("copied");
    let part = |name: &str| root.join(name).to_str().expect("UTF-8").to_string();
    let parts = [
        ("--connectors", part("text_encoders/connectors_dev_bf16.safetensors")),
        ("--text-encoder", part("split_files/text_encoders/gemma_3_12B_it.safetensors")),
        ("--vae", part("vae/LTX_video_vae_bf16.safetensors")),
        ("--audio-vae", part("vae/LTX_audio_vae_bf16.safetensors")),
    ];
    let parts: Vec<&str> = parts.iter().flat_map(|(flag, file)| [*flag, file]).collect();
    for model in [&[path(&root)][..], &[&[path(&alone)], &parts[..]].concat()] {
        let (got, sidecar) = generate(dir.path(), &[model, &["--tokenizer", &tokenizer]].concat());
        assert_eq!(sidecar["programs"], told["programs"], "{model:?}");
        assert_eq!(sidecar["sha256"], told["sha256"], "{model:?}");
        got.iter().for_each(|(key, tensor)| assert!(*tensor == want[key], "{model:?}: {key}"));
    }
    // The tokenizer in Gemma's file: other tokens, and so another video.
    let (got, _) = generate(dir.path(), &[path(&root)]);
    assert!(got["prompt_embeds"] != want["prompt_embeds"]);
    let missing = ltx2(dir.path(), &["check", path(&alone)]);
    let said = text(&missing.stdout) + &text(&missing.stderr);
    assert!(missing.status.code() == Some(1) && said.contains("connectors                absent"), "{said}");
}

#[needs(nothing)]
fn ambiguous_single_files_are_listed_with_selecting_flags() {
    let dir = TempDir::new().expect("a folder");
    let root = dir.path().join("files");
    write_single_files(&root, TINY_2_3, &header_2_3());
    // The presets do not fit the model's few blocks, but all of its components are found and have the right tensors.
    let complete = |arguments: &[&str]| {
        let said = text(&ltx2(dir.path(), &[&["check", path(&root)], arguments].concat()).stdout);
        for part in ["text_encoder", "connectors", "transformer", "vae", "audio_vae", "vocoder"] {
            assert!(said.contains(&format!("{part:<25} ok: ")), "{part}: {said}");
        }
        assert!(said.contains("LTX-2.3") && said.contains("tokenizer                 present"), "{said}");
    };
    complete(&[]);
    let dev = root.join("diffusion_models/ltx-2.3-22b-dev_transformer_only_bf16.safetensors");
    fs::copy(&dev, dev.with_file_name("ltx-2.3-22b-distilled_transformer_only_bf16.safetensors")).expect("copied");
    let vae = root.join("vae/LTX_video_vae_bf16.safetensors");
    fs::copy(&vae, vae.with_file_name("other.safetensors")).expect("copied");
    let fails = |arguments: &[&str], words: &[&str]| {
        let done = ltx2(dir.path(), &[&["check", path(&root)], arguments].concat());
        let said = text(&done.stdout) + &text(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{said}");
        words.iter().for_each(|word| assert!(said.contains(word), "`{word}` is not in: {said}"));
    };
    fails(&[], &["2 files could be the transformer", "diffusion_models/ltx-2.3-22b-distilled", "--variant"]);
    fails(&["--variant", "nvfp4"], &["no file matches `model.variant` = nvfp4; available: diffusion_models/"]);
    fails(&["--variant", "dev"], &["2 files could be the video VAE", "vae/other.safetensors", "--vae"]);
    complete(&["--variant", "dev", "--vae", path(&vae)]);
}

#[needs(cpu)]
fn mixed_model_versions_are_rejected() {
    let dir = TempDir::new().expect("a folder");
    let refused = |arguments: &[&str], words: &[&str]| {
        let done = ltx2(dir.path(), &[&["check"], arguments].concat());
        let said = format!("{}{}", text(&done.stdout), text(&done.stderr));
        assert_eq!(done.status.code(), Some(1), "{said}");
        words.iter().for_each(|w| assert!(said.contains(w), "`{w}` is not in: {said}"));
    };
    let file = dir.path().join("mixed.safetensors");
    write(&file, &combined_of(TINY_2_3), Some(&header()));
    let newer = ["mixed.safetensors", "`prompt_adaln.linear.weight` of LTX-2.3", "the file's header describes LTX-2.0"];
    refused(&[path(&file)], &newer);
    write(&file, &combined(), Some(&header_2_3()));
    let older = ["`caption_projection.linear_1.weight` of LTX-2.0", "the file's header describes LTX-2.3"];
    refused(&[path(&file)], &older);

    for (component, tensor) in [
        ("transformer", "caption_projection.linear_1.weight"),
        ("connectors", "text_proj_in.weight"),
        ("vocoder", "conv_in.weight"),
    ] {
        let scratch = TempDir::new().expect("a folder");
        let model = damaged(scratch.path(), component);
        let config = Path::new(component).join("config.json");
        fs::copy(Path::new(TINY_2_3).join(&config), model.join(&config)).expect("copied");
        let told = [&format!("`{tensor}` of LTX-2.0"), "config.json describes LTX-2.3"];
        refused(&[path(&model)], &told);
    }
}

/// `init` writes the same values as the device generates for random weights with the same seed: of the vocoder, and in
/// the full test of every component.
#[needs(cpu)]
fn init_writes_same_weights_as_device_generates() {
    let dir = TempDir::new().expect("a folder");
    let written = dir.path().join("written");
    // `run` draws with the default seed.
    let seed = if full() { "5" } else { "0" };
    let made = ltx2(dir.path(), &["init", "--preset", "nano", "--seed", seed, "--dtype", "f32", path(&written)]);
    assert!(made.status.success(), "{}", text(&made.stderr));
    if !full() {
        let mel = Tensor::F32(ndarray::ArrayD::from_shape_fn(vec![1, 2, 5, 64], |i| (i[3] as f32 * 0.3).sin()));
        let inputs = dir.path().join("in.safetensors");
        tensors::write(&inputs, &[("mel".into(), mel)]).expect("written");
        let samples = |name: &str, model: &[&str]| {
            let output = dir.path().join(name);
            let base = ["run", "vocoder", "--platform", "cpu", "--dtype", "f32", "--inputs", path(&inputs)];
            let done = ltx2(dir.path(), &[&base[..], &["-o", path(&output), "--model"], model].concat());
            assert!(done.status.success(), "{}", text(&done.stderr));
            tensors::read(&output).expect("samples")
        };
        let files = samples("files.safetensors", &[path(&written)]);
        assert!(files["audio"].to_f32().iter().any(|sample| *sample != 0.0));
        assert_eq!(files, samples("devices.safetensors", &["nano", "--weights", "random"]));
        return;
    }
    let dumped = |name: &str, model: &[&str]| {
        let dump = dir.path().join(format!("{name}.safetensors"));
        let base = ["generate", "-c", "nano_2_0", "--platform", "cpu", "-p", "a red ball", "--steps", "1"];
        // The size of `cli bench`, whose compiled programs are reused.
        let size = ["--width", "64", "--height", "96", "--num-frames", "9", "--set", support::QUICK];
        let mp4 = dump.with_extension("mp4");
        let out = ["--dump", path(&dump), "-o", path(&mp4)];
        let done = ltx2(dir.path(), &[&base[..], &size, &out, &["--model"], model].concat());
        assert!(done.status.success(), "{}", text(&done.stderr));
        read(&dump)
    };
    let files = dumped("files", &[path(&written)]);
    let devices = dumped("devices", &["nano", "--weights", "random", "--set", "model.weights_seed=5"]);
    assert!(files.keys().eq(devices.keys()));
    files.iter().for_each(|(k, t)| assert!(*t == devices[k], "{k}"));
}

/// Creates tiny_a from links, with a copy of `component` that can be damaged.
fn damaged(dir: &Path, component: &str) -> PathBuf {
    let model = dir.join("model");
    fs::create_dir(&model).expect("a folder");
    for entry in fs::read_dir(TINY).expect("a folder").map(|e| e.expect("an entry")) {
        if entry.file_name() != component {
            symlink(entry.path(), model.join(entry.file_name())).expect("a link");
        }
    }
    fs::create_dir(model.join(component)).expect("a folder");
    for entry in fs::read_dir(Path::new(TINY).join(component)).expect("a folder").map(|e| e.expect("a file")) {
        fs::copy(entry.path(), model.join(component).join(entry.file_name())).expect("copied");
    }
    model
}

/// Runs a model that must fail with exit code 1 and a single error line that contains `words`, without writing
/// anything.
fn fails(model: &[&str], words: &[&str]) {
    let out = TempDir::new().expect("a folder");
    let done = run(out.path(), model, out.path());
    let stderr = text(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{words:?}: {stderr}");
    let lines: Vec<&str> = stderr.lines().filter(|l| l.starts_with("error: ")).collect();
    assert_eq!(lines.len(), 1, "one line says it: {stderr}");
    eprintln!("{}", lines[0]);
    words.iter().for_each(|w| assert!(lines[0].contains(w), "`{w}` is not in: {}", lines[0]));
    assert_eq!(fs::read_dir(out.path()).expect("the folder").count(), 0, "{words:?}: something was written");
    assert!(done.stdout.is_empty());
}

type Tensors = BTreeMap<String, TensorData>;
type Edit = fn(&mut Tensors, &str);

/// Sets the third value to NaN (bf16).
fn set_to_nan(tensors: &mut Tensors, key: &str) {
    tensors.get_mut(key).expect("there").2[4..6].copy_from_slice(&[0xc0, 0x7f]);
}

fn flatten(tensors: &mut Tensors, key: &str) {
    let shape = &mut tensors.get_mut(key).expect("there").1;
    *shape = vec![shape.iter().product()];
}

#[needs(cpu)]
fn damaged_files_give_one_error_line() {
    let shard = "diffusion_pytorch_model-00001-of-00003.safetensors";
    let norm = "language_model.model.norm.weight";
    let encoder = read(&Path::new(TINY).join("text_encoder/model.safetensors"));
    let norm = encoder.keys().find(|k| k.ends_with(".norm.weight")).map_or(norm, String::as_str);
    let (one, plain) = ("model.safetensors", "diffusion_pytorch_model.safetensors");
    let edits: [(&str, &str, Edit, &str, &[&str]); 5] = [
        ("text_encoder", one, set_to_nan, norm, &["NaN at [2]"]),
        ("text_encoder", one, flatten, "language_model.model.embed_tokens.weight", &["[9600]", "[400, 24]"]),
        ("connectors", plain, |t, k| drop(t.remove(k)), "text_proj_in.weight", &["missing"]),
        ("transformer", shard, set_to_nan, "proj_in.weight", &["NaN at [0, 2]"]),
        ("transformer", shard, |t, k| drop(t.remove(k)), "proj_in.weight", &["index.json", "is not in"]),
    ];
    for (component, file, edit, key, words) in edits {
        let dir = TempDir::new().expect("a folder");
        let model = damaged(dir.path(), component);
        let target = model.join(component).join(file);
        let mut tensors = read(&target);
        edit(&mut tensors, key);
        write(&target, &tensors, None);
        fails(&[path(&model)], &[&[component, file, key], words].concat());
    }

    let dir = TempDir::new().expect("a folder");
    let model = damaged(dir.path(), "transformer");
    let target = model.join("transformer").join(shard);
    let bytes = fs::read(&target).expect("a shard");
    fs::write(&target, &bytes[..bytes.len() - 9]).expect("written");
    fails(&[path(&model)], &["transformer", shard, "truncated", &format!("the file has {}", bytes.len() - 9)]);
    fs::remove_file(&target).expect("removed");
    fails(&[path(&model)], &["transformer", shard, "is missing", "more tensors"]);
}

/// A newer model must not be run as if it were an older one.
#[needs(cpu)]
fn unknown_keys_and_tensors_are_rejected() {
    let edits: [(&str, Value, &[&str]); 4] = [
        (
            "transformer",
            json!({"use_keyframes_abs_pos_embedding": true}),
            &["`use_prompt_embeddings` does not match cross_attn_mod or use_keyframes_abs_pos_embedding"],
        ),
        ("vae", json!({"blend_tiles": 3}), &["unknown key blend_tiles = 3"]),
        ("connectors", json!({"text_proj_in_factor": 7}), &["text_proj_in.weight: file [24, 192], model [24, 168]"]),
        (
            "text_encoder",
            json!({"model_type": "gemma4_unified"}),
            &["`model_type` = gemma4_unified is the text encoder of LTX-2.5", "use Gemma-3-12B"],
        ),
    ];
    for (component, keys, words) in edits {
        let dir = TempDir::new().expect("a folder");
        let model = damaged(dir.path(), component);
        let config = model.join(component).join("config.json");
        let mut json: Value = serde_json::from_slice(&fs::read(&config).expect("a file")).expect("JSON");
        json.as_object_mut().expect("an object").extend(keys.as_object().expect("an object").clone());
        fs::write(&config, json.to_string()).expect("written");
        fails(&[path(&model)], &[&[path(&model.join(component))], words].concat());
    }
    let dir = TempDir::new().expect("a folder");
    let model = damaged(dir.path(), "transformer");
    let shard = model.join("transformer/diffusion_pytorch_model-00001-of-00003.safetensors");
    let mut tensors = read(&shard);
    let known = tensors["proj_in.weight"].clone();
    tensors.insert("keyframes_abs_pos_embedding".into(), known);
    write(&shard, &tensors, None);
    let index = model.join("transformer/diffusion_pytorch_model.safetensors.index.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&index).expect("an index")).expect("JSON");
    json["weight_map"]["keyframes_abs_pos_embedding"] = json!(shard.file_name().and_then(|n| n.to_str()));
    fs::write(&index, json.to_string()).expect("written");
    fails(&[path(&model)], &["transformer", "`keyframes_abs_pos_embedding` of LTX-2.5", "describes LTX-2.0"]);
}

/// Invalid model as a folder or a single file, and the expected words of the error.
struct Wrong {
    model: Vec<String>,
    words: Vec<String>,
}

/// Creates models whose video VAE has an unknown key, an unknown tensor, or lacks a tensor.
fn invalid_models(dir: &Path) -> Vec<Wrong> {
    let plain = "vae/diffusion_pytorch_model.safetensors";
    let (invented, gone) = ("decoder.invented.weight", "decoder.conv_in.conv.weight");
    let mut all = vec![];
    for (i, word) in ["blend_tiles", invented, gone].into_iter().enumerate() {
        let scratch = dir.join(i.to_string());
        fs::create_dir(&scratch).expect("a folder");
        let model = damaged(&scratch, "vae");
        let (mut folder, mut single, mut header) = (read(&model.join(plain)), combined(), header());
        let known = folder[gone].clone();
        match i {
            0 => {
                let config = model.join("vae/config.json");
                let mut json: Value = serde_json::from_slice(&fs::read(&config).expect("a file")).expect("JSON");
                json[word] = json!(3);
                fs::write(&config, json.to_string()).expect("written");
                header["vae"][word] = json!(3);
            }
            1 => {
                folder.insert(word.into(), known.clone());
                single.insert(format!("vae.{word}"), known);
            }
            _ => {
                folder.remove(word);
                single.remove(&format!("vae.{word}"));
            }
        }
        write(&model.join(plain), &folder, None);
        let file = scratch.join("ltx-2-tiny-dev.safetensors");
        write(&file, &single, Some(&header));
        let said = [["unknown key", "missing", "unknown"][[0, 2, 1][i]], word];
        let words = |place: &str| said.iter().copied().chain([place]).map(String::from).collect();
        let place = if i == 0 { "vae/config.json" } else { "diffusion_pytorch_model.safetensors" };
        all.push(Wrong { model: vec![path(&model).into()], words: words(place) });
        let encoder = format!("{TINY}/text_encoder");
        let model = vec![path(&file).into(), "--text-encoder".into(), encoder];
        all.push(Wrong { model, words: words("ltx-2-tiny-dev.safetensors") });
    }
    all
}

/// Each command that reads a model reports the error in one line before anything is compiled. The plugin does not
/// exist, so a valid model fails with that instead.
#[needs(nothing)]
fn invalid_files_are_rejected_before_compiling() {
    let dir = TempDir::new().expect("a folder");
    let plugin = dir.path().join("pjrt_cpu_plugin.so");
    fs::write(&plugin, "no library").expect("written");
    let inputs = dir.path().join("inputs.safetensors");
    write(&inputs, &BTreeMap::new(), None);
    let (out, tensors) = (dir.path().join("out.mp4"), dir.path().join("out.safetensors"));
    let size = ["--width", "64", "--height", "96", "--num-frames", "9", "--max-sequence-length", "64"];
    let set = ["--set", "request={width: 64, height: 96, num_frames: 9, max_sequence_length: 64}"];
    let hlo = dir.path().join("hlo");
    let (platform, ahead) = (["--platform", path(&plugin)], ["--target", "cpu:1", "--dump-hlo", path(&hlo)]);
    let commands = [
        [&["generate", "-c", "nano_2_0", "-p", "a ball", "-o", path(&out)][..], &platform, &size].concat(),
        [&["run", "video-decoder", "--inputs", path(&inputs), "-o", path(&tensors)][..], &platform].concat(),
        [&["compile", "-c", "nano_2_0", "--program", "video-decoder"][..], &ahead, &set].concat(),
        vec!["check"],
    ];
    let said = |command: &[&str], model: &[String]| {
        let mut ltx2 = support::ltx2();
        ltx2.env("HF_HOME", dir.path()).args(command);
        // `check` takes the model as a positional argument.
        ltx2.args(if command == ["check"] { &[][..] } else { &["--model"] }).args(model);
        let done = ltx2.output().expect("the binary runs");
        (done.status.code(), format!("{}{}", text(&done.stdout), text(&done.stderr)))
    };
    for command in &commands[..2] {
        let (code, whole) = said(command, &[TINY.to_string()]);
        assert!(code != Some(0) && whole.contains("pjrt_cpu_plugin.so"), "{command:?}: {whole}");
    }
    for wrong in invalid_models(dir.path()) {
        for command in &commands {
            let (code, said) = said(command, &wrong.model);
            assert_eq!(code, Some(1), "{command:?}: {said}");
            let named = said.lines().any(|line| wrong.words.iter().all(|word| line.contains(&word[..])));
            // The report of `check` has a line for each tensor.
            let listed = command == &["check"] && said.contains(&wrong.words[1]);
            assert!(named || listed, "{command:?}: {:?} are not in a line of: {said}", wrong.words);
            assert!(!said.contains("pjrt_cpu_plugin.so"), "{command:?} looked for a device first: {said}");
        }
    }
    assert!(!out.exists() && !tensors.exists() && !hlo.exists());
}

/// Sets every value to the largest bf16 number, so that sums overflow to infinity.
fn set_to_largest_bf16(tensors: &mut Tensors, key: &str) {
    let bytes = &mut tensors.get_mut(key).expect("there").2;
    bytes.chunks_exact_mut(2).for_each(|value| value.copy_from_slice(&[0x7f, 0x7f]));
}

#[needs(cpu)]
fn non_finite_values_are_reported_instead_of_written() {
    let shard = "diffusion_pytorch_model-00001-of-00003.safetensors";
    let plain = "diffusion_pytorch_model.safetensors";
    let edits = [
        ("transformer", shard, "proj_in.weight", "the video latents after step 1 of 2 contain NaN"),
        ("vae", plain, "decoder.conv_in.conv.weight", "the decoded frames contain NaN"),
        ("vocoder", plain, "conv_in.weight", "the decoded samples contain NaN"),
    ];
    for (component, file, key, said) in edits {
        let dir = TempDir::new().expect("a folder");
        let model = damaged(dir.path(), component);
        let target = model.join(component).join(file);
        let mut tensors = read(&target);
        set_to_largest_bf16(&mut tensors, key);
        write(&target, &tensors, None);
        // The frames are float values if dumped, otherwise bytes.
        fails(&[path(&model)], &[said, "infinite values"]);
        if component != "vae" {
            continue;
        }
        let out = TempDir::new().expect("a folder");
        let done = run_into(out.path(), &[path(&model)], &["-o", path(&out.path().join("a.mp4"))]);
        assert!(!done.status.success() && text(&done.stderr).contains(said), "{}", text(&done.stderr));
        assert_eq!(fs::read_dir(out.path()).expect("the folder").count(), 0, "{component}: something was written");
    }
}

#[needs(cpu)]
fn damaged_single_file_reports_file_and_tensor() {
    let dir = TempDir::new().expect("a folder");
    let file = dir.path().join("ltx-2-tiny-dev.safetensors");
    let block = "model.diffusion_model.video_embeddings_connector.transformer_1d_blocks.1.attn1";
    let norm = format!("{block}.q_norm.weight");
    let gone = "video_connector.transformer_blocks.1.attn1.norm_q.weight";
    let edits: [(Edit, &str, &[&str]); 3] = [
        (set_to_nan, &norm, &[&norm, "NaN at [2]"]),
        (flatten, &format!("{block}.to_q.weight"), &["attn1.to_q.weight", "[576]", "[24, 24]"]),
        // A missing tensor has no name in the file, so the error uses the diffusers name.
        (|t, k| drop(t.remove(k)), &norm, &[gone, "missing"]),
    ];
    for (edit, key, words) in edits {
        let mut tensors = combined();
        edit(&mut tensors, key);
        write(&file, &tensors, Some(&header()));
        let model = [path(&file), "--text-encoder", &format!("{TINY}/text_encoder")];
        fails(&model, &[&["ltx-2-tiny-dev.safetensors"], words].concat());
    }
}
