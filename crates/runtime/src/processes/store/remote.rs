//! Client of the key-value store that process 0 serves.

use std::time::{Duration, Instant};

use ureq::Agent;
use ureq::http::StatusCode;

use super::served::PATH;
use ltx2_pjrt::{KvError, KvStore};

/// Maximum time that one request waits for a key, so that a lost server is noticed.
const WAIT: Duration = Duration::from_secs(5);
/// Pause between attempts to reach the server while waiting for a key.
const PAUSE: Duration = Duration::from_millis(200);

/// Creates an HTTP client with a timeout of `answer` per request.
pub(super) fn agent(answer: Duration) -> Agent {
    let config = Agent::config_builder()
        .http_status_as_error(false)
        // Processes connect directly, never through the HTTP proxy of the environment.
        .proxy(None)
        .timeout_global(Some(answer))
        .build();
    config.into()
}

/// A store served at `HOST:PORT`.
pub struct RemoteStore {
    agent: Agent,
    place: String,
    answer: Duration,
}

impl RemoteStore {
    /// Creates a client for the store at `place` without connecting. `answer` is the timeout of a single request.
    pub fn new(place: &str, answer: Duration) -> RemoteStore {
        RemoteStore { agent: agent(answer), place: place.into(), answer }
    }

    fn url(&self) -> String {
        format!("http://{}{PATH}", self.place)
    }

    fn unavailable(&self, reason: impl ToString) -> KvError {
        KvError::Unavailable { place: self.place.clone(), reason: reason.to_string() }
    }

    /// Returns a key's value; `None` if it does not exist after `wait`.
    fn read(&self, key: &str, wait: Duration) -> Result<Option<Vec<u8>>, KvError> {
        let request = self.agent.get(self.url()).query("key", key).query("wait", wait.as_millis().to_string());
        let request = request.config().timeout_global(Some(wait + self.answer)).build();
        let mut response = request.call().map_err(|e| self.unavailable(e))?;
        match response.status() {
            StatusCode::OK => {
                let body = response.body_mut().with_config().limit(u64::MAX);
                body.read_to_vec().map(Some).map_err(|e| self.unavailable(e))
            }
            StatusCode::NOT_FOUND => Ok(None),
            other => Err(self.unavailable(other)),
        }
    }

    fn write(&self, key: &str, value: &[u8], replace: bool) -> Result<(), KvError> {
        let request = self.agent.put(self.url()).query("key", key).query("replace", replace.to_string());
        let response = request.send(value).map_err(|e| self.unavailable(e))?;
        match response.status() {
            StatusCode::NO_CONTENT => Ok(()),
            StatusCode::CONFLICT => Err(KvError::AlreadyExists(key.into())),
            other => Err(self.unavailable(other)),
        }
    }
}

impl KvStore for RemoteStore {
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, KvError> {
        let started = Instant::now();
        loop {
            let left = timeout.saturating_sub(started.elapsed());
            match self.read(key, left.min(WAIT)) {
                Ok(Some(value)) => return Ok(value),
                Err(error) if left.is_zero() => return Err(error),
                Ok(None) if left.is_zero() => return Err(KvError::Timeout { key: key.into(), after: timeout }),
                Ok(None) => {}
                Err(_) => std::thread::sleep(PAUSE.min(left)),
            }
        }
    }

    fn try_get(&self, key: &str) -> Result<Vec<u8>, KvError> {
        self.read(key, Duration::ZERO)?.ok_or_else(|| KvError::NotFound(key.into()))
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), KvError> {
        self.write(key, value, false)
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<(), KvError> {
        self.write(key, value, true)
    }

    fn remove(&self, key: &str) -> Result<(), KvError> {
        let response = self.agent.delete(self.url()).query("key", key).call().map_err(|e| self.unavailable(e))?;
        match response.status() {
            StatusCode::NO_CONTENT => Ok(()),
            other => Err(self.unavailable(other)),
        }
    }
}
