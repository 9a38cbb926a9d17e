//! Key-value store in an existing etcd: `etcd://HOST:PORT/RUN`. Uses etcd's JSON gateway, which every version since 3.4
//! serves in addition to gRPC.

use std::time::{Duration, Instant};

use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde_json::{Value, json};
use ureq::Agent;

use super::remote::agent;
use ltx2_pjrt::{KvError, KvStore};

/// Polling interval while waiting for a key.
const PAUSE: Duration = Duration::from_millis(50);
/// Lease in seconds. When it expires, etcd deletes the keys of a run, even if the run was killed.
const LEASE: u64 = 7 * 86_400;

/// A store of the keys of one run, which are prefixed with the name of the run.
pub(crate) struct EtcdStore {
    agent: Agent,
    host: String,
    run: String,
    lease: String,
}

impl EtcdStore {
    /// Opens the store. `place` is the part after `etcd://`; `answer` is the timeout of a single request. Fails if
    /// `place` has no run name or etcd does not respond.
    pub(crate) fn connect(place: &str, answer: Duration) -> Result<EtcdStore, KvError> {
        let (host, run) = place.split_once('/').unwrap_or((place, ""));
        if host.is_empty() || run.is_empty() {
            let reason = "expected etcd://HOST:PORT/RUN, where RUN is a name unique to this run".into();
            return Err(KvError::Unavailable { place: place.into(), reason });
        }
        let mut store = EtcdStore { agent: agent(answer), host: host.into(), run: run.into(), lease: String::new() };
        let granted = store.ask("lease/grant", &json!({"TTL": LEASE.to_string()}))?;
        store.lease = granted["ID"].as_str().ok_or_else(|| store.unavailable("etcd granted no lease".into()))?.into();
        Ok(store)
    }

    fn unavailable(&self, reason: String) -> KvError {
        KvError::Unavailable { place: format!("etcd://{}", self.host), reason }
    }

    fn ask(&self, what: &str, question: &Value) -> Result<Value, KvError> {
        let fail = |reason: String| self.unavailable(reason);
        let url = format!("http://{}/v3/{what}", self.host);
        let mut answer = self.agent.post(url).send(question.to_string()).map_err(|e| fail(e.to_string()))?;
        let body = answer.body_mut().with_config().limit(u64::MAX);
        let text = body.read_to_string().map_err(|e| fail(e.to_string()))?;
        if !answer.status().is_success() {
            return Err(fail(format!("{}: {}", answer.status(), text.trim())));
        }
        serde_json::from_str(&text).map_err(|e| fail(e.to_string()))
    }

    fn key(&self, key: &str) -> String {
        BASE64_STANDARD.encode(format!("ltx2/{}/{key}", self.run))
    }

    fn entry(&self, key: &str, value: &[u8]) -> Value {
        json!({"key": self.key(key), "value": BASE64_STANDARD.encode(value), "lease": self.lease})
    }
}

impl KvStore for EtcdStore {
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, KvError> {
        let started = Instant::now();
        loop {
            match self.try_get(key) {
                Ok(value) => return Ok(value),
                Err(error) if started.elapsed() >= timeout => {
                    return Err(match error {
                        KvError::NotFound(key) => KvError::Timeout { key, after: timeout },
                        error => error,
                    });
                }
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    fn try_get(&self, key: &str) -> Result<Vec<u8>, KvError> {
        let found = self.ask("kv/range", &json!({"key": self.key(key)}))?;
        let Some(entry) = found["kvs"].get(0) else { return Err(KvError::NotFound(key.into())) };
        // etcd omits the field of an empty value.
        BASE64_STANDARD
            .decode(entry["value"].as_str().unwrap_or_default())
            .map_err(|e| self.unavailable(format!("invalid value of '{key}': {e}")))
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), KvError> {
        let absent = json!({"key": self.key(key), "target": "VERSION", "result": "EQUAL", "version": "0"});
        let put = json!({"compare": [absent], "success": [{"requestPut": self.entry(key, value)}]});
        match self.ask("kv/txn", &put)?["succeeded"] == true {
            true => Ok(()),
            false => Err(KvError::AlreadyExists(key.into())),
        }
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<(), KvError> {
        self.ask("kv/put", &self.entry(key, value)).map(drop)
    }

    fn remove(&self, key: &str) -> Result<(), KvError> {
        self.ask("kv/deleterange", &json!({"key": self.key(key)})).map(drop)
    }
}
