//! The processes of a run, from the point of view of one.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::launch::Launch;
use super::store::{self, ETCD, Server};
use super::watch::{OnEnd, Watch, Watched};
use crate::pjrt::{KvError, KvStore, Node};

/// A wait that only the watch ends.
const FOR_EVER: Duration = Duration::from_secs(30 * 86_400);
/// Between two tries to reach process 0, which may start later.
const PAUSE: Duration = Duration::from_millis(200);

/// How long others are waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Until all have come.
    pub start: Duration,
    /// Without a sign of life, after which a process counts as lost.
    pub lost: Duration,
}

/// Why processes do not come together, or do not run the same.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// The store.
    #[error("several processes: {0}")]
    Store(#[from] KvError),
    /// Process 0 cannot serve the store.
    #[error("process 0 cannot listen at {place}: {reason}")]
    Listen {
        /// Where.
        place: String,
        /// The system's words.
        reason: String,
    },
    /// The store was not there in time.
    #[error("process 0 did not come within {seconds} s: {error}")]
    Absent {
        /// The time waited.
        seconds: u64,
        /// The last try.
        error: KvError,
    },
    /// Processes that did not come.
    #[error(
        "{missing} of {count} did not come within {seconds} s; each needs the same --coordinator and its own --process-id"
    )]
    Missing {
        /// Which.
        missing: String,
        /// All.
        count: usize,
        /// The time waited.
        seconds: u64,
    },
    /// Processes that contradict each other.
    #[error("{0}")]
    Differ(String),
}

/// What a process says of itself when it comes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Card {
    host: String,
    pid: u32,
    count: usize,
}

/// This process among all of a run.
pub struct Group {
    launch: Launch,
    store: Arc<dyn KvStore>,
    hosts: Vec<String>,
    exchanges: AtomicUsize,
    left: AtomicBool,
    watch: Mutex<Watch>,
    watched: Arc<Watched>,
    /// Of process 0: what the others ask. Last, so that it goes last.
    _server: Option<Server>,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} of {}", self.launch.id, self.launch.count)
    }
}

impl Group {
    /// Meets the other processes; returns when all have come. From the first moment on, `on_end` is called, on a thread of
    /// its own, with a line that says why the run cannot go on: it ends the process.
    ///
    /// # Errors
    /// An address that cannot be used, processes that do not come or that contradict each other.
    pub fn join(launch: &Launch, timeouts: Timeouts, on_end: OnEnd) -> Result<Group, GroupError> {
        let started = Instant::now();
        let (server, store) = open(launch, timeouts)?;
        let own = Card { host: host(), pid: std::process::id(), count: launch.count };
        come(&*store, launch.id, &own, timeouts.start)?;
        let watched = Arc::new(Watched {
            id: launch.id,
            store: store.clone(),
            place: launch.coordinator.clone(),
            timeout: timeouts.lost,
            hosts: OnceLock::new(),
        });
        let watch = Watch::start(watched.clone(), launch.count, on_end)
            .map_err(|e| GroupError::Differ(format!("no thread to watch the other processes with: {e}")))?;
        let group = |hosts| Group {
            launch: launch.clone(),
            store: store.clone(),
            hosts,
            exchanges: AtomicUsize::new(0),
            left: AtomicBool::new(false),
            watch: Mutex::new(watch),
            watched: watched.clone(),
            _server: server,
        };
        let left = timeouts.start.saturating_sub(started.elapsed());
        let met = match launch.id {
            0 => receive(&*store, launch, left),
            // Process 0 names who is missing; it is given the time to do so.
            _ => store.get("processes", left + timeouts.lost).map_err(GroupError::from).and_then(|text| list(&text)),
        };
        match met {
            Ok(hosts) => {
                let _ = watched.hosts.set(hosts.clone());
                Ok(group(hosts))
            }
            Err(error) => {
                // The others learn why, those that come.
                group(Vec::new()).fail(&format!("failed: {error}"));
                Err(error)
            }
        }
    }

    /// This process, from 0.
    pub fn id(&self) -> usize {
        self.launch.id
    }

