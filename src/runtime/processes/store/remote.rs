//! The store that process 0 serves, seen from the others.

use std::time::{Duration, Instant};

use ureq::Agent;
use ureq::http::StatusCode;

use super::served::PATH;
use crate::pjrt::{KvError, KvStore};

/// The longest that one question waits for a key: a store that is gone is noticed after it.
const WAIT: Duration = Duration::from_secs(5);
/// Between two tries to reach a store while a key is waited for.
const PAUSE: Duration = Duration::from_millis(200);

/// Asks over HTTP, each question answered in `answer` or not at all.
pub(super) fn agent(answer: Duration) -> Agent {
    let config = Agent::config_builder()
        .http_status_as_error(false)
        // Processes talk to each other, not through what the environment names for the web.
        .proxy(None)
        .timeout_global(Some(answer))
        .build();
    config.into()
}

/// A store at `HOST:PORT`.
pub struct RemoteStore {
    agent: Agent,
    place: String,
    answer: Duration,
}

impl RemoteStore {
    /// The store at `place`; nothing is asked yet. `answer` is how long it may take to answer a question.
    pub fn new(place: &str, answer: Duration) -> RemoteStore {
        RemoteStore { agent: agent(answer), place: place.into(), answer }
    }

    fn url(&self) -> String {
        format!("http://{}{PATH}", self.place)
    }

    fn unavailable(&self, reason: impl ToString) -> KvError {
        KvError::Unavailable { place: self.place.clone(), reason: reason.to_string() }
    }

    /// A key's value; None where it is not there after `wait`.
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
