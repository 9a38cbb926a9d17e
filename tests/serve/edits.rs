//! Tests of edits and extensions over HTTP, with finished videos and uploaded files as input.

use std::process::Command;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ltx2::serve::store::Variant;
use serde_json::{Value, json};

use crate::scripted::files;
use crate::site::Site;
use crate::support::needs;

/// Returns a form with the fields and with `video` as a file named `file_name`.
fn named_form(fields: &[(&str, &str)], file_name: &str, video: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, value) in fields {
        body.extend(format!("--b\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n").bytes());
    }
    let head = format!("--b\r\ncontent-disposition: form-data; name=\"video\"; filename=\"{file_name}\"\r\n\r\n");
    body.extend(head.bytes());
    body.extend(video);
    body.extend(b"\r\n--b--\r\n");
    body
}

fn form(fields: &[(&str, &str)], video: &[u8]) -> Vec<u8> {
    named_form(fields, "a.mp4", video)
}

#[needs(ffmpeg)]
fn finished_videos_and_files_are_edited_and_extended() {
    let site = Site::new(&["pipelines=[retake, extend]"]);
    let source = site.create("steps=1");
    site.wait(&source);
    let mp4 = &files().iter().find(|(variant, _)| *variant == Variant::Video).expect("a video").1;
    let edit = [("prompt", json!("steps=2")), ("start", json!(0.125)), ("end", json!(0.25))];
    let extend = [("prompt", json!("steps=2")), ("seconds", json!(1)), ("overlap", json!(9))];
    for (path, pipeline, fields) in
        [("/v1/videos/edits", "retake", &edit[..]), ("/v1/videos/extensions", "extend", &extend[..])]
    {
        let mut body: Value = fields.iter().map(|(name, value)| ((*name).to_string(), value.clone())).collect();
        body["video"] = json!({"id": source});
        let made = site.send("POST", path, Some(&body)).json();
        assert_eq!((&made["pipeline"], &made["status"]), (&json!(pipeline), &json!("queued")), "{made}");
        assert_eq!(made["remixed_from_video_id"], json!(source));
        // The result has the size of the input video, not the configured size.
        assert_eq!(made["size"], json!("32x32"));
        assert_eq!(site.wait(made["id"].as_str().expect("an id"))["status"], "completed");

        let text: Vec<(&str, String)> = fields
            .iter()
            .map(|(name, value)| (*name, value.as_str().map_or_else(|| value.to_string(), str::to_string)))
            .collect();
        let text: Vec<(&str, &str)> = text.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let kind = [("content-type", "multipart/form-data; boundary=b")];
        let sent = site.client().roundtrip("POST", path, &kind, Some(&form(&text, mp4))).expect("an answer");
        assert_eq!(sent.status, 200, "{}", sent.text());
        assert_eq!((&sent.json()["pipeline"], &sent.json()["size"]), (&json!(pipeline), &json!("32x32")));
        assert_eq!(sent.json()["remixed_from_video_id"], Value::Null);
        let cut = site.client().roundtrip("POST", path, &kind, Some(&form(&text, &mp4[..200]))).expect("an answer");
        assert_eq!((cut.error().0, cut.error().2.as_deref()), (400, Some("video")), "{}", cut.text());
        let gone = json!({"prompt": "a", "video": {"id": "video_00000000000000000000000000"}});
        assert_eq!(site.send("POST", path, Some(&gone)).error().1, "video_not_found");
    }
    // Some clients refer to the files of a video by index.
    let first = site.get(&format!("/v1/videos/{source}/content?variant=0"));
    assert_eq!((first.status, first.header("content-type")), (200, Some("video/mp4")));
    // OpenAI's client cannot send a time span, so everything after the first frame is regenerated.
    let own = site.send("POST", "/v1/videos/edits", Some(&json!({"prompt": "steps=1", "video": {"id": source}})));
    assert_eq!(own.status, 200, "{}", own.text());
    assert!(own.json()["warnings"].to_string().contains("no span is given"), "{}", own.text());
    // The response contains the duration of the result, which is the input video plus the extension.
    let longer = json!({"prompt": "a", "seconds": 1, "overlap": 9, "video": {"id": source}});
    let longer = site.send("POST", "/v1/videos/extensions", Some(&longer)).json();
    assert_eq!((&longer["num_frames"], &longer["duration_s"]), (&json!(9 + 24), &json!(1.375)), "{longer}");
    site.end();
    // If a server does not enable these pipelines, the error contains the configuration key that enables them.
    let site = Site::new(&[]);
    let source = site.create("steps=1");
    site.wait(&source);
    let refused =
        site.send("POST", "/v1/videos/edits", Some(&json!({"prompt": "a", "video": {"id": source}, "start": 0})));
    assert_eq!(refused.error(), (400, "invalid_value".into(), Some("pipeline".into())));
    assert!(refused.text().contains("serve.pipelines"), "{}", refused.text());
    site.end();
}

