//! A stand-in for a chat server with OpenAI's protocol, on loopback.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

/// An answer of the server.
#[derive(Clone)]
pub enum Answer {
    /// A chat completion with this text.
    Text(&'static str),
    /// A status and a body.
    Raw(&'static str, String),
    /// The status 200 and these bytes.
    Bytes(Vec<u8>),
    /// A redirect to this URL.
    Redirect(String),
    /// No answer for this time.
    Silence(Duration),
}

/// A request that the server received.
#[derive(Clone, Debug)]
pub struct ChatRequest {
    /// Request line and headers.
    pub head: String,
    pub body: Value,
}

/// A running stand-in.
pub struct ChatServer {
    /// Base URL for `enhance.endpoint`.
    pub base: String,
    answers: Arc<Mutex<VecDeque<Answer>>>,
    requests: Arc<Mutex<Vec<ChatRequest>>>,
}

impl ChatServer {
    /// Starts a server that gives these answers in turn and then repeats the last one.
    pub fn start(answers: impl IntoIterator<Item = Answer>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let base = format!("http://{}/v1", listener.local_addr().expect("an address"));
        let answers = Arc::new(Mutex::new(answers.into_iter().collect()));
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (own, seen) = (Arc::clone(&answers), Arc::clone(&requests));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (own, seen) = (Arc::clone(&own), Arc::clone(&seen));
                std::thread::spawn(move || {
                    // A client may close the connection early.
                    let _ = answer(&stream, &own, &seen);
                });
            }
        });
        ChatServer { base, answers, requests }
    }

    /// Replaces the answers by one.
    pub fn answer(&self, answer: Answer) {
        self.answers([answer]);
    }

    /// Replaces the answers.
    pub fn answers(&self, answers: impl IntoIterator<Item = Answer>) {
        *self.answers.lock().unwrap_or_else(PoisonError::into_inner) = answers.into_iter().collect();
    }

    /// Returns the requests since the last call.
    pub fn requests(&self) -> Vec<ChatRequest> {
        std::mem::take(&mut self.requests.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the configuration keys that select this server, with one more key.
    pub fn keys(&self, more: &str) -> [String; 3] {
        [format!("enhance.endpoint={}", self.base), "enhance.model=stand-in".into(), more.into()]
    }
}

fn answer(
    stream: &TcpStream,
    answers: &Mutex<VecDeque<Answer>>,
    requests: &Mutex<Vec<ChatRequest>>,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while reader.read_line(&mut head)? > 2 {}
    let length = |line: &str| line.to_lowercase().strip_prefix("content-length: ").and_then(|n| n.trim().parse().ok());
    let mut body = vec![0; head.lines().find_map(length).unwrap_or(0)];
    reader.read_exact(&mut body)?;
    let body = serde_json::from_slice(&body).unwrap_or_default();
    requests.lock().unwrap_or_else(PoisonError::into_inner).push(ChatRequest { head, body });
    let mut answers = answers.lock().unwrap_or_else(PoisonError::into_inner);
    let next = if answers.len() > 1 { answers.pop_front() } else { answers.front().cloned() };
    drop(answers);
    let (status, location, body) = match next.expect("an answer") {
        Answer::Text(text) => {
            let message = json!({"role": "assistant", "content": text});
            ("200 OK", None, json!({"choices": [{"message": message, "finish_reason": "stop"}]}).to_string().into())
        }
        Answer::Raw(status, body) => (status, None, body.into_bytes()),
        Answer::Bytes(body) => ("200 OK", None, body),
        Answer::Redirect(url) => ("307 Temporary Redirect", Some(url), Vec::new()),
        Answer::Silence(time) => {
            std::thread::sleep(time);
            return Ok(());
        }
    };
    let location = location.map_or(String::new(), |url| format!("location: {url}\r\n"));
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {length}\r\n{location}\r\n");
    let mut stream = stream;
    stream.write_all(head.as_bytes())?;
    stream.write_all(&body)
}
