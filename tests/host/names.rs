//! Values of keys work the same in files, `--set` and flags.

use std::path::Path;
use std::process::Command;

use ltx2::config::{CliOverrides, Config, load};
use ltx2::media::{Frames, write_png_frames};
use ndarray::Array4;
use serde_json::{Map, Value, json};

use crate::support::needs;

/// Loads `key=value` pairs with `--set` and from a file, and checks that both give the same configuration.
fn both_ways(folder: &Path, pairs: &[String]) -> Config {
    let loaded = |given: CliOverrides| load(&given).unwrap_or_else(|error| panic!("{pairs:?}: {error}")).config;
    let by_set = loaded(CliOverrides { set: pairs.to_vec(), ..CliOverrides::default() });
    let mut tree = Value::Object(Map::new());
    for pair in pairs {
        let (key, value) = pair.split_once('=').expect("a pair");
        let place = key.split('.').fold(&mut tree, |tree, key| {
            if tree.is_null() {
                *tree = json!({});
            }
            &mut tree[key]
        });
        *place = serde_json::from_str(value).unwrap_or_else(|_| value.into());
    }
    let file = folder.join("names.yml");
    std::fs::write(&file, tree.to_string()).expect("written");
    let files = vec![file.to_str().expect("UTF-8").to_string()];
    let by_file = loaded(CliOverrides { files, ..CliOverrides::default() });
    assert_eq!(by_set, by_file, "{pairs:?}");
    by_set
}

/// Writes a folder of 25 frames of 64x64 pixels.
fn frames(folder: &Path) -> String {
    let path = folder.join("frames");
    let frames = Frames::new(Array4::zeros((25, 64, 64, 3))).expect("frames");
    write_png_frames(&path, &frames).expect("written");
    path.to_str().expect("UTF-8").into()
}

/// Checks the value at a JSON pointer of the loaded configuration.
fn says(folder: &Path, pairs: &[&str], pointer: &str, want: &Value) {
    let pairs: Vec<String> = pairs.iter().map(|pair| (*pair).to_string()).collect();
    let config = serde_json::to_value(both_ways(folder, &pairs)).expect("a value");
    assert_eq!(config.pointer(pointer), Some(want), "{pairs:?}");
}

