//! Tests of batch keys, model cards and arbitrary request bodies.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{ParsedConfig, TestConverter, at};
use crate::config::{Decoder, LoraApply, Pipeline};
use crate::serve::fields::Endpoint;
use crate::serve::fields::table::FIELDS;
use crate::serve::form::Form;
use crate::serve::generator::Generator;
use crate::serve::job::AcceptedJob;

#[test]
fn batch_key_ignores_prompt_seed_user_and_metadata() {
    let server = TestConverter::new("nano", &[]);
    let of = |body: Value| server.good(&body);
    let first = of(json!({"seed": 1}));
    let other = of(json!({"seed": 2, "prompt": "b", "user": "me", "metadata": {"a": "b"}}));
    assert_eq!((&first.batch_key, &first.shape), (&other.batch_key, &other.shape));
    assert_ne!(first.id, other.id);
    // These values are inputs of the same programs.
    for body in [
        json!({"steps": 8}),
        json!({"guidance_scale": 5}),
        json!({"negative_prompt": "blur"}),
        json!({"sigmas": [1, 0.5]}),
    ] {
        let own = of(body.clone());
        assert_ne!(own.batch_key, first.batch_key, "{body}");
        assert_eq!(own.shape, first.shape, "{body}");
    }
    for body in [
        json!({"size": "64x96"}),
        json!({"num_frames": 33}),
        json!({"guidance_scale": 1}),
        json!({"stg_scale": 1, "stg_blocks": [1]}),
        json!({"ltx2": {"sampler": {"kind": "res_2s"}}}),
        json!({"guidance_skip_step": 1}),
    ] {
        let own = of(body.clone());
        assert_ne!(own.batch_key, first.batch_key, "{body}");
        assert_ne!(own.shape, first.shape, "{body}");
    }
}

/// Clients of other servers always send these fields. Their default values have no effect.
#[test]
fn neutral_values_of_compatibility_fields_have_no_effect() {
    let server = TestConverter::new("nano", &[]);
    let plain = server.good(&json!({"seed": 1}));
    for (name, value) in [
        ("generator_device", json!("cuda")),
        ("generator_device", json!("cpu")),
        ("frame_interpolation_exp", json!(1)),
        ("frame_interpolation_scale", json!(1.0)),
        ("upscaling_scale", json!(4)),
        ("output_quality", json!("default")),
        ("profile_all_stages", json!(false)),
        ("enable_cache_dit", json!(false)),
        ("return_stage_metrics", json!(false)),
        ("use_diffusion_decoder", json!(false)),
        ("auto_duration", json!(false)),
    ] {
        let made = server.good(&json!({"seed": 1, name: value}));
        assert_eq!((made.config, &made.shape), (plain.config.clone(), &plain.shape), "{name}");
    }
}

#[test]
fn decoder_and_auto_duration_aliases_work() {
    let server = TestConverter::new("nano_2_5", &[]);
    for (body, decoder) in [
        (json!({"seed": 1, "use_diffusion_decoder": true}), Decoder::Diffusion),
        (json!({"seed": 1, "use_diffusion_decoder": "false"}), Decoder::Conv),
        (json!({"seed": 1}), Decoder::Auto),
    ] {
        assert_eq!(server.good(&body).config().model.decoder, decoder, "{body}");
    }
    for body in [json!({"seed": 1, "auto_duration": true}), json!({"seed": 1, "num_frames": "auto"})] {
        assert_eq!(server.good(&body).num_frames(), None, "{body}");
    }
}

