//! Tests of images, audio and videos in requests, sent as form parts and as text.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ndarray::{Array2, Array4};
use serde_json::{Value, json};

use super::{ParsedConfig, TestConverter, TestPart, at};
use crate::config::{ExtendAt, Pipeline};
use crate::media::{
    Audio, EncoderChoice, FrameFilter, Frames, Mp4Options, WavFormat, read_image, write_mp4, write_wav,
};
use crate::serve::error::ApiError;
use crate::serve::fields::media::takes_file;
use crate::serve::fields::{Shape, source_video};
use crate::serve::form::Form;
use crate::serve::generator::{Endpoint, SourceVideo};
use crate::serve::job::AcceptedJob;

pub(super) fn image(name: &str) -> Vec<u8> {
    std::fs::read(format!("tests/fixtures/images/{name}")).expect("a fixture")
}

pub(super) fn data_url(bytes: &[u8]) -> String {
    format!("data:image/png;base64,{}", STANDARD.encode(bytes))
}

/// Returns an MP4 with the given number and size of black frames.
pub(super) fn video(frames: usize, height: usize, width: usize) -> Vec<u8> {
    let file = tempfile::Builder::new().suffix(".mp4").tempfile().expect("a file");
    let frames = Frames::new(Array4::zeros((frames, height, width, 3))).expect("frames");
    let options = Mp4Options { encoder: EncoderChoice::Embedded, ..Mp4Options::default() };
    write_mp4(file.path(), &frames, 24.0, None, &options).expect("an MP4");
    std::fs::read(file.path()).expect("a file")
}

/// Returns a WAV file with one second of audio.
pub(super) fn sound() -> Vec<u8> {
    let file = tempfile::Builder::new().suffix(".wav").tempfile().expect("a file");
    let audio = Audio::new(Array2::from_elem((1, 8000), 0.25), 8000).expect("sound");
    write_wav(file.path(), &audio, WavFormat::Pcm16).expect("a WAV");
    std::fs::read(file.path()).expect("a file")
}

/// Encodes fields and files as a multipart form and converts the form into a job.
fn form(
    server: &TestConverter,
    fields: &[(&str, &str)],
    files: &[(&str, &[u8])],
    endpoint: Endpoint,
) -> Result<AcceptedJob, ApiError> {
    let heads = fields.iter().map(|(name, _)| format!("name=\"{name}\""));
    let named = files.iter().map(|(name, _)| format!("name=\"{name}\"; filename=\"../a\""));
    let heads: Vec<String> = heads.chain(named).collect();
    let contents = fields.iter().map(|(_, text)| text.as_bytes()).chain(files.iter().map(|(_, bytes)| *bytes));
    let parts: Vec<TestPart> = heads.iter().map(String::as_str).zip(contents).collect();
    server.accept(server.read_form(&parts)?, endpoint)
}

pub(super) fn create(
    server: &TestConverter,
    fields: &[(&str, &str)],
    files: &[(&str, &[u8])],
) -> Result<AcceptedJob, ApiError> {
    form(server, &[&[("prompt", "a"), ("seed", "1")], fields].concat(), files, Endpoint::Create)
}

#[test]
fn only_media_fields_and_their_content_members_accept_files() {
    for name in ["input_reference", "input_reference[image_url]", "images[]", "images[0]", "input_audio", "video"] {
        assert!(takes_file(name), "{name}");
    }
    for name in ["images[][strength]", "user", "prompt", "unknown"] {
        assert!(!takes_file(name), "{name}");
    }
}

