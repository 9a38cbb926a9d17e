//! Tests of models with unknown parts: newer versions, unknown keys and unknown tensors.

use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::*;
use super::official::{SINGLE, file_of, official_config};
use super::{diffusers_folder, fails, open, open_with, put, safetensors};

/// Opens a single file with a version in its header and some configuration values replaced.
fn versioned(version: &str, edits: &[(&str, &str, Value)]) -> Result<ModelSource, WeightsError> {
    let dir = TempDir::new().expect("dir");
    let mut config = official_config();
    for (section, key, value) in edits {
        config[section][key] = value.clone();
    }
    let header = json!({"config": config.to_string(), "model_version": version});
    open(&put(dir.path().join("x.safetensors"), safetensors(&SINGLE, header)))
}

#[test]
fn newer_single_file_is_refused() {
    for known in ["2.0", "2.0.0", "2.3.0", "2.3-rc1", "2.5.0", "2.5-rc1", "community"] {
        versioned(known, &[]).unwrap_or_else(|e| panic!("{known}: {e}"));
    }
    let nine = ["x.safetensors", "`model_version` 9.0 in the header", "is unknown to this program", "newer ltx2"];
    fails(versioned("9.0", &[]), &nine);
    for newer in ["2.4.1", "v2.4.1", "2.6", "LTX-9.0"] {
        fails(versioned(newer, &[]), &[&format!("`model_version` {newer}"), "is unknown to this program"]);
    }
    // LTX-2.5's marker, as a key or as a tensor, together with LTX-2.0's text path matches no version.
    let marks = ("transformer", "use_keyframes_abs_pos_embedding", json!(true));
    fails(
        versioned("", &[marks]).and_then(|source| source.version()),
        &["x.safetensors", "neither LTX-2.0 nor LTX-2.3"],
    );
    let dir = TempDir::new().expect("dir");
    let tensor = ("model.diffusion_model.keyframes_abs_pos_embedding", "BF16", &[1, 2][..]);
    let tensors = [&SINGLE[..], &[tensor]].concat();
    let newer = file_of(dir.path(), "newer.safetensors", &tensors, &official_config());
    let mixed =
        ["newer.safetensors", "`keyframes_abs_pos_embedding` of LTX-2.5", "the file's header describes LTX-2.0"];
    fails(newer, &mixed);
}

#[test]
fn newer_folder_is_refused() {
    let refused = |file: &str, json: Value, words: &[&str]| {
        let dir = TempDir::new().expect("dir");
        diffusers_folder(dir.path());
        put(dir.path().join(file), json.to_string());
        fails(open(dir.path()), &[&[file], words].concat());
    };
    let unknown = "is unknown to this program";
    let class = json!({"_class_name": "LTX9VideoTransformer3DModel", "num_layers": 2});
    refused("transformer/config.json", class, &["`_class_name` = LTX9VideoTransformer3DModel", unknown, "newer ltx2"]);
    refused("scheduler/scheduler_config.json", json!({"_class_name": "NineSteps"}), &["NineSteps", unknown]);
    refused("model_index.json", json!({"_class_name": "LTX9Pipeline"}), &["LTX9Pipeline", unknown]);
    let parts = |name: &str| json!({"_class_name": "LTX2Pipeline", name: ["ltx2", "X"], "processor": ["a", "B"]});
    refused("model_index.json", parts("dream_head"), &["`dream_head`", unknown]);
    let dir = TempDir::new().expect("dir");
    diffusers_folder(dir.path());
    let index = json!({"_class_name": "LTX2Pipeline", "duration_head": ["ltx2", "LTX2DurationHead"], "processor": null,
        "diffusion_decoder": ["diffusers", "X"], "temporal_latent_upsampler": ["ltx2", "Y"]});
    put(dir.path().join("model_index.json"), index.to_string());
    open(dir.path()).expect("parts of LTX-2.5 are known");

    let dir = TempDir::new().expect("dir");
    diffusers_folder(dir.path());
    let index = json!({"_class_name": "LTX2ImageToVideoPipeline", "duration_head": [null, null], "processor": null});
    put(dir.path().join("model_index.json"), index.to_string());
    let source = open(dir.path()).expect("absent parts are none");
    put(dir.path().join("transformer/config.json"), json!({"use_prompt_embeddings": true}).to_string());
    let tensors = [("keyframes_abs_pos_embedding", "BF16", &[1, 2][..])];
    put(dir.path().join("transformer/diffusion_pytorch_model.safetensors"), safetensors(&tensors, Value::Null));
    let mixed = ["`keyframes_abs_pos_embedding` of LTX-2.5", "transformer/config.json describes LTX-2.0"];
    fails(source.checkpoint(Component::Transformer), &mixed);
}