#[test]
fn loras_are_selected_by_name() {
    let set = [
        "serve.loras={style: {path: tests/fixtures/lora/plain.safetensors}, late: {path: b.safetensors, stages: [2]}}",
    ];
    let server = TestConverter::new("nano_two_stage", &set);
    let of = |body: Value| {
        let loras = server.good(&body).config().model.loras;
        loras.into_iter().map(|lora| (lora.path, lora.strength, lora.stages)).collect::<Vec<_>>()
    };
    let style = ("tests/fixtures/lora/plain.safetensors".to_string(), 0.5, vec![1, 2]);
    for body in [
        json!({"seed": 1, "lora": {"name": "style", "scale": 0.5}}),
        json!({"seed": 1, "loras": [{"name": "style", "scale": "0.5"}]}),
        json!({"seed": 1, "lora": "{\"lora_name\": \"style\", \"lora_scale\": 0.5}"}),
        json!({"seed": 1, "extra_params": {"lora": {"adapter": "style", "scale": 0.5}}}),
    ] {
        assert_eq!(of(body), std::slice::from_ref(&style));
    }
    let both = of(json!({"seed": 1, "loras": [{"name": "style", "scale": 0.5}, {"name": "late"}]}));
    assert_eq!(both, [style, ("b.safetensors".to_string(), 1.0, vec![2])]);
    let first = server.good(&json!({"seed": 1}));
    let with = server.good(&json!({"seed": 1, "lora": "style"}));
    assert_eq!(with.shape, first.shape);
    assert_ne!(with.batch_key, first.batch_key);
    for bad in [
        json!({"lora": "styel"}),
        json!({"lora": {"name": "style", "scale": 3}}),
        json!({"loras": vec![json!({"name": "style"}); 5]}),
        json!({"lora": {"name": "tests/fixtures/lora/plain.safetensors"}}),
    ] {
        assert_eq!(server.bad(&bad).1, "invalid_value", "{bad}");
    }
    let error = server.json(&json!({"prompt": "a", "lora": "x"})).expect_err("unknown");
    assert!(error.message.contains("late, style") && !error.message.contains("fixtures"), "{error}");
}

#[test]
fn ic_lora_is_selected_by_name() {
    let file = "tests/fixtures/lora/ic_tiny_a.safetensors";
    let set = ["serve.pipelines=[in_context]", &format!("serve.ic_loras=[deblur, {file}]")];
    let server = TestConverter::new("nano", &set);
    assert_eq!(json!(server.fields.card())["ic_loras"], json!(["deblur", file]));
    let error = server.json(&json!({"prompt": "a", "ic_lora": "sharpen"})).expect_err("unknown");
    assert_eq!((error.code, error.param.as_deref()), ("invalid_value", Some("ic_lora")));
    assert!(error.message.contains("unknown LoRA 'sharpen'; available: deblur, "), "{error}");
    let path = json!({"ic_lora": {"path": file}});
    assert_eq!(server.bad(&path), (400, "parameter_not_allowed", Some("ic_lora.path".into())));
    // It needs a reference video, and is for another generation than this model.
    assert_eq!(server.bad(&json!({"ic_lora": file})).2.as_deref(), Some("ic_lora"));
    let tree = json!({"ltx2": {"model": {"ic_lora": {"path": file}}}});
    assert_eq!(server.bad(&tree).1, "parameter_not_allowed");
}

#[test]
fn only_the_ranks_of_added_loras_change_the_shape_key() {
    let file = |name: &str| format!("{{path: tests/fixtures/lora/{name}.safetensors, apply: add}}");
    let set = format!(
        "serve.loras={{style: {}, quick: {}, merged: {{path: a.safetensors}}}}",
        file("ic_tiny_a_plain"),
        file("ic_tiny_a")
    );
    let server = TestConverter::new("nano", &[&set]);
    let good = |loras: Value| server.good(&json!({"seed": 1, "loras": loras}));
    let none = server.good(&json!({"seed": 1}));
    let (added, other) = (good(json!(["style"])), good(json!([{"name": "quick", "scale": -1}])));
    assert_eq!([&added, &other].map(|job| job.config().model.loras[0].apply), [LoraApply::Add; 2]);
    assert_eq!(added.shape, other.shape);
    assert_ne!(added.shape, none.shape);
    assert_eq!(good(json!(["merged"])).shape, none.shape);
    let refused =
        server.json(&json!({"prompt": "a", "lora": {"name": "merged", "apply": "add"}})).expect_err("refused");
    assert!(refused.message.contains("apply"), "the operator chooses: {refused}");
}

