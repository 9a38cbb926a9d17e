//! Tests of the HTTP endpoints over real connections.

use std::time::{Duration, Instant};

use ltx2::serve::store::Variant;
use serde_json::{Value, json};

use crate::scripted::files;
use crate::site::{Client, Events, Site, body, quantile};
use crate::support::needs;

#[needs(nothing)]
fn video_is_created_polled_and_downloaded() {
    let site = Site::new(&[]);
    let answer = site.send("POST", "/v1/videos", Some(&body("steps=3 ms=5")));
    assert_eq!(answer.status, 200, "{answer:?}");
    let video = answer.json();
    let id = video["id"].as_str().expect("an id");
    assert_eq!(answer.header("location"), Some(format!("/v1/videos/{id}").as_str()));
    assert_eq!(answer.header("openai-poll-after-ms"), Some("1000"));
    assert_eq!(answer.header("cache-control"), Some("no-store"));
    assert!(answer.header("x-request-id").is_some_and(|id| id.starts_with("req_")));
    assert_eq!((&video["object"], &video["seed"], &video["size"]), (&json!("video"), &json!(7), &json!("64x64")));
    let done = site.wait(id);
    assert_eq!((&done["status"], &done["progress"], &done["error"]), (&json!("completed"), &json!(100), &Value::Null));
    assert!(done["expires_at"].as_u64() > done["completed_at"].as_u64());
    let answer = site.get(&format!("/v1/videos/{id}"));
    assert_eq!(answer.header("openai-poll-after-ms"), None);
    let file = site.get(&format!("/v1/videos/{id}/content"));
    let expected = &files().iter().find(|(variant, _)| *variant == Variant::Video).expect("a video").1;
    assert_eq!((file.status, &file.body), (200, expected));
    assert_eq!(file.header("content-type"), Some("video/mp4"));
    assert_eq!(file.header("content-disposition"), Some(format!("inline; filename=\"{id}.mp4\"").as_str()));
    assert_eq!(file.header("x-content-type-options"), Some("nosniff"));
    assert_eq!(site.end(), 0);
}

#[needs(nothing)]
fn downloads_support_ranges_and_etags() {
    let site = Site::new(&[]);
    let id = site.create("steps=1");
    site.wait(&id);
    let mut client = site.client();
    let kinds = [("thumbnail", "image/jpeg"), ("spritesheet", "image/jpeg"), ("audio", "audio/wav")];
    for (name, kind) in kinds {
        let answer = client.get(&format!("/v1/videos/{id}/content?variant={name}"));
        assert_eq!((answer.status, answer.header("content-type")), (200, Some(kind)), "{name}");
        assert!(!answer.body.is_empty());
    }
    let path = format!("/v1/videos/{id}/content");
    let whole = client.get(&path);
    let tag = whole.header("etag").expect("a tag").to_string();
    let head = client.ask("HEAD", &path, &[]);
    assert_eq!((head.status, head.header("content-length")), (200, whole.header("content-length")));
    let part = client.ask("GET", &path, &[("range", "bytes=4-7")]);
    assert_eq!((part.status, part.body.as_slice()), (206, &b"ftyp"[..]));
    assert_eq!(part.header("content-range"), Some(format!("bytes 4-7/{}", whole.body.len()).as_str()));
    let tail = client.ask("GET", &path, &[("range", "bytes=-10")]);
    assert_eq!(tail.body, whole.body[whole.body.len() - 10..]);
    let beyond = client.ask("GET", &path, &[("range", "bytes=99999999-")]);
    assert_eq!((beyond.status, beyond.error().1.as_str()), (416, "range_not_satisfiable"));
    assert_eq!(client.ask("GET", &path, &[("if-none-match", &tag)]).status, 304);
    assert_eq!(client.ask("GET", &path, &[("if-none-match", "\"other\"")]).status, 200);
    let error = client.get(&format!("{path}?variant=poster")).error();
    assert_eq!(error, (400, "invalid_value".into(), Some("variant".into())));
    site.end();
}