#[test]
fn unknown_config_keys_are_refused() {
    let dir = TempDir::new().expect("dir");
    let with = |way: &str, value: Value| {
        let mut config = official_config();
        let (section, key) = way.rsplit_once('/').expect("a section");
        config.pointer_mut(section).expect("a section")[key] = value;
        file_of(dir.path(), "x.safetensors", &SINGLE, &config)
    };
    for section in ["", "/transformer", "/vae", "/audio_vae/model/params/ddconfig", "/vocoder"] {
        let key = format!("config{}.zoom_level", section.replace('/', "."));
        fails(
            with(&format!("{section}/zoom_level"), json!(3)),
            &["x.safetensors", &key, "is an unknown key (value 3)"],
        );
        with(&format!("{section}/_saved_by"), json!("x")).expect("says nothing of the network");
    }
    // These keys have no effect with the values of all published models; other values are an error.
    for (way, value) in [
        ("/transformer/dropout", json!(0.1)),
        ("/transformer/causal_temporal_positioning", json!(true)),
        ("/transformer/text_encoder_norm_type", json!("PER_TOKEN_RMS")),
        ("/vae/use_quant_conv", json!(false)),
    ] {
        with(way, value).unwrap_or_else(|e| panic!("{way}: {e}"));
    }
    for (way, value, said) in [
        ("/transformer/causal_temporal_positioning", json!(false), "is false, which is not supported"),
        ("/transformer/text_encoder_norm_type", json!("batch"), "is \"batch\", which is not supported"),
        ("/vae/normalize_latent_channels", json!(true), "is true, which is not supported"),
    ] {
        fails(with(way, value), &[way.rsplit('/').next().expect("a key"), said]);
    }
    // A section of the wrong type is not treated as missing.
    for (way, value) in [("/transformer", json!([])), ("/audio_vae/model/params/ddconfig", json!("x"))] {
        fails(with(way, value), &[&format!("config{}", way.replace('/', ".")), "not an object"]);
    }
    let source = with("/transformer/double_self_attention", json!(true)).expect("opens");
    fails(source.config(Component::Transformer), &["config.transformer.double_self_attention", "only false"]);
}

/// Every key that is listed as read changes a derived configuration, or causes an error.
#[test]
fn every_read_key_changes_a_derived_config() {
    let dir = TempDir::new().expect("dir");
    let parts =
        [Component::Transformer, Component::Connectors, Component::Vae, Component::AudioVae, Component::Vocoder];
    let derived = |config: &Value| -> Vec<String> {
        let all = SINGLE.iter().chain(&[("audio_vae.decoder.x", "BF16", &[1][..])]).copied().collect::<Vec<_>>();
        let source = file_of(dir.path(), "x.safetensors", &all, config).expect("opens");
        let config = |c: &Component| source.config(*c).map_or_else(|e| e.to_string(), |v| v.to_string());
        parts.iter().chain(&[Component::Scheduler]).map(config).collect()
    };
    // The number of mel bins can be in three sections; the first one that is present is used.
    let mut base = official_config();
    base["audio_vae"] = json!({});
    let plain = derived(&base);
    let mut silent = vec![];
    for way in official_keys::read() {
        // LTX-2.0's vocoder has a fixed activation.
        if way == ["vocoder", "activation"] {
            continue;
        }
        let changes = |value: &Value| {
            let mut config = base.clone();
            *way.iter().fold(&mut config, |place, name| &mut place[name]) = value.clone();
            derived(&config) != plain
        };
        // Every default differs from at least one of these values.
        if ![json!([77, 78, 79]), json!(true), json!(false), json!("77")].iter().any(changes) {
            silent.push(way.join("."));
        }
    }
    assert!(silent.is_empty(), "{silent:?}");
}

#[test]
fn unknown_upsampler_keys_and_tensors_are_refused() {
    let dir = TempDir::new().expect("dir");
    diffusers_folder(dir.path());
    let source = |config: Value, more: &str| {
        let tensors = [("initial_conv.weight", "BF16", &[32, 4, 3, 3, 3][..]), (more, "BF16", &[1][..])];
        let file = put(dir.path().join("up.safetensors"), safetensors(&tensors, json!({"config": config.to_string()})));
        let overrides = Overrides { upsampler: file.to_str().map(String::from), ..Overrides::default() };
        open_with(dir.path(), &overrides)
    };
    source(json!({"dims": 3}), "final_conv.bias").expect("opens").refuse_unread().expect("reads all");
    fails(
        source(json!({"warp": 2}), "final_conv.bias"),
        &["up.safetensors", "config.warp", "is an unknown key (value 2)"],
    );
    let extra = source(json!({"dims": 3}), "warp.weight").expect("opens");
    fails(extra.refuse_unread(), &["up.safetensors", "`warp.weight` is not read"]);
}
