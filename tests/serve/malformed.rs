//! Tests of malformed requests. Each error is one line of JSON that contains the field name and no path, and its status
//! is never 5xx.

use std::io::Write;
use std::time::Duration;

use serde_json::{Value, json};

use crate::site::{Answer, Client, Site, body};
use crate::support::needs;

fn post(client: &mut Client, kind: &str, bytes: &[u8]) -> Answer {
    client.roundtrip("POST", "/v1/videos", &[("content-type", kind)], Some(bytes)).expect("an answer")
}

fn form(parts: &[(&str, &str)]) -> Vec<u8> {
    let mut text = String::new();
    for (name, value) in parts {
        text += &format!("--b\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
    }
    (text + "--b--\r\n").into_bytes()
}

/// Sends requests that must be rejected, and collects those that were not.
struct Refusals<'a> {
    site: &'a Site,
    faults: Vec<String>,
}

impl<'a> Refusals<'a> {
    fn new(site: &'a Site) -> Self {
        Refusals { site, faults: Vec::new() }
    }

    fn unless(&mut self, is_so: bool, fault: impl FnOnce() -> String) {
        if !is_so {
            self.faults.push(fault());
        }
    }

    /// Sends a request and returns its error.
    fn send(&mut self, kind: &str, bytes: &[u8], what: &str) -> (u16, String, Option<String>) {
        let answer = post(&mut self.site.client(), kind, bytes);
        if (400..500).contains(&answer.status) {
            return answer.error();
        }
        let text: String = answer.text().chars().take(200).collect();
        self.faults.push(format!("{what}: {} {text}", answer.status));
        (answer.status, String::new(), None)
    }

    fn end(self) {
        assert!(self.faults.is_empty(), "{}", self.faults.join("\n"));
    }
}

const FORM: &str = "multipart/form-data; boundary=b";
const JSON: &str = "application/json";

#[needs(nothing)]
fn malformed_forms_are_rejected() {
    let site = Site::new(&[]);
    let mut refusals = Refusals::new(&site);
    let good = form(&[("prompt", "steps=1"), ("size", "64x64"), ("num_frames", "9")]);
    for kind in ["multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=other"] {
        let (_, code, _) = refusals.send(kind, &good, kind);
        assert!(["invalid_multipart", "missing_prompt"].contains(&code.as_str()), "{kind}: {code}");
    }
    // A body that is truncated at any byte is rejected and does not cause a server error.
    for cut in 0..good.len() - 4 {
        refusals.send(FORM, &good[..cut], &format!("cut at {cut}"));
    }
    for (what, name) in [
        ("nested brackets", format!("a{}", "[b]".repeat(10_000))),
        ("brackets that do not close", "a[b".into()),
        ("a long name", "a".repeat(100)),
        ("no name", String::new()),
    ] {
        refusals.send(FORM, &form(&[("prompt", "a"), (&name, "1")]), what);
    }
    let (_, _, param) = refusals.send(FORM, &form(&[("prompt", "a"), ("prompt", "b")]), "two prompts");
    assert_eq!(param.as_deref(), Some("prompt"));
    let many: Vec<(&str, &str)> = std::iter::repeat_n(("prompt", "a"), 100_000).collect();
    refusals.send(FORM, &form(&many), "many parts");
    let names: Vec<String> = (0..1000).map(|n| format!("f{n}")).collect();
    let many: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "a")).collect();
    refusals.send(FORM, &form(&many), "many fields");
    let mut wrong = b"--b\r\ncontent-disposition: form-data; name=\"prompt\"\r\n\r\n".to_vec();
    wrong.extend(b"\xff\xfe\xfd\r\n--b--\r\n");
    refusals.send(FORM, &wrong, "no UTF-8");
    let charset = "--b\r\ncontent-disposition: form-data; name=\"prompt\"\r\ncontent-type: text/plain; charset=utf-16\r\n\r\n\
        a\r\n--b--\r\n";
    let answer = post(&mut site.client(), FORM, charset.as_bytes());
    assert!(answer.status < 500, "{}", answer.text());
    assert_eq!(post(&mut site.client(), FORM, &good).status, 200);
    refusals.end();
    site.end();
}

#[needs(nothing)]
fn malformed_json_is_rejected() {
    let site = Site::new(&[]);
    let mut refusals = Refusals::new(&site);
    let deep = |open: &str, close: &str| format!("{{\"prompt\":{}1{}}}", open.repeat(10_000), close.repeat(10_000));
    let digits = "9".repeat(1_000_000);
    for (what, text) in [
        ("nothing", String::new()),
        ("no object", "[]".into()),
        ("text", "\"a\"".into()),
        ("null", "null".into()),
        ("cut", "{\"prompt\": \"a".into()),
        ("more behind it", "{\"prompt\": \"a\"} {}".into()),
        ("deep lists", deep("[", "]")),
        ("deep objects", deep("{\"a\":", "}")),
        ("a long number", format!("{{\"prompt\":\"a\",\"seed\":{digits}}}")),
        ("a long number as text", format!("{{\"prompt\":\"a\",\"seed\":\"{digits}\"}}")),
        ("a number without end", "{\"prompt\":\"a\",\"fps\":1e999}".into()),
        ("a half surrogate", "{\"prompt\":\"\\ud800\"}".into()),
        ("a NUL", "{\"prompt\":\"a\\u0000b\"}".into()),
        ("a key twice", "{\"prompt\":\"a\",\"prompt\":\"b\"}".into()),
    ] {
        refusals.send(JSON, text.as_bytes(), what);
    }
    refusals.send(JSON, b"{\"prompt\":\"\xff\"}", "no UTF-8");
    refusals.end();
    site.end();
}

