//! An HTTP server on the scripted device, and an HTTP client that can send malformed requests.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ltx2::config::{CliOverrides, load};
use ltx2::serve::device::JobDevice;
use ltx2::serve::server::{Server, ServerOptions};
use ltx2::serve::start;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::scripted::{Log, ScriptedDevice, quick_folder};
use crate::support::needs;

/// Returns a request that the toy model could run quickly.
pub fn body(prompt: &str) -> Value {
    json!({"prompt": prompt, "size": "64x64", "num_frames": 9, "seed": 7})
}

/// Starts a server with the toy model's configuration and a test device, and waits until it is ready.
pub fn started(state: &Path, keys: &[&str], options: ServerOptions, device: impl JobDevice + Send + 'static) -> Server {
    let own = ["listen=127.0.0.1:0", "min_free=0", "warm=[\"none\"]", "queue=1000", "queue_per_key=1000"];
    let set = own.iter().chain(keys).map(|key| format!("serve.{key}"));
    let set = set.chain([format!("serve.state={}", state.display())]).collect();
    let loaded = load(&CliOverrides { files: vec!["nano".into()], set, ..CliOverrides::default() });
    let factory = Box::new(move || Ok(Box::new(device) as Box<dyn JobDevice>));
    let server = start(loaded.expect("a configuration"), options, factory).expect("a server");
    server.wait_ready(Duration::from_secs(30)).expect("ready");
    server
}

/// An HTTP server on the scripted device.
pub struct Site {
    pub server: Server,
    pub address: SocketAddr,
    pub log: Arc<Log>,
    pub state: PathBuf,
    folder: Option<TempDir>,
}

impl Site {
    /// Starts a server with settings of the section `serve`, each in the form `KEY=VALUE`.
    pub fn new(keys: &[&str]) -> Self {
        Site::with(keys, ServerOptions::default())
    }

    pub fn with(keys: &[&str], options: ServerOptions) -> Self {
        let folder = quick_folder();
        let state = folder.path().join("state");
        Site { folder: Some(folder), ..Site::at(state, keys, options) }
    }

    /// Starts a server on an existing state folder, which is not removed at the end.
    pub fn at(state: PathBuf, keys: &[&str], options: ServerOptions) -> Self {
        let log = Arc::new(Log::default());
        let device = ScriptedDevice::new(Arc::clone(&log));
        let server = started(&state, keys, options, device);
        Site { address: server.address(), server, log, state, folder: None }
    }

    pub fn client(&self) -> Client {
        Client::to(self.address)
    }

    /// Sends a request on a new connection and returns the response.
    pub fn send(&self, method: &str, path: &str, body: Option<&Value>) -> Answer {
        self.client().send(method, path, body)
    }

    pub fn get(&self, path: &str) -> Answer {
        self.send("GET", path, None)
    }

    /// Creates a video and returns its id.
    pub fn create(&self, prompt: &str) -> String {
        let answer = self.send("POST", "/v1/videos", Some(&body(prompt)));
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["id"].as_str().expect("an id").to_string()
    }

    /// Waits until a video has ended and returns its object.
    pub fn wait(&self, id: &str) -> Value {
        let mut client = self.client();
        let since = Instant::now();
        loop {
            let video = client.send("GET", &format!("/v1/videos/{id}"), None).json();
            if video["status"] == "completed" || video["status"] == "failed" {
                return video;
            }
            assert!(since.elapsed() < Duration::from_secs(60), "waited a minute for {video}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Drains the server and returns its exit code.
    pub fn end(self) -> u8 {
        let code = self.server.end(|| false);
        drop(self.folder);
        code
    }
}

#[needs(nothing)]
fn test_server_responds_until_stopped() {
    let site = Site::new(&[]);
    let address = site.address;
    assert_eq!(site.get("/live").status, 200);
    assert_eq!(site.end(), 0);
    assert!(TcpStream::connect(address).is_err());
}

/// An HTTP response.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(own, _)| own.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {} {}", self.status, self.text()))
    }

    /// Returns the status, code and field of an error. Checks that the message is one line without paths.
    pub fn error(&self) -> (u16, String, Option<String>) {
        let body = self.json();
        let error = &body["error"];
        let message = error["message"].as_str().unwrap_or_else(|| panic!("no message: {}", self.text()));
        assert!(!message.is_empty() && !message.contains('\n'), "{message:?}");
        let cwd = std::env::current_dir().expect("a folder");
        for secret in [cwd.to_string_lossy().as_ref(), "/dev/shm", "/tmp/", "/home/", "/root"] {
            assert!(!self.text().contains(secret), "{secret} in {}", self.text());
        }
        assert!(error["type"].is_string(), "{body}");
        assert_eq!(self.header("content-type"), Some("application/json"));
        let code = error["code"].as_str().expect("a code").to_string();
        (self.status, code, error["param"].as_str().map(str::to_string))
    }
}

/// An HTTP client whose connection stays open between requests.
pub struct Client {
    stream: BufReader<TcpStream>,
    address: SocketAddr,
    pub headers: Vec<(String, String)>,
}

impl Client {
    pub fn to(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("a connection");
        stream.set_nodelay(true).expect("an option");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("an option");
        stream.set_write_timeout(Some(Duration::from_secs(60))).expect("an option");
        Client { stream: BufReader::with_capacity(16 << 10, stream), address, headers: Vec::new() }
    }

