//! The processes of a run, from the point of view of one.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::heartbeat::{Heartbeat, OnAbort, Peers};
use super::launch::{JOBSET, Launch};
use super::store::{self, ETCD, Server};
use super::waiting::{Waiting, resolve};
use crate::pjrt::{KvError, KvStore, Node};

/// A wait that only the heartbeat ends.
const FOR_EVER: Duration = Duration::from_secs(30 * 86_400);
/// Pause between two attempts to reach process 0, which may start later.
const PAUSE: Duration = Duration::from_millis(200);

/// Timeouts for other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Until all have registered.
    pub start: Duration,
    /// Without a heartbeat, after which a process counts as lost.
    pub lost: Duration,
}

/// Errors of a group of processes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    #[error("several processes: {0}")]
    Store(#[from] KvError),
    #[error(
        "several processes: the coordinator's name '{name}' does not resolve: {reason}; correct --coordinator, or what the launcher says ({how})"
    )]
    Unresolved { name: String, reason: String, how: String },
    #[error("process 0 cannot listen at {place}: {reason}")]
    Listen { place: String, reason: String },
    #[error("process 0 did not come within {seconds} s: {error}")]
    Absent { seconds: u64, error: KvError },
    /// Processes, by their numbers, that did not register in time.
    #[error(
        "{missing} of {count} did not come within {seconds} s; each needs the same --coordinator and its own --process-id"
    )]
    Missing { missing: String, count: usize, seconds: u64 },
    /// Processes that run different programs, versions or flags.
    #[error("{0}")]
    Differ(String),
}

/// Registration of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ProcessInfo {
    host: String,
    pid: u32,
    count: usize,
}

/// The processes of a run, seen from this one.
pub struct Group {
    launch: Launch,
    store: Arc<dyn KvStore>,
    hosts: Vec<String>,
    all_gathers: AtomicUsize,
    left: AtomicBool,
    heartbeat: Mutex<Heartbeat>,
    peers: Arc<Peers>,
    /// Of process 0: what the others ask. Last, so that it goes last.
    server: Option<Server>,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} of {}", self.launch.id, self.launch.count)
    }
}

impl Group {
    /// Joins the other processes; returns when all have registered. `on_abort` is called, on a thread of its own, with a line
    /// that says why the run cannot go on: it exits the process.
    ///
    /// # Errors
    /// An unusable address, processes that do not register in time or that contradict each other.
    pub fn join(launch: &Launch, timeouts: Timeouts, on_abort: OnAbort) -> Result<Group, GroupError> {
        let started = Instant::now();
        let (server, store) = open(launch, timeouts)?;
        let own = ProcessInfo { host: host(), pid: std::process::id(), count: launch.count };
        register(&*store, launch, &own, timeouts.start)?;
        let peers = Arc::new(Peers {
            id: launch.id,
            store: store.clone(),
            place: launch.coordinator.clone(),
            timeout: timeouts.lost,
            hosts: OnceLock::new(),
        });
        let heartbeat = Heartbeat::start(peers.clone(), launch.count, on_abort)
            .map_err(|e| GroupError::Differ(format!("no thread to watch the other processes with: {e}")))?;
        let group = |hosts| Group {
            launch: launch.clone(),
            store: store.clone(),
            hosts,
            all_gathers: AtomicUsize::new(0),
            left: AtomicBool::new(false),
            heartbeat: Mutex::new(heartbeat),
            peers: peers.clone(),
            server,
        };
        let left = timeouts.start.saturating_sub(started.elapsed());
        let met = match launch.id {
            0 => rendezvous(&*store, launch, left),
            // Process 0 names who is missing; it is given the time to do so.
            _ => {
                let whom = || format!("the other processes of {} at {}", launch.count, launch.coordinator);
                let met = Waiting::start(left + timeouts.lost).get(&*store, "processes", whom);
                met.map_err(GroupError::from).and_then(|text| list(&text))
            }
        };
        match met {
            Ok(hosts) => {
                let _ = peers.hosts.set(hosts.clone());
                Ok(group(hosts))
            }
            Err(error) => {
                // The others learn why, those that come.
                group(Vec::new()).fail(&format!("failed: {error}"));
                Err(error)
            }
        }
    }

    pub fn id(&self) -> usize {
        self.launch.id
    }

    pub(crate) fn count(&self) -> usize {
        self.launch.count
    }

    pub fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// Index of this process among those of its host, from 0.
    pub fn local_rank(&self) -> usize {
        let own = self.hosts.get(self.id());
        self.hosts.iter().take(self.id()).filter(|host| Some(*host) == own).count()
    }

    /// Keys of the store that this process serves, if it does: in the long run they are not more.
    pub fn served_keys(&self) -> Option<usize> {
        self.server.as_ref().map(Server::keys)
    }

