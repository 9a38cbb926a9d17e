//! Tests of requests that are rejected, with the code and field of their errors.

use serde_json::{Value, json};

use super::{ParsedConfig, TestConverter};
use crate::serve::fields::Endpoint;
use crate::serve::form::Form;

#[test]
#[allow(clippy::too_many_lines)] // A table.
fn errors_name_the_invalid_field() {
    let (server, mut wrong) = (TestConverter::new("nano", &[]), Vec::new());
    let long = "x".repeat(16385);
    for (body, code, param) in [
        (json!({"prompt": null}), "missing_prompt", "prompt"),
        (json!({"prompt": ""}), "missing_prompt", "prompt"),
        (json!({"prompt": " \n"}), "missing_prompt", "prompt"),
        (json!({"prompt": 5}), "invalid_value", "prompt"),
        (json!({"prompt": ["a"]}), "invalid_value", "prompt"),
        (json!({"prompt": long}), "prompt_too_long", "prompt"),
        (json!({"negative_prompt": long}), "prompt_too_long", "negative_prompt"),
        (json!({"negative_prompt": {}}), "invalid_value", "negative_prompt"),
        (json!({"ltx2": {"request": {"prompt": long}}, "prompt": null}), "prompt_too_long", "ltx2.request.prompt"),
        (json!({"model": "sora-2"}), "model_not_found", "model"),
        (json!({"model": "../nano"}), "model_not_found", "model"),
        (json!({"model": {}}), "invalid_value", "model"),
        (json!({"size": "100x96"}), "invalid_size", "size"),
        (json!({"size": "96x100"}), "invalid_size", "size"),
        (json!({"size": "128"}), "invalid_size", "size"),
        (json!({"size": "128X96"}), "invalid_size", "size"),
        (json!({"size": "128x96x25"}), "invalid_size", "size"),
        (json!({"size": "0x0"}), "invalid_size", "size"),
        (json!({"size": "00x00"}), "invalid_size", "size"),
        (json!({"size": "-64x96"}), "invalid_size", "size"),
        (json!({"size": "64 x96"}), "invalid_size", "size"),
        (json!({"size": "999999x96"}), "invalid_size", "size"),
        (json!({"size": 128}), "invalid_size", "size"),
        (json!({"size": ["128x96"]}), "invalid_size", "size"),
        (json!({"width": 100}), "invalid_size", "width"),
        (json!({"height": 100}), "invalid_size", "height"),
        (json!({"width": 0}), "invalid_value", "width"),
        (json!({"width": 1e300}), "invalid_value", "width"),
        (json!({"width": 64.5}), "invalid_value", "width"),
        (json!({"width": "wide"}), "invalid_value", "width"),
        (json!({"width": 64, "size": "128x96"}), "invalid_value", "width"),
        (json!({"size": "16000x16000"}), "too_large", "size"),
        (json!({"width": 16000, "height": 16000}), "too_large", "width"),
        (json!({"fps": 0}), "invalid_value", "fps"),
        (json!({"fps": 61}), "invalid_value", "fps"),
        (json!({"fps": "inf"}), "invalid_value", "fps"),
        (json!({"fps": "NaN"}), "invalid_value", "fps"),
        (json!({"frame_rate": true}), "invalid_value", "frame_rate"),
        (json!({"fps": 24, "frame_rate": 25}), "invalid_value", "frame_rate"),
        (json!({"seconds": 0}), "invalid_value", "seconds"),
        (json!({"seconds": "-4"}), "invalid_value", "seconds"),
        (json!({"seconds": "four"}), "invalid_value", "seconds"),
        (json!({"seconds": 1e9}), "invalid_value", "seconds"),
        (json!({"seconds": 60}), "too_large", "seconds"),
        (json!({"num_frames": 24}), "invalid_value", "num_frames"),
        (json!({"num_frames": 0}), "invalid_value", "num_frames"),
        (json!({"num_frames": -8}), "invalid_value", "num_frames"),
        (json!({"num_frames": 297}), "too_large", "num_frames"),
        (json!({"num_frames": "some"}), "invalid_value", "num_frames"),
        (json!({"seed": -2}), "invalid_value", "seed"),
        (json!({"seed": 1.5}), "invalid_value", "seed"),
        (json!({"seed": "18446744073709551616"}), "invalid_value", "seed"),
        (json!({"seed": "9".repeat(100_000)}), "invalid_value", "seed"),
        (json!({"seed": "0x10"}), "invalid_value", "seed"),
        (json!({"num_inference_steps": 0}), "invalid_value", "num_inference_steps"),
        (json!({"steps": 101}), "invalid_value", "steps"),
        (json!({"steps": 1000}), "invalid_value", "steps"),
        (json!({"steps": 8, "num_inference_steps": 9}), "invalid_value", "num_inference_steps"),
        (json!({"sigmas": []}), "invalid_value", "sigmas"),
        (json!({"sigmas": [0.5, 0.9]}), "invalid_value", "sigmas"),
        (json!({"sigmas": [2, 1]}), "invalid_value", "sigmas"),
        (json!({"sigmas": 1}), "invalid_value", "sigmas"),
        (json!({"sigmas": ["a"]}), "invalid_value", "sigmas"),
        (json!({"sigmas": "[1, 0.5"}), "invalid_value", "sigmas"),
        (json!({"sigmas": vec![0.5; 2000]}), "invalid_value", "sigmas"),
        (json!({"sigmas": [1, 0.5], "steps": 8}), "invalid_value", "steps"),
        (json!({"max_sequence_length": 128}), "invalid_value", "max_sequence_length"),
        (
            json!({"ltx2": {"request": {"max_sequence_length": 128}}}),
            "invalid_value",
            "ltx2.request.max_sequence_length",
        ),
        (json!({"guidance_scale": 31}), "invalid_value", "guidance_scale"),
        (json!({"guidance_scale": -1}), "invalid_value", "guidance_scale"),
        (json!({"guidance_scale": "high"}), "invalid_value", "guidance_scale"),
        (json!({"rescale_scale": 2}), "invalid_value", "rescale_scale"),
        (json!({"stg_scale": 1, "stg_blocks": [99]}), "invalid_value", "stg_blocks"),
        (json!({"stg_blocks": [-1]}), "invalid_value", "stg_blocks"),
        (json!({"stg_blocks": "1,2"}), "invalid_value", "stg_blocks"),
        (json!({"guidance_skip_step": 256}), "invalid_value", "guidance_skip_step"),
        (json!({"video_skip_step": -1}), "invalid_value", "video_skip_step"),
        (
            json!({"guidance_skip_step": 1, "ltx2": {"sampler": {"kind": "res_2s"}}}),
            "invalid_value",
            "guidance_skip_step",
        ),
        (json!({"generate_audio": "maybe"}), "invalid_value", "generate_audio"),
        (json!({"pipeline": "text"}), "invalid_value", "pipeline"),
        (json!({"pipeline": "two_stage"}), "invalid_value", "pipeline"),
        (json!({"ltx2": {"pipeline": "hq"}}), "invalid_value", "ltx2.pipeline"),
        (json!({"pipeline": "image_to_video"}), "invalid_value", "input_reference"),
        (json!({"user": "u".repeat(65)}), "invalid_value", "user"),
        (json!({"metadata": {"a": 1}}), "invalid_value", "metadata"),
        (json!({"metadata": {"a": "b".repeat(513)}}), "invalid_value", "metadata"),
        (json!({"metadata": "text"}), "invalid_value", "metadata"),
        (
            json!({"metadata": (0..17).map(|i| (i.to_string(), json!("a"))).collect::<serde_json::Map<_, _>>()}),
            "invalid_value",
            "metadata",
        ),
        (json!({"lora": {"name": "style"}}), "invalid_value", "lora"),
        (json!({"loras": [{"scale": 1}]}), "invalid_value", "loras"),
        (json!({"lora": {"path": "/etc/passwd"}}), "parameter_not_allowed", "lora.path"),
        (json!({"lora": 5}), "invalid_value", "lora"),
        (json!({"start": 1}), "invalid_value", "start"),
        (json!({"retake": {"start": 1}}), "invalid_value", "retake"),
        (json!({"before": true}), "invalid_value", "before"),
        (json!({"overlap": 9}), "invalid_value", "overlap"),
        (json!({"extra_params": 5}), "invalid_value", "extra_params"),
        (json!({"extra_params": "{\"a\": 1, \"a\": 2}"}), "invalid_value", "extra_params"),
        (json!({"extra_params": {"extra_params": {}}}), "invalid_value", "extra_params.extra_params"),
        (json!({"extra_params": {"stg_scael": 1}}), "unknown_field", "extra_params.stg_scael"),
        (json!({"stg_scale": 1, "extra_params": {"stg_scale": 2}}), "invalid_value", "extra_params.stg_scale"),
        (json!({"promt": "a"}), "unknown_field", "promt"),
        (json!({"request": {"prompt": "a"}}), "unknown_field", "request"),
        (json!({"ltx2": 5}), "invalid_value", "ltx2"),
        (json!({"ltx2": {"sampler": {"stepz": 5}}}), "unknown_field", "ltx2.sampler.stepz"),
        (json!({"ltx2": {"smapler": {}}}), "unknown_field", "ltx2.smapler"),
        (json!({"ltx2": {"sampler": {"steps": "many"}}}), "invalid_value", "ltx2.sampler.steps"),
        (json!({"ltx2": {"sampler": {"steps": 200}}}), "invalid_value", "ltx2.sampler.steps"),
        (json!({"ltx2": {"request": {"width": 100}}}), "invalid_size", "ltx2.request.width"),
        (json!({"ltx2": {"model": {"path": "/x"}}}), "parameter_not_allowed", "ltx2.model"),
        (json!({"ltx2": {"runtime": {"platform": "/x.so"}}}), "parameter_not_allowed", "ltx2.runtime"),
        (json!({"ltx2": {"extends": "/etc/passwd"}}), "parameter_not_allowed", "ltx2.extends"),
        (json!({"ltx2": {"output": {"path": "/x"}}}), "parameter_not_allowed", "ltx2.output.path"),
        (json!({"ltx2": {"request": {"images": [{"path": "/x"}]}}}), "parameter_not_allowed", "ltx2.request.images"),
        (json!({"ltx2": {"request": {"chain": {}}}}), "parameter_not_allowed", "ltx2.request.chain"),
        (json!({"ltx2": {"request": {"num_videos": 9}}}), "parameter_not_allowed", "ltx2.request.num_videos"),
        (
            json!({"ltx2": {"request": {"negative_prompt_file": "/x"}}}),
            "parameter_not_allowed",
            "ltx2.request.negative_prompt_file",
        ),
        (json!({"output_path": "/x"}), "parameter_not_allowed", "output_path"),
        (json!({"perf_dump_path": "/x"}), "parameter_not_allowed", "perf_dump_path"),
        (json!({"n": 2}), "unsupported_parameter", "n"),
        (json!({"num_outputs_per_prompt": "2"}), "unsupported_parameter", "num_outputs_per_prompt"),
        (json!({"quality": "hd"}), "unsupported_parameter", "quality"),
        (json!({"output_format": "webm"}), "unsupported_parameter", "output_format"),
        (json!({"response_format": "b64_json"}), "unsupported_parameter", "response_format"),
        (json!({"generator_device": "mps"}), "unsupported_parameter", "generator_device"),
        (json!({"output_quality": "high"}), "unsupported_parameter", "output_quality"),
        (json!({"frame_interpolation_exp": 2}), "unsupported_parameter", "frame_interpolation_exp"),
        (json!({"upscaling_scale": 2}), "unsupported_parameter", "upscaling_scale"),
        (json!({"profile_all_stages": true}), "unsupported_parameter", "profile_all_stages"),
        (json!({"enable_cache_dit": true}), "unsupported_parameter", "enable_cache_dit"),
        (json!({"return_stage_metrics": true}), "unsupported_parameter", "return_stage_metrics"),
        (json!({"use_diffusion_decoder": true}), "invalid_value", "use_diffusion_decoder"),
        (json!({"auto_duration": true, "num_frames": 25}), "invalid_value", "auto_duration"),
        (json!({"auto_duration": true, "seconds": 1}), "invalid_value", "auto_duration"),
        (json!({"guidance_scale_2": 1}), "unsupported_parameter", "guidance_scale_2"),
        (json!({"true_cfg_scale": 4}), "unsupported_parameter", "true_cfg_scale"),
        (json!({"flow_shift": 5.0}), "unsupported_parameter", "flow_shift"),
        (json!({"enable_teacache": true}), "unsupported_parameter", "enable_teacache"),
        (json!({"enable_upscaling": {}}), "unsupported_parameter", "enable_upscaling"),
        (json!({"enhance_prompt": "maybe"}), "invalid_value", "enhance_prompt"),
        (json!({"enhance_prompt": true, "prompt": " "}), "invalid_value", "enhance_prompt"),
        (json!({"ltx2": {"enhance": {"endpoint": "http://10.0.0.1"}}}), "parameter_not_allowed", "ltx2.enhance"),
        (json!({"input_reference": "https://example.com/a.png"}), "invalid_image", "input_reference"),
        (json!({"input_reference": {"image_url": "http://169.254.169.254/"}}), "invalid_image", "input_reference"),
        (json!({"input_reference": "file:///etc/passwd"}), "invalid_image", "input_reference"),
        (json!({"input_reference": "/etc/passwd"}), "invalid_image", "input_reference"),
        (json!({"input_reference": {"file_id": "f"}}), "invalid_value", "input_reference"),
        (json!({"input_reference": {"image_url": "data:image/png,x"}}), "invalid_image", "input_reference"),
        (json!({"input_reference": "data:image/png;base64"}), "invalid_image", "input_reference"),
        (json!({"input_reference": "data:image/png;base64,"}), "invalid_image", "input_reference"),
        (json!({"input_reference": "data:image/png;base64,AAAA"}), "invalid_image", "input_reference"),
        (
            json!({"input_reference": "R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"}),
            "invalid_image",
            "input_reference",
        ),
        (json!({"input_reference": {}}), "invalid_value", "input_reference"),
        (json!({"input_reference": {"content": "AAAA", "data": "AAAA"}}), "invalid_value", "input_reference"),
        (json!({"input_reference": {"content": "AAAA", "role": "middle"}}), "invalid_value", "input_reference"),
        (json!({"input_reference": {"content": "AAAA", "colour": "red"}}), "unknown_field", "input_reference.colour"),
        (json!({"input_reference": {"stored": "a.png", "data": "AAAA"}}), "unknown_field", "input_reference.stored"),
        (json!({"input_reference": 5}), "invalid_value", "input_reference"),
        (json!({"images": [{"file": "missing"}]}), "invalid_value", "images"),
        (json!({"images": [{"data": "AAAA", "frame": 0, "role": "last_frame"}]}), "invalid_value", "images"),
        (json!({"images": [{"data": "AAAA", "strength": 2}]}), "invalid_value", "images"),
        (json!({"images": vec![json!("AAAA"); 9]}), "invalid_value", "images"),
        (json!({"image_crf": 99}), "invalid_value", "image_crf"),
        (json!({"input_audio": "AAAA"}), "invalid_audio", "input_audio"),
        (json!({"audio_reference": "https://example.com/a.wav"}), "invalid_audio", "audio_reference"),
        (json!({"input_video": "AAAA"}), "invalid_video", "input_video"),
        (json!({"video": "video_01k9"}), "invalid_video", "video"),
        (json!({"reference_videos": ["AAAA"]}), "invalid_video", "reference_videos"),
        (json!({"reference_videos": vec![json!("AAAA"); 5]}), "invalid_value", "reference_videos"),
    ] {
        let status = if code == "model_not_found" { 404 } else { 400 };
        let (found, want) = (server.bad(&body), (status, code, Some(param.to_string())));
        if found != want {
            wrong.push(format!("{}: {found:?}, not {want:?}", body.to_string().chars().take(120).collect::<String>()));
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
}

#[test]
fn server_limits_are_enforced() {
    let of = |set: &[&str], body: Value| TestConverter::new("nano", set).bad(&body);
    let refused = |code: &'static str, param: &str| (400, code, Some(param.to_string()));
    assert_eq!(of(&["serve.max_frames=25"], json!({"num_frames": 33})), refused("too_large", "num_frames"));
    assert_eq!(of(&["serve.max_tokens=40"], json!({"size": "128x96"})), refused("too_large", "size"));
    assert_eq!(of(&["serve.max_steps=10"], json!({"steps": 11})), refused("invalid_value", "steps"));
    for (body, param) in [
        (json!({"sigmas": [1, 0.8, 0.6, 0.4, 0]}), "sigmas"),
        (json!({"ltx2": {"sampler": {"sigmas": [1, 0.8, 0.6, 0.4, 0]}}}), "ltx2.sampler.sigmas"),
        (json!({"stage_2_sigmas": [0.9, 0.8, 0.6, 0.4, 0]}), "stage_2_sigmas"),
        (json!({"ltx2": {"dfr": {"sigmas": [0.9, 0.8, 0.6, 0.4, 0]}}}), "ltx2.dfr.sigmas"),
        (json!({"ltx2": {"sampler": {"steps": 4}}}), "ltx2.sampler.steps"),
    ] {
        assert_eq!(of(&["serve.max_steps=3"], body.clone()), refused("invalid_value", param), "{body}");
    }
    let lora = json!({"ltx2": {"dfr": {"detailing_lora": {"path": "a.safetensors"}}}});
    let not_allowed = refused("parameter_not_allowed", "ltx2.dfr.detailing_lora");
    assert_eq!(TestConverter::new("ltx2_5_dfr", &[]).bad(&lora), not_allowed);
    // Each DFR round doubles the number of frames.
    let dfr = TestConverter::new("ltx2_5_dfr", &["serve.max_frames=10000", "serve.max_tokens=20000"]);
    let rounds = |rounds: usize| {
        let tree = json!({"dfr": {"temporal_rounds": rounds}});
        dfr.bad(&json!({"seed": 1, "size": "768x512", "num_frames": 121, "ltx2": tree}))
    };
    let error = (400, "too_large", Some("size".to_string()));
    assert_eq!((rounds(2), rounds(0).1), (error, ""));
    assert_eq!(of(&["serve.max_images=0"], json!({"images": ["AAAA"]})), refused("invalid_value", "images"));
    let warm = ["serve.only_warm=true", "serve.warm=[128x96x25, 64x64x9]"];
    assert_eq!(of(&warm, json!({"num_frames": 9})), refused("shape_not_warm", "size"));
    let server = TestConverter::new("nano", &warm);
    assert_eq!(server.good(&json!({"seed": 1, "size": "64x64", "num_frames": 9})).config().request.width, 64);
    assert_eq!(of(&["reference=official"], json!({"num_frames": "auto"})), refused("invalid_value", "num_frames"));
    let auto = json!({"seed": 1, "num_frames": "auto"});
    let own = TestConverter::new("nano", &[]);
    assert_eq!(own.good(&auto).num_frames(), None);
    assert_ne!(own.good(&auto).batch_key, own.good(&auto).batch_key, "each prompt has its own duration");
    assert_eq!(of(&[], json!({"num_frames": "auto", "size": "2048x1024"})), refused("too_large", "size"));
    // The server's own configuration may set more steps than the limit.
    assert_eq!(
        TestConverter::new("nano", &["serve.max_steps=10"]).good(&json!({"seed": 1})).config().sampler.steps,
        20
    );
}

/// The errors contain the client's field names. Settings without effect in the server's own configuration are accepted.
#[test]
fn errors_name_fields_without_effect() {
    let refused = |param: &str| (400, "invalid_value", Some(param.to_string()));
    let nano = TestConverter::new("nano", &["two_stage.adain=0.5", "guidance.rescale_scope=batch"]);
    for (body, param) in [
        (json!({"stg_scale": 1}), "stg_scale"),
        (json!({"extra_body": {"stg_scale": 1}}), "extra_body.stg_scale"),
        (json!({"stg_blocks": [1]}), "stg_blocks"),
        (json!({"ltx2": {"two_stage": {"tone_map": 0.5}}}), "ltx2.two_stage.tone_map"),
        (json!({"ltx2": {"guidance": {"video": {"stg": 1}}}}), "ltx2.guidance.video.stg"),
        (json!({"ltx2": {"conditioning": {"crf": 20}}}), "ltx2.conditioning.crf"),
    ] {
        assert_eq!(nano.bad(&body), refused(param), "{body}");
    }
    nano.good(&json!({"seed": 1, "stg_scale": 1, "stg_blocks": [1]}));
    let distilled = TestConverter::new("ltx2_distilled", &["request.negative_prompt=blur"]);
    assert_eq!(distilled.bad(&json!({"negative_prompt": "hiss"})), refused("negative_prompt"));
    for neutral in [json!({"negative_prompt": ""}), json!({"guidance_scale": 1}), json!({"stg_scale": 0})] {
        distilled.good(&neutral);
    }
}

/// Fields that a remix inherits from its source may be without effect.
#[test]
fn remix_may_disable_guidance_of_its_source() {
    let server = TestConverter::new("nano", &[]);
    let source = server.good(&json!({"seed": 1, "negative_prompt": "hiss", "stg_scale": 1, "stg_blocks": [1]}));
    let body = json!({"prompt": "b", "guidance_scale": 1, "stg_scale": 0}).to_string();
    let form = Form::json(body.as_bytes()).expect("JSON");
    let made = server.accept(form, Endpoint::Remix(&source)).expect("accepted");
    assert_eq!(made.config().guidance.video.cfg, Some(1.0));
}

#[test]
fn distilled_model_rejects_steps_and_accepts_sigmas() {
    let server = TestConverter::new("ltx2_distilled", &[]);
    assert_eq!(server.bad(&json!({"steps": 8})), (400, "invalid_value", Some("steps".into())));
    let accepted = server.good(&json!({"seed": 1}));
    assert_eq!(accepted.config().sampler.sigmas.map(|sigmas| sigmas.len()), Some(9));
    let accepted = server.good(&json!({"seed": 1, "stage_1_sigmas": [1, 0.5], "stage_2_sigmas": "[0.9, 0.4, 0]"}));
    assert_eq!((accepted.config().sampler.steps, accepted.config().two_stage.sigmas), (2, vec![0.9, 0.4, 0.0]));
    assert_eq!(server.bad(&json!({"size": "1504x1024"})), (400, "invalid_size", Some("size".into())));
}