/// The server accepts a video in any container that ffmpeg can decode completely. It rejects others immediately, with
/// the field name that the client used.
#[needs(ffmpeg)]
fn undecodable_uploads_are_rejected() {
    let site = Site::new(&["pipelines=[retake]"]);
    let folder = tempfile::tempdir().expect("a folder");
    let made = |name: &str, how: &[&str]| {
        let path = folder.path().join(name);
        let source = ["-y", "-f", "lavfi", "-i", "testsrc2=size=64x32:rate=24", "-frames:v", "25", "-g", "4"];
        let mut ffmpeg = Command::new("ffmpeg");
        let output = ffmpeg.args(["-v", "error"]).args(source).args(how).arg(&path).output().expect("ffmpeg starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        std::fs::read(path).expect("a file")
    };
    let send = |name: &str, bytes: &[u8]| {
        let body = named_form(&[("prompt", "steps=1"), ("start", "0.125"), ("end", "0.25")], name, bytes);
        let kind = [("content-type", "multipart/form-data; boundary=b")];
        site.client().roundtrip("POST", "/v1/videos/edits", &kind, Some(&body)).expect("an answer")
    };
    let matroska = made("whole.mkv", &["-c:v", "mpeg4"]);
    let fragments = ["-c:v", "mpeg4", "-movflags", "+frag_keyframe+empty_moov"];
    for (name, bytes) in [("whole.mkv", &matroska), ("fragments.mp4", &made("fragments.mp4", &fragments))] {
        let sent = send(name, bytes);
        assert_eq!((sent.status, &sent.json()["size"]), (200, &json!("64x32")), "{name}: {}", sent.text());
    }
    let indexed = made("indexed.mp4", &["-c:v", "mpeg4", "-movflags", "+faststart"]);
    let playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n";
    let hdr = ["-c:v", "mpeg4", "-color_trc", "smpte2084", "-color_primaries", "bt2020", "-colorspace", "bt2020nc"];
    let varying = ["-c:v", "mpeg4", "-vf", "select='not(eq(mod(n,3),1))'", "-fps_mode", "vfr"];
    for (name, bytes, why) in [
        ("cut.mkv", &matroska[..matroska.len() * 2 / 3], "is truncated"),
        ("cut.mp4", &indexed[..indexed.len() * 2 / 3], ""),
        ("wide.mkv", &made("wide.mkv", &["-c:v", "mpeg4", "-vf", "setsar=4/3"]), "pixels are not square but 4:3"),
        ("hdr.mkv", &made("hdr.mkv", &hdr), "HDR (PQ)"),
        ("vfr.mkv", &made("vfr.mkv", &varying), "the frame rate varies"),
        ("list.mp4", playlist, "it is damaged or not a video"),
        ("text.mp4", b"no video at all", "it is damaged or not a video"),
    ] {
        let sent = send(&format!("../{name}"), bytes);
        assert_eq!(sent.error(), (400, "invalid_video".into(), Some("video".into())), "{name}: {}", sent.text());
        let said = sent.json()["error"]["message"].as_str().expect("a message").to_string();
        assert!(said.starts_with(&format!("video ({name}): ")) && said.contains(why), "{name}: {said}");
        let is_raw = said.contains(" @ 0x") || said.contains(".part-") || said.contains("inputs");
        assert!(!is_raw && !said.contains('\n'), "{name}: {said}");
    }
    site.end();
}

/// Formats without audio are accepted although audio is not read from them.
#[needs(ffmpeg)]
fn silent_uploads_of_every_format_are_accepted() {
    let site = Site::new(&["pipelines=[retake]"]);
    let folder = tempfile::tempdir().expect("a folder");
    for (name, how) in [
        ("a.gif", &["-c:v", "gif"][..]),
        ("a.y4m", &["-f", "yuv4mpegpipe"]),
        ("a.ivf", &["-c:v", "libvpx"]),
        ("a.apng", &["-f", "apng", "-plays", "0"]),
        ("a.h264", &["-c:v", "libx264", "-bf", "0"]),
        ("a.hevc", &["-c:v", "libx265", "-x265-params", "log-level=none:bframes=0"]),
        ("a.mjpeg", &["-c:v", "mjpeg"]),
        ("a.m2v", &["-c:v", "mpeg2video", "-bf", "0"]),
        ("a.m4v", &["-c:v", "mpeg4", "-f", "m4v"]),
    ] {
        let path = folder.path().join(name);
        let source = ["-y", "-f", "lavfi", "-i", "testsrc2=size=64x32:rate=24", "-frames:v", "25"];
        let mut ffmpeg = Command::new("ffmpeg");
        let output = ffmpeg.args(["-v", "error"]).args(source).args(how).arg(&path).output().expect("ffmpeg starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let fields = [("prompt", "steps=1"), ("start", "0.125"), ("end", "0.25")];
        let body = named_form(&fields, name, &std::fs::read(path).expect("a file"));
        let kind = [("content-type", "multipart/form-data; boundary=b")];
        let sent = site.client().roundtrip("POST", "/v1/videos/edits", &kind, Some(&body)).expect("an answer");
        assert_eq!((sent.status, &sent.json()["size"]), (200, &json!("64x32")), "{name}: {}", sent.text());
    }
    site.end();
}

/// The built-in decoders do not read lossless JPEG and PPM.
#[needs(ffmpeg)]
fn images_that_only_ffmpeg_decodes_are_accepted() {
    let site = Site::new(&[]);
    let folder = tempfile::tempdir().expect("a folder");
    for (name, how) in [("a.jpg", &["-c:v", "ljpeg", "-pix_fmt", "yuvj444p", "-f", "image2"][..]), ("a.ppm", &[])] {
        let path = folder.path().join(name);
        let source = ["-y", "-f", "lavfi", "-i", "testsrc2=size=64x32", "-frames:v", "1"];
        let mut ffmpeg = Command::new("ffmpeg");
        let output = ffmpeg.args(["-v", "error"]).args(source).args(how).arg(&path).output().expect("ffmpeg starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let whole = std::fs::read(path).expect("a file");
        let send = |bytes: &[u8]| {
            let image = STANDARD.encode(bytes);
            site.send("POST", "/v1/videos", Some(&json!({"prompt": "steps=1", "input_reference": image})))
        };
        let sent = send(&whole);
        assert_eq!(sent.status, 200, "{name}: {}", sent.text());
        let cut = send(&whole[..whole.len() / 2]);
        assert_eq!(cut.error(), (400, "invalid_image".into(), Some("input_reference".into())), "{}", cut.text());
    }
    site.end();
}