/// Ranks of LoRA files are read once: other contents of the same size and time do not change the key.
#[test]
fn lora_files_are_read_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.safetensors");
    std::fs::copy("tests/fixtures/lora/ic_tiny_a.safetensors", &path).expect("copied");
    let server = TestConverter::new("nano", &[&format!("serve.loras={{a: {{path: {}, apply: add}}}}", path.display())]);
    let shape = || server.good(&json!({"seed": 1, "lora": "a"})).shape;
    let first = shape();
    let meta = std::fs::metadata(&path).expect("a file");
    std::fs::write(&path, vec![0; meta.len() as usize]).expect("written");
    let file = std::fs::File::options().write(true).open(&path).expect("a file");
    file.set_modified(meta.modified().expect("a time")).expect("the time that it had");
    assert_eq!(shape(), first);
    file.set_modified(std::time::SystemTime::UNIX_EPOCH).expect("another time");
    assert_ne!(shape(), first);
}

/// Each rank of programs that one LoRA of the server needs is warmed up; with `only_warm`, requests with others are
/// rejected.
#[test]
fn ranks_of_served_loras_are_warmed_up() {
    let file = |name: &str, more: &str| format!("{{path: tests/fixtures/lora/{name}.safetensors{more}}}");
    let set = [
        "serve.only_warm=true".to_string(),
        "serve.warm=[128x96x25, 128x128x9@two_stage]".into(),
        "serve.pipelines=[two_stage]".into(),
        format!(
            "serve.loras={{a: {}, b: {}, large: {}, late: {}, merged: {}}}",
            file("ic_tiny_a", ", apply: add"),
            file("ic_tiny_a_plain", ", apply: add"),
            file("plain", ", apply: add"),
            file("ic_tiny_a", ", apply: add, stages: [2]"),
            file("plain", "")
        ),
    ];
    let server = TestConverter::new("nano", &set.each_ref().map(String::as_str));
    let warm = server.fields.warm_up(&server.ids).expect("batches");
    let loras: Vec<_> = warm
        .iter()
        .map(|batch| {
            let config = batch.jobs[0].config();
            let paths = config.model.loras.iter().map(|lora| (lora.path.clone(), lora.stages.clone()));
            (config.pipeline, paths.collect::<Vec<_>>())
        })
        .collect();
    let one = |name: &str, stages: &[u8]| vec![(format!("tests/fixtures/lora/{name}.safetensors"), stages.to_vec())];
    let (single, two) = (Pipeline::TextToVideo, Pipeline::TwoStage);
    let (a, large) = (one("ic_tiny_a", &[1, 2]), one("plain", &[1, 2]));
    let want = [
        (single, Vec::new()),
        (single, a.clone()),
        (single, large.clone()),
        (two, Vec::new()),
        (two, a),
        (two, large),
        (two, one("ic_tiny_a", &[2])),
    ];
    assert_eq!(loras, want);
    let ask = |loras: Value| json!({"seed": 1, "size": "128x96", "num_frames": 25, "loras": loras});
    for (loras, batch) in
        [(json!(["merged"]), 0), (json!(["b"]), 1), (json!(["a", "b"]), 1), (json!(["large", "merged"]), 2)]
    {
        assert_eq!(server.good(&ask(loras.clone())).shape, warm[batch].jobs[0].shape, "{loras}");
    }
    let refused = (400, "shape_not_warm", Some("loras".to_string()));
    assert_eq!(server.bad(&ask(json!(["large", "a"]))), refused);
}

