//! Tests with slow clients and with many clients.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ltx2::serve::listen::ConnectionLimits;
use ltx2::serve::server::ServerOptions;
use serde_json::json;

use crate::api::slower;
use crate::figures::{FORM, form};
use crate::site::{Client, Site, quantile};
use crate::support::harness::{full, note_figure};
use crate::support::needs;

/// Returns limits that are short enough for a test.
fn short() -> ConnectionLimits {
    ConnectionLimits {
        headers: Duration::from_millis(500),
        body_window: Duration::from_millis(250),
        write: Duration::from_millis(500),
        idle: Duration::from_millis(700),
        ..ConnectionLimits::default()
    }
}

/// Waits until the server closes a connection. Returns how long that took; `None` if the connection stays open.
fn closed(mut stream: TcpStream, within: Duration) -> Option<Duration> {
    let since = Instant::now();
    stream.set_read_timeout(Some(within)).expect("an option");
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => Some(since.elapsed()),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Some(since.elapsed()),
        Err(_) => None,
    }
}

#[needs(nothing)]
fn idle_and_slow_connections_time_out() {
    let site = Site::with(&[], ServerOptions { limits: short(), ..ServerOptions::default() });
    let open = || TcpStream::connect(site.address).expect("a connection");
    let patience = Duration::from_secs(5);
    // The connections send nothing, half a request, a complete request, or a complete request and half of another one.
    let took = closed(open(), patience).expect("closed");
    assert!(took >= Duration::from_millis(400), "{took:?}");
    let mut half = open();
    half.write_all(b"GET /live HTTP/1.1\r\nhost: loc").expect("sent");
    assert!(closed(half, patience).expect("closed") >= Duration::from_millis(400));
    let mut client = site.client();
    assert_eq!(client.get("/live").status, 200);
    let took = closed(client.stream().try_clone().expect("a handle"), patience).expect("closed");
    assert!(took >= Duration::from_millis(600), "{took:?}");
    let mut client = site.client();
    assert_eq!(client.get("/live").status, 200);
    client.stream().write_all(b"GET /li").expect("sent");
    let took = closed(client.stream().try_clone().expect("a handle"), patience).expect("closed");
    assert!(took < Duration::from_millis(700) + Duration::from_secs(1), "{took:?}");
    // A client cannot keep its connection open by sending one byte at a time.
    let mut drops = open();
    let since = Instant::now();
    drops.write_all(b"GET /live HTTP/1.1\r\nx: ").expect("sent");
    while since.elapsed() < Duration::from_secs(3) && drops.write_all(b"a").is_ok() {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(since.elapsed() < Duration::from_secs(2), "{:?}", since.elapsed());
    site.end();
}

#[needs(nothing)]
fn slow_upload_gets_408() {
    let site = Site::with(&["min_upload_rate=1KiB"], ServerOptions { limits: short(), ..ServerOptions::default() });
    let kind = [("content-type", "application/json")];
    for (what, pause) in [("nothing", None), ("ten bytes a second", Some(Duration::from_millis(100)))] {
        let mut client = site.client();
        client.head("POST", "/v1/videos", &kind, Some(100_000)).expect("sent");
        let mut sender = client.stream().try_clone().expect("a handle");
        let over = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&over);
        let sending = std::thread::spawn(move || {
            while let Some(pause) = pause.filter(|_| !stop.load(Ordering::Relaxed)) {
                if sender.write_all(b" ").is_err() {
                    break;
                }
                std::thread::sleep(pause);
            }
        });
        let since = Instant::now();
        let answer = client.answer(false).expect("an answer");
        assert_eq!((answer.error().0, answer.error().1.as_str()), (408, "request_timeout"), "{what}");
        assert!(since.elapsed() < Duration::from_millis(1500), "{what}: {:?}", since.elapsed());
        over.store(true, Ordering::Relaxed);
        sending.join().expect("ended");
    }
    // An upload above the minimum rate may take any time, here six of the intervals in which the rate is measured.
    let text = crate::site::body("steps=1").to_string() + &" ".repeat(10_000);
    let mut client = site.client();
    client.head("POST", "/v1/videos", &kind, Some(text.len())).expect("sent");
    for part in text.as_bytes().chunks(700) {
        client.stream().write_all(part).expect("sent");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(client.answer(false).expect("an answer").status, 200);
    site.end();
}

/// An upload of 90 MB at 600 kB per second takes two and a half minutes. The default minimum rate allows it.
#[needs(full)]
fn long_upload_above_minimum_rate_is_accepted() {
    const BYTES: usize = 90_000_000;
    let site = Site::new(&["body_limit=128MiB"]);
    let head = crate::site::body("steps=1").to_string();
    let mut client = site.client();
    client.head("POST", "/v1/videos", &[("content-type", "application/json")], Some(BYTES)).expect("sent");
    client.stream().write_all(head.as_bytes()).expect("sent");
    let (since, spaces, mut sent) = (Instant::now(), vec![b' '; 60_000], head.len());
    while sent < BYTES {
        let part = spaces.len().min(BYTES - sent);
        client.stream().write_all(&spaces[..part]).expect("the server still reads");
        sent += part;
        std::thread::sleep(Duration::from_secs_f64(sent as f64 / 600e3).saturating_sub(since.elapsed()));
    }
    let answer = client.answer(false).expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    let took = since.elapsed();
    eprintln!("measured: an upload of 90 MB at 600 kB a second is read, in {took:.0?}");
    assert!(took > Duration::from_secs(120));
    site.end();
}

/// A client that does not read its response is disconnected. A client that waits for events is not.
#[needs(nothing)]
fn client_that_does_not_read_is_disconnected() {
    let site = Site::with(&[], ServerOptions { limits: short(), ..ServerOptions::default() });
    let id = site.create("steps=1 bytes=33554432");
    site.wait(&id);
    let mut client = site.client();
    client.head("GET", &format!("/v1/videos/{id}/content?variant=audio"), &[], None).expect("sent");
    std::thread::sleep(Duration::from_millis(2500));
    crate::scripted::until("the connection to be closed", || {
        site.get("/metrics").text().contains("ltx2_http_connections 1\n")
    });
    let slow = site.create("steps=40 ms=50");
    let events: Vec<_> = crate::site::Events::subscribe(&site, &format!("/v1/videos/{slow}/events")).collect();
    assert_eq!(events.last().expect("an event").1["status"], "completed");
    site.end();
}

/// At the connection limit, connections without a complete request are closed first, so that clients that send headers
/// slowly cannot block others.
#[needs(nothing)]
fn slow_header_senders_do_not_block_others() {
    let limits = ConnectionLimits { connections: 32, headers: Duration::from_secs(30), ..ConnectionLimits::default() };
    let site = Site::with(&[], ServerOptions { limits, ..ServerOptions::default() });
    let half: Vec<TcpStream> = (0..100)
        .map(|_| {
            let mut stream = TcpStream::connect(site.address).expect("a connection");
            let _ = stream.write_all(b"GET /live HTTP/1.1\r\n");
            stream
        })
        .collect();
    let since = Instant::now();
    for _ in 0..20 {
        assert_eq!(site.get("/live").status, 200);
    }
    assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
    drop(half);
    site.end();
}

/// Clients that read a KiB of a response per second, send ten bytes of a body per second, or send half a request.
struct Slow {
    held: Vec<TcpStream>,
    over: Arc<AtomicBool>,
    paced: std::thread::JoinHandle<()>,
}

impl Slow {
    fn hold(site: &Site, readers: &[String], halves: usize, senders: usize) -> Self {
        let open = |text: &str| {
            let mut stream = TcpStream::connect(site.address).expect("a connection");
            stream.write_all(text.as_bytes()).expect("sent");
            stream
        };
        let head = |line: &str, more: &str| format!("{line} HTTP/1.1\r\nhost: localhost\r\n{more}\r\n");
        let mut reading: Vec<TcpStream> = readers.iter().map(|path| open(&head(&format!("GET {path}"), ""))).collect();
        let body = "content-type: application/json\r\ncontent-length: 100000\r\n";
        let mut sending: Vec<TcpStream> = (0..senders).map(|_| open(&head("POST /v1/videos", body))).collect();
        let held = (0..halves).map(|_| open("GET /live HTTP/1.1\r\nhost: loc")).collect();
        reading.iter().chain(&sending).for_each(|stream| stream.set_nonblocking(true).expect("an option"));
        let over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&over);
        let paced = std::thread::spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                let since = Instant::now();
                // Errors are ignored, because the server may have disconnected the clients.
                reading.iter_mut().for_each(|stream| drop(stream.read(&mut [0; 1024])));
                sending.iter_mut().for_each(|stream| drop(stream.write(b"          ")));
                while since.elapsed() < Duration::from_secs(1) && !ends.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        });
        Slow { held, over, paced }
    }

    fn end(self) {
        self.over.store(true, Ordering::Relaxed);
        self.paced.join().expect("ended");
        drop(self.held);
    }
}