#[needs(nothing)]
fn files_of_hdr_video_are_downloaded_and_deleted() {
    let site = Site::new(&[]);
    let [sdr, hdr] = ["steps=1", "steps=1 hdr=300000"].map(|prompt| site.create(prompt));
    [&sdr, &hdr].into_iter().for_each(|id| drop(site.wait(id)));
    let mut client = site.client();
    for (name, kind, file) in [("hdr_video", "video/mp4", "_hdr.mp4"), ("exr", "application/zip", "_exr.zip")] {
        let path = |id: &str| format!("/v1/videos/{id}/content?variant={name}");
        let answer = client.get(&path(&hdr));
        assert_eq!((answer.status, answer.header("content-type"), answer.body.len()), (200, Some(kind), 300_000));
        let named = format!("inline; filename=\"{hdr}{file}\"");
        assert_eq!(answer.header("content-disposition"), Some(&*named));
        let part = client.ask("GET", &path(&hdr), &[("range", "bytes=299998-")]);
        assert_eq!((part.status, part.body.as_slice()), (206, &[9, 9][..]));
        let none = client.get(&path(&sdr));
        assert_eq!((none.error().0, none.error().1.as_str()), (404, "no_such_file"));
        assert!(none.text().contains(&format!("the video has no {name}")), "{}", none.text());
    }
    let wrong = client.get(&format!("/v1/videos/{hdr}/content?variant=raw"));
    assert!(wrong.text().contains("must be one of video, thumbnail, spritesheet, sidecar, audio, hdr_video, exr"));
    assert_eq!(site.send("DELETE", &format!("/v1/videos/{hdr}"), None).status, 200);
    assert_eq!(client.get(&format!("/v1/videos/{hdr}/content?variant=exr")).error().0, 404);
    site.end();
}

#[needs(nothing)]
fn unfinished_video_has_no_content() {
    let site = Site::new(&[]);
    let running = site.create("steps=1000 ms=20");
    let path = format!("/v1/videos/{running}/content");
    let answer = site.get(&path);
    assert_eq!((answer.error().0, answer.error().1.as_str()), (404, "video_not_ready"));
    let cancelled = site.send("POST", &format!("/v1/videos/{running}/cancel"), None).json();
    assert_eq!((&cancelled["status"], &cancelled["error"]["code"]), (&json!("failed"), &json!("cancelled")));
    let answer = site.get(&path);
    assert_eq!((answer.error().0, answer.error().1.as_str()), (404, "video_failed"));
    let deleted = site.send("DELETE", &format!("/v1/videos/{running}"), None).json();
    assert_eq!(deleted, json!({"id": running, "object": "video.deleted", "deleted": true}));
    let again = site.send("DELETE", &format!("/v1/videos/{running}"), None);
    assert_eq!(again.error(), (404, "video_not_found".into(), None));
    site.end();
}

#[needs(nothing)]
fn lists_are_paginated() {
    let site = Site::new(&[]);
    let mut ids: Vec<String> = (0..7).map(|n| site.create(&format!("steps=1 n={n}"))).collect();
    ids.iter().for_each(|id| drop(site.wait(id)));
    let mut client = site.client();
    let mut read = |order: &str| {
        let (mut found, mut after) = (Vec::new(), String::new());
        loop {
            let page = client.get(&format!("/v1/videos?limit=3&order={order}{after}")).json();
            let of_page = page["data"].as_array().expect("a list").clone();
            assert_eq!(page["first_id"], of_page[0]["id"]);
            found.extend(of_page.iter().map(|video| video["id"].as_str().expect("an id").to_string()));
            if page["has_more"] == false {
                return found;
            }
            after = format!("&after={}", page["last_id"].as_str().expect("an id"));
        }
    };
    assert_eq!(read("asc"), ids);
    ids.reverse();
    assert_eq!(read("desc"), ids);
    let empty = site.get("/v1/videos?status=queued").json();
    assert_eq!((&empty["data"], &empty["has_more"], &empty["first_id"]), (&json!([]), &json!(false), &Value::Null));
    assert_eq!(site.get("/v1/videos?limit=0").error(), (400, "invalid_value".into(), Some("limit".into())));
    site.end();
}