#[test]
fn model_names_and_size_aliases_are_resolved() {
    let server = TestConverter::new("nano", &[]);
    assert_eq!(server.fields.model_names(), ["nano"]);
    assert_eq!(server.good(&json!({"seed": 1})).model, "nano");
    let other = TestConverter::new("nano_two_stage", &[]);
    assert_eq!(other.fields.model_names(), ["nano_two_stage", "nano"]);
    assert_eq!(other.good(&json!({"seed": 1, "model": "nano"})).model, "nano");
    let unknown = other.json(&json!({"seed": 1, "model": "sora-2"})).expect_err("unknown").message;
    assert!(
        unknown.ends_with("; other names need the server's setting serve.any_model or serve.served_model_name"),
        "{unknown}"
    );
    let named = TestConverter::new("nano", &["serve.served_model_name=[video]", "serve.any_model=true"]);
    assert_eq!(named.good(&json!({"seed": 1})).model, "video");
    assert_eq!(named.good(&json!({"seed": 1, "model": "sora-2"})).model, "sora-2");
    let large = TestConverter::new("nano", &["serve.max_tokens=100000"]);
    let accepted = large.good(&json!({"seed": 1, "size": "1280x720"}));
    assert_eq!((accepted.config().request.width, accepted.config().request.height), (1280, 704));
    assert_eq!(accepted.warnings, ["size 1280x720 is an alias of 1280x704"]);
    // The map is merged over the default aliases, so they must be removed one by one.
    let set = ["serve.size_aliases={1280x720: null, 720x1280: null, small: 64x64}", "serve.max_tokens=100000"];
    let other = TestConverter::new("nano", &set);
    assert_eq!(other.fields.card().size_aliases, [("small".to_string(), "64x64".to_string())].into());
    assert_eq!(other.bad(&json!({"size": "1280x720"})).1, "invalid_size");
    assert_eq!(other.good(&json!({"seed": 1, "size": "small"})).config().request.width, 64);
    let frames = server.good(&json!({"seed": 1, "num_frames": 33, "seconds": 2}));
    assert_eq!(frames.warnings, ["num_frames overrides seconds"]);
}

#[test]
fn model_card_lists_pipelines_shapes_and_limits() {
    let server =
        TestConverter::new("nano", &["serve.pipelines=[two_stage]", "serve.warm=[128x96x25, 256x192x25@two_stage]"]);
    let card = serde_json::to_value(server.fields.card()).expect("JSON");
    assert_eq!(card["pipelines"], json!(["text_to_video", "two_stage", "image_to_video"]));
    assert_eq!(card["shapes"][1], json!({"width": 256, "height": 192, "num_frames": 25, "pipeline": "two_stage"}));
    assert_eq!((&card["defaults"]["size"], &card["defaults"]["num_inference_steps"]), (&json!("128x96"), &json!(20)));
    assert_eq!((&card["limits"]["max_frames"], &card["limits"]["size_multiple"]), (&json!(289), &json!(32)));
    let two = server.good(&json!({"seed": 1, "pipeline": "two_stage", "size": "256x192"}));
    assert_eq!(two.config().pipeline, Pipeline::TwoStage);
    assert_eq!(server.bad(&json!({"pipeline": "two_stage", "size": "160x96"})).1, "invalid_size");
    let all = TestConverter::new("nano", &["serve.warm=[none]"]);
    assert_eq!(all.fields.warm_shapes(), Ok(Vec::new()));
}

#[test]
fn field_names_are_unique() {
    let mut names: Vec<&str> =
        FIELDS.iter().flat_map(|spec| spec.aliases.iter().chain([&spec.name]).copied()).collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all, "two fields share a name");
    assert!(FIELDS.iter().all(|spec| spec.description.ends_with(['.', ']', '}'])));
    let error =
        TestConverter::new("nano", &[]).json(&json!({"prompt": "a", "guidence_scale": 3})).expect_err("unknown");
    assert_eq!(error.message, "unknown field 'guidence_scale'; did you mean 'guidance_scale'?");
}