/// Polls of a running job are answered while hundreds of slow clients are connected. Full test runs also check that the
/// server disconnects slow senders.
#[needs(nothing)]
fn polls_are_answered_despite_slow_clients() {
    let (readers, halves, senders) = if full() { (500, 500, 200) } else { (60, 60, 24) };
    let site = Site::new(&[]);
    let done = site.create("steps=1 bytes=16777216");
    site.wait(&done);
    let id = site.create("steps=100000 ms=10");
    let streams = readers.min(256) / 2;
    let paths = (0..readers).map(|n| match n < streams {
        true => format!("/v1/videos/{id}/events"),
        false => format!("/v1/videos/{done}/content?variant=audio"),
    });
    let slow = Slow::hold(&site, &paths.collect::<Vec<_>>(), halves, senders);
    let mut client = site.client();
    let path = format!("/v1/videos/{id}");
    let mut times: Vec<Duration> = (0..500)
        .map(|_| {
            let since = Instant::now();
            assert_eq!(client.get(&path).status, 200);
            since.elapsed()
        })
        .collect();
    let (half, most) = (quantile(&mut times, 0.5), quantile(&mut times, 0.99));
    eprintln!("polls beside {} slow clients: p50 {half:?}, p99 {most:?}", readers + halves + senders);
    assert!(most < Duration::from_millis(20 * slower()), "{half:?}, {most:?}");
    if full() {
        crate::scripted::until("half heads and slow bodies to be cut", || {
            let text = client.get("/metrics").text();
            let line = text.lines().find_map(|line| line.strip_prefix("ltx2_http_connections "));
            line.and_then(|count| count.parse::<usize>().ok()).is_some_and(|count| count <= readers + 1)
        });
    }
    slow.end();
    site.send("DELETE", &path, None);
    site.end();
}