#[needs(nothing)]
fn invalid_fields_are_named_in_the_error() {
    let site = Site::new(&["max_frames=97"]);
    let mut refusals = Refusals::new(&site);
    for (field, value) in [
        ("prompt", json!("")),
        ("prompt", json!(7)),
        ("prompt", json!("a".repeat(17 << 10))),
        ("size", json!("64x65")),
        ("size", json!("0x0")),
        ("size", json!("-64x64")),
        ("size", json!("99999x99999")),
        ("size", json!("64×64")),
        ("num_frames", json!(10)),
        ("num_frames", json!(105)),
        ("num_frames", json!(-1)),
        ("num_frames", json!("many")),
        ("seconds", json!("-4")),
        ("seconds", json!("1e400")),
        ("fps", json!(0)),
        ("fps", json!("NaN")),
        ("seed", json!("18446744073709551616")),
        ("seed", json!(1.5)),
        ("num_inference_steps", json!(101)),
        ("num_inference_steps", json!(0)),
        ("guidance_scale", json!(31)),
        ("guidance_scale", json!([1])),
        ("model", json!("other")),
        ("n", json!(2)),
        ("video_path", json!("/etc/passwd")),
        ("prompts", json!("a")),
        ("promt", json!("a")),
        ("loras", json!([{"name": "none"}])),
        ("lora", json!({"path": "/etc/passwd"})),
        ("input_reference", json!("data:image/png;base64,AAAA")),
        ("metadata", json!("a")),
        ("ltx2", json!({"model": {"path": "/etc"}})),
        ("ltx2", json!("{")),
    ] {
        let mut body = body("a");
        if field == "seconds" {
            body.as_object_mut().unwrap().remove("num_frames");
        }
        body[field] = value.clone();
        let shown: String = format!("{field} {value}").chars().take(80).collect();
        let (_, code, param) = refusals.send(JSON, body.to_string().as_bytes(), &shown);
        let is_named = param.as_deref().is_some_and(|param| param.starts_with(field));
        refusals.unless(is_named, || format!("{shown}: {code} of {param:?}"));
    }
    let body = json!({"size": "64x64"});
    assert_eq!(
        site.send("POST", "/v1/videos", Some(&body)).error(),
        (400, "missing_prompt".into(), Some("prompt".into()))
    );
    assert_eq!(std::fs::read_dir(site.state.join("jobs")).expect("a folder").count(), 0);
    refusals.end();
    site.end();
}

/// Returns an image file of 124 bytes whose header declares 10^10 pixels.
fn bomb() -> Vec<u8> {
    let mut png = b"\x89PNG\r\n\x1a\n".to_vec();
    let mut chunk = |kind: &[u8], data: &[u8]| {
        png.extend((data.len() as u32).to_be_bytes());
        let mut sum = flate2::Crc::new();
        sum.update(kind);
        sum.update(data);
        png.extend(kind);
        png.extend(data);
        png.extend(sum.sum().to_be_bytes());
    };
    let mut head = 100_000_u32.to_be_bytes().to_vec();
    head.extend(100_000_u32.to_be_bytes());
    head.extend([8, 2, 0, 0, 0]);
    chunk(b"IHDR", &head);
    chunk(b"IDAT", &[0x78, 0x9c, 0x63, 0, 0, 0, 1, 0, 1]);
    chunk(b"IEND", &[]);
    png
}

#[needs(nothing)]
fn decompression_bombs_and_non_images_are_rejected() {
    let site = Site::new(&[]);
    let mut refusals = Refusals::new(&site);
    let polyglot = b"GIF89a/*\x00\x00*/=1;//<svg onload=alert(1)>".to_vec();
    let pdf = b"%PDF-1.7\n\x89PNG\r\n\x1a\n".to_vec();
    for (what, bytes) in
        [("a bomb", bomb()), ("a polyglot", polyglot), ("another", pdf), ("an empty head", b"\x89PNG".to_vec())]
    {
        let mut form = b"--b\r\ncontent-disposition: form-data; name=\"prompt\"\r\n\r\na\r\n--b\r\n\
            content-disposition: form-data; name=\"input_reference\"; filename=\"a.png\"\r\ncontent-type: image/png\r\n\r\n"
            .to_vec();
        form.extend(bytes);
        form.extend(b"\r\n--b--\r\n");
        let (_, code, param) = refusals.send(FORM, &form, what);
        let is_so = ["invalid_image", "image_too_large"].contains(&code.as_str())
            && param.as_deref() == Some("input_reference");
        refusals.unless(is_so, || format!("{what}: {code} of {param:?}"));
    }
    refusals.end();
    site.end();
}

