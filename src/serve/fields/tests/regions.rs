//! Tests of the fields of the pipelines `inpaint` and `dub_it`: `mask`, `region`, `keep` and `dub_strength`.

use serde_json::{Value, json};

use super::files::{create, data_url, image, sound, video};
use super::{ParsedConfig, TestConverter, at};
use crate::config::Pipeline;
use crate::media::read_image;
use crate::serve::form::Form;
use crate::serve::generator::Endpoint;

const INPAINT: (&str, &str) = ("pipeline", "inpaint");

fn server() -> TestConverter {
    TestConverter::new("nano", &["serve.pipelines=[inpaint, dub_it]"])
}

#[test]
fn mask_may_be_an_image_or_a_video() {
    let (server, clip, still) = (server(), video(17, 96, 128), image("frame.png"));
    let with = |mask: &[u8]| create(&server, &[INPAINT], &[("video", &clip), ("mask", mask)]);
    let accepted = with(&still).expect("an image");
    let mask = accepted.config().request.mask.expect("a mask");
    assert!(accepted.inputs.contains(&mask) && mask.ends_with(".png"), "{mask}");
    let stored = read_image(&server.folder.path().join("inputs").join(&mask)).expect("PNG");
    assert_eq!(stored, read_image("tests/fixtures/images/frame.png".as_ref()).expect("PNG"));
    let long = with(&video(17, 96, 128)).expect("a video");
    assert!(long.config().request.mask.is_some_and(|mask| mask.ends_with(".mp4")));
    assert_eq!((&long.shape, long.inputs.len()), (&accepted.shape, 1), "equal files are stored once");
    assert_ne!(long.batch_key, accepted.batch_key);

    let (clip, url) = (data_url(&clip), data_url(&still));
    for mask in [json!(url), json!({"data": url})] {
        let sent = server.good(&json!({"seed": 1, "pipeline": "inpaint", "video": clip, "mask": mask}));
        assert_eq!(at(&sent, "request.mask"), at(&accepted, "request.mask"));
    }
    // A remix keeps the mask, unless it has another region.
    let remix = |body: Value| {
        let form = Form::json(body.to_string().as_bytes()).expect("JSON");
        server.accept(form, Endpoint::Remix(&accepted)).expect("a remix").config().request
    };
    assert_eq!(remix(json!({"prompt": "b"})).mask, Some(mask));
    let other = remix(json!({"prompt": "b", "region": [0, 0, 64, 64]}));
    assert_eq!((other.mask, other.inpaint.and_then(|own| own.region)), (None, Some([0, 0, 64, 64])));
}

#[test]
fn invalid_masks_and_rectangles_name_their_field() {
    let (server, clip, still) = (server(), video(17, 96, 128), image("frame.png"));
    let short = video(9, 96, 128);
    let exclusive = "keep only one of";
    for (fields, mask, code, param, why) in [
        (&[INPAINT][..], Some(&b"no mask"[..]), "invalid_video", "mask", "not a video"),
        (&[INPAINT], Some(&still[..100]), "invalid_image", "mask", "mask"),
        (&[INPAINT], Some(&short), "invalid_value", "mask", "has 9 frames, but the video has 17"),
        (&[INPAINT], None, "invalid_value", "pipeline", "requires a region: mask, region or keep"),
        (&[INPAINT, ("region", "[0, 0, 8, 8]")], Some(&still), "invalid_value", "pipeline", exclusive),
        (
            &[INPAINT, ("region", "[0, 0, 8, 8]"), ("keep", "[0, 0, 32, 32]")],
            None,
            "invalid_value",
            "pipeline",
            exclusive,
        ),
        (&[INPAINT, ("region", "[0, 0, 8]")], None, "invalid_value", "region", "must be [left, top, width, height]"),
        (&[INPAINT, ("region", "[0, 0, 0, 8]")], None, "invalid_value", "region", "within 128x96 pixels"),
        (&[INPAINT, ("keep", "[0, 0, 8, 8]")], None, "invalid_value", "keep", "multiples of 32"),
        (&[INPAINT, ("mask", "https://example.com/a.png")], None, "invalid_mask", "mask", "does not download URLs"),
        (&[INPAINT, ("mask", r#"{"data": "AAAA", "frame": 0}"#)], None, "unknown_field", "mask.frame", "frame"),
        (&[INPAINT, ("mask", "AAAA")], Some(&still), "invalid_value", "mask", "set twice"),
        (
            &[INPAINT, ("ltx2", r#"{"request": {"mask": "/etc/passwd"}}"#)],
            None,
            "parameter_not_allowed",
            "ltx2.request.mask",
            "use the field mask",
        ),
    ] {
        let files: Vec<_> = [("video", &*clip)].into_iter().chain(mask.map(|mask| ("mask", mask))).collect();
        let error = create(&server, fields, &files).expect_err(why);
        assert_eq!((error.code, error.param.as_deref()), (code, Some(param)), "{fields:?}: {error}");
        assert!(error.message.contains(why), "{fields:?}: {error}");
    }
    // Other pipelines have no mask.
    let error = create(&server, &[], &[("mask", &still)]).expect_err("no inpainting");
    assert_eq!(error.param.as_deref(), Some("mask"), "{error}");
    assert!(error.message.contains("only the pipeline inpaint uses this field"), "{error}");
}

#[test]
fn rectangles_and_dub_strength_set_their_keys() {
    let (server, clip) = (server(), data_url(&video(17, 64, 128)));
    let inpaint = |field: &str, value: Value| json!({"seed": 1, "pipeline": "inpaint", "video": clip, field: value});
    let inside = server.good(&inpaint("region", json!([8, 0, 40, 24])));
    assert_eq!(at(&inside, "request.inpaint.region"), json!([8, 0, 40, 24]));
    let outside = server.good(&inpaint("keep", json!([32, 0, 64, 64])));
    assert_eq!(at(&outside, "request.inpaint.keep"), json!([32, 0, 64, 64]));

    let tone = data_url(&sound());
    let dub = |strength: Value| json!({"seed": 1, "pipeline": "dub_it", "video": clip, "input_audio": tone, "dub_strength": strength});
    let dubbed = server.good(&dub(json!(0.5)));
    assert_eq!((dubbed.config().pipeline, at(&dubbed, "request.dub.strength")), (Pipeline::DubIt, json!(0.5)));
    let error = server.json(&inpaint("dub_strength", json!(0.5))).expect_err("no dubbing");
    assert_eq!(error.code, "invalid_value", "{error}");
    for wrong in [json!(1.5), json!(-0.1), json!("much")] {
        assert_eq!(server.bad(&dub(wrong)), (400, "invalid_value", Some("dub_strength".into())));
    }
    let error = server.json(&json!({"prompt": "a", "dub_strength": 0.5})).expect_err("no dubbing");
    assert_eq!(error.param.as_deref(), Some("dub_strength"), "{error}");
}