#[needs(nothing)]
fn repeated_idempotent_request_creates_one_job() {
    let site = Site::new(&[]);
    let send = |key: &str, seed: u64| {
        let mut body = body("steps=1");
        body["seed"] = seed.into();
        site.client().with("idempotency-key", key).send("POST", "/v1/videos", Some(&body))
    };
    let first = send("a", 1).json();
    assert_eq!(send("a", 1).json()["id"], first["id"]);
    let other = send("a", 2);
    assert_eq!((other.error().0, other.error().1.as_str()), (409, "idempotency_conflict"));
    assert_eq!(other.header("x-should-retry"), Some("false"));
    assert_ne!(send("b", 1).json()["id"], first["id"]);
    assert_eq!(send(&"x".repeat(129), 1).error().2.as_deref(), Some("Idempotency-Key"));
    site.end();
}

#[needs(nothing)]
fn request_to_full_queue_gets_retry_after_and_leaves_no_files() {
    let site = Site::new(&["queue=2"]);
    let running = site.create("steps=10000 ms=10");
    crate::scripted::until("the job to run", || site.get("/v1/queue").json()["running"] == json!([running]));
    let waiting = [site.create("n=1"), site.create("n=2")];
    let refused = site.send("POST", "/v1/videos", Some(&body("n=3")));
    assert_eq!((refused.error().0, refused.error().1.as_str()), (429, "queue_full"));
    let seconds: u32 = refused.header("retry-after").and_then(|s| s.parse().ok()).expect("seconds");
    assert!((1..=120).contains(&seconds));
    let queue = site.get("/v1/queue").json();
    assert_eq!((&queue["queued"], &queue["limit"]), (&json!(waiting), &json!(2)));
    assert_eq!(std::fs::read_dir(site.state.join("jobs")).expect("a folder").count(), 3);
    assert_eq!(std::fs::read_dir(site.state.join("tmp")).expect("a folder").count(), 0);
    assert!(site.get("/metrics").text().contains("ltx2_queue_rejected_total{reason=\"queue_full\"} 1"));
    site.end();
}

#[needs(nothing)]
fn json_and_form_requests_create_the_same_job() {
    let site = Site::new(&[]);
    let form = "--b\r\ncontent-disposition: form-data; name=\"prompt\"\r\n\r\nsteps=1\r\n\
        --b\r\ncontent-disposition: form-data; name=\"size\"\r\n\r\n64x64\r\n\
        --b\r\ncontent-disposition: form-data; name=\"num_frames\"\r\n\r\n9\r\n\
        --b\r\ncontent-disposition: form-data; name=\"seed\"\r\n\r\n7\r\n--b--\r\n";
    let kind = [("content-type", "multipart/form-data; boundary=b")];
    let answer = site.client().roundtrip("POST", "/v1/videos", &kind, Some(form.as_bytes())).expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    let (form, json) = (answer.json(), site.send("POST", "/v1/videos", Some(&body("steps=1"))).json());
    for key in ["prompt", "size", "num_frames", "seed", "fps", "pipeline", "steps", "model"] {
        assert_eq!(form[key], json[key], "{key}");
    }
    let kind = [("content-type", "application/x-www-form-urlencoded")];
    let answer = site.client().roundtrip("POST", "/v1/videos", &kind, Some(b"prompt=a")).expect("an answer");
    assert_eq!((answer.error().0, answer.error().1.as_str()), (415, "unsupported_media_type"));
    site.end();
}