#[needs(nothing)]
fn too_long_bodies_are_rejected() {
    let site = Site::new(&["body_limit=1MiB"]);
    let mut refusals = Refusals::new(&site);
    let long = json!({"prompt": "a".repeat(2 << 20)}).to_string();
    let (status, code, _) = refusals.send(JSON, long.as_bytes(), "said to be too long");
    assert_eq!((status, code.as_str()), (413, "body_too_large"));
    // Sends the same body with chunked encoding, which does not declare the length.
    let mut client = site.client();
    let headers = [("content-type", JSON), ("transfer-encoding", "chunked")];
    client.head("POST", "/v1/videos", &headers, None).expect("sent");
    let chunk = format!("10000\r\n{}\r\n", "a".repeat(0x10000));
    for _ in 0..32 {
        if client.stream().write_all(chunk.as_bytes()).is_err() {
            break;
        }
    }
    let _ = client.stream().write_all(b"0\r\n\r\n");
    let answer = client.answer(false).expect("an answer");
    assert_eq!((answer.error().0, answer.error().1.as_str()), (413, "body_too_large"));
    // The size of a body is also limited on endpoints that do not create videos.
    let cancel = site.client().roundtrip(
        "POST",
        "/v1/videos/video_00000000000000000000000000/cancel",
        &[("content-type", JSON)],
        Some(long.as_bytes()),
    );
    assert_eq!(cancel.expect("an answer").status, 404);
    assert_eq!(site.get("/live").status, 200);
    refusals.end();
    site.end();
}

/// hyper answers bytes that are not HTTP without a body, before they reach the server. Malformed HTTP requests get a
/// JSON response. Other clients are not affected.
#[needs(nothing)]
fn non_http_bytes_are_rejected() {
    let site = Site::new(&[]);
    let long = format!("GET /live HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n", "a".repeat(20 << 10));
    let many = format!("GET /live HTTP/1.1\r\nhost: localhost\r\n{}\r\n", "x: a\r\n".repeat(500));
    let mut wrong = Vec::new();
    for (what, status, is_json, text) in [
        ("noise", 400, false, "\u{1}\u{2}\u{3}\r\n\r\n".to_string()),
        ("no version", 400, false, "GET /live\r\n\r\n".into()),
        ("HTTP/2", 0, false, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".into()),
        ("two lengths", 400, false, "POST /v1/videos HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\na".into()),
        ("length and chunks", 415, true, "POST /v1/videos HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n".into()),
        ("a wrong chunk", 400, true, "POST /v1/videos HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n".into()),
        ("a folded header", 400, false, "GET /live HTTP/1.1\r\nhost: localhost\r\nx: a\r\n b\r\n\r\n".into()),
        ("no host", 421, true, "GET /live HTTP/1.1\r\n\r\n".into()),
        ("long headers", 431, false, long),
        ("many headers", 431, false, many),
    ] {
        let mut client = site.client();
        client.stream().set_read_timeout(Some(Duration::from_secs(20))).expect("an option");
        client.stream().write_all(text.as_bytes()).expect("sent");
        // Status 0 means that there was no response: hyper closes a connection with another protocol.
        let answer = client.answer(false).unwrap_or_default();
        let found = (answer.status, !answer.body.is_empty());
        // If the connection closes while there is unread data, the client may not receive the response.
        let is_lost = what == "long headers" && found.0 == 0;
        if found != (status, is_json) && !is_lost {
            wrong.push(format!("{what}: {found:?} {}", answer.text()));
        } else if is_json {
            answer.error();
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(site.get("/live").status, 200);
    assert!(!site.get("/metrics").text().contains("status=\"5"), "{}", site.get("/metrics").text());
    site.end();
}

#[needs(nothing)]
fn invalid_queries_and_headers_are_rejected() {
    let site = Site::new(&[]);
    let mut client = site.client();
    for query in [
        "limit=a",
        "limit=-1",
        "after=%ff",
        "order=%00",
        "status%5b%5d=a",
        "x=1",
        "limit=1&limit=1",
        "after=../..",
        "%",
    ] {
        let answer = client.get(&format!("/v1/videos?{query}"));
        assert_eq!(answer.error().0, 400, "{query}");
    }
    for (name, value) in [("traceparent", "x"), ("range", "bytes=a"), ("accept", "application/binary")] {
        let answer = client.ask("GET", "/v1/videos", &[(name, value)]);
        assert!(answer.status == 200 || answer.status == 400, "{name}");
    }
    let list: Value = client.get("/v1/videos").json();
    assert_eq!(list["data"], json!([]));
    site.end();
}