    /// All processes.
    pub fn count(&self) -> usize {
        self.launch.count
    }

    /// The host of each process.
    pub fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// This process among those of its host, from 0.
    pub fn local_rank(&self) -> usize {
        let own = self.hosts.get(self.id());
        self.hosts.iter().take(self.id()).filter(|host| Some(*host) == own).count()
    }

    /// What a plugin's client is made with.
    pub fn node(&self) -> Node {
        Node { id: self.id(), count: self.count(), store: self.store.clone() }
    }

    /// One line about it: what said so, where they meet, which this is.
    pub fn describe(&self) -> String {
        let Launch { id, count, coordinator, how } = &self.launch;
        format!("process {id} of {count} on {} ({how}), coordinator {coordinator}", self.hosts[*id])
    }

    /// `process 2 (host b)`.
    pub fn name(&self, process: usize) -> String {
        self.watched.name(process)
    }

    /// Gives every process the texts of all, in their order. The n-th call of one meets the n-th of each other; it waits
    /// for them as long as they live.
    ///
    /// # Errors
    /// The store.
    pub fn exchange(&self, text: &str) -> Result<Vec<String>, GroupError> {
        let n = self.exchanges.fetch_add(1, Ordering::SeqCst);
        let key = |process: usize| format!("exchange/{n}/{process}");
        let all = format!("exchange/{n}");
        if self.id() != 0 {
            self.store.put(&key(self.id()), text.as_bytes())?;
            return list(&self.store.get(&all, FOR_EVER)?);
        }
        let mut texts = vec![text.to_string()];
        for process in 1..self.count() {
            texts.push(String::from_utf8_lossy(&self.store.get(&key(process), FOR_EVER)?).into_owned());
        }
        self.store.put(&all, &serde_json::to_vec(&texts).unwrap_or_default())?;
        Ok(texts)
    }

    /// Exchanges a text that must be the same everywhere; `differ` says what is wrong, of the first process that differs
    /// from process 0: its name, its text, process 0's.
    ///
    /// # Errors
    /// Texts that differ, in every process the same line; the store.
    pub fn agree(&self, text: &str, differ: impl Fn(&str, &str, &str) -> String) -> Result<(), GroupError> {
        let texts = self.exchange(text)?;
        match texts.iter().position(|t| *t != texts[0]) {
            None => Ok(()),
            Some(other) => Err(GroupError::Differ(differ(&self.name(other), &texts[other], &texts[0]))),
        }
    }

    /// Compares a program, by the hashes of its text and of its compile options, with the other processes', and says whether
    /// all of them `kept` it compiled.
    ///
    /// # Errors
    /// The first process that runs another program than process 0, with both; the same in every process.
    pub fn agree_on_program(&self, name: &str, text: &str, options: &str, kept: bool) -> Result<bool, GroupError> {
        let own = format!("program '{name}' {text} with options {options}");
        let texts = self.exchange(&format!("{kept} {own}"))?;
        let all: Vec<(&str, &str)> = texts.iter().map(|text| text.split_once(' ').unwrap_or_default()).collect();
        match all.iter().position(|(_, program)| *program != all[0].1) {
            None => Ok(all.iter().all(|(kept, _)| *kept == "true")),
            Some(other) => Err(GroupError::Differ(format!(
                "{} runs {}, process 0 {}: all need the same binary, plugin, model and configuration",
                self.name(other),
                all[other].1,
                all[0].1
            ))),
        }
    }

    /// Ends well. Process 0 waits for the others, to whom it serves the store.
    pub fn finish(&self) {
        if !self.leave() {
            return;
        }
        if self.id() == 0 {
            let late = self.watched.wait_for_others(self.count(), self.watched.timeout);
            if let Some(first) = late.first() {
                tracing::warn!("{} has not ended; its part of the work is done", self.name(*first));
            }
        }
        self.watched.done();
    }

    /// Ends badly: every other process ends with this one's name and `message`, a verb and what follows.
    pub fn fail(&self, message: &str) {
        if !self.leave() {
            return;
        }
        self.watched.end(self.id(), message);
        if self.id() == 0 {
            self.watched.wait_for_others(self.count(), self.watched.pause() * 4);
        }
        self.watched.done();
    }