/// While images that take long to decode are processed, other requests are answered. Requests with files that wait too
/// long are rejected. The test takes half a minute, in which two cores decode.
#[needs(full)]
fn large_image_uploads_do_not_block_others() {
    let site = Site::new(&[]);
    let id = site.create("steps=100000 ms=10");
    let mut png = std::io::Cursor::new(Vec::new());
    image::RgbImage::new(8000, 5000).write_to(&mut png, image::ImageFormat::Png).expect("a PNG");
    let body = form("a", &png.into_inner());
    let most = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..100)
            .map(|_| {
                scope.spawn(|| {
                    let answer = site.client().roundtrip("POST", "/v1/videos", &[("content-type", FORM)], Some(&body));
                    answer.expect("an answer").status
                })
            })
            .collect();
        std::thread::sleep(Duration::from_secs(2));
        // A request without files does not wait for requests with files.
        let since = Instant::now();
        let text = site.send("POST", "/v1/videos", Some(&json!({"prompt": "steps=1"}))).status;
        assert!(
            [200, 429].contains(&text) && since.elapsed() < Duration::from_secs(2),
            "{text} in {:?}",
            since.elapsed()
        );
        let mut most = Duration::ZERO;
        while clients.iter().any(|client| !client.is_finished()) {
            let since = Instant::now();
            assert_eq!(site.get("/metrics").status, 200);
            assert_eq!(site.send("DELETE", "/v1/videos/video_00000000000000000000000000", None).status, 404);
            most = most.max(since.elapsed());
            std::thread::sleep(Duration::from_millis(50));
        }
        let statuses: Vec<u16> = clients.into_iter().map(|client| client.join().expect("asked")).collect();
        assert!(statuses.contains(&200) && statuses.iter().all(|s| [200, 429, 503].contains(s)), "{statuses:?}");
        most
    });
    eprintln!("measured: others wait for {most:.0?} at most while 100 clients send images of 40 million pixels");
    assert!(most < Duration::from_secs(2), "{most:?}");
    site.send("DELETE", &format!("/v1/videos/{id}"), None);
    site.end();
}

/// Sends 10,000 polls over 1,000 connections in full test runs, otherwise a tenth of both.
#[needs(nothing)]
fn polls_of_many_clients_are_answered() {
    let connections = if full() { 1000 } else { 100 };
    let site = Site::new(&[]);
    let id = site.create("steps=100000 ms=10");
    let path = format!("/v1/videos/{id}");
    let threads = 20;
    let answered = AtomicUsize::new(0);
    let mut times: Vec<Duration> = std::thread::scope(|scope| {
        let poll = || {
            let mut clients: Vec<Client> = (0..connections / threads).map(|_| site.client()).collect();
            let mut times = Vec::new();
            for _ in 0..10 {
                // All requests are sent before the first response is read, so that the server handles them
                // concurrently.
                let since = Instant::now();
                for client in &mut clients {
                    client.head("GET", &path, &[], None).expect("sent");
                }
                for client in &mut clients {
                    assert_eq!(client.answer(false).expect("an answer").status, 200);
                    times.push(since.elapsed());
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            }
            times
        };
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(poll)).collect();
        all.into_iter().flat_map(|thread| thread.join().expect("polled")).collect()
    });
    assert_eq!(answered.load(Ordering::Relaxed), 10 * connections);
    let (half, most) = (quantile(&mut times, 0.5), quantile(&mut times, 0.99));
    let is_met = most < Duration::from_millis(250 * slower());
    let figure = format!("{} answered, median {half:.0?}, 99 % within {most:.0?}", times.len());
    if full() {
        note_figure("10,000 polls over 1,000 connections", "all answered, 99 % within 250 ms", &figure, is_met);
    } else {
        assert!(is_met, "{figure}");
    }
    site.send("DELETE", &path, None);
    site.end();
}
