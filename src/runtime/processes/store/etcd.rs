//! A store in an etcd cluster that is there already: `etcd://HOST:PORT[,HOST:PORT…]/RUN`.

use std::time::{Duration, Instant};

use etcd_client::{Client, Compare, CompareOp, PutOptions, Txn, TxnOp};
use tokio::runtime::Runtime;

use crate::pjrt::{KvError, KvStore};

/// Between two looks for a key that is waited for.
const PAUSE: Duration = Duration::from_millis(50);
/// Seconds after which a run's keys go by themselves, whatever became of it.
const LEASE: i64 = 7 * 86_400;

/// The keys of one run, under its name.
pub struct EtcdStore {
    runtime: Runtime,
    client: Client,
    lease: i64,
    place: String,
    run: String,
    answer: Duration,
}

impl EtcdStore {
    /// Connects; `place` is what follows `etcd://`.
    ///
    /// # Errors
    /// A place without a run's name; a cluster that does not answer.
    pub fn connect(place: &str, answer: Duration) -> Result<EtcdStore, KvError> {
        let fail = |reason: String| KvError::Unavailable { place: place.into(), reason };
        let Some((hosts, run)) = place.split_once('/').filter(|(hosts, run)| !hosts.is_empty() && !run.is_empty())
        else {
            return Err(fail("give etcd://HOST:PORT/RUN, RUN a name that no other run has".into()));
        };
        let hosts: Vec<String> = hosts.split(',').map(str::to_string).collect();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(|e| fail(e.to_string()))?;
        let (client, lease) = runtime
            .block_on(async {
                let mut client = Client::connect(hosts, None).await?;
                let lease = client.lease_grant(LEASE, None).await?.id();
                Ok::<_, etcd_client::Error>((client, lease))
            })
            .map_err(|e| fail(e.to_string()))?;
        Ok(EtcdStore { runtime, client, lease, place: place.into(), run: run.into(), answer })
    }

    fn key(&self, key: &str) -> String {
        format!("ltx2/{}/{key}", self.run)
    }

    /// Waits for an answer of the cluster.
    fn ask<T>(&self, question: impl Future<Output = Result<T, etcd_client::Error>>) -> Result<T, KvError> {
        let fail = |reason: String| KvError::Unavailable { place: self.place.clone(), reason };
        let answer = self.runtime.block_on(async { tokio::time::timeout(self.answer, question).await });
        answer.map_err(|e| fail(e.to_string()))?.map_err(|e| fail(e.to_string()))
    }
}

impl KvStore for EtcdStore {
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, KvError> {
        let started = Instant::now();
        loop {
            match self.try_get(key) {
                Err(KvError::NotFound(key)) if started.elapsed() >= timeout => {
                    return Err(KvError::Timeout { key, after: timeout });
                }
                Err(error) if started.elapsed() >= timeout => return Err(error),
                Err(_) => std::thread::sleep(PAUSE),
                Ok(value) => return Ok(value),
            }
        }
    }

    fn try_get(&self, key: &str) -> Result<Vec<u8>, KvError> {
        let found = self.ask(self.client.clone().get(self.key(key), None))?;
        found.kvs().first().map(|kv| kv.value().to_vec()).ok_or_else(|| KvError::NotFound(key.into()))
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), KvError> {
        let name = self.key(key);
        let put = TxnOp::put(name.clone(), value, Some(PutOptions::new().with_lease(self.lease)));
        let absent = Compare::version(name, CompareOp::Equal, 0);
        let done = self.ask(self.client.clone().txn(Txn::new().when([absent]).and_then([put])))?;
        if done.succeeded() { Ok(()) } else { Err(KvError::AlreadyExists(key.into())) }
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<(), KvError> {
        let options = PutOptions::new().with_lease(self.lease);
        self.ask(self.client.clone().put(self.key(key), value, Some(options))).map(drop)
    }
}