    pub(crate) fn node(&self) -> Node {
        Node { id: self.id(), count: self.count(), store: self.store.clone() }
    }

    /// One line for the log: index, count, host, launcher, coordinator.
    pub fn describe(&self) -> String {
        let Launch { id, count, coordinator, how } = &self.launch;
        format!("process {id} of {count} on {} ({how}), coordinator {coordinator}", self.hosts[*id])
    }

    /// Name for messages: `process 2 (host b)`.
    pub(crate) fn name(&self, process: usize) -> String {
        self.peers.name(process)
    }

    /// All-gather: the texts of all processes, in their order. The n-th call of one process pairs with the n-th of each
    /// other; it waits for them as long as they live.
    ///
    /// # Errors
    /// The store.
    pub fn all_gather(&self, text: &str) -> Result<Vec<String>, GroupError> {
        let n = self.all_gathers.fetch_add(1, Ordering::SeqCst);
        let key = |process: usize| format!("all_gather/{n}/{process}");
        let all = format!("all_gather/{n}");
        if self.id() != 0 {
            self.store.put(&key(self.id()), text.as_bytes())?;
            return list(&self.store.get(&all, FOR_EVER)?);
        }
        let mut texts = vec![text.to_string()];
        for process in 1..self.count() {
            texts.push(String::from_utf8_lossy(&self.store.get(&key(process), FOR_EVER)?).into_owned());
            self.store.remove(&key(process))?;
        }
        // Who is here has read what came before.
        if let Some(before) = n.checked_sub(1) {
            self.store.remove(&format!("all_gather/{before}"))?;
        }
        self.store.put(&all, &serde_json::to_vec(&texts).expect("texts have a JSON form"))?;
        Ok(texts)
    }

    /// Checks that a text is equal in all processes; `differ` makes the error from the first process that differs from
    /// process 0: its name, its text, process 0's.
    ///
    /// # Errors
    /// Texts that differ, in every process the same line; the store.
    pub(crate) fn ensure_equal(
        &self,
        text: &str,
        differ: impl Fn(&str, &str, &str) -> String,
    ) -> Result<(), GroupError> {
        let texts = self.all_gather(text)?;
        match texts.iter().position(|t| *t != texts[0]) {
            None => Ok(()),
            Some(other) => Err(GroupError::Differ(differ(&self.name(other), &texts[other], &texts[0]))),
        }
    }

    /// Checks that all processes run the same program, by the hashes of its text and of its compile options; whether all of
    /// them have it `cached`.
    ///
    /// # Errors
    /// The first process that runs another program than process 0, with both; the same in every process.
    pub fn ensure_same_program(&self, name: &str, text: &str, options: &str, cached: bool) -> Result<bool, GroupError> {
        let own = format!("program '{name}' {text} with options {options}");
        let texts = self.all_gather(&format!("{cached} {own}"))?;
        let all: Vec<(&str, &str)> = texts.iter().map(|text| text.split_once(' ').unwrap_or(("", text))).collect();
        match all.iter().position(|(_, program)| *program != all[0].1) {
            None => Ok(all.iter().all(|(cached, _)| *cached == "true")),
            Some(other) => Err(GroupError::Differ(format!(
                "{} runs {}, process 0 {}: all need the same binary, plugin, model and configuration",
                self.name(other),
                all[other].1,
                all[0].1
            ))),
        }
    }

    /// Leaves after success. Process 0 waits for the others, to whom it serves the store.
    pub fn finish(&self) {
        if !self.leave() {
            return;
        }
        if self.id() == 0 {
            let late = self.peers.wait_for_others(self.count(), self.peers.timeout);
            if let Some(first) = late.first() {
                tracing::warn!("{} has not ended; its part of the work is done", self.name(*first));
            }
        }
        self.peers.done();
    }

    /// Aborts the run: every other process exits with this one's name and `message`, a verb and what follows.
    pub fn fail(&self, message: &str) {
        if !self.leave() {
            return;
        }
        self.peers.abort(self.id(), message);
        if self.id() == 0 {
            self.peers.wait_for_others(self.count(), self.peers.pause() * 4);
        }
        self.peers.done();
    }

    /// Stops the heartbeat, which would end this process with the others; false where it has been stopped before.
    fn leave(&self) -> bool {
        if self.left.swap(true, Ordering::SeqCst) {
            return false;
        }
        self.heartbeat.lock().unwrap_or_else(PoisonError::into_inner).stop();
        true
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.fail("exited without reporting a result");
    }
}

