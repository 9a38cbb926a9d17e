//! A stand-in for the Hugging Face hub on loopback: listings, gated repositories, redirects to a storage server on another
//! port, and faults.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ltx2_download::Checksum;
use serde_json::{Value, json};

/// A file of a repository.
#[derive(Clone)]
struct ServedFile {
    bytes: Vec<u8>,
    /// Size in the listing, for files whose contents are never requested.
    listed_size: u64,
    checksum: Checksum,
}

/// What the server does wrong, once, when the contents of a file are requested.
#[derive(Clone, Copy)]
pub enum Fault {
    /// Closes the connection after this many bytes of the body.
    Cut(usize),
    /// Like `Cut`, but does not send the length of the body.
    CutWithoutLength(usize),
    /// Appends this many bytes to the body.
    Longer(usize),
    /// Answers 429 with a `Retry-After` of this many seconds.
    Busy(u32),
    /// Answers with this status.
    Status(&'static str),
    /// Ignores the requested range.
    WholeFile,
    /// Changes the last byte.
    WrongByte,
    /// Sends this many bytes, then nothing until the client disconnects.
    Stall(usize),
}

#[derive(Default)]
struct Repository {
    commit: String,
    files: BTreeMap<String, ServedFile>,
    /// Files that replace those of the same names when the repository is listed for the first time.
    changes_after_listing: BTreeMap<String, ServedFile>,
    /// Tokens that the hub knows, and whether their accounts have access. `None`: everybody has access.
    tokens: Option<BTreeMap<&'static str, bool>>,
    faults: Vec<(String, Fault)>,
}

impl Repository {
    /// Removes and returns the next fault of a file; of the listing if `path` is empty.
    fn fault(&mut self, path: &str) -> Option<Fault> {
        let at = self.faults.iter().position(|(name, _)| name == path)?;
        Some(self.faults.remove(at).1)
    }
}

#[derive(Default)]
struct State {
    repositories: BTreeMap<&'static str, Repository>,
    requests: Vec<String>,
    storage: String,
}

/// A repository of a running stand-in.
pub struct StandInHub {
    /// URL for `HF_ENDPOINT`.
    pub endpoint: String,
    repository: &'static str,
    state: Arc<Mutex<State>>,
}

impl StandInHub {
    /// Starts a hub with an empty repository.
    pub fn start(repository: &'static str) -> Self {
        let [hub, storage] = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").expect("a port"));
        let address = |listener: &TcpListener| format!("http://{}", listener.local_addr().expect("an address"));
        let state = State { storage: address(&storage), ..State::default() };
        let (endpoint, state) = (address(&hub), Arc::new(Mutex::new(state)));
        for (listener, is_hub) in [(hub, true), (storage, false)] {
            let state = state.clone();
            std::thread::spawn(move || {
                for stream in listener.incoming().map_while(Result::ok) {
                    // A client may close the connection early.
                    let _ = answer(stream, is_hub, &state);
                }
            });
        }
        StandInHub { endpoint, repository, state }.repository(repository)
    }

