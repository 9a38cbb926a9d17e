//! Tests of loading sidecars as configurations.

use super::*;

#[test]
fn sidecar_reproduces_the_configuration_of_its_run() {
    let places = ["output.path=first.mp4", "output.save_frames=frames", "output.save_audio=first.wav"];
    let mut given = set(&[&["model.path=models/none", "request.num_videos=3"], &places[..]].concat());
    given.flag("prompt", "request.prompt", Some("a: b # c"));
    let first = load(&given).unwrap().config;
    let sidecar = json!({"versions": {"ltx2": "0.1.0"}, "config": first.effective("a: b # c", 12), "seed": 12});
    let files = TestFolder::new(&[("out.json", &serde_json::to_string_pretty(&sidecar).unwrap())]);
    let again = load(&files.overrides("out.json")).unwrap().config;
    let mut expected = first;
    expected.request.seed = 12;
    expected.request.num_videos = 1;
    // The output paths of the first run are not reused.
    (expected.output.path, expected.output.save_frames, expected.output.save_audio) = (None, None, None);
    // The sidecar records no form of layers.
    expected.runtime.recorded_layers = Some(RecordedLayers { platform: None, form: LayerForm::Unrolled });
    assert_eq!(again, expected);
}

#[test]
fn form_that_auto_selected_is_recorded_and_not_configured() {
    let loaded = |configured: &str, layers: serde_json::Value, pairs: &[&str]| {
        let first = load(&set(&[&format!("runtime.layers={configured}")])).unwrap().config;
        let mut sidecar = json!({"config": first.effective("a", 1)});
        if !layers.is_null() {
            sidecar["layers"] = layers;
        }
        let files = TestFolder::new(&[("out.json", &sidecar.to_string()), ("other.yml", "extends: out.json\n")]);
        let own = |file: &str| {
            let given = CliOverrides { set: set(pairs).set, ..files.overrides(file) };
            let runtime = load(&given).unwrap().config.runtime;
            (runtime.layers, runtime.recorded_layers)
        };
        assert_eq!(own("out.json"), own("other.yml"));
        own("out.json")
    };
    let of = |platform: Option<&str>, form| Some(RecordedLayers { platform: platform.map(String::from), form });
    let looped = of(Some("cuda"), LayerForm::Loop);
    let selected = json!({"platform": "cuda", "form": "loop", "reason": "predicted: 1 s"});
    assert_eq!(loaded("auto", selected.clone(), &[]), (LayerForm::Auto, looped));
    // A form that the configuration sets applies to every platform, and a flag overrides both.
    let configured = json!({"platform": "cuda", "form": "loop", "reason": "set in the configuration"});
    assert_eq!(loaded("loop", configured, &[]), (LayerForm::Loop, None));
    assert_eq!(loaded("auto", selected.clone(), &["runtime.layers=unrolled"]), (LayerForm::Unrolled, None));
    assert_eq!(loaded("auto", selected, &["runtime.layers=auto"]), (LayerForm::Auto, None));
    // Sidecars without the platform have the selected form in their configuration, too.
    let unnamed = json!({"form": "unrolled", "reason": "default of the platform"});
    let unrolled = of(None, LayerForm::Unrolled);
    assert_eq!(loaded("unrolled", unnamed, &[]), (LayerForm::Auto, unrolled.clone()));
    assert_eq!(loaded("auto", serde_json::Value::Null, &[]), (LayerForm::Auto, unrolled));
}

