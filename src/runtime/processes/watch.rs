//! The thread that tells the others that this process lives, and ends it when one of them does not.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::pjrt::{KvError, KvStore};

/// Where the reason of a common end stands.
const END: &str = "end";
/// The beat of a process that has done its part.
const DONE: &[u8] = b"done";
/// Looks at the others within the time after which one counts as lost.
const LOOKS: u32 = 20;

/// Why all end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct End {
    /// The process that it is about.
    pub process: usize,
    /// One line.
    pub message: String,
}

/// What a watch does with its process when the run has ended elsewhere: it says why, and does not return.
pub type OnEnd = Box<dyn FnOnce(&str) + Send>;

/// What the thread knows.
pub(super) struct Watched {
    /// This process.
    pub id: usize,
    /// Where all meet.
    pub store: Arc<dyn KvStore>,
    /// What is said about the place, when it does not answer.
    pub place: String,
    /// The time without a beat after which a process counts as lost.
    pub timeout: Duration,
    /// The hosts of all processes, once all have come.
    pub hosts: OnceLock<Vec<String>>,
}

/// A running watch.
pub(super) struct Watch {
    stop: Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl Watched {
    fn key(id: usize) -> String {
        format!("beat/{id}")
    }

    /// `process 2 (host b)`.
    pub fn name(&self, process: usize) -> String {
        match self.hosts.get().and_then(|hosts| hosts.get(process)) {
            Some(host) => format!("process {process} ({host})"),
            None => format!("process {process}"),
        }
    }

    /// Ends the run for all, unless it has an end already.
    pub fn end(&self, process: usize, message: &str) {
        let end = End { process, message: message.into() };
        let text = serde_json::to_vec(&end).unwrap_or_default();
        if let Err(e) = self.store.put(END, &text)
            && !matches!(e, KvError::AlreadyExists(_))
        {
            tracing::debug!("the end cannot be told: {e}");
        }
    }

    /// Why the run ended.
    pub fn ended(&self) -> Result<Option<End>, KvError> {
        match self.store.try_get(END) {
            Ok(text) => Ok(serde_json::from_slice(&text).ok()),
            Err(KvError::NotFound(_)) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Says that this process has done its part.
    pub fn done(&self) {
        if let Err(e) = self.store.set(&Self::key(self.id), DONE) {
            tracing::debug!("the end of this process cannot be told: {e}");
        }
    }

    /// Whether a process has said so.
    fn is_done(&self, process: usize) -> bool {
        self.store.try_get(&Self::key(process)).is_ok_and(|beat| beat == DONE)
    }

    /// Waits until all others have done their part, `patience` at most; those that have not.
    pub fn wait_for_others(&self, count: usize, patience: Duration) -> Vec<usize> {
        let started = Instant::now();
        loop {
            let left: Vec<usize> = (0..count).filter(|&i| i != self.id && !self.is_done(i)).collect();
            if left.is_empty() || started.elapsed() > patience {
                return left;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The time between two looks.
    pub fn pause(&self) -> Duration {
        self.timeout / LOOKS
    }
}

impl Watch {
    /// Begins to watch; process 0 watches all, the others process 0.
    pub fn start(watched: Arc<Watched>, count: usize, on_end: OnEnd) -> std::io::Result<Watch> {
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new().name("watch".into()).spawn(move || {
            if let Some(message) = watch(&watched, count, &stopped) {
                on_end(&message);
            }
        })?;
        Ok(Watch { stop, thread: Some(thread) })
    }

    /// Ends the thread.
    pub fn stop(&mut self) {
        // A thread that is gone needs no word.
        let _ = self.stop.send(());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Beats and looks until told to stop; the reason where the run has to end.
fn watch(watched: &Watched, count: usize, stopped: &Receiver<()>) -> Option<String> {
    let others: Vec<usize> = if watched.id == 0 { (1..count).collect() } else { vec![0] };
    // The last beat of each and when it was first seen; before its first, a process is still starting.
    let mut seen: Vec<Option<(Vec<u8>, Instant)>> = vec![None; others.len()];
    let mut answered = Instant::now();
    let mut beats = 0u64;
    loop {
        match stopped.recv_timeout(watched.pause()) {
            Err(RecvTimeoutError::Timeout) => {}
            _ => return None,
        }
        beats += 1;
        let beat = watched.store.set(&Watched::key(watched.id), beats.to_string().as_bytes());
        match beat.and_then(|()| watched.ended()) {
            Ok(None) => answered = Instant::now(),
            Ok(Some(end)) => {
                watched.done();
                if watched.id == 0 {
                    // The store is here: the others have to read the reason first.
                    watched.wait_for_others(count, watched.pause() * 4);
                }
                return Some(match end.process == watched.id {
                    true => format!("the others ended the run: {}", end.message),
                    false => format!("{} {}; the run is ended", watched.name(end.process), end.message),
                });
            }
            Err(e) if answered.elapsed() > watched.timeout => {
                let (name, seconds) = (watched.name(0), watched.timeout.as_secs_f64());
                return Some(format!(
                    "{name} has not answered at {} for {seconds:.0} s: it died or hangs ({e}); the run is ended",
                    watched.place
                ));
            }
            Err(_) => continue,
        }
        for (process, seen) in others.iter().zip(&mut seen) {
            let beat = match watched.store.try_get(&Watched::key(*process)) {
                Ok(beat) => Some(beat),
                // All have come: one that never beats is counted from here.
                Err(KvError::NotFound(_)) if watched.hosts.get().is_some() => Some(Vec::new()),
                Err(_) => None,
            };
            match (beat, &seen) {
                (None, _) => {}
                (Some(beat), Some((last, since))) if beat == *last => {
                    if beat != DONE && since.elapsed() > watched.timeout {
                        let seconds = watched.timeout.as_secs_f64();
                        watched.end(*process, &format!("has not answered for {seconds:.0} s: it died or hangs"));
                    }
                }
                (Some(beat), _) => *seen = Some((beat, Instant::now())),
            }
        }
    }
}