#[test]
fn image_encodings_give_the_same_job() {
    let (server, bytes) = (TestConverter::new("nano", &[]), image("frame.png"));
    let url = data_url(&bytes);
    let first = create(&server, &[], &[("input_reference", &bytes)]).expect("a file");
    assert_eq!((first.config().pipeline, first.inputs.len()), (Pipeline::ImageToVideo, 1));
    let config = first.config();
    let [given] = &config.request.images[..] else { panic!("one image") };
    assert_eq!((&given.path, given.frame, given.strength), (&first.inputs[0], 0, 1.0));
    let stored = server.folder.path().join("inputs").join(&given.path);
    assert_eq!(read_image(&stored).expect("PNG"), read_image("tests/fixtures/images/frame.png".as_ref()).expect("PNG"));
    for body in [
        json!({"input_reference": url}),
        json!({"input_reference": STANDARD.encode(&bytes)}),
        json!({"input_reference": {"image_url": url}}),
        json!({"input_reference": {"image_url": {"url": url, "detail": "high"}}}),
        json!({"input_reference": {"content": url, "role": "first_frame"}}),
        json!({"input_reference": [{"content": url}]}),
        json!({"image_reference": url}),
        json!({"reference_url": url}),
        json!({"images": [{"data": url, "frame": 0}]}),
    ] {
        let mut body = body;
        body["seed"] = json!(1);
        let accepted = server.good(&body);
        assert_eq!((&accepted.config, &accepted.batch_key), (&first.config, &first.batch_key), "{body}");
        assert!(!serde_json::to_string(&accepted.fields).expect("text").contains("base64"));
    }
    // A list refers to form parts by name.
    let list = r#"[{"file": "one", "frame": 8, "strength": 0.5, "crf": 20}, {"file": "two", "frame": 16}]"#;
    let defaults = [("images", list), ("image_cond_strength", "0.25"), ("image_crf", "0")];
    let accepted = create(&server, &defaults, &[("one", &bytes), ("two", &image("shapes.png"))]).expect("parts");
    let told: Vec<_> = accepted.config().request.images.iter().map(|i| (i.frame, i.strength, i.crf)).collect();
    assert_eq!(told, [(8, 0.5, Some(20)), (16, 0.25, Some(0))]);
    assert_eq!(accepted.inputs.len(), 2);
    // The frame `last` is resolved for any number of frames.
    let both = json!({"seed": 1, "seconds": 2, "input_reference": [
        {"content": url, "role": "last_frame"}, {"content": url, "role": "first_frame"}]});
    let frames: Vec<usize> = server.good(&both).config().request.images.iter().map(|image| image.frame).collect();
    assert_eq!(frames, [48, 0]);
}

#[test]
fn images_are_stored_upright() {
    let server = TestConverter::new("nano", &[]);
    let accepted = create(&server, &[], &[("input_reference", &image("turned_6.jpg"))]).expect("a JPEG");
    let stored = server.folder.path().join("inputs").join(&accepted.inputs[0]);
    let (kept, given) = (read_image(&stored), read_image("tests/fixtures/images/turned_6.jpg".as_ref()));
    assert_eq!(kept.expect("PNG"), given.expect("JPEG"));
    let left: Vec<_> = std::fs::read_dir(server.folder.path().join("inputs")).expect("a folder").collect();
    assert_eq!(left.len(), 1, "no other file is left");
}

#[test]
fn invalid_images_leave_no_files() {
    let server = TestConverter::new("nano", &[]);
    let refused = |bytes: &[u8]| {
        let error = create(&server, &[], &[("image", bytes)]).expect_err("refused");
        assert!(!error.message.contains('/'), "{error}");
        (error.status, error.code, error.param.expect("a field"))
    };
    let huge = std::fs::read("fuzz/seeds/media/huge.png").expect("a seed");
    let cut = image("frame.png");
    let large = [&image("frame.png")[..], &vec![0; 1 << 20]].concat();
    for (bytes, code) in [
        (&b"GIF89a"[..], "invalid_image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "invalid_image"),
        (b"\x89PNG\r\n\x1a\n", "invalid_image"),
        (&cut[..cut.len() / 2], "invalid_image"),
        (&huge, "image_too_large"),
    ] {
        assert_eq!(refused(bytes), (400, code, "image".into()));
    }
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), large.repeat(17)).expect("written");
    let error = server.fields.inputs.keep_image("image", file.path()).expect_err("17 MiB");
    assert_eq!((error.code, error.param.as_deref()), ("image_too_large", Some("image")));
    for cut_at in (0..cut.len()).step_by(41).chain([cut.len() - 1]) {
        drop(create(&server, &[], &[("image", &cut[..cut_at])]));
    }
    let left = std::fs::read_dir(server.folder.path().join("inputs")).expect("a folder").count();
    assert!(left <= 1, "{left} files: at most one, truncated only by its last bytes");
    let both = create(&server, &[], &[("image", &cut), ("image", &cut)]).expect_err("two");
    assert_eq!((both.code, both.param.as_deref()), ("invalid_value", Some("image")));
    let nowhere = create(&server, &[], &[("picture", &cut)]).expect_err("no field");
    assert_eq!((nowhere.code, nowhere.param.as_deref()), ("unknown_field", Some("picture")));
    let text = create(&server, &[], &[("size", b"128x96")]).expect_err("a file");
    assert_eq!((text.code, text.param.as_deref()), ("invalid_value", Some("size")));
}

