//! Edits and extensions over HTTP, of finished videos and of files.

use ltx2::serve::store::Variant;
use serde_json::{Value, json};

use crate::scripted::files;
use crate::site::Site;
use crate::support::needs;

/// A request as a form, with the video as a file.
fn form(fields: &[(&str, &str)], video: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, value) in fields {
        body.extend(format!("--b\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n").bytes());
    }
    body.extend(b"--b\r\ncontent-disposition: form-data; name=\"video\"; filename=\"a.mp4\"\r\n\r\n");
    body.extend(video);
    body.extend(b"\r\n--b--\r\n");
    body
}

#[needs(nothing)]
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
        // The size is the given video's, not the configuration's.
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
    site.end();
    // A server that was not started for them says what to write.
    let site = Site::new(&[]);
    let source = site.create("steps=1");
    site.wait(&source);
    let refused =
        site.send("POST", "/v1/videos/edits", Some(&json!({"prompt": "a", "video": {"id": source}, "start": 0})));
    assert_eq!(refused.error(), (400, "invalid_value".into(), Some("pipeline".into())));
    assert!(refused.text().contains("serve.pipelines"), "{}", refused.text());
    site.end();
}
