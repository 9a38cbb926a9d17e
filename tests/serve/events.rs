//! Tests of event streams.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::api::slower;
use crate::site::{Events, Site, quantile};
use crate::support::needs;

#[needs(nothing)]
fn video_events_report_progress_until_completion() {
    let site = Site::new(&[]);
    let id = site.create("steps=20 ms=5");
    let mut events = Events::subscribe(&site, &format!("/v1/videos/{id}/events"));
    assert_eq!(events.block().as_deref(), Some("retry: 2000"));
    let all: Vec<_> = events.collect();
    let (first, last) = (&all[0], &all[all.len() - 1]);
    assert_eq!((first.0.as_str(), &first.1["id"]), ("video", &json!(id)));
    assert_eq!((last.0.as_str(), &last.1["status"]), ("video", &json!("completed")));
    let progress: Vec<u64> =
        all.iter().filter(|(name, _)| name == "progress").filter_map(|(_, data)| data["progress"].as_u64()).collect();
    assert!(progress.len() > 3 && progress.windows(2).all(|pair| pair[0] <= pair[1]), "{progress:?}");
    assert!(progress.iter().all(|percent| *percent <= 99));
    // The stream of a finished video contains only the complete object.
    let over: Vec<_> = Events::subscribe(&site, &format!("/v1/videos/{id}/events")).collect();
    assert_eq!((over.len(), &over[0].1["status"]), (1, &json!("completed")));
    assert_eq!(site.get("/v1/videos/video_00000000000000000000000000/events").error().1, "video_not_found");
    site.end();
}

#[needs(nothing)]
fn queue_events_report_every_video() {
    let site = Site::new(&[]);
    let before = site.create("steps=1");
    site.wait(&before);
    let mut events = Events::subscribe(&site, "/v1/queue/events");
    let (name, data) = events.next().expect("the queue");
    assert_eq!((name.as_str(), &data["running"], &data["queued"]), ("queue", &json!([]), &json!([])));
    let (slow, quick) = (site.create("steps=60 ms=10"), site.create("steps=1"));
    let cancelled = site.create("steps=1 n=2");
    site.send("POST", &format!("/v1/videos/{cancelled}/cancel"), None);
    let deleted = site.create("steps=1 n=3");
    site.send("DELETE", &format!("/v1/videos/{deleted}"), None);
    let mut ended = Vec::new();
    let mut progress = 0;
    for (name, data) in events.by_ref() {
        match name.as_str() {
            "video" if ["completed", "failed"].contains(&data["status"].as_str().unwrap()) => {
                ended.push(data["id"].as_str().expect("an id").to_string());
            }
            "progress" => progress += 1,
            _ => {}
        }
        if ended.len() == 3 {
            break;
        }
    }
    ended.sort();
    assert_eq!(ended, [slow.as_str(), quick.as_str(), cancelled.as_str()]);
    assert!((1..60).contains(&progress), "{progress}");
    site.send("DELETE", &format!("/v1/videos/{slow}"), None);
    site.end();
}

/// Returns the steps of the previews among events.
fn preview_steps(events: &[(String, serde_json::Value)]) -> Vec<u64> {
    let previews = events.iter().filter(|(name, _)| name == "preview");
    previews.map(|(_, data)| data["step"].as_u64().expect("a step")).collect()
}

#[needs(nothing)]
fn previews_are_sent_only_to_clients_that_ask() {
    let site = Site::new(&[]);
    let id = site.create("steps=12 ms=20 preview=1");
    let path = format!("/v1/videos/{id}/events");
    let streams = [path.clone(), format!("{path}?previews=true"), "/v1/queue/events?previews=true".into()];
    let is_over = |(name, data): &(String, serde_json::Value)| name == "video" && data["status"] == json!("completed");
    let readers = streams.map(|path| {
        let events = Events::subscribe(&site, &path);
        std::thread::spawn(move || {
            let mut all = Vec::new();
            for event in events {
                all.push(event);
                if is_over(&all[all.len() - 1]) {
                    break;
                }
            }
            all
        })
    });
    let [without, of_video, of_queue] = readers.map(|reader| reader.join().expect("read"));
    assert_eq!(preview_steps(&without), Vec::<u64>::new());
    for events in [&of_video, &of_queue] {
        let steps = preview_steps(events);
        assert!(steps.len() > 1 && steps.windows(2).all(|pair| pair[0] < pair[1]), "{steps:?}");
        let (_, preview) = events.iter().find(|(name, _)| name == "preview").expect("a preview");
        assert_eq!((&preview["id"], &preview["phase"], &preview["steps"]), (&json!(id), &json!("denoise"), &json!(12)));
        assert_eq!((&preview["frames"], &preview["columns"], &preview["fps"]), (&json!(4), &json!(2), &json!(3.0)));
        let image = preview["image"].as_str().expect("an image");
        assert!(image.starts_with("data:image/jpeg;base64,") && image.len() > 1024 * 4 / 3, "{}", image.len());
    }
    // The preview is dropped when the video ends.
    let after: Vec<_> = Events::subscribe(&site, &format!("{path}?previews=true")).collect();
    assert_eq!((after.len(), preview_steps(&after).len()), (1, 0));
    let (status, code, _) = site.get(&format!("{path}?previews=1")).error();
    assert_eq!((status, code.as_str()), (400, "invalid_value"));
    assert_eq!(site.get("/v1/queue/events?preview=true").error().1, "unknown_field");
    site.end();
}

