//! Tests of API keys, session cookies, origins and host names.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use ltx2::config::{CliOverrides, load};
use ltx2::serve::server::{ServerOptions, StartError};
use serde_json::json;

use crate::site::{Client, Site, body};
use crate::support::needs;

const KEYS: &str = "anna:key-of-anna\nbert:key-of-bert\nroot*:key-of-root\n";

pub fn keys(folder: &Path, text: &str, mode: u32) -> PathBuf {
    let path = folder.join("keys");
    std::fs::write(&path, text).expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("a mode");
    path
}

fn site(folder: &Path) -> Site {
    Site::new(&[&format!("api_key_file={}", keys(folder, KEYS, 0o600).display())])
}

#[needs(nothing)]
fn every_endpoint_except_probes_and_page_requires_a_key() {
    let folder = tempfile::tempdir().expect("a folder");
    let site = site(folder.path());
    let document = site.client().with("authorization", "Bearer key-of-anna").get("/openapi.json").json();
    let open = ["/", "/live", "/health", "/ready", "/session"];
    let mut client = site.client();
    for (path, item) in document["paths"].as_object().expect("paths") {
        let asked = path.replace("{id}", "video_00000000000000000000000000").replace("{model}", "nano");
        for method in item.as_object().expect("methods").keys() {
            if open.contains(&path.as_str()) {
                continue;
            }
            for wrong in
                [None, Some("Bearer key-of-ann"), Some("Bearer "), Some("Basic key-of-anna"), Some("key-of-anna")]
            {
                let headers: Vec<(&str, &str)> = wrong.iter().map(|value| ("authorization", *value)).collect();
                let answer = client.ask(&method.to_uppercase(), &asked, &headers);
                assert_eq!(answer.error(), (401, "invalid_api_key".into(), None), "{method} {path} {wrong:?}");
                assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
            }
        }
    }
    for path in ["/", "/live", "/health", "/ready"] {
        assert_eq!(client.get(path).status, 200, "{path}");
    }
    site.end();
}

#[needs(nothing)]
fn each_key_sees_its_own_videos() {
    let folder = tempfile::tempdir().expect("a folder");
    let site = site(folder.path());
    let as_ = |name: &str| site.client().with("authorization", &format!("Bearer key-of-{name}"));
    let video = as_("anna").send("POST", "/v1/videos", Some(&body("steps=1"))).json();
    let id = video["id"].as_str().expect("an id");
    crate::scripted::until("the video", || {
        as_("anna").get(&format!("/v1/videos/{id}")).json()["status"] == "completed"
    });
    let paths = ["", "/content", "/events"].map(|end| format!("/v1/videos/{id}{end}"));
    for path in &paths {
        assert_eq!(as_("bert").get(path).error(), (404, "video_not_found".into(), None), "{path}");
        assert_eq!(as_("root").get(path).status, 200, "{path}");
    }
    for (method, end) in [("POST", "/cancel"), ("DELETE", "")] {
        let answer = as_("bert").send(method, &format!("/v1/videos/{id}{end}"), None);
        assert_eq!(answer.error().1, "video_not_found");
    }
    let remix = as_("bert").send("POST", &format!("/v1/videos/{id}/remix"), Some(&json!({"prompt": "a"})));
    assert_eq!(remix.error().1, "video_not_found");
    for (name, count) in [("anna", 1), ("bert", 0), ("root", 1)] {
        assert_eq!(as_(name).get("/v1/videos").json()["data"].as_array().map(Vec::len), Some(count), "{name}");
    }
    assert!(!as_("root").get(&paths[0]).text().contains("anna"), "names of keys are nobody's business");
    site.end();
}

#[needs(nothing)]
fn page_exchanges_key_for_cookie() {
    let folder = tempfile::tempdir().expect("a folder");
    let site = site(folder.path());
    assert_eq!(site.send("POST", "/session", None).error().0, 401);
    let answer = site.client().with("authorization", "Bearer key-of-anna").send("POST", "/session", None);
    let cookie = answer.header("set-cookie").expect("a cookie");
    for part in ["HttpOnly", "SameSite=Strict", "Path=/", "Max-Age=43200"] {
        assert!(cookie.contains(part), "{cookie}");
    }
    let pair = cookie.split(';').next().expect("a pair");
    assert!(!pair.contains("anna"));
    assert_eq!(site.client().with("cookie", &format!("a=b; {pair}")).get("/v1/videos").status, 200);
    assert_eq!(site.client().with("cookie", "ltx2_session=0").get("/v1/videos").status, 401);
    // After the keys are reloaded without one of them, the cookies of that key are invalid.
    keys(folder.path(), "bert:key-of-bert\n", 0o600);
    assert_eq!(site.server.reread_keys(), Ok(1));
    assert_eq!(site.client().with("cookie", pair).get("/v1/videos").status, 401);
    keys(folder.path(), KEYS, 0o644);
    assert!(site.server.reread_keys().is_err_and(|why| why.contains("chmod 600")));
    assert_eq!(site.client().with("authorization", "Bearer key-of-bert").get("/v1/videos").status, 200);
    site.end();
}