/// The server accepts the same audio formats as `ltx2 generate`.
#[needs(ffmpeg)]
fn audio_that_only_ffmpeg_decodes_is_accepted() {
    let site = Site::new(&["pipelines=[audio_to_video]"]);
    let sound = std::fs::read("tests/fixtures/sounds/tone.opus").expect("a fixture");
    let send = |sound: &[u8]| {
        let head = "--b\r\ncontent-disposition: form-data; name=\"prompt\"\r\n\r\nsteps=1\r\n\
            --b\r\ncontent-disposition: form-data; name=\"input_audio\"; filename=\"C:\\music\\a.opus\"\r\n\r\n";
        let form = [head.as_bytes(), sound, b"\r\n--b--\r\n"].concat();
        let kind = [("content-type", "multipart/form-data; boundary=b")];
        site.client().roundtrip("POST", "/v1/videos", &kind, Some(&form)).expect("an answer")
    };
    let folder = tempfile::tempdir().expect("a folder");
    let encoded = |name: &str, how: &[&str]| {
        let path = folder.path().join(name);
        let mut ffmpeg = std::process::Command::new("ffmpeg");
        ffmpeg.args(["-v", "error", "-i", "tests/fixtures/sounds/tone.opus"]).args(how).arg(&path);
        assert!(ffmpeg.status().expect("ffmpeg runs").success(), "{name}");
        std::fs::read(path).expect("encoded")
    };
    let ogg = encoded("a.ogg", &["-c:a", "libvorbis"]);
    let video = ["-f", "lavfi", "-i", "testsrc=size=64x64:rate=24:duration=0.2", "-c:v", "libx265", "-x265-params"];
    let sounds = [
        sound.clone(),
        [ogg.clone(), ogg].concat(),
        encoded("a.m4a", &["-c:a", "aac", "-movflags", "frag_keyframe+empty_moov"]),
        encoded("a.mp4", &[&video[..], &["log-level=none", "-c:a", "aac"]].concat()),
    ];
    for (n, sound) in sounds.iter().enumerate() {
        let answer = send(sound);
        assert_eq!(
            (answer.status, &answer.json()["pipeline"]),
            (200, &json!("audio_to_video")),
            "{n}: {}",
            answer.text()
        );
    }
    let cut = send(&sound[..60]);
    assert_eq!(cut.error(), (400, "invalid_audio".into(), Some("input_audio".into())), "{}", cut.text());
    assert!(cut.text().contains("a.opus") && !cut.text().contains("ffmpeg"), "{}", cut.text());
    site.end();
}

#[needs(nothing)]
fn sync_request_returns_the_video() {
    let site = Site::new(&[]);
    let answer = site.send("POST", "/v1/videos/sync", Some(&body("steps=2 ms=5")));
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("video/mp4")), "{}", answer.text());
    let id = answer.header("x-video-id").expect("an id").to_string();
    assert_eq!(site.wait(&id)["status"], "completed");
    assert!(answer.header("x-inference-time-s").is_some_and(|s| s.parse::<f64>().is_ok()));
    let stages: Value = serde_json::from_str(answer.header("x-stage-durations").expect("stages")).expect("JSON");
    assert!(stages["total"].is_number());
    assert!(answer.header("server-timing").is_some_and(|text| text.contains("total;dur=")));
    // When the client of a synchronous request disconnects, its video is cancelled.
    let mut client = site.client();
    let text = body("steps=10000 ms=10").to_string();
    let kind = [("content-type", "application/json")];
    client.head("POST", "/v1/videos/sync", &kind, Some(text.len())).expect("sent");
    std::io::Write::write_all(client.stream(), text.as_bytes()).expect("sent");
    crate::scripted::until("the job to run", || site.get("/v1/queue").json()["running"] != json!([]));
    let id = site.get("/v1/queue").json()["running"][0].as_str().expect("an id").to_string();
    drop(client);
    assert_eq!(site.wait(&id)["error"]["code"], "cancelled");
    site.end();
}