    /// Adds a header to all requests of the client.
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    pub fn stream(&mut self) -> &mut TcpStream {
        self.stream.get_mut()
    }

    pub fn send(&mut self, method: &str, path: &str, body: Option<&Value>) -> Answer {
        let bytes = body.map(|body| body.to_string().into_bytes());
        let kind = [("content-type", "application/json")];
        self.roundtrip(method, path, if bytes.is_some() { &kind } else { &[] }, bytes.as_deref()).expect("an answer")
    }

    pub fn get(&mut self, path: &str) -> Answer {
        self.send("GET", path, None)
    }

    /// Sends a request without a body and with additional headers.
    pub fn ask(&mut self, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
        self.roundtrip(method, path, headers, None).expect("an answer")
    }

    pub fn roundtrip(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<&[u8]>,
    ) -> io::Result<Answer> {
        self.head(method, path, headers, body.map(<[u8]>::len))?;
        if let Some(body) = body {
            // Writing may fail if the server has already responded and closed the connection.
            let _ = self.stream.get_mut().write_all(body);
        }
        self.answer(method == "HEAD")
    }

    /// Sends the request line and the headers of a request.
    pub fn head(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        length: Option<usize>,
    ) -> io::Result<()> {
        let mut text = format!("{method} {path} HTTP/1.1\r\n");
        let own = self.headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let all: Vec<(&str, &str)> = headers.iter().copied().chain(own).collect();
        if !all.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
            text += &format!("host: {}\r\n", self.address);
        }
        for (name, value) in all {
            text += &format!("{name}: {value}\r\n");
        }
        if let Some(length) = length {
            text += &format!("content-length: {length}\r\n");
        }
        text += "\r\n";
        self.stream.get_mut().write_all(text.as_bytes())
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(line.trim_end().into())
    }

    /// Reads the status line and the headers of a response.
    pub fn answer_head(&mut self) -> io::Result<Answer> {
        let first = self.line()?;
        let status = first.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no status: {first:?}"));
        let mut headers = Vec::new();
        loop {
            let line = self.line()?;
            if line.is_empty() {
                return Ok(Answer { status, headers, body: Vec::new() });
            }
            let (name, value) = line.split_once(':').unwrap_or_else(|| panic!("no header: {line:?}"));
            headers.push((name.to_ascii_lowercase(), value.trim().to_string()));
        }
    }

    pub fn answer(&mut self, is_head: bool) -> io::Result<Answer> {
        let mut answer = self.answer_head()?;
        if is_head || [204, 304].contains(&answer.status) {
            return Ok(answer);
        }
        if answer.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.chunk()? {
                answer.body.extend(chunk);
            }
            return Ok(answer);
        }
        let length = answer.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
        answer.body.resize(length, 0);
        self.stream.read_exact(&mut answer.body)?;
        Ok(answer)
    }

    /// Returns the next chunk of a response body; `None` at its end.
    pub fn chunk(&mut self) -> io::Result<Option<Vec<u8>>> {
        let size = usize::from_str_radix(self.line()?.trim(), 16).map_err(io::Error::other)?;
        let mut chunk = vec![0; size];
        self.stream.read_exact(&mut chunk)?;
        self.line()?;
        Ok((size > 0).then_some(chunk))
    }
}

/// Iterator over the events of an event stream.
pub struct Events {
    client: Client,
    text: String,
    over: bool,
}

impl Events {
    pub fn subscribe(site: &Site, path: &str) -> Self {
        Events::open(site.client(), path)
    }

    pub fn open(mut client: Client, path: &str) -> Self {
        client.head("GET", path, &[], None).expect("sent");
        let head = client.answer_head().expect("a head");
        assert_eq!((head.status, head.header("content-type")), (200, Some("text/event-stream")));
        Events { client, text: String::new(), over: false }
    }

    /// Returns the next block of lines of the stream; `None` at its end.
    pub fn block(&mut self) -> Option<String> {
        loop {
            if let Some((block, rest)) = self.text.split_once("\n\n") {
                let block = block.to_string();
                self.text = rest.to_string();
                return Some(block);
            }
            if self.over {
                return None;
            }
            match self.client.chunk().expect("a chunk") {
                Some(chunk) => self.text += &String::from_utf8(chunk).expect("UTF-8"),
                None => self.over = true,
            }
        }
    }
}

impl Iterator for Events {
    type Item = (String, Value);

    /// Returns the name and the data of the next event.
    fn next(&mut self) -> Option<(String, Value)> {
        loop {
            let block = self.block()?;
            let find = |name: &str| block.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
            if let (Some(event), Some(data)) = (find("event"), find("data")) {
                assert!(find("id").is_some_and(|id| id.parse::<u64>().is_ok()), "{block}");
                return Some((event.into(), serde_json::from_str(data).expect("JSON")));
            }
        }
    }
}

/// Returns the quantile `share` (0 to 1) of measured times.
pub fn quantile(times: &mut [Duration], share: f64) -> Duration {
    times.sort();
    times[((times.len() - 1) as f64 * share).round() as usize]
}
