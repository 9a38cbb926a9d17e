//! Tests of the slots in the queue: how many there are, when a request takes one, and which requests need none.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ltx2::config::{CliOverrides, Drain, Serve, load};
use ltx2::serve::device::JobDevice;
use ltx2::serve::job::{JobPhase, JobState};
use ltx2::serve::jobs::Caller;
use ltx2::serve::server::ServerOptions;
use serde_json::{Value, json};

use crate::scripted::{ScriptedDevice, Server, anyone, frames_of, quick_folder, until};
use crate::site::{Answer, Client, Site, body};
use crate::support::needs;

/// Without API keys, only the length of the entire queue is limited. With keys, the number of jobs of each key is
/// limited too.
#[needs(nothing)]
fn default_queue_holds_64_jobs_and_32_per_key() {
    let state = quick_folder();
    let mut settings = Serve::default();
    settings.min_free.0 = 0;
    let server = Server::start(state.path(), settings);
    let running = server.send("fault=hang");
    server.until("the job to run", |jobs| {
        jobs.get(&anyone(), &running).expect("the job").record.state == JobState::InProgress
    });
    (0..32).for_each(|n| drop(server.send(&format!("owner=ann n={n}"))));
    let ann = Caller { name: "ann".into(), sees_all: false };
    assert_eq!(server.jobs.admit(&ann).err().expect("no 33rd of one key").code, "key_queue_full");
    assert_eq!(server.jobs.check_place(&ann).expect_err("nor its body").code, "key_queue_full");
    let waiting: Vec<_> = (0..32).map(|n| server.send(&format!("n={n}"))).collect();
    let refused = server.jobs.admit(&anyone()).err().expect("no 65th");
    assert_eq!((refused.status, refused.code), (429, "queue_full"));
    // Without keys, one client can use all 64 slots.
    (0..32).for_each(|n| drop(server.jobs.cancel(&anyone(), &waiting[n]).expect("cancelled")));
    let ids: Vec<_> = server.jobs.queue(&anyone()).1.iter().map(|job| job.accepted.id.clone()).collect();
    ids.iter().for_each(|id| drop(server.jobs.cancel(&anyone(), id).expect("cancelled")));
    (0..64).for_each(|n| drop(server.send(&format!("again={n}"))));
    assert_eq!(server.jobs.admit(&anyone()).err().expect("no 65th").code, "queue_full");
    server.log.released.store(true, Ordering::Release);
    server.until("an empty queue", |jobs| jobs.queue(&anyone()).1.is_empty());
    server.stop().expect("drained");
}

/// A request whose body does not arrive takes no slot, neither in the queue nor among the bodies that are being read.
#[needs(nothing)]
fn slow_bodies_take_no_queue_slot() {
    let site = Site::new(&["queue=4"]);
    let mut held = Vec::new();
    for length in [1000, 100_000].repeat(20) {
        let mut client = site.client();
        client.head("POST", "/v1/videos", &[("content-type", "application/json")], Some(length)).expect("sent");
        client.stream().write_all(b"{\"prompt\":").expect("sent");
        held.push(client);
    }
    // Waits until the server has read the headers of these requests.
    until("their connections", || site.get("/metrics").text().contains("ltx2_http_connections 41\n"));
    let since = Instant::now();
    let short = site.create("steps=1");
    let long = json!({"prompt": "steps=1", "size": "64x64", "num_frames": 9, "metadata": {"a": "b"}}).to_string();
    let long = long + &" ".repeat(200 << 10);
    let kind = [("content-type", "application/json")];
    let answer = site.client().roundtrip("POST", "/v1/videos", &kind, Some(long.as_bytes())).expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
    site.wait(&short);
    // If the queue is full, the server still says so before the body arrives.
    let running = site.create("steps=100000 ms=10");
    until("the job to run", || site.get("/v1/queue").json()["running"] == json!([running]));
    (0..4).for_each(|n| drop(site.create(&format!("n={n}"))));
    let mut client = site.client();
    let waits = [("content-type", "application/json"), ("expect", "100-continue")];
    client.head("POST", "/v1/videos", &waits, Some(100_000)).expect("sent");
    let refused = client.answer(false).expect("an answer without a body");
    assert_eq!((refused.error().0, refused.error().1.as_str()), (429, "queue_full"));
    drop(held);
    site.end();
}

fn keyed(site: &Site, key: &str, path: &str, body: &Value) -> Answer {
    Client::to(site.address).with("idempotency-key", key).send("POST", path, Some(body))
}

