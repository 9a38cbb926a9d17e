//! Waits for other processes: logs a line immediately and then at each interval, and fails early if a host name does
//! not resolve.

use std::net::{IpAddr, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use ltx2_pjrt::{KvError, KvStore};

/// Interval between log lines.
const EVERY: Duration = Duration::from_secs(10);
/// Time for which temporary resolver failures are retried.
const RESOLVER: Duration = Duration::from_secs(3);

/// A wait for other processes with a time limit.
pub(super) struct PeerWait {
    started: Instant,
    patience: Duration,
    /// Interval between log lines, [`EVERY`] except in tests.
    every: Duration,
    said: Option<Instant>,
}

impl PeerWait {
    pub(super) fn start(patience: Duration) -> Self {
        PeerWait { started: Instant::now(), patience, every: EVERY, said: None }
    }

    /// Returns the remaining time.
    pub(super) fn left(&self) -> Duration {
        self.patience.saturating_sub(self.started.elapsed())
    }

    /// Logs which processes are awaited, at most once per interval.
    pub(super) fn say(&mut self, whom: impl FnOnce() -> String) {
        if self.said.is_none_or(|said| said.elapsed() >= self.every) {
            self.said = Some(Instant::now());
            tracing::info!("{}", self.line(&whom()));
        }
    }

    fn line(&self, whom: &str) -> String {
        let left = self.left();
        // Omits an end time beyond the calendar's range.
        let until = jiff::Timestamp::now().checked_add(left).map_or(String::new(), |end| format!(", until {end:.0}"));
        format!("waiting for {whom}{until} ({} s left)", left.as_secs())
    }

    /// Waits for a key of the store; `whom` describes the awaited processes. Returns the store's error when the time
    /// limit is reached.
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
            match store.get(key, left.min(self.every)) {
                Err(KvError::Timeout { .. }) if left > self.every => {}
                // A refused connection fails immediately, so pause before the retry.
                Err(KvError::Unavailable { .. }) if left > self.every => thread::sleep(Duration::from_millis(200)),
                Err(KvError::Timeout { key, .. }) => return Err(KvError::Timeout { key, after: self.patience }),
                ended => return ended,
            }
        }
    }
}

/// Checks that the host in `HOST:PORT` resolves. The error contains the host and the resolver's message.
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
    use std::io::{Read, Seek, SeekFrom};
    use std::sync::Arc;

    use super::super::store::MemoryStore;
    use super::*;

    #[test]
    fn log_line_contains_the_awaited_process_and_the_deadline() {
        let line = PeerWait::start(Duration::from_secs(600)).line("process 0 at a:1");
        assert!(
            line.starts_with("waiting for process 0 at a:1, until 2") && line.ends_with("Z (599 s left)"),
            "{line}"
        );
    }

    #[test]
    fn log_line_is_repeated_every_ten_seconds() {
        let mut waiting = PeerWait::start(Duration::from_millis(200));
        assert_eq!(waiting.every, Duration::from_secs(10));
        waiting.every = Duration::from_millis(40);
        let mut file = Arc::new(tempfile::tempfile().unwrap());
        let log = tracing_subscriber::fmt().with_ansi(false).with_writer(Arc::clone(&file)).finish();
        tracing::subscriber::with_default(log, || {
            waiting.get(&MemoryStore::default(), "a", || "process 1".into()).unwrap_err();
        });
        let mut text = String::new();
        file.seek(SeekFrom::Start(0)).and_then(|_| file.read_to_string(&mut text)).unwrap();
        let lines = text.lines().filter(|line| line.contains("waiting for process 1, until 2")).count();
        assert!((2..=5).contains(&lines), "{text}");
    }

    #[test]
    fn wait_returns_the_value_or_times_out() {
        let store = MemoryStore::default();
        let mut waiting = PeerWait::start(Duration::from_millis(20));
        let late = waiting.get(&store, "a", || "process 1".into());
        assert_eq!(late, Err(KvError::Timeout { key: "a".into(), after: Duration::from_millis(20) }));
        assert!(waiting.said.is_some());
        store.put("a", b"1").unwrap();
        let mut waiting = PeerWait::start(Duration::ZERO);
        assert_eq!(waiting.get(&store, "a", || "process 1".into()).unwrap(), b"1");
        assert!(waiting.said.is_none(), "nothing was logged");
    }

    #[test]
    fn unresolvable_host_is_an_error_with_its_name() {
        for place in ["127.0.0.1:1", "[::1]:1", "localhost:1"] {
            assert_eq!(resolve(place), Ok(()), "{place}");
        }
        let (name, reason) = resolve("no-such-host.invalid:8476").unwrap_err();
        assert_eq!(name, "no-such-host.invalid");
        assert!(!reason.is_empty());
    }
}
