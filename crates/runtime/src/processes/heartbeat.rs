//! Heartbeat thread: sends this process's heartbeats and terminates this process when another process is lost.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use ltx2_pjrt::{KvError, KvStore};

/// Key under which the abort reason is stored.
const ABORT: &str = "end";
/// Value that replaces the heartbeat of a process that has finished.
const DONE: &[u8] = b"done";
/// Number of heartbeats that a process sends within one timeout.
const BEATS_PER_TIMEOUT: u32 = 20;

/// Reason why all processes exit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Abort {
    /// Id of the process that caused the abort.
    pub process: usize,
    pub message: String,
}

/// Callback that exits the process when the run is aborted; receives the reason.
pub(crate) type OnAbort = Box<dyn FnOnce(&str) + Send>;

/// The store and the ids and hosts of the processes, shared with the heartbeat thread.
pub(super) struct Peers {
    pub id: usize,
    pub store: Arc<dyn KvStore>,
    /// Address of the store, for messages.
    pub place: String,
    /// Time without a heartbeat after which a process counts as lost.
    pub timeout: Duration,
    /// Hosts of all processes, set once all have registered.
    pub hosts: OnceLock<Vec<String>>,
}

/// A running heartbeat thread.
pub(super) struct Heartbeat {
    stop: Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl Peers {
    fn key(id: usize) -> String {
        format!("beat/{id}")
    }

    /// Returns a process's name for messages: `process 2 (host b)`.
    pub(crate) fn name(&self, process: usize) -> String {
        match self.hosts.get().and_then(|hosts| hosts.get(process)) {
            Some(host) => format!("process {process} ({host})"),
            None => format!("process {process}"),
        }
    }

    /// Aborts the run for all processes, unless it is already aborted.
    pub(crate) fn abort(&self, process: usize, message: &str) {
        let abort = Abort { process, message: message.into() };
        let text = serde_json::to_vec(&abort).expect("structs of strings and numbers serialize to JSON");
        if let Err(e) = self.store.put(ABORT, &text)
            && !matches!(e, KvError::AlreadyExists(_))
        {
            tracing::debug!("cannot publish the abort reason: {e}");
        }
    }

    pub(crate) fn aborted(&self) -> Result<Option<Abort>, KvError> {
        match self.store.try_get(ABORT) {
            Ok(text) => Ok(serde_json::from_slice(&text).ok()),
            Err(KvError::NotFound(_)) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Announces that this process has finished.
    pub(crate) fn done(&self) {
        if let Err(e) = self.store.set(&Self::key(self.id), DONE) {
            tracing::debug!("cannot announce that this process has finished: {e}");
        }
    }

    fn is_done(&self, process: usize) -> bool {
        self.store.try_get(&Self::key(process)).is_ok_and(|beat| beat == DONE)
    }

    /// Waits until all other processes have finished, at most for `patience`. Returns the ids of those that have not
    /// finished.
    pub(crate) fn wait_for_others(&self, count: usize, patience: Duration) -> Vec<usize> {
        let started = Instant::now();
        loop {
            let left: Vec<usize> = (0..count).filter(|&i| i != self.id && !self.is_done(i)).collect();
            if left.is_empty() || started.elapsed() > patience {
                return left;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns the time between two heartbeats.
    pub(crate) fn pause(&self) -> Duration {
        self.timeout / BEATS_PER_TIMEOUT
    }
}

impl Heartbeat {
    /// Starts the thread. Process 0 monitors all others; the others monitor process 0.
    pub(crate) fn start(peers: Arc<Peers>, count: usize, on_abort: OnAbort) -> std::io::Result<Heartbeat> {
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new().name("heartbeat".into()).spawn(move || {
            if let Some(message) = monitor(&peers, count, &stopped) {
                on_abort(&message);
            }
        })?;
        Ok(Heartbeat { stop, thread: Some(thread) })
    }

    pub(crate) fn stop(&mut self) {
        // Fails if the thread has already finished.
        let _ = self.stop.send(());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sends and monitors heartbeats until stopped. Returns a reason if the run must be aborted.
fn monitor(peers: &Peers, count: usize, stopped: &Receiver<()>) -> Option<String> {
    let others: Vec<usize> = if peers.id == 0 { (1..count).collect() } else { vec![0] };
    // The last heartbeat of each process and when it was first seen; `None` while the process is still starting.
    let mut seen: Vec<Option<(Vec<u8>, Instant)>> = vec![None; others.len()];
    let mut answered = Instant::now();
    let mut beats = 0u64;
    loop {
        match stopped.recv_timeout(peers.pause()) {
            Err(RecvTimeoutError::Timeout) => {}
            _ => return None,
        }
        beats += 1;
        let beat = peers.store.set(&Peers::key(peers.id), beats.to_string().as_bytes());
        match beat.and_then(|()| peers.aborted()) {
            Ok(None) => answered = Instant::now(),
            Ok(Some(abort)) => {
                peers.done();
                if peers.id == 0 {
                    // This process serves the store; wait until the others have read the reason.
                    peers.wait_for_others(count, peers.pause() * 4);
                }
                return Some(match abort.process == peers.id {
                    true => format!("the other processes aborted the run: {}", abort.message),
                    false => format!("{} {}; the run is aborted", peers.name(abort.process), abort.message),
                });
            }
            Err(e) if answered.elapsed() > peers.timeout => {
                let (name, seconds) = (peers.name(0), peers.timeout.as_secs_f64());
                return Some(format!(
                    "{name} has not answered at {} for {seconds:.0} s: it died or hangs ({e}); the run is aborted",
                    peers.place
                ));
            }
            Err(_) => continue,
        }
        for (process, seen) in others.iter().zip(&mut seen) {
            let beat = match peers.store.try_get(&Peers::key(*process)) {
                Ok(beat) => Some(beat),
                // All processes have registered, so the timeout for a process that has not sent a heartbeat starts now.
                Err(KvError::NotFound(_)) if peers.hosts.get().is_some() => Some(Vec::new()),
                Err(_) => None,
            };
            match (beat, &seen) {
                (None, _) => {}
                (Some(beat), Some((last, since))) if beat == *last => {
                    if beat != DONE && since.elapsed() > peers.timeout {
                        let seconds = peers.timeout.as_secs_f64();
                        peers.abort(*process, &format!("has not answered for {seconds:.0} s: it died or hangs"));
                    }
                }
                (Some(beat), _) => *seen = Some((beat, Instant::now())),
            }
        }
    }
}