/// An idempotency key belongs to one endpoint and one source video. The earlier job is returned even if the queue is
/// full.
#[needs(nothing)]
fn idempotent_replay_needs_no_queue_slot_but_the_same_endpoint_and_source() {
    let site = Site::new(&["queue=1"]);
    let sources = [1, 2].map(|n| {
        let id = site.create(&format!("steps=1 n={n}"));
        site.wait(&id);
        id
    });
    let remix = |n: usize| format!("/v1/videos/{}/remix", sources[n]);
    let of = |answer: &Answer| answer.json()["id"].as_str().expect("an id").to_string();
    let new = json!({"prompt": "steps=1 again"});
    let first = of(&keyed(&site, "k", &remix(0), &new));
    site.wait(&first);
    assert_eq!(of(&keyed(&site, "k", &remix(0), &new)), first);
    assert_eq!(keyed(&site, "k", &remix(1), &new).error().1, "idempotency_conflict");
    let create = body("steps=1 once");
    let made = of(&keyed(&site, "c", "/v1/videos", &create));
    site.wait(&made);
    assert_eq!(keyed(&site, "c", "/v1/videos/sync", &create).error().1, "idempotency_conflict");
    // Fills the queue. The server then drains.
    let running = site.create("steps=100000 ms=10");
    until("the job to run", || site.get("/v1/queue").json()["running"] == json!([running]));
    site.create("waits");
    assert_eq!(keyed(&site, "other", "/v1/videos", &create).error().1, "queue_full");
    assert_eq!(of(&keyed(&site, "c", "/v1/videos", &create)), made);
    assert_eq!(keyed(&site, "c", "/v1/videos", &body("steps=1 other")).error().1, "idempotency_conflict");
    // The earlier job is returned even if the source video has been deleted.
    assert_eq!(site.send("DELETE", &format!("/v1/videos/{}", sources[0]), None).status, 200);
    assert_eq!(of(&keyed(&site, "k", &remix(0), &new)), first);
    assert_eq!(keyed(&site, "other", &remix(0), &new).error().1, "video_not_found");
    site.server.drain();
    assert_eq!(keyed(&site, "other", "/v1/videos", &create).error().1, "draining");
    assert_eq!(of(&keyed(&site, "c", "/v1/videos", &create)), made);
    assert_eq!(of(&keyed(&site, "k", &remix(0), &new)), first);
    site.end();
}

/// Sends a synchronous request and returns its connection without reading the response.
fn waiting(site: &Site, key: &str, body: &Value) -> Client {
    let mut client = site.client().with("idempotency-key", key);
    let text = body.to_string();
    let kind = [("content-type", "application/json")];
    client.head("POST", "/v1/videos/sync", &kind, Some(text.len())).expect("sent");
    std::io::Write::write_all(client.stream(), text.as_bytes()).expect("sent");
    client
}

/// Several clients wait for the same job with one idempotency key. When the last client disconnects, the job is
/// cancelled, and sending the request again creates a new job.
#[needs(nothing)]
fn disconnected_sync_client_can_send_its_request_again() {
    let site = Site::new(&[]);
    let body = body("steps=300 ms=10");
    let running = || site.get("/v1/queue").json()["running"][0].as_str().map(str::to_string);
    let [first, second] = [(); 2].map(|()| waiting(&site, "k", &body));
    until("the job to run", || running().is_some());
    let id = running().expect("an id");
    // Waits until the server has read the second request.
    std::thread::sleep(Duration::from_millis(100));
    drop(first);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(running(), Some(id.clone()), "one still waits");
    drop(second);
    assert_eq!(site.wait(&id)["error"]["code"], "cancelled");
    let again = keyed(&site, "k", "/v1/videos/sync", &body);
    assert_eq!(again.status, 200, "{}", again.text());
    assert_ne!(again.header("x-video-id"), Some(id.as_str()));
    site.end();
}

/// After a restart, the earlier job is returned before the model is loaded.
#[needs(nothing)]
fn idempotent_replay_needs_no_loaded_model() {
    let folder = quick_folder();
    let state = folder.path().join("state");
    let site = Site::at(state.clone(), &[], ServerOptions::default());
    let made = keyed(&site, "k", "/v1/videos/sync", &body("steps=1"));
    let id = made.header("x-video-id").expect("an id").to_string();
    site.end();
    let (go, goes) = std::sync::mpsc::channel::<()>();
    let set = ["listen=127.0.0.1:0", "min_free=0", "warm=[\"none\"]"].map(|key| format!("serve.{key}"));
    let set = set.into_iter().chain([format!("serve.state={}", state.display())]).collect();
    let loaded = load(&CliOverrides { files: vec!["nano".into()], set, ..CliOverrides::default() });
    let factory = move || {
        goes.recv().expect("the word to go on");
        Ok(Box::new(ScriptedDevice::new(Arc::default())) as Box<dyn JobDevice>)
    };
    let server = ltx2::serve::start(loaded.expect("one"), ServerOptions::default(), Box::new(factory));
    let server = server.expect("a server");
    let send = |key: &str| {
        let mut client = Client::to(server.address()).with("idempotency-key", key);
        client.send("POST", "/v1/videos/sync", Some(&body("steps=1")))
    };
    assert_eq!(send("other").error().1, "starting");
    let again = send("k");
    assert_eq!((again.status, again.header("x-video-id")), (200, Some(id.as_str())));
    go.send(()).expect("the job waits");
    server.wait_ready(Duration::from_secs(30)).expect("ready");
    assert_eq!(server.end(|| false), 0);
}

