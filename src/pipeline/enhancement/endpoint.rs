//! Chat servers with OpenAI's protocol.

use std::time::Duration;

use ltx2_download::{DownloadError, HeaderName, HttpClient, HttpSettings, header};
use serde_json::{Value, json};

use super::enhancer::Sampling;
use crate::config::Enhance;
use crate::pipeline::error::{PipelineError, Result, one_line};

/// Maximum size of an answer in bytes.
const MOST_BYTES: u64 = 1 << 20;
/// Maximum number of characters of a server's error message that an error quotes.
const SHOWN: usize = 300;

/// A chat server.
#[derive(Clone)]
pub(super) struct Endpoint {
    base: String,
    url: String,
    model: String,
    timeout: u64,
    /// Environment variable of the API key.
    variable: Option<String>,
    /// API key, or why it cannot be read. The key must not appear in messages or files.
    key: std::result::Result<Option<String>, String>,
}

impl Endpoint {
    /// Returns the endpoint of a configuration; `None` if it has none. Opens no connection. The API key is read here, but a
    /// missing key is an error only when it is needed, because only one of several processes needs it.
    pub(super) fn from_config(config: &Enhance) -> Option<Self> {
        let (base, model) = config.endpoint.as_ref().zip(config.model.as_ref())?;
        let base = base.trim_end_matches('/').to_string();
        let variable = config.key_env.clone();
        let key = variable.as_ref().map(|name| read_key(name, &base)).transpose();
        let url = format!("{base}/chat/completions");
        Some(Endpoint { url, base, model: model.clone(), timeout: config.timeout, variable, key })
    }

    /// Checks that the API key can be sent.
    ///
    /// # Errors
    /// Returns an error if the environment variable with the API key is not set, or does not contain a key.
    pub(super) fn check_key(&self) -> Result<()> {
        self.key.as_ref().map(drop).map_err(|why| PipelineError::Usage(why.clone()))
    }