#[test]
fn audio_is_validated_by_its_contents() {
    let bytes = sound();
    let server = TestConverter::new("nano", &["serve.pipelines=[audio_to_video]"]);
    let accepted = create(&server, &[], &[("input_audio", &bytes)]).expect("a WAV");
    assert_eq!(accepted.config().pipeline, Pipeline::AudioToVideo);
    assert_eq!(at(&accepted, "request.audio.path"), accepted.inputs[0]);
    let url = format!("data:audio/wav;base64,{}", STANDARD.encode(&bytes));
    let again = server.good(&json!({"seed": 1, "audio_reference": url}));
    assert_eq!(again.config, accepted.config);
    let span = server.good(&json!({"seed": 1, "input_audio": {"data": url, "start": "0.25", "duration": 0.5}}));
    assert_eq!(at(&span, "request.audio.start"), 0.25);
    assert_ne!(span.batch_key, accepted.batch_key);
    for bad in [&bytes[..20], b"#EXTM3U\nfile:///etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n"] {
        let error = create(&server, &[], &[("input_audio", bad)]).expect_err("refused");
        assert_eq!((error.code, error.param.as_deref()), ("invalid_audio", Some("input_audio")));
    }
    // The error about a truncated file contains the client's file name and does not mention the server's tools.
    let whole = std::fs::read("tests/fixtures/sounds/tone.mp3").expect("a fixture");
    assert!(create(&server, &[], &[("input_audio", &whole)]).is_ok());
    let mut hole = whole.clone();
    hole[whole.len() / 2..whole.len() / 2 + 300].fill(0x55);
    for bad in [&hole[..], b"no sound at all"] {
        let error = create(&server, &[], &[("input_audio", bad)]).expect_err("refused");
        assert_eq!((error.status, error.code, error.param.as_deref()), (400, "invalid_audio", Some("input_audio")));
        assert!(error.message.starts_with("input_audio (a): "), "{error}");
        assert!(!error.message.contains("ffmpeg") && !error.message.contains('/'), "{error}");
    }
    let late = server.json(&json!({"prompt": "a", "input_audio": {"data": url, "start": 1}}));
    let late = late.expect_err("it ends before");
    assert_eq!((late.code, late.param.as_deref()), ("invalid_audio", Some("input_audio")));
    assert!(late.message.contains("ends after 1.000 s, before its start offset of 1 s"), "{late}");
    // A server that does not enable the audio pipeline rejects the request.
    let plain = TestConverter::new("nano", &[]);
    let error = create(&plain, &[], &[("input_audio", &bytes)]).expect_err("refused");
    assert_eq!(error.code, "invalid_value");
    let silent = create(&server, &[("pipeline", "audio_to_video")], &[]).expect_err("no sound");
    assert_eq!(silent.param.as_deref(), Some("input_audio"));
}