#[needs(nothing)]
fn other_origins_cannot_send_writes() {
    let site = Site::new(&["cors_origin=[\"https://studio.example\"]"]);
    let kind = ("content-type", "application/json");
    let text = body("steps=1").to_string();
    let own = format!("http://{}", site.address);
    let post = |headers: &[(&str, &str)]| {
        let headers: Vec<(&str, &str)> = headers.iter().copied().chain([kind]).collect();
        site.client().roundtrip("POST", "/v1/videos", &headers, Some(text.as_bytes())).expect("an answer")
    };
    for foreign in [
        &[("origin", "https://evil.example")][..],
        &[("origin", "null")],
        &[("sec-fetch-site", "cross-site")],
        &[("sec-fetch-site", "same-site"), ("origin", "http://127.0.0.1:1")],
    ] {
        assert_eq!(post(foreign).error(), (403, "cross_origin".into(), None), "{foreign:?}");
    }
    for good in [&[][..], &[("origin", own.as_str())], &[("sec-fetch-site", "same-origin")]] {
        assert_eq!(post(good).status, 200, "{good:?}");
    }
    let allowed = post(&[("origin", "https://studio.example"), ("sec-fetch-site", "cross-site")]);
    assert_eq!((allowed.status, allowed.header("access-control-allow-origin")), (200, Some("https://studio.example")));
    let asked = [("access-control-request-method", "POST"), ("origin", "https://evil.example")];
    let preflight = site.client().ask("OPTIONS", "/v1/videos", &asked);
    assert_eq!(preflight.header("access-control-allow-origin"), None);
    assert_eq!(site.get("/v1/videos").json()["data"].as_array().map(Vec::len), Some(4));
    site.end();
}

#[needs(nothing)]
fn unknown_host_names_are_rejected() {
    let site = Site::new(&["allow_host=[\"video.example\"]"]);
    let ask = |host: &str| site.client().ask("GET", "/v1/videos", &[("host", host)]);
    for foreign in ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", ""] {
        assert_eq!(ask(foreign).error(), (421, "wrong_host".into(), None), "{foreign}");
    }
    for own in ["localhost", "localhost:1", "127.0.0.1", "[::1]:9", "video.example", "VIDEO.example:443"] {
        assert_eq!(ask(own).status, 200, "{own}");
    }
    site.end();
}

#[needs(nothing)]
fn other_machines_require_a_key() {
    let folder = tempfile::tempdir().expect("a folder");
    let count = std::cell::Cell::new(0);
    let start = |keys: &[String], options: ServerOptions| {
        count.set(count.get() + 1);
        let own = [
            "listen=0.0.0.0:0".to_string(),
            format!("state={}", folder.path().join(count.get().to_string()).display()),
        ];
        let set = own.iter().chain(keys).map(|key| format!("serve.{key}")).collect();
        let loaded = load(&CliOverrides { files: vec!["nano".into()], set, ..CliOverrides::default() });
        ltx2::serve::start(loaded.expect("a configuration"), options, Box::new(|| Err("no device".into())))
    };
    let refused = start(&[], ServerOptions::default()).err().expect("refused");
    let StartError::Usage(message) = refused else { panic!("{refused}") };
    assert!(message.contains("--api-key-file") && message.contains("--insecure"), "{message}");
    let open = keys(folder.path(), KEYS, 0o640);
    let refused =
        start(&[format!("api_key_file={}", open.display())], ServerOptions::default()).err().expect("refused");
    assert!(matches!(&refused, StartError::Usage(why) if why.contains("chmod 600")), "{refused}");
    for (keys, options) in [
        (vec!["insecure=true".to_string()], ServerOptions::default()),
        (vec![], ServerOptions { key: Some("key-of-the-environment".into()), ..ServerOptions::default() }),
    ] {
        let server = start(&keys, options).expect("a server");
        assert_eq!(server.wait_ready(std::time::Duration::from_secs(10)), Err("no device".into()));
        assert_eq!(server.end(|| false), 1);
    }
}

/// The separate metrics address checks API keys and host names in the same way. Without keys, it requires --insecure to
/// listen for other machines.
#[needs(nothing)]
fn metrics_address_has_the_same_access_rules() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = format!("api_key_file={}", keys(folder.path(), KEYS, 0o600).display());
    let site = Site::new(&[&file, "metrics_listen=127.0.0.1:0", "allow_host=[\"figures.example\"]"]);
    let to = site.server.metrics_address().expect("an address");
    let ask = |headers: &[(&str, &str)]| Client::to(to).ask("GET", "/metrics", headers);
    assert_eq!(ask(&[]).error(), (401, "invalid_api_key".into(), None));
    let key = ("authorization", "Bearer key-of-bert");
    assert_eq!(ask(&[key, ("host", "evil.example")]).error(), (421, "wrong_host".into(), None));
    for host in ["localhost", "figures.example"] {
        let figures = ask(&[key, ("host", host)]);
        assert!(figures.status == 200 && figures.text().contains("ltx2_build_info"), "{host}: {figures:?}");
    }
    let other = Client::to(to).with(key.0, key.1).get("/v1/videos");
    assert_eq!((other.error().0, other.error().1.as_str()), (404, "not_found"));
    site.end();

    let state = format!("serve.state={}", folder.path().join("state").display());
    let start = |more: &[&str]| {
        let set = ["serve.listen=127.0.0.1:0", "serve.metrics_listen=0.0.0.0:0", &state];
        let set = set.iter().chain(more).map(ToString::to_string).collect();
        let loaded = load(&CliOverrides { files: vec!["nano".into()], set, ..CliOverrides::default() });
        ltx2::serve::start(
            loaded.expect("a configuration"),
            ServerOptions::default(),
            Box::new(|| Err("no device".into())),
        )
    };
    let refused = start(&[]).err().expect("refused");
    let StartError::Usage(message) = refused else { panic!("{refused}") };
    assert!(message.contains("--metrics-listen") && message.contains("--insecure"), "{message}");
    let server = start(&["serve.insecure=true"]).expect("a server");
    assert_eq!(server.end(|| false), 1);
}
