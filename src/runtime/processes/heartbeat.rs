//! The heartbeat thread: it beats for this process and aborts it when another one is lost.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::pjrt::{KvError, KvStore};

/// Key of the reason of an abort.
const ABORT: &str = "end";
/// Last beat of a process that has finished.
const DONE: &[u8] = b"done";
/// Beats within the timeout.
const LOOKS: u32 = 20;

/// Reason why all processes exit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Abort {
    /// Process that caused it.
    pub(crate) process: usize,
    pub(crate) message: String,
}

/// Called with the reason when the run was aborted elsewhere: it exits the process.
pub(crate) type OnAbort = Box<dyn FnOnce(&str) + Send>;

/// Store and names of the processes, shared with the heartbeat thread.
pub(super) struct Peers {
    pub(crate) id: usize,
    pub(crate) store: Arc<dyn KvStore>,
    /// Address of the store, for messages.
    pub(crate) place: String,
    /// Time without a beat after which a process counts as lost.
    pub(crate) timeout: Duration,
    /// Hosts of all processes, once all have registered.
    pub(crate) hosts: OnceLock<Vec<String>>,
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

    /// Name for messages: `process 2 (host b)`.
    pub(crate) fn name(&self, process: usize) -> String {
        match self.hosts.get().and_then(|hosts| hosts.get(process)) {
            Some(host) => format!("process {process} ({host})"),
            None => format!("process {process}"),
        }
    }

    /// Aborts the run for all, unless it is aborted already.
    pub(crate) fn abort(&self, process: usize, message: &str) {
        let abort = Abort { process, message: message.into() };
        let text = serde_json::to_vec(&abort).expect("structs of texts and numbers have a JSON form");
        if let Err(e) = self.store.put(ABORT, &text)
            && !matches!(e, KvError::AlreadyExists(_))
        {
            tracing::debug!("the end cannot be told: {e}");
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
            tracing::debug!("the end of this process cannot be told: {e}");
        }
    }

    fn is_done(&self, process: usize) -> bool {
        self.store.try_get(&Self::key(process)).is_ok_and(|beat| beat == DONE)
    }

    /// Waits until all others have finished, `patience` at most; those that have not.
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

    /// Time between two beats.
    pub(crate) fn pause(&self) -> Duration {
        self.timeout / LOOKS
    }
}

impl Heartbeat {
    /// Starts the thread; process 0 monitors all, the others process 0.
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
        // A thread that is gone needs no word.
        let _ = self.stop.send(());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Beats and monitors until stopped; the reason where the run has to end.
fn monitor(peers: &Peers, count: usize, stopped: &Receiver<()>) -> Option<String> {
    let others: Vec<usize> = if peers.id == 0 { (1..count).collect() } else { vec![0] };
    // The last beat of each and when it was first seen; before its first, a process is still starting.
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
                    // The store is here: the others have to read the reason first.
                    peers.wait_for_others(count, peers.pause() * 4);
                }
                return Some(match abort.process == peers.id {
                    true => format!("the others ended the run: {}", abort.message),
                    false => format!("{} {}; the run is ended", peers.name(abort.process), abort.message),
                });
            }
            Err(e) if answered.elapsed() > peers.timeout => {
                let (name, seconds) = (peers.name(0), peers.timeout.as_secs_f64());
                return Some(format!(
                    "{name} has not answered at {} for {seconds:.0} s: it died or hangs ({e}); the run is ended",
                    peers.place
                ));
            }
            Err(_) => continue,
        }
        for (process, seen) in others.iter().zip(&mut seen) {
            let beat = match peers.store.try_get(&Peers::key(*process)) {
                Ok(beat) => Some(beat),
                // All have come: one that never beats is counted from here.
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