/// A synchronous request whose job fails receives the job's error. The status is 400 if the request caused the error.
#[needs(nothing)]
fn sync_response_contains_the_error_of_the_failed_job() {
    let site = Site::new(&[]);
    for (fault, status, code, param, kind) in [
        ("given", 400, "invalid_video", Some("input_video"), "invalid_request_error"),
        ("large", 400, "too_large", Some("size"), "invalid_request_error"),
        ("not_finite", 500, "not_finite", None, "server_error"),
    ] {
        let answer = site.send("POST", "/v1/videos/sync", Some(&body(&format!("fault={fault}"))));
        assert_eq!(answer.error(), (status, code.to_string(), param.map(String::from)), "{fault}");
        assert_eq!(answer.header("x-should-retry"), Some("false"));
        let id = site.create(&format!("fault={fault}"));
        let error = &site.wait(&id)["error"];
        assert_eq!((&error["code"], &error["param"], &error["type"]), (&json!(code), &json!(param), &json!(kind)));
        assert_eq!(error["message"], answer.json()["error"]["message"]);
    }
    site.end();
}

/// The server stops within the timeout even if the finisher thread has panicked and the device hangs.
#[needs(nothing)]
fn shutdown_meets_drain_timeout_despite_hung_device() {
    let site = Site::new(&["drain_timeout=300ms"]);
    let bad = site.create("write=panic write_ms=200");
    let hangs = site.create("fault=hang");
    assert_eq!(site.wait(&bad)["error"]["code"], "internal");
    until("the failure", || site.server.has_failed());
    assert_eq!(site.get(&format!("/v1/videos/{hangs}")).json()["status"], "in_progress");
    let (since, log) = (Instant::now(), Arc::clone(&site.log));
    assert_eq!(site.end(), 130);
    assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
    log.released.store(true, Ordering::Release);
}

/// A server stops at once if the only running video was cancelled, although the device still executes its step.
#[needs(nothing)]
fn shutdown_does_not_wait_for_a_cancelled_video() {
    for cancel in [true, false] {
        let site = Site::new(&["drain_timeout=3s"]);
        let hangs = site.create("fault=hang");
        until("the device to run", || site.get(&format!("/v1/videos/{hangs}")).json()["status"] == "in_progress");
        if cancel {
            assert_eq!(site.send("POST", &format!("/v1/videos/{hangs}/cancel"), None).status, 200);
        }
        let (since, log) = (Instant::now(), Arc::clone(&site.log));
        assert_eq!(site.end(), if cancel { 0 } else { 130 });
        assert_eq!(since.elapsed() < Duration::from_secs(2), cancel, "{:?}", since.elapsed());
        log.released.store(true, Ordering::Release);
    }
}

/// A server that is drained at any stage of a video stops without an error, and the next start completes the same
/// video.
#[needs(nothing)]
fn video_drained_at_any_stage_completes_after_restart() {
    let stages = [
        JobPhase::Compiling,
        JobPhase::Loading,
        JobPhase::PromptEnhancer,
        JobPhase::TextEncoder,
        JobPhase::Denoise,
        JobPhase::Upsampler,
        JobPhase::Refine,
        JobPhase::VideoDecoder,
        JobPhase::AudioDecoder,
        JobPhase::Encoding,
    ];
    for (drain, stage) in [Drain::Checkpoint, Drain::Finish].into_iter().flat_map(|d| stages.map(|stage| (d, stage))) {
        let state = quick_folder();
        let mut settings = crate::scripted::settings();
        settings.drain = drain;
        let server = Server::start(state.path(), settings.clone());
        let name = serde_json::to_value(stage).expect("a name");
        let pause = match stage {
            JobPhase::Denoise => "fault=hang at=2".to_string(),
            JobPhase::Encoding => "write_ms=100".into(),
            _ => format!("pause={}", name.as_str().expect("a name")),
        };
        let id = server.send(&pause);
        let waits = server.send("waits");
        server.until(&format!("{stage:?}"), |jobs| {
            let job = jobs.get(&anyone(), &id).expect("the job");
            job.progress.stage == stage && (stage != JobPhase::Denoise || job.progress.step == 2)
        });
        server.jobs.drain();
        server.log.released.store(true, Ordering::Release);
        server.join().unwrap_or_else(|why| panic!("{drain:?} {stage:?}: {why}"));

        let server = Server::start(state.path(), settings);
        server.log.released.store(true, Ordering::Release);
        let found = server.get(&id).record.state;
        let is_made = drain == Drain::Finish || stage == JobPhase::Encoding;
        assert!(!is_made || found == JobState::Completed, "{drain:?} {stage:?}: {found:?}");
        for id in [&id, &waits] {
            let job = server.wait(id);
            assert_eq!(job.record.produced.as_ref().expect("a video").frames_sha256, frames_of(&job.accepted));
            assert_eq!(job.record.attempts, 1, "{drain:?} {stage:?}: a drain is no crash");
        }
        server.stop().expect("drained");
    }
}