/// Flags override values of a sidecar and the values derived from them.
#[test]
fn flags_override_a_sidecar() {
    let folder = tempfile::tempdir().unwrap();
    let frames = crate::media::Frames::new(ndarray::Array4::zeros((25, 64, 96, 3))).unwrap();
    crate::media::write_png_frames(folder.path(), &frames).unwrap();
    let video = format!("request.video={}", folder.path().display());
    let more = crate::media::Frames::new(ndarray::Array4::zeros((33, 64, 64, 3))).unwrap();
    let other = tempfile::tempdir().unwrap();
    crate::media::write_png_frames(other.path(), &more).unwrap();
    let sidecar = |pairs: &[&str]| {
        let first = load(&set(pairs)).unwrap().config;
        let sidecar = json!({"config": first.effective("a", 12), "seed": 12});
        TestFolder::new(&[("out.json", &serde_json::to_string(&sidecar).unwrap())])
    };
    let again = |files: &TestFolder, pairs: &[&str]| {
        let given = CliOverrides { set: set(pairs).set, ..files.overrides("out.json") };
        let loaded = load(&given).unwrap_or_else(|error| panic!("{pairs:?}: {error}"));
        loaded.check_effect().unwrap_or_else(|error| panic!("{pairs:?}: {error}"));
        loaded.config
    };
    let extended = sidecar(&["pipeline=extend", &video, "request.extend={seconds: 1, overlap: 9}"]);
    assert_eq!(again(&extended, &[]).request.num_frames.count(), Some(33));
    let longer = again(&extended, &["request.extend.seconds=2"]);
    assert_eq!((longer.request.num_frames.count(), longer.request.extend.unwrap().overlap), (Some(57), 9));
    // A different video determines the size.
    let retaken = sidecar(&["pipeline=retake", &video, "request.retake={from: 0.5, to: 0.7}"]);
    let other = format!("request.video={}", other.path().display());
    let request = again(&retaken, &[&other, "request.retake.to=0.9"]).request;
    assert_eq!((request.width, request.num_frames.count()), (64, Some(33)));
    assert_eq!(request.retake.map(|span| (span.from, span.to)), Some((0.5, Some(0.9))));
    // Other pipelines ignore the span of a retake.
    let extend = again(&retaken, &["pipeline=extend", "request.extend={seconds: 1, overlap: 9}"]);
    assert_eq!((extend.request.retake, extend.request.num_frames.count()), (None, Some(33)));
    // Predicted number of frames, sampler options, chains.
    let drawn = sidecar(&["sampler.kind=euler_ancestral", "sampler.eta=0.5", "request.chain={clip: 33, overlap: 9}"]);
    assert_eq!(again(&drawn, &["request.num_frames=auto", "request.chain=null"]).request.num_frames.count(), None);
    let euler = again(&drawn, &["sampler.kind=euler", "request.chain.clip=65"]);
    assert_eq!((euler.sampler.eta, euler.request.chain.unwrap().clip), (None, 65));
}

#[test]
fn sidecar_detects_a_different_model() {
    let first = load(&set(&["model.path=models/none"])).unwrap().config;
    let sidecar =
        json!({"config": first.effective("a", 1), "inputs": {"a.png": "01"}, "model": {"path": "models/none"}});
    let files = TestFolder::new(&[
        ("out.json", &sidecar.to_string()),
        ("plain.yml", "model: {path: models/none}\n"),
        ("other.yml", "extends: out.json\nmodel: {vae: models/other}\n"),
    ]);
    let names_other = |given: &CliOverrides| load(given).unwrap().sidecar().map(|own| own.uses_other_model);
    assert_eq!(names_other(&files.overrides("plain.yml")), None);
    assert_eq!(names_other(&files.overrides("out.json")), Some(false));
    assert_eq!(names_other(&files.overrides("other.yml")), Some(true));
    let mut flags = files.overrides("out.json");
    flags.flag("width", "request.width", Some(512));
    assert_eq!(names_other(&flags), Some(false));
    flags.flag("model", "model.path", Some("models/none"));
    assert_eq!(names_other(&flags), Some(true));
    assert_eq!(load(&flags).unwrap().sidecar().unwrap().inputs, json!({"a.png": "01"}));
}

#[test]
fn enhancing_a_sidecar_starts_from_the_original_prompts() {
    let first = load(&set(&["request.chain={clip: 33, overlap: 9, prompts: [A dog., a cow]}"])).unwrap().config;
    let prompts = json!([{"prompt": "a fox", "enhanced": "A fox.", "seed": 1}, {"prompt": "a dog", "enhanced": "A dog.", "seed": 1}]);
    let sidecar = json!({"config": first.effective("A fox.", 1), "enhancement": {"prompts": prompts}});
    let files = TestFolder::new(&[("out.json", &sidecar.to_string())]);
    let request = |pairs: &[&str]| {
        let request =
            load(&CliOverrides { set: set(pairs).set, ..files.overrides("out.json") }).unwrap().config.request;
        (request.prompt.unwrap(), request.chain.unwrap().prompts)
    };
    let texts = |texts: [&str; 2]| texts.map(String::from).to_vec();
    assert_eq!(request(&[]), ("A fox.".into(), texts(["A dog.", "a cow"])));
    assert_eq!(request(&["request.enhance_prompt=true"]), ("a fox".into(), texts(["a dog", "a cow"])));
    let other = request(&["request.enhance_prompt=true", "request.prompt=A fox."]);
    assert_eq!(other.0, "A fox.", "a prompt of the command line is kept");
}