/// The store, and at process 0 its server.
fn open(launch: &Launch, timeouts: Timeouts) -> Result<(Option<Server>, Arc<dyn KvStore>), GroupError> {
    let place = &launch.coordinator;
    // Pods get their names when they start, which may be later.
    if !place.starts_with(ETCD) && !launch.how.contains(JOBSET) {
        let unresolved = |(name, reason)| GroupError::Unresolved { name, reason, how: launch.how.clone() };
        resolve(place).map_err(unresolved)?;
    }
    if launch.id == 0 && !place.starts_with(ETCD) {
        let (host, port) = place.rsplit_once(':').unwrap_or((place, ""));
        let host = if host == "localhost" { "127.0.0.1" } else { host };
        let near = host.parse::<Ipv4Addr>().is_ok_and(|address| address.is_loopback());
        // Other hosts may know this one by several addresses.
        let at = format!("{}:{port}", if near { host } else { "0.0.0.0" });
        let listen = |e: std::io::Error| GroupError::Listen { place: at.clone(), reason: e.to_string() };
        let server = Server::start(&at).map_err(listen)?;
        let store = server.store();
        return Ok((Some(server), store));
    }
    let answer = (timeouts.lost / 4).min(Duration::from_secs(5));
    Ok((None, store::connect(place, answer)?))
}

/// Registers this process in the store.
fn register(store: &dyn KvStore, launch: &Launch, own: &ProcessInfo, patience: Duration) -> Result<(), GroupError> {
    let id = launch.id;
    let (key, text) =
        (format!("process/{id}"), serde_json::to_vec(own).expect("structs of texts and numbers have a JSON form"));
    let mut waiting = Waiting::start(patience);
    loop {
        match store.put(&key, &text) {
            Ok(()) => return Ok(()),
            Err(KvError::AlreadyExists(_)) => {
                let other = store.try_get(&key)?;
                // An answer that was lost on its way.
                if other == text {
                    return Ok(());
                }
                let other: Option<ProcessInfo> = serde_json::from_slice(&other).ok();
                let other = other.map_or("another".into(), |c| format!("pid {} on {}", c.pid, c.host));
                return Err(GroupError::Differ(format!(
                    "process {id} is there already ({other}): each process needs a --process-id of its own, each run a place of its own"
                )));
            }
            Err(error) if waiting.left().is_zero() => {
                return Err(GroupError::Absent { seconds: patience.as_secs(), error });
            }
            Err(error) => {
                waiting.say(|| format!("process 0 of {} at {}: {error}", launch.count, launch.coordinator));
                std::thread::sleep(PAUSE);
            }
        }
    }
}

/// Waits, as process 0, for all to register, and publishes their hosts.
fn rendezvous(store: &dyn KvStore, launch: &Launch, patience: Duration) -> Result<Vec<String>, GroupError> {
    let mut waiting = Waiting::start(patience);
    let mut hosts = Vec::new();
    let mut missing = Vec::new();
    let key = |id: usize| format!("process/{id}");
    let absent = |first: usize| {
        let absent = (first..launch.count).filter(|id| store.try_get(&key(*id)).is_err());
        format!("{} of {} to come to {}", numbered(absent), launch.count, launch.coordinator)
    };
    for id in 0..launch.count {
        let text = match waiting.get(store, &key(id), || absent(id)) {
            Ok(text) => text,
            Err(KvError::Timeout { .. }) => {
                missing.push(id);
                continue;
            }
            Err(e) => return Err(e.into()),
        };
        let info: ProcessInfo = serde_json::from_slice(&text)
            .map_err(|e| GroupError::Differ(format!("process {id} is of another version: {e}")))?;
        if info.count != launch.count {
            return Err(GroupError::Differ(format!(
                "process {id} ({}) is one of {}, process 0 one of {}: give all the same --num-processes",
                info.host, info.count, launch.count
            )));
        }
        hosts.push(info.host);
    }
    if !missing.is_empty() {
        let missing = numbered(missing);
        return Err(GroupError::Missing { missing, count: launch.count, seconds: patience.as_secs() });
    }
    store.put("processes", &serde_json::to_vec(&hosts).expect("texts have a JSON form"))?;
    Ok(hosts)
}

/// Processes by their numbers: `processes 1, 3`.
fn numbered(ids: impl IntoIterator<Item = usize>) -> String {
    let ids: Vec<String> = ids.into_iter().map(|id| id.to_string()).collect();
    format!("process{} {}", if ids.len() > 1 { "es" } else { "" }, ids.join(", "))
}

fn list(text: &[u8]) -> Result<Vec<String>, GroupError> {
    serde_json::from_slice(text).map_err(|e| GroupError::Differ(format!("process 0 is of another version: {e}")))
}

/// This host's name.
pub(crate) fn host() -> String {
    match std::fs::read_to_string("/proc/sys/kernel/hostname") {
        Ok(name) if !name.trim().is_empty() => name.trim().into(),
        _ => "unknown host".into(),
    }
}