/// A client that does not read its stream misses previews; the device does not wait for it.
#[needs(nothing)]
fn slow_clients_do_not_delay_the_device() {
    let site = Site::new(&[]);
    let id = site.create("steps=400 ms=1 preview=64");
    let mut slow = Events::subscribe(&site, &format!("/v1/videos/{id}/events?previews=true"));
    let since = Instant::now();
    site.wait(&id);
    assert!(since.elapsed() < Duration::from_secs(20), "{:?}", since.elapsed());
    let events: Vec<_> = slow.by_ref().collect();
    assert!(preview_steps(&events).len() < 400, "the stream sent every preview");
    assert_eq!(events[events.len() - 1].1["status"], json!("completed"));
    site.end();
}

#[needs(nothing)]
fn removal_of_queued_video_sends_an_event() {
    let site = Site::new(&[]);
    let running = site.create("steps=2000 ms=10");
    let waiting = site.create("steps=1");
    let mut events = Events::subscribe(&site, "/v1/queue/events");
    assert!(events.by_ref().any(|(name, data)| name == "video" && data["id"] == json!(waiting)));
    site.send("DELETE", &format!("/v1/videos/{waiting}"), None);
    assert!(events.by_ref().any(|(name, data)| name == "deleted" && data["id"] == json!(waiting)));
    site.send("DELETE", &format!("/v1/videos/{running}"), None);
    assert!(events.by_ref().any(|(name, data)| name == "deleted" && data["id"] == json!(running)));
    site.end();
}

#[needs(nothing)]
fn event_streams_end_with_the_server() {
    let site = Site::new(&[]);
    let id = site.create("steps=2000 ms=10");
    let of_video = Events::subscribe(&site, &format!("/v1/videos/{id}/events"));
    let of_queue = Events::subscribe(&site, "/v1/queue/events");
    let readers = [of_video, of_queue].map(|events| std::thread::spawn(|| events.last().expect("an event").0));
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(site.end(), 0);
    for reader in readers {
        assert_eq!(reader.join().expect("read"), "shutdown");
    }
}

#[needs(nothing)]
fn event_streams_are_limited_and_shared_between_clients() {
    // The first client can use half of the streams, the second client half of the rest, and so on, so that no client
    // can use all of them.
    const SHARES: [usize; 9] = [128, 64, 32, 16, 8, 4, 2, 1, 1];
    let folder = tempfile::tempdir().expect("a folder");
    let keys: String = (0..SHARES.len()).map(|n| format!("k{n}*:key-number-{n}\n")).collect();
    let keys = crate::auth::keys(folder.path(), &keys, 0o600);
    let site = Site::new(&[&format!("api_key_file={}", keys.display())]);
    let client = |n: usize| site.client().with("authorization", &format!("Bearer key-number-{n}"));
    let made = client(0).send("POST", "/v1/videos", Some(&crate::site::body("steps=4000 ms=10"))).json();
    let id = made["id"].as_str().expect("an id");
    let path = format!("/v1/videos/{id}/events");
    let mut streams: Vec<Events> = Vec::new();
    for (n, share) in SHARES.into_iter().enumerate() {
        streams.extend((0..share).map(|_| Events::open(client(n), &path)));
        let refused = client(n).get(&path);
        let status = if streams.len() < 256 { 429 } else { 503 };
        assert_eq!((refused.error().0, refused.error().1.as_str()), (status, "too_many_streams"), "{n}");
    }
    // Every stream still receives progress events.
    for _ in 0..2 {
        assert!(streams.iter_mut().all(|stream| stream.next().is_some()));
    }
    assert!(client(0).get("/metrics").text().contains("ltx2_http_streams 256"));
    drop(streams);
    crate::scripted::until("places", || client(0).get("/metrics").text().contains("ltx2_http_streams 0"));
    client(0).send("DELETE", &format!("/v1/videos/{id}"), None);
    site.end();
}

/// Measures the time from the request to the first byte of the stream.
#[needs(nothing)]
fn first_byte_of_event_stream_is_immediate() {
    let site = Site::new(&[]);
    let id = site.create("steps=4000 ms=10");
    let mut times: Vec<Duration> = (0..100)
        .map(|_| {
            let client = site.client();
            let since = Instant::now();
            let mut events = Events::open(client, &format!("/v1/videos/{id}/events"));
            assert!(events.block().is_some());
            since.elapsed()
        })
        .collect();
    let (half, most) = (quantile(&mut times, 0.5), quantile(&mut times, 0.99));
    eprintln!("first byte of a stream: p50 {half:?}, p99 {most:?}");
    assert!(
        half < Duration::from_millis(5 * slower()) && most < Duration::from_millis(50 * slower()),
        "{half:?}, {most:?}"
    );
    site.send("DELETE", &format!("/v1/videos/{id}"), None);
    site.end();
}
