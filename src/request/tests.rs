//! Tests of requests resolved from configurations and model sizes.

use serde_json::json;

use super::*;
use crate::config::{CliOverrides, Config, load, parse_mesh};
use crate::models::connectors::ConnectorsConfig;
use crate::models::testing::{changed, published};
use crate::models::transformer::TransformerConfig;
use crate::models::{audio_vae, video_vae};
use crate::nn::Build;
use crate::pipeline::stages::batch::videos_per_batch;
use crate::sampling::SamplerKind;
use crate::sampling::denoise::denoise;

/// Loads the default configuration with `key=value` overrides.
pub(super) fn config(set: &[&str]) -> Config {
    let set = set.iter().map(|s| (*s).to_string()).collect();
    load(&CliOverrides { set, ..CliOverrides::default() }).expect("a configuration").config
}

/// Returns the sizes of a small LTX-2.3 model with some keys of the transformer configuration replaced.
fn sizes(transformer: &serde_json::Value) -> ModelSizes {
    let config = |part| published("nano_2_3", part);
    let transformer = changed(config("transformer"), transformer);
    let vae = video_vae::VideoVaeConfig::from_json(&config("vae")).expect("valid").geometry();
    ModelSizes::new(
        TransformerConfig::from_json(&transformer).expect("valid"),
        &ConnectorsConfig::from_json(&config("connectors")).expect("valid"),
        &vae,
        &audio_vae::AudioVaeConfig::from_json(&config("audio_vae")).expect("valid"),
    )
}

/// Returns a request for a video of this size.
pub(crate) fn request_of_size(width: usize, height: usize, frames: usize) -> Request {
    let size = [("width", width), ("height", height), ("num_frames", frames)];
    request_with(&size.map(|(key, value)| format!("request.{key}={value}")))
}

/// Returns the request of the toy model with `key=value` overrides.
pub(crate) fn request_with(set: &[String]) -> Request {
    let config = Config::load("nano_2_3", set.to_vec()).expect("legal");
    let marks = json!({"use_keyframes_abs_pos_embedding": config.pipeline.spec().has_rounds()});
    resolve(&config, &sizes(&marks)).expect("legal sizes")
}

#[test]
fn only_videos_with_an_adaptive_cache_are_generated_alone() {
    let mesh = Some(parse_mesh("data=2").expect("a mesh"));
    let layout = Config { layout: "cfg".into(), mesh, ..Config::default() }.placement(2).expect("a layout");
    let ratio = "sampler.cache={kind: fixed, ratio: 0.5}";
    for (set, at_once) in [("sampler.cache.kind=off", 2), (ratio, 2), ("sampler.cache.kind=adaptive", 1)] {
        let config = Config::load("nano_2_3", [set]).expect("shipped");
        let request = resolve(&config, &sizes(&json!({}))).expect("legal sizes");
        assert_eq!(videos_per_batch(&[request], &layout), at_once, "{set}");
    }
}

/// The second pass of a dubbed video keeps the audio of the first, which also replaces the reference sound; both passes
/// append the input video.
#[test]
fn dubbed_video_appends_references_in_both_passes() {
    let marks = sizes(&json!({}));
    let mut config = Config::load("nano_2_3", ["request.width=128", "request.height=64", "request.num_frames=17"]);
    let config = config.as_mut().expect("legal");
    config.pipeline = crate::config::Pipeline::DubIt;
    config.request.dub = Some(crate::config::Dub { strength: 0.5, sound_seconds: Some(0.25) });
    let (one, two) = resolve(config, &marks).expect("legal sizes").passes();
    let two = two.expect("two passes");
    let [first, second] = [&one, &two].map(|pass| Shapes::from_request(&marks, pass).expect("legal sizes"));
    // 0.25 s are 26 frames of the spectrogram, 4 per latent.
    assert_eq!((first.appended, first.own_tokens()), (Av { video: 6, audio: 7 }, Av { video: 6, audio: 18 }));
    assert_eq!((second.appended, second.own_tokens()), (Av { video: 24, audio: 18 }, Av { video: 24, audio: 18 }));
    assert_eq!([one.roles.audio, two.roles.audio], [StreamRole::Denoised, StreamRole::Kept]);
    assert_eq!([one.noise_levels(), two.noise_levels()], [vec![1.0, 0.5, 0.0], vec![1.0, 0.5]]);
}

/// If the model has the keyframe embedding (`use_keyframes_abs_pos_embedding`), the denoising loop adds it to the first
/// latent frame, unless `conditioning.first_frame_marker` is `diffusers` (which limits it to `dfr`).
#[test]
fn keyframe_embedding_is_added_to_the_first_latent_frame() {
    let marks = json!({"ff_bias": false, "use_keyframes_abs_pos_embedding": true});
    let cases = [
        (&marks, "reference=official", true),
        (&marks, "reference=official_1_0", true),
        (&marks, "reference=diffusers", false),
        (&marks, "conditioning.first_frame_marker=diffusers", false),
        (&json!({}), "reference=official", false),
    ];
    for (transformer, set, marked) in cases {
        let sizes = sizes(transformer);
        let config = Config::load("nano_2_3", [set]).expect("shipped");
        let request = resolve(&config, &sizes).expect("legal sizes");
        let shapes = Shapes::from_request(&sizes, &request).expect("legal sizes");
        let shape = request.denoise_shape(&sizes, &shapes, 1);
        let network = denoise(&sizes.transformer, &shape, &Build::new(DType::F32)).expect("builds");
        let mask = network.program.argument("keyframes.video").map(|a| a.ty.dims.clone());
        assert_eq!(mask, marked.then(|| vec![1, shapes.tokens.video]), "{set}");
        let reads = network.params.iter().any(|p| p.name.ends_with("keyframes_abs_pos_embedding"));
        assert_eq!(reads, marked, "{set}");
    }
}