#[test]
fn edits_and_extensions_use_the_uploaded_video() {
    let bytes = video(25, 96, 128);
    let server =
        TestConverter::new("nano", &["serve.pipelines=[retake, extend]", "request.width=64", "request.height=64"]);
    let edit = |fields: &[(&str, &str)], bytes: &[u8]| {
        form(&server, &[&[("prompt", "a"), ("seed", "1")], fields].concat(), &[("video", bytes)], Endpoint::Edit(None))
    };
    let accepted = edit(&[("start", "0.2"), ("end", "0.6")], &bytes).expect("a retake");
    let r = accepted.config().request;
    // The size of the input video overrides the size in the server's configuration.
    assert_eq!(
        (accepted.config().pipeline, r.width, r.height, r.num_frames.count()),
        (Pipeline::Retake, 128, 96, Some(25))
    );
    assert_eq!(r.video.as_ref(), accepted.inputs.first());
    assert_eq!(r.retake.as_ref().map(|span| (span.from, span.to, span.audio)), Some((0.2, Some(0.6), true)));
    let span = edit(&[("retake", r#"{"start": 0.5, "audio": false}"#)], &bytes).expect("a retake");
    assert_eq!(span.config().request.retake.map(|span| (span.from, span.to, span.audio)), Some((0.5, None, false)));
    let empty = edit(&[("start", "0.5"), ("end", "0.5")], &bytes).expect_err("an empty span");
    assert!(empty.message.ends_with("is empty; end must be after start"), "{empty}");
    for (fields, param) in [
        (&[("start", "0.5"), ("end", "0.5")][..], "start"),
        (&[("start", "9")], "start"),
        (&[("start", "0"), ("retake", "{}")], "retake"),
        (&[("start", "0"), ("num_frames", "33")], "num_frames"),
        (&[("start", "0"), ("fps", "12")], "fps"),
        (&[("start", "0"), ("size", "100x96")], "size"),
    ] {
        let error = edit(fields, &bytes).expect_err("refused");
        assert_eq!(error.param.as_deref(), Some(param), "{error}");
        assert!(!error.message.contains('/') && !error.message.contains("--"), "{error}");
    }
    // If the client sends neither a span nor a length, everything after the first frame is regenerated, with the
    // largest supported number of frames.
    for (bytes, frames, warned) in [(&bytes, 25, 1), (&video(30, 96, 128), 25, 2)] {
        let accepted = edit(&[], bytes).expect("a retake without a span");
        let r = accepted.config().request;
        assert_eq!(r.retake.as_ref().map(|span| (span.from, span.to)), Some((0.042, None)));
        assert_eq!((r.num_frames.count(), accepted.num_frames()), (Some(frames), Some(frames)));
        assert_eq!(accepted.warnings.len(), warned, "{:?}", accepted.warnings);
        let again = Form::json(br#"{"prompt": "b"}"#).expect("JSON");
        let again = server.accept(again, Endpoint::Remix(&accepted)).expect("a remix").config().request;
        assert_eq!((again.retake, again.num_frames), (r.retake.clone(), r.num_frames));
    }
    for bad in [&b"RIFF"[..], b"#EXTM3U", &bytes[..200], &video(2, 96, 128)[..64]] {
        let error = edit(&[("start", "0")], bad).expect_err("refused");
        assert_eq!((error.code, error.param.as_deref()), ("invalid_video", Some("video")));
    }
    let none = form(&server, &[("prompt", "a"), ("start", "0")], &[], Endpoint::Edit(None)).expect_err("no video");
    assert_eq!(none.param.as_deref(), Some("video"));

    let extend = |fields: &[(&str, &str)]| {
        form(
            &server,
            &[&[("prompt", "a"), ("seed", "1")], fields].concat(),
            &[("video", &bytes)],
            Endpoint::Extend(None),
        )
    };
    let accepted = extend(&[("seconds", "1"), ("before", "true"), ("overlap", "9")]).expect("an extension");
    assert_eq!(accepted.config().request.num_frames.count(), Some(9 + 24));
    // The expected number of frames is that of the input video plus the added frames.
    assert_eq!(accepted.expected.map(|video| (video.width, video.height, video.num_frames)), Some((128, 96, 25 + 24)));
    assert_eq!((accepted.config().pipeline, accepted.seconds.as_deref()), (Pipeline::Extend, Some("1")));
    assert!(accepted.config().request.extend.is_some_and(|extend| extend.at == ExtendAt::Start));
    for (fields, param) in [
        (&[][..], "seconds"),
        (&[("seconds", "1"), ("overlap", "24")], "seconds"),
        (&[("seconds", "1"), ("overlap", "33")], "seconds"),
        (&[("seconds", "1"), ("num_frames", "33")], "num_frames"),
        (&[("seconds", "60")], "seconds"),
    ] {
        let error = extend(fields).expect_err("refused");
        assert_eq!(error.param.as_deref(), Some(param), "{error}");
    }
    let unserved = form(
        &TestConverter::new("nano", &[]),
        &[("prompt", "a"), ("start", "0")],
        &[("video", &bytes)],
        Endpoint::Edit(None),
    );
    assert_eq!(unserved.expect_err("not served").param.as_deref(), Some("pipeline"));
}

#[test]
fn finished_video_can_be_edited_and_remixed() {
    let server = TestConverter::new("nano", &["serve.pipelines=[retake, extend]"]);
    let source = server.good(&json!({"seed": 5, "steps": 8, "user": "me", "metadata": {"a": "b"}}));
    let file = server.folder.path().join("video.mp4");
    std::fs::write(&file, video(25, 96, 128)).expect("a file");
    let made = SourceVideo { accepted: &source, video: &file };
    let body = json!({"prompt": "b", "seed": 6, "video": {"id": source.id}, "start": 0.5});
    let read = |body: &Value| Form::json(body.to_string().as_bytes()).expect("JSON");
    assert_eq!(source_video(&read(&body)), Ok(Some(source.id.clone())));
    assert_eq!(source_video(&read(&json!({"video": source.id}))), Ok(Some(source.id.clone())));
    assert_eq!(source_video(&read(&json!({"video": "AAAA"}))), Ok(None));
    assert_eq!(source_video(&read(&json!({"video": "video_x"}))).expect_err("none").status, 404);
    let edited = server.accept(read(&body), Endpoint::Edit(Some(made))).expect("an edit");
    assert_eq!((edited.config().pipeline, edited.remixed_from.as_ref()), (Pipeline::Retake, Some(&source.id)));
    assert_eq!(edited.inputs.len(), 1);

    let remix = |source: &AcceptedJob, body: Value| server.accept(read(&body), Endpoint::Remix(source));
    let remixed = remix(&source, json!({"prompt": "c"})).expect("a remix");
    assert_eq!((remixed.prompt(), remixed.config().request.seed, remixed.config().sampler.steps), ("c", 5, 8));
    assert_eq!((remixed.remixed_from.as_ref(), remixed.user, remixed.metadata.len()), (Some(&source.id), None, 0));
    assert_eq!(remixed.batch_key, source.batch_key);
    let other = remix(&source, json!({"prompt": "c", "seed": 9, "sigmas": [1, 0.5], "width": 64})).expect("a remix");
    assert_eq!((other.config().request.seed, other.config().sampler.steps, other.config().request.width), (9, 2, 64));
    let again = remix(&edited, json!({"prompt": "d", "start": 0.25})).expect("a remix of an edit");
    assert_eq!(
        (again.config().pipeline, again.config().request.video),
        (Pipeline::Retake, edited.config().request.video.clone())
    );
    span_by_span(&server, made);
    std::fs::remove_file(server.folder.path().join("inputs").join(&edited.inputs[0])).expect("removed");
    assert_eq!(remix(&edited, json!({"prompt": "d"})).expect_err("gone").status, 410);
    assert_eq!(remix(&source, json!({"prompt": ""})).expect_err("no prompt").code, "missing_prompt");
}

/// A remix that sets one end of the span keeps the other end of its source; the field `retake` replaces both ends.
fn span_by_span(server: &TestConverter, made: SourceVideo) {
    let id = &made.accepted.id;
    let read = |body: &Value| Form::json(body.to_string().as_bytes()).expect("JSON");
    let sources = [
        json!({"start": 0.25, "end": 0.5}),
        json!({"retake": {"start": 0.25, "end": 0.5}}),
        json!({"ltx2": {"request": {"retake": {"from": 0.25, "to": 0.5}}}}),
        json!({"start": 0.25, "ltx2": {"request": {"retake": {"to": 0.5}}}}),
    ];
    for source in sources {
        let mut body = source.clone();
        (body["prompt"], body["seed"], body["video"]) = ("b".into(), 6.into(), id.to_string().into());
        let edited = server.accept(read(&body), Endpoint::Edit(Some(made))).unwrap_or_else(|e| panic!("{body}: {e}"));
        for (body, from, to) in [
            (json!({}), json!(0.25), json!(0.5)),
            (json!({"end": 0.75}), json!(0.25), json!(0.75)),
            (json!({"start": 0.125}), json!(0.125), json!(0.5)),
            (json!({"ltx2": {"request": {"retake": {"to": 0.75}}}}), json!(0.25), json!(0.75)),
            (json!({"ltx2": {"request": {"retake": {"from": 0.125}}}, "end": 0.75}), json!(0.125), json!(0.75)),
            (json!({"retake": {"start": 0.125}}), json!(0.125), Value::Null),
        ] {
            let mut body = body;
            body["prompt"] = "c".into();
            let remix = |of: &AcceptedJob, body: &Value| {
                server.accept(read(body), Endpoint::Remix(of)).unwrap_or_else(|e| panic!("{source} {body}: {e}"))
            };
            let first = remix(&edited, &body);
            for made in [&first, &remix(&first, &json!({"prompt": "d"}))] {
                let got = (at(made, "request.retake.from"), at(made, "request.retake.to"));
                assert_eq!((got, &made.warnings), ((from.clone(), to.clone()), &Vec::new()), "{source} {body}");
            }
        }
    }
}

#[test]
fn reference_videos_are_stored_with_their_masks() {
    let set = ["serve.pipelines=[in_context]", "model.loras=[{path: tests/fixtures/lora/ic_tiny_a.safetensors}]"];
    let server = TestConverter::new("nano", &set);
    let (clip, mask) = (video(25, 96, 128), video(9, 96, 128));
    let list = r#"[{"file": "clip", "strength": 0.5, "mask": "mask", "frames": 9}]"#;
    let size = [("reference_videos", list), ("size", "128x128"), ("num_frames", "25")];
    let accepted = create(&server, &size, &[("clip", &clip), ("mask", &mask)]).expect("references");
    let config = accepted.config();
    let [video] = &config.request.reference_videos[..] else { panic!("one video") };
    assert_eq!((config.pipeline, video.strength, video.frames), (Pipeline::IcLora, 0.5, Some(9)));
    assert_eq!(accepted.inputs.len(), 2);
    assert!(
        accepted.inputs.contains(&video.path)
            && accepted.inputs.contains(video.attention_mask.as_ref().expect("a mask"))
    );
}

#[test]
fn reference_videos_select_ic_lora_and_conversion() {
    let file = "tests/fixtures/lora/ic_tiny_a.safetensors";
    let set = ["serve.pipelines=[in_context]", &format!("serve.ic_loras=[{file}]")];
    let server = TestConverter::new("nano", &set);
    let clip = video(25, 96, 128);
    let with = |preprocess: &str| {
        let list = format!(r#"[{{"file": "clip", "preprocess": {preprocess}}}]"#);
        let lora = format!(r#"{{"name": "{file}", "scale": 0.5}}"#);
        let fields = [("reference_videos", &*list), ("ic_lora", &lora), ("size", "128x128"), ("num_frames", "25")];
        create(&server, &fields, &[("clip", &clip)])
    };
    let config = with(r#""canny""#).expect("a conversion").config();
    let [lora] = &config.model.loras[..] else { panic!("one LoRA") };
    assert_eq!(
        (config.pipeline, &*lora.path, lora.strength, &lora.stages[..]),
        (Pipeline::IcLora, file, 0.5, &[1][..])
    );
    let error = with(r#"{"kind": "blur", "sigma": 16.5}"#).expect_err("a sigma above 16");
    assert!(error.message.contains("16"), "{error}");
    let preprocess = config.request.reference_videos[0].preprocess.as_ref().expect("a conversion");
    assert_eq!(preprocess.filter(), Ok(FrameFilter::Canny { low: 100, high: 200 }));
    let error = with(r#"{"kind": "canny", "low": 300}"#).expect_err("thresholds");
    assert_eq!((error.code, error.param.as_deref()), ("invalid_value", Some("reference_videos")));
    assert!(with(r#""sharpen""#).is_err_and(|error| error.param.as_deref() == Some("reference_videos")));
}

/// Pipelines that need input files are warmed up with synthetic files of the shape's size.
#[test]
fn every_video_pipeline_can_be_warmed_up() {
    let set = [
        "serve.pipelines=[audio_to_video, retake, extend, in_context, keyframes]",
        "model.loras=[{path: tests/fixtures/lora/ic_tiny_a.safetensors}]",
    ];
    let server = TestConverter::new("nano", &set);
    for (pipeline, files) in [
        (Pipeline::TextToVideo, 0),
        (Pipeline::ImageToVideo, 1),
        (Pipeline::Keyframes, 1),
        (Pipeline::AudioToVideo, 1),
        (Pipeline::Retake, 1),
        (Pipeline::Extend, 1),
        (Pipeline::IcLora, 1),
    ] {
        let shape = Shape { width: 128, height: 128, num_frames: 25, pipeline };
        let accepted = server.fields.warm(&shape, None, &server.ids).unwrap_or_else(|error| panic!("{shape}: {error}"));
        assert_eq!(Shape::from_config(&accepted.config()), Some(shape));
        assert_eq!(accepted.inputs.len(), files, "{shape}");
    }
    // An extension that is too short is rejected, because it would be rounded up to another length.
    for (text, is_one) in [("64x64x17@extend", true), ("64x64x9@extend", false), ("64x64x9@retake", true)] {
        let parsed = Shape::parse(text, Pipeline::TextToVideo);
        assert_eq!(parsed.is_ok(), is_one, "{parsed:?}");
        if let Err(error) = parsed {
            assert!(error.contains("64x64x9@extend") && error.contains("at least 17 frames"), "{error}");
            assert!(Shape::parse("64x64x9", Pipeline::Extend).is_err());
        }
    }
}