#[test]
fn prompt_comes_only_from_the_request() {
    let server = TestConverter::new("nano", &["request.prompt=the server's"]);
    let error = server.json(&json!({"seed": 1})).expect_err("no prompt");
    assert_eq!(error.code, "missing_prompt");
    let accepted = server.good(&json!({"seed": 1, "prompt": "mine"}));
    assert_eq!(accepted.prompt(), "mine");
    assert_eq!(server.good(&json!({"seed": 1, "negative_prompt": "x"})).config().request.negative_prompt, "x");
    let empty = server.json(&json!({"prompt": "a", "negative_prompt": ""})).expect("an empty one");
    assert_eq!(empty.config().request.negative_prompt, "");
    assert_eq!((accepted.owner.as_str(), accepted.config().serve == Default::default()), ("me", true));
}

/// If a request sets a YAML key and a field for the same setting, the field takes precedence, with a warning.
#[test]
fn field_overriding_a_yaml_key_gives_a_warning() {
    let server = TestConverter::new("nano", &[]);
    for (body, key, wanted, warnings) in [
        (
            json!({"steps": 8, "ltx2": {"sampler": {"steps": 9}}}),
            "sampler.steps",
            json!(8),
            &["steps overrides ltx2.sampler.steps"][..],
        ),
        (json!({"steps": 8, "ltx2": {"sampler": {"steps": 8}}}), "sampler.steps", json!(8), &[]),
        (
            json!({"guidance_scale": 5, "ltx2": {"guidance": {"video": {"cfg": 3}, "audio": {"cfg": 5}}}}),
            "guidance.video.cfg",
            json!(5.0),
            &["guidance_scale overrides ltx2.guidance.video.cfg"],
        ),
        (
            json!({"size": "64x96", "ltx2": {"request": {"width": 64, "height": 64}}}),
            "request.height",
            json!(96),
            &["size overrides ltx2.request.height"],
        ),
        (
            json!({"seconds": 1, "ltx2": {"request": {"num_frames": 9}}}),
            "request.num_frames",
            json!(25),
            &["seconds overrides ltx2.request.num_frames"],
        ),
        // A field for one stream overrides the field for both streams, without a warning.
        (json!({"guidance_scale": 5, "video_cfg_scale": 3}), "guidance.video.cfg", json!(3.0), &[]),
    ] {
        let mut body = body;
        body["seed"] = 1.into();
        let accepted = server.good(&body);
        assert_eq!(at(&accepted, key), wanted, "{body}");
        assert_eq!(accepted.warnings, warnings, "{body}");
    }
}

