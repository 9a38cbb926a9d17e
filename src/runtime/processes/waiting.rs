//! Waits for other processes: a line at once, then one every ten seconds; names that do not resolve end them.

use std::net::{IpAddr, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use crate::pjrt::{KvError, KvStore};

/// Between two lines of a wait.
const EVERY: Duration = Duration::from_secs(10);
/// How long a resolver may fail for a while.
const RESOLVER: Duration = Duration::from_secs(3);

/// A wait for other processes, up to a limit.
pub(super) struct Waiting {
    started: Instant,
    patience: Duration,
    said: Option<Instant>,
}

impl Waiting {
    pub(super) fn start(patience: Duration) -> Self {
        Waiting { started: Instant::now(), patience, said: None }
    }

    /// What is left of the wait.
    pub(super) fn left(&self) -> Duration {
        self.patience.saturating_sub(self.started.elapsed())
    }

    /// Logs whom the wait is for, unless that was done less than ten seconds ago.
    pub(super) fn say(&mut self, whom: impl FnOnce() -> String) {
        if self.said.is_none_or(|said| said.elapsed() >= EVERY) {
            self.said = Some(Instant::now());
            tracing::info!("{}", self.line(&whom()));
        }
    }

    fn line(&self, whom: &str) -> String {
        let left = self.left();
        // An end that no calendar has is no use to a reader.
        let until = jiff::Timestamp::now().checked_add(left).map_or(String::new(), |end| format!(", until {end:.0}"));
        format!("waiting for {whom}{until} ({} s left)", left.as_secs())
    }

    /// A key of the store once it is there; `whom` names those that are waited for.
    ///
    /// # Errors
    /// The store's at the end of the wait.
    pub(super) fn get(
        &mut self,
        store: &dyn KvStore,
        key: &str,
        whom: impl Fn() -> String,
    ) -> Result<Vec<u8>, KvError> {
        if let Ok(value) = store.try_get(key) {
            return Ok(value);
        }
        loop {
            self.say(&whom);
            let left = self.left();
            match store.get(key, left.min(EVERY)) {
                Err(KvError::Timeout { .. }) if left > EVERY => {}
                // A store that refuses connections answers at once.
                Err(KvError::Unavailable { .. }) if left > EVERY => thread::sleep(Duration::from_millis(200)),
                Err(KvError::Timeout { key, .. }) => return Err(KvError::Timeout { key, after: self.patience }),
                ended => return ended,
            }
        }
    }
}

/// Checks that the name in `HOST:PORT` resolves.
///
/// # Errors
/// The name, and the resolver's reason.
pub(super) fn resolve(place: &str) -> Result<(), (String, String)> {
    let (host, port) = place.rsplit_once(':').unwrap_or((place, "0"));
    let host = host.trim_start_matches('[').trim_end_matches(']');
    if host.parse::<IpAddr>().is_ok() {
        return Ok(());
    }
    let started = Instant::now();
    loop {
        match (host, port.parse().unwrap_or(0)).to_socket_addrs() {
            Ok(_) => return Ok(()),
            Err(e) if e.to_string().contains("Temporary failure") && started.elapsed() < RESOLVER => {
                thread::sleep(Duration::from_millis(500));
            }
            Err(e) => return Err((host.into(), e.to_string())),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::store::MemoryStore;
    use super::*;

    #[test]
    fn a_wait_names_whom_it_is_for_and_its_end() {
        let line = Waiting::start(Duration::from_secs(600)).line("process 0 at a:1");
        assert!(
            line.starts_with("waiting for process 0 at a:1, until 2") && line.ends_with("Z (599 s left)"),
            "{line}"
        );
    }

    #[test]
    fn a_wait_ends_with_the_value_or_its_limit() {
        let store = MemoryStore::default();
        let mut waiting = Waiting::start(Duration::from_millis(20));
        let late = waiting.get(&store, "a", || "process 1".into());
        assert_eq!(late, Err(KvError::Timeout { key: "a".into(), after: Duration::from_millis(20) }));
        assert!(waiting.said.is_some());
        store.put("a", b"1").unwrap();
        let mut waiting = Waiting::start(Duration::ZERO);
        assert_eq!(waiting.get(&store, "a", || "process 1".into()).unwrap(), b"1");
        assert!(waiting.said.is_none(), "nothing was waited for");
    }

    #[test]
    fn names_that_do_not_resolve_are_named() {
        for place in ["127.0.0.1:1", "[::1]:1", "localhost:1"] {
            assert_eq!(resolve(place), Ok(()), "{place}");
        }
        let (name, reason) = resolve("no-such-host.invalid:8476").unwrap_err();
        assert_eq!(name, "no-such-host.invalid");
        assert!(!reason.is_empty());
    }
}
