//! A client of HTTP that shows every byte: connections that stay open, headers as they are given, time-outs on everything.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use ltx2::config::{CliOverrides, load};
use ltx2::serve::device::Device;
use ltx2::serve::server::{Options, Server};
use serde_json::Value;

/// Longest time that an answer takes.
const SECONDS: u64 = 60;

/// A server over HTTP with the toy model's configuration and `serve.*` keys of one's own, on a device of tests; it is ready.
pub fn server<D: Device + 'static>(folder: &Path, set: &[&str], device: impl FnOnce() -> D + Send + 'static) -> Server {
    let state = format!("serve.state={}", folder.join("state").display());
    let own = [&state, "serve.listen=127.0.0.1:0", "serve.warm=[none]", "serve.min_free=0"];
    let set = own.into_iter().chain(set.iter().copied()).map(String::from).collect();
    let given = CliOverrides { files: vec!["configs/nano.yml".into()], set, ..CliOverrides::default() };
    let loaded = load(&given).expect("a configuration");
    let factory = || -> Result<Box<dyn Device>, String> { Ok(Box::new(device())) };
    let server = Server::start(loaded, Options::default(), Box::new(factory)).expect("a server");
    server.wait_ready(Duration::from_secs(SECONDS)).expect("it is ready");
    server
}

/// An answer, with header names in lower case.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
}

impl Answer {
    /// The body; null where it is no JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// The id of the video that was made.
    pub fn id(&self) -> String {
        let text = String::from_utf8_lossy(&self.body);
        assert_eq!(self.status, 200, "{text}");
        self.json()["id"].as_str().unwrap_or_else(|| panic!("no id in {text}")).into()
    }
}

/// A connection to a server; it stays open between requests.
pub struct Connection {
    reader: BufReader<TcpStream>,
    to: SocketAddr,
}

impl Connection {
    pub fn open(to: SocketAddr) -> Self {
        let stream = TcpStream::connect(to).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(SECONDS))).expect("a time-out");
        stream.set_nodelay(true).expect("no delay");
        Connection { reader: BufReader::new(stream), to }
    }

    /// Sends a request, and reads the head of its answer.
    fn begin(&mut self, method: &str, path: &str, headers: &BTreeMap<String, String>, body: &[u8]) -> Answer {
        let own: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let head =
            format!("{method} {path} HTTP/1.1\r\nhost: {}\r\ncontent-length: {}\r\n{own}\r\n", self.to, body.len());
        let mut bytes = head.into_bytes();
        bytes.extend(body);
        self.reader.get_mut().write_all(&bytes).expect("sent");
        let status = self.line().split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        let mut headers = BTreeMap::new();
        loop {
            let line = self.line();
            let Some((name, value)) = line.split_once(": ") else { break };
            headers.insert(name.to_lowercase(), value.to_string());
        }
        Answer { status, headers, body: Vec::new() }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.reader.read_line(&mut line).expect("a line");
        line.trim_end().into()
    }

    /// Sends a request, and reads its whole answer.
    pub fn send(&mut self, method: &str, path: &str, headers: &BTreeMap<String, String>, body: &[u8]) -> Answer {
        let mut answer = self.begin(method, path, headers, body);
        if method == "HEAD" {
            return answer;
        }
        if let Some(length) = answer.headers.get("content-length").and_then(|length| length.parse().ok()) {
            answer.body = vec![0; length];
            self.reader.read_exact(&mut answer.body).expect("a body");
        } else if answer.headers.contains_key("transfer-encoding") {
            while let Some(chunk) = self.chunk() {
                answer.body.extend(chunk);
            }
        }
        answer
    }

    /// A chunk of a body whose length is not known.
    fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = usize::from_str_radix(&self.line(), 16).expect("a chunk's size");
        let mut chunk = vec![0; size + 2];
        self.reader.read_exact(&mut chunk).expect("a chunk");
        chunk.truncate(size);
        (size > 0).then_some(chunk)
    }

    /// Asks without headers or body.
    pub fn get(&mut self, path: &str) -> Answer {
        self.send("GET", path, &BTreeMap::new(), b"")
    }

    /// Sends JSON.
    pub fn post(&mut self, path: &str, body: &Value) -> Answer {
        let headers = BTreeMap::from([("content-type".into(), "application/json".into())]);
        self.send("POST", path, &headers, body.to_string().as_bytes())
    }

    /// A stream of events: what comes, as it comes.
    pub fn events(mut self, path: &str) -> Events {
        let answer = self.begin("GET", path, &BTreeMap::new(), b"");
        assert_eq!(answer.status, 200, "{path}");
        Events { connection: self, rest: String::new() }
    }
}

/// Server-sent events of a connection.
pub struct Events {
    connection: Connection,
    rest: String,
}

impl Iterator for Events {
    /// Name and data; comments have no name.
    type Item = (String, Value);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some((event, rest)) = self.rest.split_once("\n\n") {
                let field =
                    |name: &str| event.lines().find_map(|line| line.strip_prefix(name)).map(|v| v.trim().to_string());
                let found =
                    (field("event:").unwrap_or_default(), serde_json::from_str(&field("data:").unwrap_or_default()));
                self.rest = rest.into();
                return Some((found.0, found.1.unwrap_or_default()));
            }
            let chunk = self.connection.chunk()?;
            self.rest.push_str(&String::from_utf8(chunk).expect("text"));
        }
    }
}