    /// Adds an empty repository to the same hub.
    pub fn repository(&self, repository: &'static str) -> Self {
        let own = Repository { commit: "c0".repeat(20), ..Repository::default() };
        self.state().repositories.insert(repository, own);
        StandInHub { endpoint: self.endpoint.clone(), repository, state: self.state.clone() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn edit(&self, edit: impl FnOnce(&mut Repository)) {
        edit(self.state().repositories.get_mut(self.repository).expect("the repository"));
    }

    /// Adds a file; returns its checksum. Names that end with `.safetensors` are large files, in the storage.
    pub fn add(&self, path: &str, bytes: &[u8]) -> String {
        let file = served(path, bytes);
        let digits = file.checksum.digits().to_string();
        self.edit(|own| drop(own.files.insert(path.into(), file)));
        digits
    }

    /// Adds a copy of a file.
    pub fn add_copy(&self, path: &str, copy: &str) {
        self.edit(|own| {
            let file = own.files[path].clone();
            own.files.insert(copy.into(), file);
        });
    }

    /// Adds a large file of which only size and checksum exist.
    pub fn add_listed(&self, path: &str, listed_size: u64, sha256: &str) {
        let file = ServedFile { bytes: Vec::new(), listed_size, checksum: Checksum::Sha256(sha256.into()) };
        self.edit(|own| drop(own.files.insert(path.into(), file)));
    }

    /// Changes the repository: a file's contents, and the commit.
    pub fn change(&self, path: &str, bytes: &[u8], commit: &str) {
        self.add(path, bytes);
        self.edit(|own| own.commit = commit.into());
    }

    /// Changes a file's contents after the next listing, without a new commit.
    pub fn change_after_listing(&self, path: &str, bytes: &[u8]) {
        self.edit(|own| drop(own.changes_after_listing.insert(path.into(), served(path, bytes))));
    }

    /// Restricts access to the accounts of tokens; `true`: the account has access.
    pub fn gate(&self, tokens: &[(&'static str, bool)]) {
        self.edit(|own| own.tokens = Some(tokens.iter().copied().collect()));
    }

    /// Adds a fault of the next request for a file's contents, or for the listing if `path` is empty.
    pub fn fail(&self, path: &str, fault: Fault) {
        self.edit(|own| own.faults.push((path.into(), fault)));
    }

    /// Returns the requests to all repositories since the last call: `hub` or `storage`, and the head in lower case.
    pub fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.state().requests)
    }
}

fn served(path: &str, bytes: &[u8]) -> ServedFile {
    let copy = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(copy.path(), bytes).expect("written");
    let checksum = match path.ends_with(".safetensors") {
        true => Checksum::Sha256(Checksum::Sha256(String::new()).of_file(copy.path()).expect("a checksum")),
        false => Checksum::GitBlob(Checksum::GitBlob(String::new()).of_file(copy.path()).expect("a checksum")),
    };
    ServedFile { bytes: bytes.to_vec(), listed_size: bytes.len() as u64, checksum }
}

fn reply(mut stream: &TcpStream, status: &str, headers: &[String], body: &[u8]) -> std::io::Result<()> {
    let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n");
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)
}

fn listing(own: &Repository) -> Value {
    let sibling = |(path, file): (&String, &ServedFile)| {
        let (size, digits) = (file.listed_size, file.checksum.digits());
        match file.checksum {
            Checksum::Sha256(_) => json!({"rfilename": path, "size": size, "blobId": "0".repeat(40),
                                          "lfs": {"sha256": digits, "size": size, "pointerSize": 134}}),
            Checksum::GitBlob(_) => json!({"rfilename": path, "size": size, "blobId": digits}),
        }
    };
    json!({
        "sha": own.commit, "gated": if own.tokens.is_some() { json!("auto") } else { json!(false) },
        "cardData": {"license": "other", "license_name": "stand-in-licence"},
        "siblings": own.files.iter().map(sibling).collect::<Vec<_>>(),
    })
}

/// Answers one request.
fn answer(stream: TcpStream, is_hub: bool, state: &Mutex<State>) -> std::io::Result<()> {
    let lines = BufReader::new(&stream).lines().map_while(Result::ok).take_while(|line| !line.is_empty());
    let head = lines.collect::<Vec<_>>().join("\n");
    let target = head.split(' ').nth(1).unwrap_or_default().to_string();
    let lower = head.to_lowercase();
    let field = |name: &str| {
        lower.lines().find_map(|line| line.strip_prefix(&format!("{name}: "))).map(|value| value.trim().to_string())
    };
    let mut guard = state.lock().unwrap_or_else(PoisonError::into_inner);
    let state = &mut *guard;
    state.requests.push(format!("{} {lower}", if is_hub { "hub" } else { "storage" }));
    if !is_hub {
        let digits = target.trim_start_matches("/blob/").split('?').next().unwrap_or_default();
        let of = |own: &Repository| {
            own.files.iter().find(|(_, file)| file.checksum.digits() == digits).map(|(k, v)| (k.clone(), v.clone()))
        };
        let found = state.repositories.values_mut().find_map(|own| of(own).map(|file| (own, file)));
        let Some((own, (path, file))) = found else {
            return reply(&stream, "404 Not Found", &[], b"");
        };
        let fault = own.fault(&path);
        drop(guard);
        return contents(&stream, &file, field("range"), fault);
    }
    if let Some(rest) = target.strip_prefix("/api/models/") {
        let (repository, rest) = rest.split_once("/revision/").unwrap_or_default();
        let own = state.repositories.get_mut(repository);
        let Some((own, revision)) = own.zip(rest.strip_suffix("?blobs=true")) else {
            return reply(&stream, "404 Not Found", &["x-error-code: RepoNotFound".into()], b"");
        };
        if let Some(fault) = own.fault("") {
            return fail(&stream, fault);
        }
        if revision != "main" && revision != own.commit {
            return reply(&stream, "404 Not Found", &["x-error-code: RevisionNotFound".into()], b"");
        }
        let body = listing(own).to_string();
        let changes = std::mem::take(&mut own.changes_after_listing);
        own.files.extend(changes);
        return reply(&stream, "200 OK", &["content-type: application/json".into()], body.as_bytes());
    }
    let (repository, rest) = target.trim_start_matches('/').split_once("/resolve/").unwrap_or_default();
    let Some(own) = state.repositories.get_mut(repository) else {
        return reply(&stream, "404 Not Found", &["x-error-code: RepoNotFound".into()], b"");
    };
    if let Some(tokens) = &own.tokens {
        let token = field("authorization").and_then(|value| value.strip_prefix("bearer ").map(String::from));
        let access = token.as_deref().map(|token| tokens.get(token));
        let (status, code) = match access {
            Some(Some(true)) => ("", ""),
            Some(Some(false)) => ("403 Forbidden", "x-error-code: GatedRepo"),
            Some(None) => ("401 Unauthorized", "x-error-message: Invalid credentials"),
            None => ("401 Unauthorized", "x-error-code: GatedRepo"),
        };
        if !status.is_empty() {
            return reply(&stream, status, &[code.into()], b"denied");
        }
    }
    let path = rest.strip_prefix(&format!("{}/", own.commit)).unwrap_or_default().to_string();
    let Some(file) = own.files.get(&path).cloned() else {
        return reply(&stream, "404 Not Found", &["x-error-code: EntryNotFound".into()], b"");
    };
    match &file.checksum {
        Checksum::Sha256(digits) => {
            let location = format!("location: {}/blob/{digits}?signature=secret", state.storage);
            let headers = [location, format!("x-linked-etag: \"{digits}\""), format!("etag: \"{digits}\"")];
            reply(&stream, "302 Found", &headers, b"redirect")
        }
        Checksum::GitBlob(_) => {
            let fault = own.fault(&path);
            drop(guard);
            contents(&stream, &file, field("range"), fault)
        }
    }
}

/// Answers with the error status of a fault.
fn fail(stream: &TcpStream, fault: Fault) -> std::io::Result<()> {
    match fault {
        Fault::Status(status) => reply(stream, status, &[], b""),
        Fault::Busy(seconds) => reply(stream, "429 Too Many Requests", &[format!("retry-after: {seconds}")], b""),
        _ => panic!("not an error status"),
    }
}

/// Sends a file's contents from the requested position.
fn contents(
    mut stream: &TcpStream,
    file: &ServedFile,
    range: Option<String>,
    fault: Option<Fault>,
) -> std::io::Result<()> {
    let mut bytes = file.bytes.clone();
    if let Some(fault @ (Fault::Status(_) | Fault::Busy(_))) = fault {
        return fail(stream, fault);
    }
    if let (Some(Fault::WrongByte), Some(last)) = (fault, bytes.last_mut()) {
        *last ^= 1;
    }
    let etag = format!("etag: \"storage-{}\"", file.checksum.digits());
    let range = range.and_then(|range| {
        let (from, last) = range.strip_prefix("bytes=")?.split_once('-')?;
        Some((from.parse::<usize>().ok()?, last.parse().unwrap_or(usize::MAX)))
    });
    if let Some(Fault::Longer(more)) = fault {
        bytes.resize(bytes.len() + more, 0);
    }
    let (status, mut headers, body) = match range.filter(|_| !matches!(fault, Some(Fault::WholeFile))) {
        Some((from, last)) if from < bytes.len() => {
            let last = last.min(bytes.len() - 1);
            let range = format!("content-range: bytes {from}-{last}/{}", bytes.len());
            ("206 Partial Content", vec![range], &bytes[from..=last])
        }
        Some(_) => return reply(stream, "416 Range Not Satisfiable", &[], b""),
        None => ("200 OK", vec![], &bytes[..]),
    };
    headers.push(etag);
    match fault {
        Some(Fault::Cut(many) | Fault::CutWithoutLength(many) | Fault::Stall(many)) => {
            if !matches!(fault, Some(Fault::CutWithoutLength(_))) {
                headers.push(format!("content-length: {}", body.len()));
            }
            let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
            let head = format!("HTTP/1.1 {status}\r\nconnection: close\r\n{headers}\r\n");
            stream.write_all(head.as_bytes())?;
            stream.write_all(&body[..many.min(body.len())])?;
            if matches!(fault, Some(Fault::Stall(_))) {
                // Returns when the client disconnects.
                let _ = std::io::Read::read(&mut stream, &mut [0]);
            }
            Ok(())
        }
        _ => reply(stream, status, &headers, body),
    }
}
