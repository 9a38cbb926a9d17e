//! Tests of requests for HDR video.

use serde_json::json;

use super::TestConverter;
use super::files::{create, data_url, video};
use super::{ParsedConfig, at};
use crate::config::Pipeline;
use crate::serve::form::Form;
use crate::serve::generator::Endpoint;

const HDR: &str = "tests/fixtures/lora/hdr_tiny_2_3.safetensors";
const SIZE: [(&str, &str); 2] = [("size", "128x128"), ("num_frames", "17")];

/// Returns a server with the pipelines `in_context` and `hdr`, and a LoRA for each.
fn server(set: &[&str]) -> TestConverter {
    let loras =
        format!("serve.loras={{wide: {{path: {HDR}}}, plain: {{path: tests/fixtures/lora/ic_tiny_a.safetensors}}}}");
    TestConverter::new("nano", &[&["reference=official", "serve.pipelines=[in_context, hdr]", &*loras], set].concat())
}

#[test]
fn hdr_lora_selects_the_pipeline_hdr() {
    let (server, clip) = (server(&[]), video(17, 96, 128));
    let with = |fields: &[(&str, &str)]| create(&server, &[&SIZE[..], fields].concat(), &[("reference_videos", &clip)]);
    let accepted = with(&[("lora", "wide")]).expect("an HDR request");
    let config = accepted.config();
    assert_eq!((config.pipeline, &config.model.loras[0].stages[..]), (Pipeline::Hdr, &[1, 2][..]));
    assert_eq!(at(&accepted, "conditioning.hdr_transform"), "logc3");
    assert_eq!((config.output.audio, config.output.save_exr), (false, None), "HDR video has no sound");
    assert_eq!(config.two_stage.sigmas, [0.909375, 0.725, 0.0]);
    assert_eq!(with(&[("lora", "plain")]).expect("an IC-LoRA").config().pipeline, Pipeline::IcLora);
    assert_eq!(with(&[]).expect("no LoRA").config().pipeline, Pipeline::IcLora);
    assert_eq!(with(&[("pipeline", "hdr")]).expect("no LoRA").config().pipeline, Pipeline::Hdr);

    let again = Form::json(br#"{"prompt": "b"}"#).expect("JSON");
    let again = server.accept(again, Endpoint::Remix(&accepted)).expect("a remix");
    assert_eq!((again.config().pipeline, &again.config().model.loras), (Pipeline::Hdr, &config.model.loras));
    assert_eq!((&again.inputs, &again.shape), (&accepted.inputs, &accepted.shape));

    let card = json!(server.fields.card());
    assert_eq!(card["pipeline_inputs"]["hdr"]["hdr"], true);
    assert_eq!(card["pipeline_inputs"]["in_context"]["hdr"], false);
}

#[test]
fn invalid_hdr_requests_name_their_field() {
    let (server, clip) = (server(&[]), video(17, 96, 128));
    let weighted = r#"[{"file": "clip", "attention_strength": 0.5}]"#;
    for (fields, param, why) in [
        (
            &[("lora", "wide"), ("pipeline", "in_context")][..],
            "lora",
            "generates HDR video, but the pipeline is in_context",
        ),
        (&[("lora", "wide"), ("preview_every", "1")], "preview_every", "shows no previews"),
        (&[("lora", "wide"), ("generate_audio", "false")], "generate_audio", "makes no sound"),
        (
            &[("lora", "wide"), ("reference_videos", weighted)],
            "reference_videos",
            "does not support attention_strength",
        ),
        (&[("lora", "wide"), ("ltx2", r#"{"output": {"hdr_video": "pq"}}"#)], "ltx2.output.hdr_video", "cannot set"),
        (&[("lora", "wide"), ("ltx2", r#"{"output": {"save_exr": "a"}}"#)], "ltx2.output.save_exr", "cannot set"),
        (&[("lora", "wide"), ("size", "96x96")], "size", "multiple of 64"),
    ] {
        let sizes = SIZE.iter().filter(|own| fields.iter().all(|field| field.0 != own.0));
        let fields: Vec<_> = fields.iter().chain(sizes).copied().collect();
        let part = if fields.iter().any(|field| field.0 == "reference_videos") { "clip" } else { "reference_videos" };
        let error = create(&server, &fields, &[(part, &clip)]).expect_err(why);
        assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{error}");
        assert!(error.message.contains(why) && !error.message.contains('/'), "{error}");
    }
    let error = server.json(&json!({"prompt": "a", "pipeline": "hdr"})).expect_err("no reference");
    assert_eq!(
        (error.param.as_deref(), &*error.message),
        (Some("reference_videos"), "reference_videos: required by the pipeline hdr")
    );
    let plain = TestConverter::new("nano", &["serve.pipelines=[in_context]"]);
    let error = plain.json(&json!({"prompt": "a", "pipeline": "hdr"})).expect_err("not served");
    assert!(error.message.contains("hdr is not enabled on this server (serve.pipelines)"), "{error}");
}

#[test]
fn hdr_ic_lora_is_used_in_both_stages() {
    let (set, clip) = (format!("serve.ic_loras=[{HDR}]"), video(17, 96, 128));
    let server = TestConverter::new("nano", &["reference=official", "serve.pipelines=[in_context, hdr]", &set]);
    let fields = [&SIZE[..], &[("ic_lora", HDR)]].concat();
    let config = create(&server, &fields, &[("reference_videos", &clip)]).expect("an HDR request").config();
    assert_eq!((config.pipeline, &config.model.loras[0].stages[..]), (Pipeline::Hdr, &[1, 2][..]));
}

/// Only HDR jobs have the operator's text embeddings; their prompt is a name.
#[test]
fn text_embeddings_of_the_server_replace_the_prompt_of_hdr_requests() {
    let server = server(&["request.text_embeddings=scene.safetensors", "guidance.video.cfg=1"]);
    let url = data_url(&video(17, 96, 128));
    let wide = json!({"prompt": "a", "size": "128x128", "num_frames": 17, "lora": "wide", "reference_videos": url});
    let accepted = server.good(&wide);
    assert_eq!((accepted.prompt(), at(&accepted, "request.text_embeddings")), ("a", json!("scene.safetensors")));
    let warned = "the prompt has no effect: the server's text embeddings for HDR video replace it";
    assert_eq!(accepted.warnings, [warned]);
    let plain = server.good(&json!({"prompt": "a"}));
    assert_eq!((at(&plain, "request.text_embeddings"), plain.warnings.len()), (json!(null), 0));
    for (name, value, param) in [
        ("enhance_prompt", json!(true), "enhance_prompt"),
        ("ltx2", json!({"request": {"text_embeddings": "b"}}), "ltx2.request.text_embeddings"),
    ] {
        let mut body = wide.clone();
        body[name] = value;
        let error = server.json(&body).expect_err(name);
        assert_eq!(error.param.as_deref(), Some(param), "{error}");
    }
}
