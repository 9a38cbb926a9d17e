//! Tests of precedence, origins and shipped files.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::check::ResolvedScales;
use super::*;
use crate::media::ImageH264;
use crate::sampling::SamplerKind;
use crate::weights::MergeOrder;

mod sidecars;

struct TestFolder(tempfile::TempDir);

impl TestFolder {
    fn new(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        TestFolder(folder)
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn overrides(&self, name: &str) -> CliOverrides {
        file(&self.path(name))
    }

    /// Returns the error without the folder's path.
    fn error(&self, name: &str) -> String {
        let text = load(&self.overrides(name)).unwrap_err().to_string();
        text.replace(&format!("{}/", self.0.path().display()), "")
    }
}

fn file(name: &str) -> CliOverrides {
    CliOverrides { files: vec![name.into()], ..CliOverrides::default() }
}

pub(super) fn set(pairs: &[&str]) -> CliOverrides {
    CliOverrides { set: pairs.iter().map(|p| (*p).to_string()).collect(), ..CliOverrides::default() }
}

#[test]
fn later_files_override_earlier_ones() {
    let files = TestFolder::new(&[
        ("base.yml", "request: {seed: 3}\nsampler: {steps: 20}\n"),
        ("model.yml", "extends: base.yml\nlayout: ulysses\nmodel: {path: LTX-2.3}\nsampler: {steps: 9}\n"),
        ("slice.yml", "layout: tensor\nmesh: {cfg: 2, tensor: 4}\n"),
    ]);
    let given =
        CliOverrides { files: ["model.yml", "slice.yml"].map(|f| files.path(f)).into(), ..CliOverrides::default() };
    let loaded = load(&given).unwrap();
    let Config { layout, mesh, sampler, request, .. } = &loaded.config;
    assert_eq!((layout.as_str(), sampler.steps, request.seed), ("tensor", 9, 3));
    assert_eq!(mesh.as_ref().map(|m| (m.cfg, m.tensor)), Some((2, 4)));
    // The preset depends on all files together.
    assert_eq!(loaded.preset(), "ltx2_3");
    assert_eq!(loaded.origin("layout").to_string(), format!("{}:1", files.path("slice.yml")));
}

#[test]
fn layers_follow_the_precedence_order() {
    let files = TestFolder::new(&[
        ("base.yml", "request:\n  width: 512\n  height: 320\n  seed: 3\nsampler: {steps: 20}\n"),
        ("sub/top.yml", "extends: ../base.yml\nrequest:\n  height: 256\nsampler: {steps: 12}\n"),
    ]);
    let mut given = files.overrides("sub/top.yml");
    given.set = vec!["sampler.steps=9".into(), "request.seed=5".into()];
    given.flag("seed", "request.seed", Some(6u64));
    let loaded = load(&given).unwrap();
    let request = &loaded.config.request;
    assert_eq!((request.width, request.height, request.seed), (512, 256, 6));
    assert_eq!((loaded.config.sampler.steps, request.num_frames.count()), (9, Some(121)));
    let origin = |path| loaded.origin(path).to_string().replace(&format!("{}/", files.0.path().display()), "");
    assert_eq!(origin("request.width"), "base.yml:2");
    assert_eq!(origin("request.height"), "sub/top.yml:3");
    assert_eq!(origin("request.seed"), "flag --seed");
    assert_eq!(origin("sampler.steps"), "--set");
    assert_eq!(origin("guidance.video.cfg"), "preset ltx2");
    assert_eq!(origin("runtime.dtype"), "default");
    assert!(loaded.to_yaml().starts_with("# preset: ltx2\npipeline: text_to_video  # preset ltx2\n"));
}

#[test]
fn printed_configuration_loads_to_the_same_values() {
    let mut given = set(&["model.loras=[{path: a.safetensors, strength: 0.5}]", "runtime.xla_flags.xla_x=true"]);
    given.mesh = Some("cfg=2".into());
    let loaded = load(&given).unwrap();
    let files = TestFolder::new(&[("again.yml", &loaded.to_yaml())]);
    let mut again = load(&files.overrides("again.yml")).unwrap().config;
    again.model.loras[0].path = "a.safetensors".into();
    assert_eq!(again, loaded.config);
}

#[test]
fn every_shipped_file_loads() {
    for (name, text) in presets::CONFIGS {
        let path = format!("configs/{name}.yml");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        let from_file = load(&file(&path)).unwrap();
        let by_name = load(&file(name)).unwrap();
        assert_eq!(from_file.config, by_name.config, "{name}");
        from_file.config.placement(64).unwrap();
    }
    let nano = load(&file("configs/nano.yml")).unwrap();
    assert_eq!(nano.config.model.path, "assets/nano");
    assert_eq!((nano.config.request.num_frames.count(), nano.config.runtime.dtype), (Some(25), Dtype::F32));
    let full = load(&file("ltx2_full_guidance")).unwrap().config;
    assert_eq!(full.scales().audio, ResolvedScales { cfg: 7.0, stg: 1.0, modality: 3.0, rescale: 0.7 });
    assert_eq!(full.guidance.stg_blocks, [29]);
    let shipped = |folder: &str| std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    let folders = ["configs", "configs/tpu", "shardings"].into_iter().flat_map(shipped);
    for path in folders.filter(|p| p.extension().is_some_and(|e| e == "yml")) {
        let name = path.to_str().unwrap();
        let listed = presets::shipped_config(name).or(presets::shipped_layout(name));
        assert!(listed.is_some(), "{name} is not embedded in the binary");
    }
}

/// A slice configuration sets the layout but no keys of the model, so each model generation keeps its preset.
#[test]
fn slice_files_work_with_any_model_and_pipeline() {
    let folder = TestFolder::new(&[("mine.yml", "extends: tpu/v6e-8\nrequest: {seed: 3}\n")]);
    let by_name = |model: &str, pipeline: &str| {
        let set = vec![format!("model.path={model}"), format!("pipeline={pipeline}")];
        load(&CliOverrides { set, ..folder.overrides("mine.yml") }).unwrap()
    };
    for (model, pipeline, preset) in [
        ("Lightricks/LTX-2", "text_to_video", "ltx2"),
        ("Lightricks/LTX-2.3", "text_to_video", "ltx2_3"),
        ("Lightricks/LTX-2.3", "two_stage", "ltx2_3_two_stage"),
    ] {
        let loaded = by_name(model, pipeline);
        assert_eq!(loaded.preset(), preset);
        assert_eq!((loaded.config.layout.as_str(), loaded.config.request.seed), ("tensor-sequence", 3));
    }
}

#[test]
fn documented_keys_are_in_the_schema() {
    let text = "pipeline: text_to_video\nmodel: {path: Lightricks/LTX-2, text_encoder: null, weights: file, loras: []}\n\
        request: {prompt: null, width: 768, height: 512, num_frames: 121, frame_rate: 24, seed: 10, images: [], max_sequence_length: 1024}\n\
        reference: official\n\
        sampler: {kind: euler, steps: 40, sigmas: null, sigma_shift: official, noise: torch, progress_every: auto}\n\
        guidance:\n  video: {cfg: 4.0, stg: 0.0, modality: 1.0, rescale: 0.0}\n  audio: {cfg: 4.0, stg: 0.0, modality: 1.0, rescale: 0.0}\n  stg_blocks: []\n  rescale_scope: per_sample\n\
        conditioning: {cross_timestep: official, h264: off}\n\
        mesh: {data: 1, cfg: 1, fsdp: 1, context: 1, tensor: 1}\nlayout: shardings/replicated.yml\n\
        runtime: {platform: auto, dtype: bf16, attention: auto, residency: auto, compile_cache: auto, xla_flags: {}}\n\
        output: {path: null, save_frames: null, save_audio: null, sidecar: true}\n";
    let files = TestFolder::new(&[("contract.yml", text)]);
    let loaded = load(&files.overrides("contract.yml")).unwrap();
    let expected =
        Config { mesh: Some(Mesh::default()), layout: "shardings/replicated.yml".into(), ..Config::default() };
    assert_eq!(loaded.config.request, expected.request);
    assert_eq!(loaded.config.conditioning.h264, ImageH264::Off);
    loaded.config.placement(1).unwrap();
    // Every key is in the schema, with a description.
    fn walk(schema: &serde_json::Value, root: &serde_json::Value, path: &str, seen: &mut Vec<String>) {
        let followed = schema["$ref"].as_str().map_or(schema, |r| &root["$defs"][r.trim_start_matches("#/$defs/")]);
        for (key, inner) in followed["properties"].as_object().into_iter().flatten() {
            assert!(inner["description"].as_str().is_some_and(|d| !d.is_empty()), "{path}{key} has no description");
            seen.push(format!("{path}{key}"));
            walk(inner, root, &format!("{path}{key}."), seen);
        }
    }
    let mut keys = Vec::new();
    walk(json_schema(), json_schema(), "", &mut keys);
    for key in
        ["pipeline", "model.loras", "request.prompts", "guidance.audio.rescale", "runtime.numerics", "output.sidecar"]
    {
        assert!(keys.iter().any(|k| k == key), "{key}");
    }
    assert!(keys.len() > 55, "{}", keys.len());
}

#[test]
fn reference_sets_keys_that_can_be_set_separately() {
    let files = TestFolder::new(&[("d.yml", "reference: diffusers\ntwo_stage: {audio: stage_1}\n")]);
    let mut given = files.overrides("d.yml");
    let config = load(&given).unwrap().config;
    assert_eq!(config.sampler.sigma_shift, Reference::Diffusers);
    assert_eq!(config.conditioning.cross_timestep, CrossTimestep::Diffusers);
    assert_eq!(config.two_stage.audio, StageAudio::Stage1);
    let both = [config.guidance.stg_streams, config.conditioning.noising, config.conditioning.keyframe_span];
    assert_eq!(both, [Reference::Diffusers; 3]);
    // `reference` of a later layer overrides all of them.
    given.flag("reference", "reference", Some("official"));
    given.set = vec!["conditioning.cross_timestep=own".into()];
    let loaded = load(&given).unwrap();
    assert_eq!(loaded.config.sampler.sigma_shift, Reference::Official);
    assert_eq!(loaded.config.two_stage.audio, StageAudio::Official);
    assert_eq!(loaded.config.conditioning.cross_timestep, CrossTimestep::Own);
    assert_eq!(loaded.origin("sampler.sigma_shift").to_string(), "reference, flag --reference");
    let config = load(&set(&["reference=official_1_0"])).unwrap().config;
    assert_eq!(config.conditioning.cross_timestep, CrossTimestep::Official1);
    assert_eq!((config.two_stage.audio, config.runtime.positions), (StageAudio::Official1, Reference::Official1));
}

#[test]
fn diffusers_reference_uses_euler_for_distilled_models() {
    let of = |pairs: &[&str]| {
        let loaded = load(&set(&[&["model.path=Lightricks/LTX-2.5", "pipeline=distilled"], pairs].concat())).unwrap();
        (loaded.config.sampler.kind, loaded.config.two_stage.sampler, loaded.origin("sampler.kind").to_string())
    };
    let second = Some(SamplerKind::Euler);
    let official = (SamplerKind::EulerAncestral, second, "preset ltx2_5_distilled".to_string());
    assert_eq!(of(&[]), official);
    let diffusers = "reference=diffusers";
    assert_eq!(of(&[diffusers]), (SamplerKind::Euler, second, "reference, --set".to_string()));
    // An explicit sampler takes precedence; an option that plain `euler` does not accept is reported.
    let written = of(&[diffusers, "sampler.kind=euler_ancestral"]);
    assert_eq!(written, (SamplerKind::EulerAncestral, second, "--set".to_string()));
    let shipped = CliOverrides { files: vec!["ltx2_5_distilled".into()], ..set(&[diffusers]) };
    assert_eq!(load(&shipped).unwrap().config.sampler.kind, SamplerKind::Euler);
    let eta = ["model.path=Lightricks/LTX-2.5", "pipeline=distilled", diffusers, "sampler.eta=0.5"];
    let fault = load(&set(&eta)).unwrap_err().to_string();
    assert!(fault.contains("sampler.eta"), "{fault}");
}

#[test]
fn set_overrides_shared_flags() {
    let mut given = set(&["guidance.audio.stg=0.5", "guidance.video.cfg=2"]);
    given.shared_flag("stg-scale", &["guidance.video.stg", "guidance.audio.stg"], Some(1.0));
    given.flag("guidance-scale", "guidance.video.cfg", Some(3.0));
    let config = load(&given).unwrap().config;
    assert_eq!((config.guidance.video.stg, config.guidance.audio.stg), (Some(1.0), Some(0.5)));
    assert_eq!(config.guidance.video.cfg, Some(3.0));
}

#[test]
fn exclusive_keys_replace_each_other_across_layers() {
    let files = TestFolder::new(&[
        ("list.yml", "request: {prompts: p.txt}\nsampler: {sigmas: [1, 0.5, 0]}\n"),
        ("p.txt", "one\n\ntwo\n"),
        ("neg.yml", "request: {negative_prompt_file: n.txt}\n"),
        ("n.txt", "ugly\n"),
        ("both.yml", "request:\n  prompt: a\n  prompts: p.txt\n"),
        ("lengths.yml", "sampler:\n  steps: 3\n  sigmas: [1, 0.5]\n"),
    ]);
    let mut given = files.overrides("list.yml");
    let config = load(&given).unwrap().config;
    assert_eq!(config.sampler.steps, 2);
    let jobs = config.jobs().unwrap();
    assert_eq!(jobs.iter().map(|j| j.prompt.as_str()).collect::<Vec<_>>(), ["one", "two"]);
    given.flag("prompt", "request.prompt", Some("mine"));
    given.flag("steps", "sampler.steps", Some(4));
    given.flag("num-videos", "request.num_videos", Some(2));
    let config = load(&given).unwrap().config;
    assert_eq!((config.sampler.steps, config.sampler.sigmas.clone(), config.request.prompts.clone()), (4, None, None));
    assert_eq!(config.jobs().unwrap().iter().map(|j| j.seed).collect::<Vec<_>>(), [10, 11]);

    let loaded = load(&files.overrides("neg.yml")).unwrap();
    assert_eq!(loaded.config.request.negative_prompt, "ugly");
    assert_eq!(
        files.error("both.yml"),
        "both.yml:3: 'request.prompt' and 'request.prompts' are mutually exclusive; remove one"
    );
    assert_eq!(
        files.error("lengths.yml"),
        "lengths.yml:2: 'sampler.steps' and 'sampler.sigmas' are mutually exclusive; remove one"
    );
}

#[test]
fn circular_extends_is_an_error() {
    let files = TestFolder::new(&[
        ("a.yml", "extends: b.yml\n"),
        ("b.yml", "\nextends: a.yml\n"),
        ("c.yml", "extends: ltx2_full_guidance\n"),
        ("d.yml", "extends: gone.yml\n"),
    ]);
    assert_eq!(files.error("a.yml"), "b.yml:2: circular 'extends': a.yml -> b.yml -> a.yml");
    assert_eq!(load(&files.overrides("c.yml")).unwrap().config.guidance.stg_blocks, [29]);
    assert!(files.error("d.yml").starts_with("d.yml:1: extends: gone.yml: no such file or preset; "));
}

#[test]
fn invalid_values_list_valid_ones() {
    let files = TestFolder::new(&[("w.yml", "request:\n  width: 500\n")]);
    assert_eq!(
        files.error("w.yml"),
        "request.width = 500 (w.yml:2): must be a multiple of 32; the nearest are 480 and 512"
    );
    for (pair, want) in [
        (
            "request.num_frames=120",
            "request.num_frames = 120 (--set): must be one more than a multiple of 8; the nearest are 113 and 121",
        ),
        ("request.frame_rate=0", "request.frame_rate = 0 (--set): must be above 0"),
        ("sampler.steps=257", "--set sampler.steps=257: 'sampler.steps' must be a whole number from 1 to 256, not 257"),
        ("sampler.stepz=2", "--set sampler.stepz=2: unknown key 'sampler.stepz'; did you mean 'steps'?"),
        ("steps", "--set steps: expected key=value, e.g. --set sampler.steps=8"),
        (
            "pipeline=image_to_video",
            "pipeline = image_to_video (--set): needs an image: --image PATH FRAME STRENGTH, or request.images",
        ),
        (
            "request.images=[{path: a.png, frame: 121, strength: 1.0}]",
            "request.images = frame 121 (--set): the video has 121 frames, numbered from 0",
        ),
        (
            "two_stage.upsample=[temporal_x2]",
            "two_stage.upsample = [temporal_x2] (--set): the pipeline text_to_video has only one stage; remove \
             two_stage.upsample, or use a two-stage pipeline",
        ),
        (
            "two_stage.sigmas=[0.5, 0.7]",
            "two_stage.sigmas = [0.5, 0.7] (--set): noise levels must decrease, but 0.7 follows 0.5",
        ),
        (
            "guidance.video.by_sigma=[{sigma: 0.9}, {sigma: 0.9, cfg: 1}]",
            "guidance.video.by_sigma = sigmas [0.9, 0.9] (--set): noise levels must decrease, but 0.9 follows 0.9",
        ),
        (
            "guidance.apg.momentum=0.5",
            "guidance.apg.momentum = 0.5 (--set): this guider does not have this option; remove it, or choose another guidance.kind",
        ),
        (
            "sampler.gamma=2",
            "sampler.gamma = 2 (--set): this sampler does not have this option; remove it, or choose another sampler.kind",
        ),
        (
            "runtime.tiling={pixels: 100}",
            "runtime.tiling = pixels 100, overlap 64 (--set): pixels and overlap must be multiples of 32, and overlap less than pixels",
        ),
    ] {
        assert_eq!(load(&set(&[pair])).unwrap_err().to_string(), want, "{pair}");
    }
}

#[test]
fn conflicting_values_name_both_keys() {
    for (pairs, want) in [
        (
            ["guidance.audio.skip=1", "sampler.kind=res_2s"],
            "guidance.audio.skip = 1 (--set): a sampler with two evaluations per step cannot skip steps; remove this key, or \
             choose another sampler.kind",
        ),
        (
            ["sampler.sigmas=[1, 0.5]", "sampler.schedule=beta"],
            "sampler.schedule = beta (--set): sampler.sigmas already sets the noise levels; remove this key, or set \
             sampler.steps instead of sampler.sigmas",
        ),
        (
            ["request.retake.from=1", "sampler.steps=4"],
            "request.retake = 1 s to the end (--set): only the pipeline retake uses this key, but the pipeline is text_to_video",
        ),
        (
            ["sampler.sigma_shift=diffusers", "sampler.schedule=beta"],
            "sampler.sigma_shift = diffusers (--set): sampler.schedule = beta does not depend on the number of tokens; remove this \
             key or sampler.schedule",
        ),
        (
            ["guidance.stg_streams=diffusers", "guidance.audio.by_sigma=[{sigma: 1, stg: 1}]"],
            "guidance.audio.by_sigma = stg at 1 (--set): not supported with guidance.stg_streams: diffusers; set \
             guidance.stg_streams to official",
        ),
    ] {
        assert_eq!(load(&set(&pairs)).unwrap_err().to_string(), want, "{pairs:?}");
    }
    // Values set by `reference` are not rejected; the sidecar of such a run has both keys.
    for written in [&["reference=diffusers"][..], &["reference=diffusers", "sampler.sigma_shift=diffusers"]] {
        assert!(load(&set(&[written, &["sampler.schedule=beta"]].concat())).is_ok(), "{written:?}");
    }
}

#[test]
fn ltx_2_3_models_select_their_preset() {
    for name in ["Lightricks/LTX-2.3", "ltx2_3", "nano_2_3", "tests/fixtures/models/tiny_2_3", "models/nano_2_3"] {
        let loaded = load(&set(&[&format!("model.path={name}")])).unwrap();
        assert_eq!(loaded.preset(), "ltx2_3", "{name}");
        assert_eq!((loaded.config.sampler.steps, &loaded.config.guidance.stg_blocks[..]), (30, &[28][..]));
        assert_eq!(loaded.config.scales().audio, ResolvedScales { cfg: 7.0, stg: 1.0, modality: 3.0, rescale: 0.7 });
    }
    assert_eq!(load(&set(&["model.path=tests/fixtures/models/tiny_a"])).unwrap().preset(), "ltx2");
}

/// LTX-2.5 presets differ from LTX-2.3 presets in image CRF (18 instead of 33) and negative prompt; `distilled` also in
/// its samplers (Euler ancestral, then Euler).
#[test]
fn ltx_2_5_models_select_their_presets() {
    for name in
        ["Lightricks/LTX-2.5", "Lightricks/LTX-2.5-Diffusers", "ltx2_5", "nano_2_5", "tests/fixtures/models/dit_2_5"]
    {
        for (pipeline, preset, kind) in [
            ("text_to_video", "ltx2_5", "euler"),
            ("image_to_video", "ltx2_5", "euler"),
            ("two_stage", "ltx2_5_two_stage", "euler"),
            ("keyframes", "ltx2_5_two_stage", "euler"),
            ("distilled", "ltx2_5_distilled", "euler_ancestral"),
            ("hq", "ltx2_5_hq", "res_2s"),
            ("dfr", "ltx2_5_dfr", "euler"),
        ] {
            let images = "request.images=[{path: a.png}]";
            let pairs = [format!("model.path={name}"), format!("pipeline={pipeline}"), images.to_string()];
            let pairs: Vec<&str> = pairs.iter().map(String::as_str).collect();
            let given = if pipeline == "text_to_video" { &pairs[..2] } else { &pairs[..] };
            let loaded = load(&set(given)).unwrap();
            let config = &loaded.config;
            assert_eq!((loaded.preset(), json!(config.sampler.kind)), (preset, json!(kind)), "{name} {pipeline}");
            assert!(config.request.images.iter().all(|image| image.crf(&config.conditioning) == 18), "{preset}");
            assert!(config.request.negative_prompt.starts_with("has_subtitles, "), "{preset}");
            let (first, second) = config.samplers().unwrap();
            assert_eq!(
                [first.noises(), second.noises()],
                if kind == "euler_ancestral" { [1, 0] } else { [first.noises(); 2] }
            );
        }
    }
    let config = |pairs: &[&str]| load(&set(pairs)).unwrap().config;
    let older = config(&["pipeline=image_to_video", "request.images=[{path: a.png}, {path: b.png, crf: 7}]"]);
    let crf: Vec<u8> = older.request.images.iter().map(|image| image.crf(&older.conditioning)).collect();
    assert_eq!(crf, [33, 7]);
    let noises = |pairs: &[&str]| config(pairs).samplers().map(|(a, b)| [a.noises(), b.noises()]);
    assert_eq!(noises(&["two_stage.sampler=euler_ancestral"]), Ok([0, 1]));
    assert_eq!(noises(&["sampler.kind=euler_ancestral", "sampler.eta=0.5"]), Ok([1, 1]));
    assert_eq!(noises(&["sampler.kind=euler_ancestral", "sampler.eta=0.5", "two_stage.sampler=euler"]), Ok([1, 0]));
}

#[test]
fn reference_sets_the_vocoder_stage_1_clamp() {
    let clamp = |pairs: &[&str]| load(&set(pairs)).unwrap().config.vocoder.stage1_clamp;
    assert_eq!(clamp(&[]), Reference::Official);
    assert_eq!(clamp(&["reference=diffusers"]), Reference::Diffusers);
    assert_eq!(clamp(&["reference=diffusers", "vocoder.stage1_clamp=official"]), Reference::Official);
}

#[test]
fn reference_sets_the_lora_merge_order() {
    let order = |pairs: &[&str]| load(&set(pairs)).unwrap().config.model.lora_merge;
    assert_eq!(order(&[]), MergeOrder::Official);
    assert_eq!(order(&["reference=diffusers"]), MergeOrder::Diffusers);
    assert_eq!(order(&["reference=diffusers", "model.lora_merge=exact"]), MergeOrder::Exact);
}

#[test]
fn set_accepts_unquoted_text() {
    let config = |pair: &str| load(&set(&[pair])).unwrap().config;
    assert_eq!(config("request.prompt=24").request.prompt.as_deref(), Some("24"));
    assert_eq!(config("request.prompt=a: b, #1 [c").request.prompt.as_deref(), Some("a: b, #1 [c"));
    assert_eq!(config("request.prompt='quoted'").request.prompt.as_deref(), Some("quoted"));
    assert_eq!(config("model.vae=null").model.vae, None);
    assert_eq!(config("request.seed=18446744073709551615").request.seed, u64::MAX);
    assert_eq!(config("runtime.xla_flags.a=3").runtime.xla_flags["a"], FlagValue::Int(3));
    assert_eq!(config("guidance.video={cfg: 3}").guidance.video.cfg, Some(3.0));
    assert_eq!(config("sampler.progress_every=4").sampler.progress_every, ProgressEvery::Steps(4));
}

#[test]
fn seconds_select_the_nearest_frame_count() {
    let mut given = set(&["request.frame_rate=25"]);
    given.seconds = Some(4.0);
    let loaded = load(&given).unwrap();
    assert_eq!(loaded.config.request.num_frames.count(), Some(97));
    assert_eq!(loaded.origin("request.num_frames").to_string(), "flag --seconds");
    given.seconds = Some(-1.0);
    assert_eq!(load(&given).unwrap_err().to_string(), "--seconds -1: must be a number above 0");
    given.seconds = Some(4e7);
    let too_long = "--seconds 40000000: must be less than 40000000, which is 1e9 frames at 25 fps";
    assert_eq!(load(&given).unwrap_err().to_string(), too_long);
}

#[test]
fn command_line_paths_are_relative_to_the_working_directory() {
    let files = TestFolder::new(&[("in/c.yml", "output: {path: x.mp4}\nmodel: {path: ./m}\n")]);
    let mut given = files.overrides("in/c.yml");
    let config = load(&given).unwrap().config;
    assert_eq!(config.output.path, Some(files.path("in/x.mp4")));
    assert_eq!(PathBuf::from(config.model.path), Path::new(&files.path("in/m")));
    given.flag("output", "output.path", Some("y.mp4"));
    assert_eq!(load(&given).unwrap().config.output.path.as_deref(), Some("y.mp4"));
}

#[test]
fn second_stage_sigmas_are_limited_by_sampler_evaluations() {
    let levels: Vec<String> = (0..140).map(|step| (1.0 - f64::from(step) / 140.0).to_string()).collect();
    let sigmas = format!("two_stage.sigmas=[{}]", levels.join(", "));
    let own = |sampler: &str| {
        let pairs = ["pipeline=two_stage", "request.width=128", "request.height=128", sampler, &sigmas[..]];
        load(&set(&pairs)).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(own("two_stage.sampler=euler"), Ok(()));
    let error = own("two_stage.sampler=res_2s").unwrap_err();
    let start = "two_stage.sigmas = 140 steps (--set): ";
    assert!(error.starts_with(start) && error.contains("transformer evaluations; use at most 127 steps"), "{error}");
}