    /// Returns the base URL and the model, for sidecars.
    pub(super) fn describe(&self) -> [(&'static str, &str); 2] {
        [("endpoint", &self.base), ("model", &self.model)]
    }

    /// Sends a system prompt and a user's message, and returns the answer's text.
    ///
    /// # Errors
    /// Returns an error in one line, with the URL and what to do, if no usable answer arrives in time.
    pub(super) fn ask(&self, system: &str, user: &str, sampling: &Sampling, seed: u64) -> Result<String> {
        self.check_key()?;
        let timeout = Duration::from_secs(self.timeout);
        let client = HttpClient::new(&HttpSettings { timeout, ..HttpSettings::default() });
        let client = client.map_err(|error| self.fail(one_line(&error)))?;
        let key = self.key.iter().flatten().map(|key| (header::AUTHORIZATION, format!("Bearer {key}")));
        let headers: Vec<(HeaderName, String)> = key.collect();
        let sent = client.post_json(&self.url, &headers, &self.body(system, user, sampling, seed));
        let mut response = sent.map_err(|error| self.unreachable(&error))?;
        let status = response.status();
        let text = response.body_mut().with_config().limit(MOST_BYTES).read_to_string();
        if !status.is_success() {
            return Err(self.refused(status.as_u16(), &status.to_string(), &text.unwrap_or_default()));
        }
        let text = text.map_err(|error| self.fail(format!("the answer cannot be read: {error}{}", self.slow())))?;
        self.content(&text)
    }

    fn body(&self, system: &str, user: &str, sampling: &Sampling, seed: u64) -> Value {
        let mut body = json!({
            "model": self.model,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
        });
        if sampling.temperature > 0.0 {
            body["seed"] = seed.into();
        }
        if let Some(top_p) = sampling.asked_top_p {
            body["top_p"] = top_p.into();
        }
        body
    }

    /// Returns the text of the first choice.
    fn content(&self, text: &str) -> Result<String> {
        let wrong = |why: &str| {
            self.fail(format!(
                "{why}: {}; enhance.endpoint must be the base URL of an OpenAI-compatible chat API",
                self.shown(text)
            ))
        };
        let answer: Value = serde_json::from_str(text).map_err(|_| wrong("the answer is not JSON"))?;
        let choice = answer["choices"].get(0).ok_or_else(|| wrong("the answer has no choices"))?;
        let content = match &choice["message"]["content"] {
            Value::String(text) => text.clone(),
            Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
            Value::Null => String::new(),
            _ => return Err(wrong("the answer's first choice has no text")),
        };
        if content.trim().is_empty() {
            let why = match choice["finish_reason"].as_str() {
                Some("length") => "it reached enhance.max_new_tokens before its answer; raise enhance.max_new_tokens",
                _ => "rephrase the prompt, or use another enhance.model",
            };
            return Err(self.fail(format!("the model {} answered without text; {why}", self.model)));
        }
        if choice["finish_reason"] == "length" {
            tracing::warn!("{}: the enhanced prompt was cut off at enhance.max_new_tokens", self.url);
        }
        Ok(content)
    }

    fn unreachable(&self, error: &DownloadError) -> PipelineError {
        if error.is_timeout() {
            return self
                .fail(format!("no answer within {} s; raise enhance.timeout, or check the server", self.timeout));
        }
        let why = match error {
            DownloadError::Request { source, .. } => one_line(source),
            other => one_line(other),
        };
        self.fail(format!("{}; start the server, or correct enhance.endpoint", self.shown(&why)))
    }

    fn slow(&self) -> String {
        format!("; if the server is slow, raise enhance.timeout ({} s)", self.timeout)
    }

    /// Returns the error for a status other than success. `body`: the answer.
    fn refused(&self, status: u16, name: &str, body: &str) -> PipelineError {
        let parsed: Value = serde_json::from_str(body).unwrap_or_default();
        let texts = [&parsed["error"]["message"], &parsed["error"], &parsed["message"], &parsed["detail"]];
        let message = texts.into_iter().find_map(Value::as_str).unwrap_or(body);
        let message = match self.shown(message) {
            empty if empty.is_empty() => String::new(),
            message => format!(": {message}"),
        };
        let cure = match (status, &self.variable) {
            (300..=399, _) => {
                "the API key is not sent to another address; set enhance.endpoint to the final URL".into()
            }
            (401 | 403, Some(name)) => {
                format!("put a valid API key into the environment variable {name} (enhance.key_env)")
            }
            (401 | 403, None) => {
                "set enhance.key_env to the name of an environment variable with the API key".to_string()
            }
            (404, _) => format!(
                "enhance.endpoint must be the base URL of an OpenAI-compatible chat API that has the model {}",
                self.model
            ),
            (429, _) => "the server limits requests; try again later, or use another enhance.endpoint".into(),
            (500.., _) => "the server failed; see its log, or try again later".into(),
            _ => "correct enhance.endpoint, enhance.model or the sampling options".into(),
        };
        self.fail(format!("{name}{message}; {cure}"))
    }

    /// Returns a text of the server in one line, shortened, without the API key.
    fn shown(&self, text: &str) -> String {
        let hidden = match &self.key {
            Ok(Some(key)) => text.replace(key.as_str(), "[key]"),
            _ => text.into(),
        };
        let line = hidden.split_whitespace().collect::<Vec<_>>().join(" ");
        match line.char_indices().nth(SHOWN) {
            Some((end, _)) => format!("{}…", &line[..end]),
            None => line,
        }
    }

    fn fail(&self, why: String) -> PipelineError {
        PipelineError::Enhancement(format!("{}: {why}", self.url))
    }
}

/// Reads the API key of the chat server `base` from an environment variable.
fn read_key(name: &str, base: &str) -> std::result::Result<String, String> {
    match std::env::var(name).map(|key| key.trim().to_string()) {
        Ok(key) if !key.is_empty() && key.chars().all(|c| c.is_ascii_graphic()) => Ok(key),
        Ok(key) if !key.is_empty() => Err(format!(
            "enhance.key_env: the value of the environment variable {name} contains spaces, control characters or \
             non-ASCII characters, so it is not an API key; correct it"
        )),
        _ => Err(format!(
            "enhance.key_env: the environment variable {name} is not set; set it to the API key of {base}, or remove \
             enhance.key_env if the server needs no key"
        )),
    }
}