#[needs(nothing)]
fn sync_timeout_returns_id_and_video_continues() {
    let site = Site::new(&["sync_timeout=200ms"]);
    let answer = site.send("POST", "/v1/videos/sync", Some(&body("steps=40 ms=20")));
    assert_eq!((answer.error().0, answer.error().1.as_str()), (504, "sync_timeout"));
    let text = answer.text();
    let id = &text[text.find("video_").expect("an id")..][..32];
    assert_eq!(site.wait(id)["status"], "completed");
    site.end();
}

#[needs(nothing)]
fn remix_inherits_unset_fields_from_source() {
    let site = Site::new(&[]);
    let source = site.create("steps=1");
    let path = format!("/v1/videos/{source}/remix");
    site.wait(&source);
    let remix = site.send("POST", &path, Some(&json!({"prompt": "steps=2"}))).json();
    assert_eq!(remix["remixed_from_video_id"], json!(source));
    for (key, value) in
        [("size", json!("64x64")), ("num_frames", json!(9)), ("seed", json!(7)), ("prompt", json!("steps=2"))]
    {
        assert_eq!(remix[key], value, "{key}");
    }
    let running = site.create("steps=1000 ms=20");
    let answer = site.send("POST", &format!("/v1/videos/{running}/remix"), Some(&json!({"prompt": "a"})));
    assert_eq!((answer.error().0, answer.error().1.as_str()), (404, "video_not_ready"));
    site.end();
}

#[needs(nothing)]
fn models_loras_and_server_info_are_listed() {
    let site = Site::new(&[]);
    let list = site.get("/v1/models").json();
    let card = &list["data"][0];
    let name = card["id"].as_str().expect("a name");
    for key in ["pipelines", "shapes", "defaults", "limits", "loras", "size_aliases"] {
        assert!(!card[key].is_null(), "{key}: {card}");
    }
    for name in card["pipelines"].as_array().expect("names") {
        let inputs = &card["pipeline_inputs"][name.as_str().expect("a name")];
        // A request with images runs `image_to_video`.
        let images = if name == "text_to_video" { "optional" } else { "required" };
        assert_eq!((&inputs["images"], &inputs["video"]), (&json!(images), &json!(null)), "{card}");
    }
    assert_eq!(site.get(&format!("/v1/models/{name}")).json()["id"], json!(name));
    assert_eq!(site.get("/v1/models/other").error().1, "model_not_found");
    assert_eq!(site.get("/v1/list_loras").json(), json!({"loaded_adapters": [], "active": []}));
    for path in ["/v1/set_lora", "/v1/merge_lora_weights", "/v1/unmerge_lora_weights"] {
        let refused = site.send("POST", path, Some(&json!({"lora_nickname": "a"})));
        assert_eq!(refused.error(), (400, "unsupported".into(), Some("lora".into())));
    }
    let refused = site.send("POST", "/v1/videos/characters", Some(&json!({})));
    assert_eq!((refused.error().0, refused.error().1.as_str()), (404, "unsupported_endpoint"));
    for (path, status) in [("/live", "live"), ("/health", "ok"), ("/ready", "ready")] {
        let answer = site.get(path);
        assert_eq!((answer.status, &answer.json()["status"]), (200, &json!(status)), "{path}");
    }
    assert_eq!(site.get("/version").json()["name"], "ltx2");
    let page = site.get("/");
    assert!(page.header("content-security-policy").is_some_and(|policy| policy.contains("default-src 'none'")));
    assert_eq!(site.get("/v1/none").error().1, "not_found");
    assert_eq!(site.send("DELETE", "/v1/videos", None).error().1, "method_not_allowed");
    site.end();
}