    /// Stops the watch, which would end this process with the others; false where it has been stopped before.
    fn leave(&self) -> bool {
        if self.left.swap(true, Ordering::SeqCst) {
            return false;
        }
        if let Ok(mut watch) = self.watch.lock() {
            watch.stop();
        }
        true
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.fail("ended without a word");
    }
}

/// The store, and at process 0 its server.
fn open(launch: &Launch, timeouts: Timeouts) -> Result<(Option<Server>, Arc<dyn KvStore>), GroupError> {
    let place = &launch.coordinator;
    if launch.id == 0 && !place.starts_with(ETCD) {
        let (host, port) = place.rsplit_once(':').unwrap_or((place, ""));
        let near = matches!(host, "localhost" | "127.0.0.1");
        // Other hosts may know this one by several addresses.
        let at = format!("{}:{port}", if near { "127.0.0.1" } else { "0.0.0.0" });
        let listen = |e: std::io::Error| GroupError::Listen { place: at.clone(), reason: e.to_string() };
        let server = Server::start(&at).map_err(listen)?;
        let store = server.store();
        return Ok((Some(server), store));
    }
    let answer = (timeouts.lost / 4).min(Duration::from_secs(5));
    Ok((None, store::connect(place, answer)?))
}

/// Says that this process has come.
fn come(store: &dyn KvStore, id: usize, own: &Card, patience: Duration) -> Result<(), GroupError> {
    let (key, text) = (format!("process/{id}"), serde_json::to_vec(own).unwrap_or_default());
    let started = Instant::now();
    loop {
        match store.put(&key, &text) {
            Ok(()) => return Ok(()),
            Err(KvError::AlreadyExists(_)) => {
                let other = store.try_get(&key)?;
                // An answer that was lost on its way.
                if other == text {
                    return Ok(());
                }
                let other: Option<Card> = serde_json::from_slice(&other).ok();
                let other = other.map_or("another".into(), |c| format!("pid {} on {}", c.pid, c.host));
                return Err(GroupError::Differ(format!(
                    "process {id} is there already ({other}): each process needs a --process-id of its own, each run a place of its own"
                )));
            }
            Err(error) if started.elapsed() > patience => {
                return Err(GroupError::Absent { seconds: patience.as_secs(), error });
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// Process 0 waits for all, and tells them who is there.
fn receive(store: &dyn KvStore, launch: &Launch, patience: Duration) -> Result<Vec<String>, GroupError> {
    let started = Instant::now();
    let mut hosts = Vec::new();
    let mut missing = Vec::new();
    for id in 0..launch.count {
        let text = match store.get(&format!("process/{id}"), patience.saturating_sub(started.elapsed())) {
            Ok(text) => text,
            Err(KvError::Timeout { .. }) => {
                missing.push(id.to_string());
                continue;
            }
            Err(e) => return Err(e.into()),
        };
        let card: Card = serde_json::from_slice(&text)
            .map_err(|e| GroupError::Differ(format!("process {id} is of another version: {e}")))?;
        if card.count != launch.count {
            return Err(GroupError::Differ(format!(
                "process {id} ({}) is one of {}, process 0 one of {}: give all the same --num-processes",
                card.host, card.count, launch.count
            )));
        }
        hosts.push(card.host);
    }
    if !missing.is_empty() {
        let missing = format!("process{} {}", if missing.len() > 1 { "es" } else { "" }, missing.join(", "));
        return Err(GroupError::Missing { missing, count: launch.count, seconds: patience.as_secs() });
    }
    store.put("processes", &serde_json::to_vec(&hosts).unwrap_or_default())?;
    Ok(hosts)
}

fn list(text: &[u8]) -> Result<Vec<String>, GroupError> {
    serde_json::from_slice(text).map_err(|e| GroupError::Differ(format!("process 0 is of another version: {e}")))
}

/// This host's name.
pub fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "unknown host".into(),
        name => name.into(),
    }
}