/// Only tokens of the first latent frame are marked, not those of appended images.
#[test]
fn only_tokens_of_the_first_latent_frame_are_marked() {
    let sizes = sizes(&json!({}));
    let shapes = Shapes::new(&sizes, 96, 64, 17, 24.0).expect("legal sizes");
    let tokens = Av { video: shapes.tokens.video + 6, ..shapes.tokens };
    let mask = Shapes { tokens, appended: Av { video: 6, audio: 0 }, ..shapes }.single_frames(&[], true);
    assert_eq!(mask.dim(), (1, 3 * 6 + 6));
    assert!(mask.iter().enumerate().all(|(n, marked)| *marked == f32::from(n < 6)), "{mask}");
}

/// Generated keyframes are appended as marked tokens in the first pass only. Each covers the time of one frame and has
/// no known clean latents.
#[test]
fn generated_keyframes_are_tokens_of_first_pass_only() {
    let marks = sizes(&json!({"ff_bias": false, "use_keyframes_abs_pos_embedding": true}));
    let set = ["conditioning.generated_keyframes=2", "request={width: 128, height: 64, num_frames: 17}"];
    let request = |reference: &str, sizes: &ModelSizes| {
        let config = Config::load("ltx2_5_distilled", set.into_iter().chain([reference])).expect("shipped");
        resolve(&config, sizes)
    };
    for (reference, first) in [("reference=official", 1.0), ("reference=diffusers", 0.0)] {
        let (one, two) = request(reference, &marks).expect("legal").passes();
        let shapes = Shapes::from_request(&marks, &one).expect("legal sizes");
        // 3 latent frames of 1 x 2 tokens.
        assert_eq!((shapes.own_tokens().video, shapes.appended.video, shapes.frame_tokens()), (6, 4, 2));
        let mask = shapes.single_frames(&one.conditions.video, one.first_frame_marker);
        assert_eq!(mask.into_raw_vec_and_offset().0, [first, first, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
        let shape = one.denoise_shape(&marks, &shapes, 1);
        assert_eq!((shape.keyframes, shape.levels, shape.conditioned), (true, 1, Av::both(false)));
        let at: Vec<_> = one.conditions.video.iter().filter_map(Condition::appended_at).collect();
        assert_eq!(at, [(5, PositionSpan::Frame), (11, PositionSpan::Frame)]);
        let two = two.expect("two passes");
        assert!(
            two.conditions.video.is_empty()
                && Shapes::from_request(&marks, &two).expect("legal sizes").appended.video == 0
        );
    }
    let why = request("reference=official", &sizes(&json!({}))).expect_err("no keyframe embedding").to_string();
    assert!(why.contains("conditioning.generated_keyframes = 2: this transformer has no keyframe embedding"), "{why}");
}

/// The tokens of reference videos are appended in the first pass only, without the keyframe embedding of LTX-2.5. If
/// their downscale factors and frame counts are set, no file is read.
#[test]
fn reference_videos_are_tokens_of_first_pass_only() {
    let marks = sizes(&json!({"ff_bias": false, "use_keyframes_abs_pos_embedding": true}));
    let set = [
        "pipeline=in_context",
        "request={width: 256, height: 128, num_frames: 17}",
        "request.reference_videos=[{path: a.mp4, frames: 12, attention_strength: 0.5}, {path: b.mp4, frames: 99}]",
        "conditioning={reference_downscale_factor: 2, reference_temporal_scale_factor: 1}",
    ];
    let config = Config::load("ltx2_5_distilled", set).expect("legal");
    assert_eq!(config.sampler.kind, SamplerKind::Euler, "Lightricks' pipeline draws no noise in its steps");
    let (one, two) = resolve(&config, &marks).expect("legal sizes").passes();
    let shapes = Shapes::from_request(&marks, &one).expect("legal sizes");
    // 3 latent frames of 2 x 4 tokens, followed by references of 2 and 3 frames of 1 x 2 tokens.
    assert_eq!((shapes.own_tokens().video, shapes.appended.video), (24, 10));
    let marked = shapes.single_frames(&one.conditions.video, true);
    assert!(marked.iter().enumerate().all(|(n, mark)| *mark == f32::from(n < 8)), "{marked}");
    let mask = |request: &Request| {
        let shapes = Shapes::from_request(&marks, request).expect("legal sizes");
        let shape = request.denoise_shape(&marks, &shapes, 1);
        let network = denoise(&marks.transformer, &shape, &Build::new(DType::F32)).expect("builds");
        network.program.argument("self_mask.video").map(|a| a.ty.dims.clone())
    };
    assert_eq!(mask(&one), Some(vec![1, 34, 34]));
    let two = two.expect("two passes");
    assert_eq!((mask(&two), Shapes::from_request(&marks, &two).expect("legal sizes").appended.video), (None, 0));
}
