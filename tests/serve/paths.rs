//! Tests that requests can access only the files of their own job.

use std::os::unix::fs::symlink;

use crate::site::Site;
use crate::support::needs;

const ID: &str = "video_01k9zzzzzzzzzzzzzzzzzzzzzz";

#[needs(nothing)]
fn invalid_ids_are_not_found() {
    let site = Site::new(&[]);
    std::fs::write(site.state.join("secret"), "secret").expect("written");
    let upper = ID.to_uppercase();
    let long = format!("{ID}0");
    let far = "a".repeat(4000);
    let mut client = site.client();
    for id in [
        "..",
        "%2e%2e",
        "%2e%2e%2fsecret",
        "..%2f..%2fsecret",
        "%00",
        "video_%00",
        "%2fetc%2fpasswd",
        "C:%5Cx",
        "%5C%5Chost%5Cx",
        "video_",
        "video_..%2f..%2fsecret",
        "video_8zzzzzzzzzzzzzzzzzzzzzzzzz",
        &upper,
        &long,
        &far,
        "video_01k9zzzzzzzzzzzzzzzzzzzzz%0a",
        "%ff%fe",
    ] {
        for (method, end) in [
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/cancel"),
            ("GET", "/content"),
            ("HEAD", "/content"),
            ("GET", "/events"),
            ("GET", "/content?variant=sidecar"),
        ] {
            let answer = client.ask(method, &format!("/v1/videos/{id}{end}"), &[]);
            assert!([400, 404].contains(&answer.status), "{method} {id}{end}: {}", answer.status);
            if method != "HEAD" {
                answer.error();
            }
            assert!(!answer.text().contains("secret"));
        }
    }
    for path in ["/../secret", "/v1/../../secret", "//etc/passwd", "/v1/videos/%2e%2e/content", "/jobs", "/state/lock"]
    {
        let answer = client.get(path);
        assert_eq!(answer.status, 404, "{path}");
    }
    assert_eq!(client.get("/live").status, 200);
    site.end();
}

#[needs(nothing)]
fn links_in_the_state_folder_are_not_followed() {
    let site = Site::new(&[]);
    let outside = tempfile::tempdir().expect("a folder");
    std::fs::write(outside.path().join("video.mp4"), "secret").expect("written");
    let id = site.create("steps=1");
    site.wait(&id);
    let job = site.state.join("jobs").join(&id);
    let path = |variant: &str| format!("/v1/videos/{id}/content?variant={variant}");
    std::fs::remove_file(job.join("thumb.jpg")).expect("removed");
    symlink(outside.path().join("video.mp4"), job.join("thumb.jpg")).expect("a link");
    std::fs::remove_file(job.join("video.json")).expect("removed");
    symlink("/etc/passwd", job.join("video.json")).expect("a link");
    std::fs::remove_file(job.join("sprite.jpg")).expect("removed");
    rustix::fs::mkfifoat(rustix::fs::CWD, job.join("sprite.jpg"), rustix::fs::Mode::RWXU).expect("a pipe");
    for variant in ["thumbnail", "sidecar", "spritesheet"] {
        let answer = site.get(&path(variant));
        assert_eq!((answer.error().0, answer.error().1.as_str()), (404, "no_such_file"), "{variant}");
    }
    assert_eq!(site.get(&path("video")).status, 200);
    // The job's folder itself is replaced by a link.
    std::fs::rename(&job, site.state.join("moved")).expect("moved");
    symlink(outside.path(), &job).expect("a link");
    let answer = site.get(&path("video"));
    assert_eq!((answer.error().0, answer.error().1.as_str()), (404, "no_such_file"));
    std::fs::remove_file(&job).expect("removed");
    site.end();
}

/// The server neither uses the file names that clients send nor follows paths inside uploaded files.
#[needs(nothing)]
fn file_names_and_paths_in_requests_are_not_opened() {
    let site = Site::new(&[]);
    let form = "--b\r\ncontent-disposition: form-data; name=\"prompt\"\r\n\r\na\r\n\
        --b\r\ncontent-disposition: form-data; name=\"input_reference\"; filename=\"../../../etc/cron.d/x\"\r\n\
        content-type: image/png\r\n\r\nno image\r\n--b--\r\n";
    let kind = [("content-type", "multipart/form-data; boundary=b")];
    let answer = site.client().roundtrip("POST", "/v1/videos", &kind, Some(form.as_bytes())).expect("an answer");
    assert_eq!((answer.error().0, answer.error().2.as_deref()), (400, Some("input_reference")));
    assert!(!answer.text().contains("cron"));
    for reference in ["file:///etc/passwd", "/etc/passwd", "http://127.0.0.1/x.png", "../x.png"] {
        let mut body = crate::site::body("a");
        body["input_reference"] = reference.into();
        let answer = site.send("POST", "/v1/videos", Some(&body));
        assert_eq!(answer.error().0, 400, "{reference}: {}", answer.text());
    }
    assert_eq!(std::fs::read_dir(site.state.join("tmp")).expect("a folder").count(), 0);
    assert_eq!(std::fs::read_dir(site.state.join("jobs")).expect("a folder").count(), 0);
    site.end();
}