#[needs(nothing)]
fn request_values_are_accepted_in_yaml_and_by_set_flag() {
    let dir = tempfile::tempdir().expect("a folder");
    let (at, path) = (dir.path(), frames(dir.path()));
    let (video, reference) = (format!("request.video={path}"), format!("request.reference_video={path}"));
    let (video, reference) = (video.as_str(), reference.as_str());
    let retake = r#"request.retake={"from": 0.25, "to": 0.5, "video": true, "audio": false, "kept": "source"}"#;
    let span = json!({"from": 0.25, "to": 0.5, "video": true, "audio": false, "kept": "source"});
    says(at, &["pipeline=retake", video, retake], "/request/retake", &span);
    let by_key = [
        "pipeline=retake",
        video,
        "request.retake.from=0.25",
        "request.retake.to=0.5",
        "request.retake.audio=false",
        "request.retake.kept=source",
    ];
    says(at, &by_key, "/request/retake", &span);
    for end in ["end", "start"] {
        let extend = format!(r#"request.extend={{"seconds": 1, "at": "{end}", "overlap": 9}}"#);
        let want = json!({"seconds": 1.0, "at": end, "overlap": 9});
        says(at, &["pipeline=extend", video, &extend], "/request/extend", &want);
    }
    says(at, &["pipeline=video_to_audio", video], "/request/video", &path.as_str().into());
    let sound = r#"request.audio={"path": "/a.wav"}"#;
    for pipeline in ["audio_to_video", "two_stage", "in_context", "extend", "retake"] {
        let pipeline = format!("pipeline={pipeline}");
        let more: &[&str] = match &pipeline["pipeline=".len()..] {
            "in_context" => &[reference],
            "extend" => &[video, "request.extend.seconds=1", "request.extend.overlap=9"],
            "retake" => &[video, "request.retake.to=1"],
            _ => &[],
        };
        says(at, &[&[&*pipeline, sound], more].concat(), "/request/audio/path", &"/a.wav".into());
    }
    says(at, &["pipeline=in_context", reference], "/request/reference_videos/0/path", &path.as_str().into());
    says(at, &[reference], "/pipeline", &"in_context".into());
    for name in ["text_to_audio", "dfr", "text_to_video", "distilled", "hq"] {
        says(at, &[&format!("pipeline={name}")], "/pipeline", &name.into());
    }
    let chain = r#"request.chain={"clip": 49, "overlap": 9}"#;
    says(at, &[chain], "/request/chain/clip", &49.into());
    says(at, &["request.num_frames=auto"], "/request/num_frames", &"auto".into());
    let images = r#"request.images=[{"path": "/a.png", "crf": 20}]"#;
    says(at, &["pipeline=image_to_video", images], "/request/images/0/crf", &20.into());
}

#[needs(nothing)]
fn sampling_and_model_values_are_accepted_in_yaml_and_by_set() {
    let dir = tempfile::tempdir().expect("a folder");
    let words: [(&str, &[&str], &[&str]); 13] = [
        ("sampler.kind", &["euler", "euler_ancestral", "gradient_estimation", "cfg_pp", "res_2s"], &[]),
        ("sampler.schedule", &["ltx2", "beta", "linear_quadratic"], &[]),
        ("guidance.kind", &["cfg", "cfg_star", "apg"], &[]),
        ("conditioning.h264", &["auto", "ffmpeg", "builtin", "off"], &[]),
        ("conditioning.first_frame_marker", &["official", "diffusers"], &[]),
        ("text.bos", &["auto", "always"], &[]),
        ("reference", &["official", "official_1_0", "diffusers"], &[]),
        ("model.decoder", &["auto", "conv", "diffusion"], &[]),
        ("model.duration_head", &["/head"], &[]),
        ("model.temporal_upsampler", &["/upsampler"], &[]),
        ("runtime.weights", &["bf16", "fp8", "int8", "int8-convrot"], &[]),
        ("runtime.activations", &["bf16", "int8"], &["runtime.weights=int8"]),
        ("runtime.layers", &["auto", "unrolled", "loop"], &[]),
    ];
    for (key, words, more) in words {
        let pointer = format!("/{}", key.replace('.', "/"));
        words.iter().for_each(|word| {
            says(dir.path(), &[more, &[&*format!("{key}={word}")]].concat(), &pointer, &(*word).into());
        });
    }
    let beta = ["sampler.schedule=beta", "sampler.beta.alpha=0.9", "sampler.beta.beta=0.4", "sampler.beta.shift=1.5"];
    says(dir.path(), &beta, "/sampler/beta", &json!({"alpha": 0.9, "beta": 0.4, "shift": 1.5}));
    let ancestral = "sampler.kind=euler_ancestral";
    says(dir.path(), &[ancestral, "sampler.eta=0.5"], "/sampler/eta", &0.5.into());
    says(dir.path(), &[ancestral, "sampler.noise_seed=7"], "/sampler/noise_seed", &7.into());
    says(dir.path(), &["sampler.kind=gradient_estimation", "sampler.gamma=1.5"], "/sampler/gamma", &1.5.into());
    let apg =
        ["guidance.kind=legacy_apg", "guidance.apg.eta=0.5", "guidance.apg.threshold=4", "guidance.apg.momentum=0.25"];
    says(dir.path(), &apg, "/guidance/apg", &json!({"eta": 0.5, "threshold": 4.0, "momentum": 0.25}));
    for stream in ["video", "audio"] {
        let key = |name: &str, value: &str| format!("guidance.{stream}.{name}={value}");
        let at = |name: &str| format!("/guidance/{stream}/{name}");
        says(dir.path(), &[&key("skip", "2")], &at("skip"), &2.into());
        says(dir.path(), &[&key("stg_blocks", "[3]")], &at("stg_blocks"), &json!([3]));
        says(
            dir.path(),
            &[&key("by_sigma", r#"[{"sigma": 0.5, "cfg": 1}]"#)],
            &at("by_sigma"),
            &json!([{"sigma": 0.5, "cfg": 1.0}]),
        );
    }
    for name in ["ltx2_5", "ltx2_5_distilled", "ltx2_5_two_stage", "ltx2_5_hq", "ltx2_5_dfr", "nano_2_5", "tpu/v6e-8"] {
        assert!(Config::load(name, [""; 0]).is_ok(), "{name}");
    }
    // The key of diffusers' component has a hint.
    let error = Config::load("ltx2", ["model.prompt_enhancer=x"]).expect_err("refused").to_string();
    assert!(error.contains("set request.enhance_prompt to true"), "{error}");
}

/// Returns the merged YAML of `generate` with these flags.
fn printed(flags: &[&str]) -> String {
    let mut ltx2 = Command::new(env!("CARGO_BIN_EXE_ltx2"));
    let made = ltx2.args(["generate", "-p", "x", "--print-config"]).args(flags).output().expect("the binary runs");
    assert!(made.status.success(), "{flags:?}: {}", String::from_utf8_lossy(&made.stderr));
    String::from_utf8(made.stdout).expect("UTF-8")
}

#[needs(nothing)]
fn flags_set_their_yaml_keys() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = frames(dir.path());
    let video = ["--video", &path];
    for (flags, lines) in [
        (
            &[&video[..], &["--retake", "0.25", "0.5", "--retake-kept", "source"]].concat()[..],
            &["pipeline: retake  # flag --retake", "from: 0.25  #", "to: 0.5  #", "kept: source  # flag --retake-kept"]
                [..],
        ),
        (
            &[&video[..], &["--extend", "1", "--extend-at", "start", "--set", "request.extend.overlap=9"]].concat(),
            &[
                "pipeline: extend  # flag --extend",
                "seconds: 1.0  #",
                "at: start  # flag --extend-at",
                "overlap: 9  # --set",
            ],
        ),
        (&["--reference-video", &path], &["pipeline: in_context  # flag --reference-video"]),
        (&["--reference-video", &path, "--pipeline", "in_context"], &["pipeline: in_context  # flag --pipeline"]),
        (&["--audio", "a.wav", "--pipeline", "audio_to_video"], &["path: a.wav  # flag --audio"]),
        (&["--chain", "--num-frames", "241"], &["chain: {}", "num_frames: 241  # flag --num-frames"]),
        (&["--num-frames", "auto"], &["num_frames: auto  # flag --num-frames"]),
    ] {
        let yaml = printed(flags);
        for line in lines {
            assert!(yaml.contains(line), "{flags:?}: no '{line}' in:\n{yaml}");
        }
    }
}
