//! Chat servers with OpenAI's protocol.

use std::io::Read;
use std::time::{Duration, Instant};

use ltx2_download::http::is_loopback;
use ltx2_download::{DownloadError, HeaderName, HttpClient, HttpSettings, header};
use serde_json::{Value, json};

use super::clean::after_reasoning;
use super::enhancer::Sampling;
use crate::config::Enhance;
use crate::pipeline::error::{PipelineError, Result, one_line};
use crate::pipeline::programs::build::warn_once;

/// Maximum size of an answer in bytes.
const MAX_ANSWER_BYTES: u64 = 1 << 20;
/// Maximum number of characters of a server's error message that an error quotes.
const MAX_QUOTED_CHARS: usize = 300;
/// Option with the maximum number of tokens, and its name in newer versions of the protocol.
const MAX_TOKENS: [&str; 2] = ["max_tokens", "max_completion_tokens"];
/// Timeout of a second request if the first one used almost all time.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(1);
/// End of the error for an answer that was cut off during the reasoning of the model.
pub(super) const USED_ALL_TOKENS: &str = "used all tokens before its answer; raise enhance.max_new_tokens";

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

    /// Checks that the API key can be sent. Warns if it is sent without encryption to another machine.
    ///
    /// # Errors
    /// Returns an error if the environment variable with the API key is not set, or does not contain a key.
    pub(super) fn check_key(&self) -> Result<()> {
        let key = self.key.as_ref().map_err(|why| PipelineError::Usage(why.clone()))?;
        if key.is_some() && is_unencrypted(&self.base) {
            warn_once(vec![format!(
                "enhance.endpoint = {}: the API key is sent without encryption; use an https URL",
                self.base
            )]);
        }
        Ok(())
    }

    /// Returns the base URL and the model, for sidecars.
    pub(super) fn describe(&self) -> [(&'static str, &str); 2] {
        [("endpoint", &self.base), ("model", &self.model)]
    }

    /// Sends a system prompt and a user's message, and returns the answer's text without its reasoning. The timeout is
    /// that of both requests if the server refuses the first one.
    ///
    /// # Errors
    /// Returns an error in one line, with the URL and what to do, if no usable answer arrives in time.
    pub(super) fn ask(&self, system: &str, user: &str, sampling: &Sampling, seed: u64) -> Result<String> {
        self.check_key()?;
        let timeout = Duration::from_secs(self.timeout);
        let since = Instant::now();
        let client = HttpClient::new(&HttpSettings { timeout, ..HttpSettings::default() });
        let client = client.map_err(|error| self.fail(one_line(&error)))?;
        let key = self.key.iter().flatten().map(|key| (header::AUTHORIZATION, format!("Bearer {key}")));
        let headers: Vec<(HeaderName, String)> = key.collect();
        let [name, newer] = MAX_TOKENS;
        for (name, is_last) in [(name, false), (newer, true)] {
            let body = self.body(system, user, sampling, seed, name);
            let left = timeout.saturating_sub(since.elapsed()).max(SHORTEST_TIMEOUT);
            let sent = client.post_json(&self.url, &headers, &body, left);
            let mut response = sent.map_err(|error| self.unreachable(&error))?;
            let status = response.status();
            let text = self.read(response.body_mut().as_reader());
            if status.is_success() {
                return self.content(&text?);
            }
            // The error then has the status alone.
            let text = text.ok().unwrap_or_default();
            // OpenAI's reasoning models refuse the older option.
            if is_last || status.as_u16() != 400 || !refuses_older_option(&text) {
                return Err(self.refused(status.as_u16(), &status.to_string(), &text));
            }
        }
        Err(PipelineError::Bug("a chat request has no option for the maximum number of tokens".into()))
    }

    /// Reads the body of a response.
    fn read(&self, body: impl Read) -> Result<String> {
        let mut bytes = Vec::new();
        let read = body.take(MAX_ANSWER_BYTES + 1).read_to_end(&mut bytes);
        read.map_err(|error| {
            let slow = format!("if the server is slow, raise enhance.timeout ({} s)", self.timeout);
            self.fail(format!("the answer cannot be read: {error}; {slow}"))
        })?;
        let wrong = |what: &str| {
            self.fail(format!(
                "the answer is {what}; enhance.endpoint must be the base URL of an OpenAI-compatible chat API"
            ))
        };
        if bytes.len() as u64 > MAX_ANSWER_BYTES {
            return Err(wrong("larger than 1 MiB"));
        }
        String::from_utf8(bytes).map_err(|_| wrong("not UTF-8"))
    }

    /// Returns the body of a request. `max_tokens`: name of the option with the maximum number of tokens. Temperature and
    /// top-p are sent only if the configuration sets them, because some models accept only their defaults.
    fn body(&self, system: &str, user: &str, sampling: &Sampling, seed: u64, max_tokens: &str) -> Value {
        let mut body = json!({
            "model": self.model,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        });
        body[max_tokens] = sampling.max_new_tokens.into();
        if sampling.set_temperature != Some(0.0) {
            // Servers read a signed number.
            body["seed"] = (seed & u64::MAX >> 1).into();
        }
        for (key, value) in [("temperature", sampling.set_temperature), ("top_p", sampling.set_top_p)] {
            if let Some(value) = value {
                body[key] = value.into();
            }
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
        let answer = after_reasoning(&content);
        if answer.is_none_or(|answer| answer.trim().is_empty()) {
            let why = match choice["finish_reason"].as_str() {
                _ if answer.is_none() => USED_ALL_TOKENS,
                Some("length") => USED_ALL_TOKENS,
                _ => "returned an empty answer; rephrase the prompt, or use another enhance.model",
            };
            return Err(self.fail(format!("the model {} {why}", self.model)));
        }
        if choice["finish_reason"] == "length" {
            tracing::warn!("{}: the enhanced prompt was cut off at enhance.max_new_tokens", self.url);
        }
        Ok(answer.unwrap_or_default().into())
    }

    fn unreachable(&self, error: &DownloadError) -> PipelineError {
        if error.is_timeout() {
            let proxy = match error {
                DownloadError::Request { failure, .. } => failure.proxy.as_deref(),
                _ => None,
            };
            let proxy = proxy.map_or(String::new(), |proxy| format!(" through the proxy {proxy}"));
            let cure = "raise enhance.timeout, or check the server";
            return self.fail(format!("no answer within {} s{proxy}; {cure}", self.timeout));
        }
        let (why, cure) = match error {
            DownloadError::Request { failure, .. } if failure.proxy.is_some() => {
                (one_line(failure), "start the server, or correct enhance.endpoint or the proxy variables")
            }
            DownloadError::Request { failure, .. } => {
                (one_line(failure), "start the server, or correct enhance.endpoint")
            }
            other => (one_line(other), "correct the settings of the connection"),
        };
        self.fail(format!("{}; {cure}", self.shown(&why)))
    }

    /// Returns the error for a status other than success. `body`: the answer.
    fn refused(&self, status: u16, name: &str, body: &str) -> PipelineError {
        // An answer that is not JSON is quoted as it is.
        let parsed: Value = serde_json::from_str(body).ok().unwrap_or_default();
        let texts = [&parsed["error"]["message"], &parsed["error"], &parsed["message"], &parsed["detail"]];
        let message = texts.into_iter().find_map(Value::as_str).unwrap_or(body);
        let message = match self.shown(message) {
            empty if empty.is_empty() => String::new(),
            message => format!(": {message}"),
        };
        let cure = match (status, &self.variable) {
            (300..=399, _) => "redirects are not followed; set enhance.endpoint to the final URL".into(),
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
        match line.char_indices().nth(MAX_QUOTED_CHARS) {
            Some((end, _)) => format!("{}…", &line[..end]),
            None => line,
        }
    }

    fn fail(&self, why: String) -> PipelineError {
        PipelineError::Enhancement(format!("{}: {why}", self.url))
    }
}

/// Returns whether a URL has no encryption and its host is another machine.
fn is_unencrypted(url: &str) -> bool {
    url.starts_with("http://") && !is_loopback(url)
}

/// Returns whether a refused request must use the newer name of `max_tokens`. Other messages about the option, such as
/// one about too large a number, are not such a refusal.
fn refuses_older_option(body: &str) -> bool {
    let is_code = |json: Value| json["error"]["code"] == "unsupported_parameter";
    let [older, newer] = MAX_TOKENS;
    body.contains(newer) || (body.contains(older) && serde_json::from_str(body).is_ok_and(is_code))
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
            "enhance.key_env: the environment variable {name} is not set, empty or not UTF-8; set it to the API key \
             of {base}, or remove enhance.key_env if the server needs no key"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_http_to_other_machines_is_unencrypted() {
        for (url, unencrypted) in
            [("http://example.com/v1", true), ("https://example.com/v1", false), ("http://localhost:8080/v1", false)]
        {
            assert_eq!(is_unencrypted(url), unencrypted, "{url}");
        }
    }
}