/// A remix overrides the values of its source, whichever names the two requests used. Other values survive several
/// remixes.
#[allow(clippy::too_many_lines)] // A table.
#[test]
fn remix_overrides_its_source_under_any_field_name() {
    let server = TestConverter::new("nano", &["serve.max_tokens=100000"]);
    let remix = |source: &AcceptedJob, body: &Value| {
        let mut body = body.clone();
        body["prompt"] = "b".into();
        let form = Form::json(body.to_string().as_bytes()).expect("JSON");
        server.accept(form, Endpoint::Remix(source)).unwrap_or_else(|error| panic!("{body}: {error}"))
    };
    for (source, body, want) in [
        (
            json!({"video_cfg_scale": 3, "audio_cfg_scale": 2}),
            json!({"guidance_scale": 5}),
            json!({"guidance.video.cfg": 5.0, "guidance.audio.cfg": 5.0}),
        ),
        (
            json!({"guidance_scale": 5}),
            json!({"ltx2": {"guidance": {"video": {"cfg": 3}}}}),
            json!({"guidance.video.cfg": 3.0, "guidance.audio.cfg": 5.0}),
        ),
        (
            json!({"guidance_scale": 5, "audio_cfg_scale": 4}),
            json!({"video_cfg_scale": 3}),
            json!({"guidance.video.cfg": 3.0, "guidance.audio.cfg": 4.0}),
        ),
        (json!({"steps": 8}), json!({"ltx2": {"sampler": {"steps": 5}}}), json!({"sampler.steps": 5})),
        (json!({"ltx2": {"sampler": {"steps": 5}}}), json!({"steps": 8}), json!({"sampler.steps": 8})),
        (json!({"sigmas": [1, 0.5]}), json!({"ltx2": {"sampler": {"steps": 5}}}), json!({"sampler.steps": 5})),
        (json!({"seconds": 1}), json!({"ltx2": {"request": {"num_frames": 9}}}), json!({"request.num_frames": 9})),
        (json!({"ltx2": {"request": {"num_frames": 9}}}), json!({"seconds": 1}), json!({"request.num_frames": 25})),
        (json!({"seed": 4}), json!({"ltx2": {"request": {"seed": 5}}}), json!({"request.seed": 5})),
        (json!({"size": "1280x720"}), json!({"width": 64}), json!({"request.width": 64, "request.height": 704})),
        (
            json!({"size": "64x96"}),
            json!({"ltx2": {"request": {"height": 64}}}),
            json!({"request.width": 64, "request.height": 64}),
        ),
        (
            json!({"ltx2": {"request": {"height": 64}}}),
            json!({"size": "96x96"}),
            json!({"request.width": 96, "request.height": 96}),
        ),
        (
            json!({"video_stg_blocks": [1], "stg_scale": 1}),
            json!({"stg_blocks": [2]}),
            json!({"guidance.stg_blocks": [2], "guidance.video.stg_blocks": null, "guidance.video.stg": 1.0}),
        ),
        (
            json!({"negative_prompt": "blur"}),
            json!({"ltx2": {"request": {"negative_prompt": "rain"}}}),
            json!({"request.negative_prompt": "rain"}),
        ),
        (
            json!({"ltx2": {"sampler": {"sigma_shift": "official", "kind": "res_2s"}}}),
            json!({"ltx2": {"reference": "diffusers"}}),
            json!({"sampler.sigma_shift": "diffusers", "sampler.kind": "res_2s"}),
        ),
    ] {
        let mut first = source.clone();
        first["seed"] = first.get("seed").cloned().unwrap_or(json!(7));
        let first = server
            .json(&{
                let mut body = first;
                body["prompt"] = "a".into();
                body
            })
            .expect("a source");
        let second = remix(&first, &body);
        // A second remix keeps the values of the first that it does not set.
        let third = remix(&second, &json!({"generate_audio": false}));
        for made in [&second, &third] {
            for (key, value) in want.as_object().expect("keys") {
                assert_eq!(at(made, key), *value, "{source} {body}: {key}");
            }
            assert_eq!(
                made.warnings.iter().filter(|text| text.contains("overrides")).count(),
                0,
                "{:?}",
                made.warnings
            );
            assert_eq!(made.prompt(), "b");
        }
    }
}

/// Generates arbitrary JSON values.
fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[ -~]{0,12}".prop_map(Value::from),
        Just(json!("128x96")),
        Just(json!("data:image/png;base64,iVBORw0KGgo=")),
        Just(json!("[{\"a\": [1]}]")),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map("[a-z_]{1,8}|name|file|data|frame|role|path|sampler|steps", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

thread_local! {
    static SERVER: TestConverter = TestConverter::new("nano", &["serve.pipelines=[retake, extend, audio_to_video, in_context, keyframes]"]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_requests_do_not_panic(fields in proptest::collection::vec((0..FIELDS.len(), any_value()), 0..5), which in 0..3usize) {
        let mut body: serde_json::Map<String, Value> =
            fields.into_iter().map(|(at, value)| (FIELDS[at].name.to_string(), value)).collect();
        body.entry("prompt").or_insert("a".into());
        let endpoint = [Endpoint::Create, Endpoint::Edit(None), Endpoint::Extend(None)][which];
        let form = Form::json(Value::Object(body).to_string().as_bytes());
        let taken = SERVER.with(|server| form.and_then(|form| server.accept(form, endpoint)));
        if let Err(error) = taken {
            prop_assert!((400..500).contains(&error.status), "{error:?}");
            prop_assert!(error.message.lines().count() == 1 && !error.message.contains("--"), "{error:?}");
        }
    }
}