/// A cancelled or deleted video remains in the queue listing while it still runs on the device.
#[needs(nothing)]
fn cancelled_video_is_listed_while_device_works() {
    for (method, end) in [("POST", "/cancel"), ("DELETE", "")] {
        let site = Site::new(&[]);
        let id = site.create("fault=hang");
        crate::scripted::until("the job to run", || site.get("/v1/queue").json()["running"] == json!([id]));
        assert_eq!(site.get("/v1/queue").json()["stopping"], json!([]));
        assert_eq!(site.send(method, &format!("/v1/videos/{id}{end}"), None).status, 200);
        let queue = site.get("/v1/queue").json();
        assert_eq!((&queue["running"], &queue["stopping"]), (&json!([id]), &json!([id])), "{method}: {queue}");
        let mut events = Events::subscribe(&site, "/v1/queue/events");
        assert_eq!(events.next().expect("the queue").1["stopping"], json!([id]));
        site.log.released.store(true, std::sync::atomic::Ordering::Release);
        let over = |(name, data): (String, serde_json::Value)| name == "queue" && data["stopping"] == json!([]);
        assert!(events.any(over), "{method}");
        assert_eq!(site.get("/v1/queue").json()["running"], json!([]));
        site.end();
    }
}

/// While every request is rejected with 507, the probes report the full disk.
#[needs(nothing)]
fn probes_report_a_full_disk() {
    let site = Site::new(&["min_free=1000000GiB"]);
    for path in ["/health", "/ready"] {
        let answer = site.get(path);
        assert_eq!((answer.status, &answer.json()["status"]), (503, &json!("insufficient_storage")));
        assert!(
            answer.json()["reason"].as_str().is_some_and(|why| why.contains("serve.min_free")),
            "{}",
            answer.text()
        );
    }
    assert_eq!(site.get("/live").status, 200);
    let refused = site.send("POST", "/v1/videos", Some(&body("a")));
    assert_eq!((refused.error().0, refused.error().1.as_str()), (507, "insufficient_storage"));
    site.end();
}

/// The OpenAPI document lists exactly the endpoints that the router serves.
#[needs(nothing)]
fn openapi_document_matches_router() {
    let site = Site::new(&[]);
    let document = site.get("/openapi.json").json();
    assert_eq!(document["security"], json!(null), "a server without keys asks for none");
    let paths = document["paths"].as_object().expect("paths");
    assert!(paths.len() > 20);
    let mut client = site.client();
    for (path, item) in paths {
        let asked = path.replace("{id}", "video_00000000000000000000000000").replace("{model}", "none");
        for method in ["get", "post", "delete", "put", "patch"] {
            let is_stream = path == "/v1/queue/events" && method == "get";
            if is_stream {
                continue;
            }
            let answer = client.roundtrip(&method.to_uppercase(), &asked, &[], None).expect("an answer");
            let known = item.get(method).is_some();
            assert_eq!(answer.status != 405, known, "{method} {path}: {}", answer.status);
            let found = answer.status != 404 || !["not_found"].contains(&answer.error().1.as_str());
            assert!(found, "{method} {path} is no route");
        }
    }
    // The document lists the same request fields as the field table.
    let fields = document["components"]["schemas"]["Create"]["properties"].as_object().expect("fields");
    for name in ["prompt", "size", "seconds", "seed", "negative_prompt", "ltx2", "input_reference"] {
        assert!(fields.contains_key(name), "{name}");
    }
    site.end();
}

#[needs(nothing)]
fn shutdown_keeps_unfinished_jobs() {
    let folder = crate::scripted::quick_folder();
    let site = Site::at(folder.path().join("state"), &["drain=checkpoint"], Default::default());
    let (running, waiting) = (site.create("steps=2000 ms=5 every=1"), site.create("steps=1"));
    crate::scripted::until("the job to run", || site.get("/v1/queue").json()["running"] == json!([running]));
    site.server.drain();
    let ready = site.get("/ready");
    assert_eq!((ready.status, &ready.json()["status"]), (503, &json!("draining")));
    let refused = site.send("POST", "/v1/videos", Some(&body("a")));
    assert_eq!((refused.error().0, refused.error().1.as_str()), (503, "draining"));
    assert!(refused.header("retry-after").is_some());
    let since = Instant::now();
    assert_eq!(site.end(), 0);
    assert!(since.elapsed() < Duration::from_secs(2), "{:?}", since.elapsed());
    let site = Site::at(folder.path().join("state"), &["drain=finish", "drain_timeout=100ms"], Default::default());
    for id in [&running, &waiting] {
        assert!(
            ["queued", "in_progress"]
                .contains(&site.get(&format!("/v1/videos/{id}")).json()["status"].as_str().unwrap())
        );
    }
    crate::scripted::until("the job to run", || site.get("/v1/queue").json()["running"] == json!([running]));
    // The drain timeout expires before the video is finished.
    assert_eq!(site.end(), 130);
}

#[needs(nothing)]
fn failed_device_makes_server_exit_with_code_1() {
    let site = Site::new(&[]);
    let id = site.create("fault=device");
    assert_eq!(site.wait(&id)["error"]["code"], "device_error");
    crate::scripted::until("the failure", || site.server.has_failed());
    crate::scripted::until("probes to say so", || site.get("/health").status == 503);
    let refused = site.send("POST", "/v1/videos", Some(&body("a")));
    assert_eq!((refused.error().0, refused.error().1.as_str()), (503, "device_failed"));
    assert_eq!(site.end(), 1);
}

/// The server detects a hung device by comparing the time without progress to the usual step time.
#[needs(nothing)]
fn hung_device_makes_health_probe_fail() {
    let patience = Some(Duration::from_millis(50));
    let site = Site::with(&[], ltx2::serve::server::ServerOptions { patience, ..Default::default() });
    let id = site.create("steps=20 ms=1 fault=hang at=10");
    crate::scripted::until("probes to say so", || site.get("/health").status == 503);
    assert_eq!(site.get("/health").json()["status"], "stuck");
    site.log.released.store(true, std::sync::atomic::Ordering::Release);
    assert_eq!(site.wait(&id)["status"], "completed");
    assert_eq!(site.get("/health").status, 200);
    site.end();
}

/// Measures the server's overhead: the time from sending a request until its video is `completed`, on a device that
/// needs almost no time.
#[needs(nothing)]
fn request_overhead_is_small() {
    let site = Site::new(&[]);
    let mut client = site.client();
    let mut times = Vec::new();
    for round in 0..60 {
        let since = Instant::now();
        let answer = client.send("POST", "/v1/videos", Some(&body(&format!("steps=1 round={round}"))));
        let id = answer.json()["id"].as_str().expect("an id").to_string();
        loop {
            let video = client.get(&format!("/v1/videos/{id}")).json();
            if video["status"] == "completed" {
                break;
            }
            assert_ne!(video["status"], "failed", "{video}");
        }
        times.push(since.elapsed());
    }
    let (half, most) = (quantile(&mut times, 0.5), quantile(&mut times, 0.99));
    eprintln!("overhead of a request: p50 {half:?}, p99 {most:?}");
    assert!(
        half < Duration::from_millis(20 * slower()) && most < Duration::from_millis(60 * slower()),
        "{half:?}, {most:?}"
    );
    let metrics = site.get("/metrics").text();
    assert!(metrics.contains("ltx2_overhead_seconds_count 60"), "{metrics}");
    site.end();
}

/// Returns the factor by which latency limits are relaxed: 4 in debug builds while other tests run, otherwise 1 (`make
/// serve-load` and full test runs).
pub fn slower() -> u64 {
    // `full()` is not called here, because it would record that the test has a short form.
    if cfg!(debug_assertions) && std::env::var_os("LTX2_TEST_FULL").is_none() { 4 } else { 1 }
}

/// The client's request id is returned, also in later requests on the same connection.
#[needs(nothing)]
fn client_request_ids_are_returned() {
    let site = Site::new(&[]);
    let mut client: Client = site.client();
    for id in ["a-1", "b.2"] {
        assert_eq!(client.ask("GET", "/live", &[("x-request-id", id)]).header("x-request-id"), Some(id));
    }
    let made = client.ask("GET", "/live", &[("x-request-id", "a b")]);
    assert!(made.header("x-request-id").is_some_and(|id| id.starts_with("req_")));
    site.end();
}
