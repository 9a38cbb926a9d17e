//! The group of processes of a run, from the point of view of one of them.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::heartbeat::{Heartbeat, OnAbort, Peers};
use super::launch::{JOBSET, Launch};
use super::store::{self, ETCD, StoreServer};
use super::waiting::{PeerWait, resolve};
use ltx2_pjrt::{KvError, KvStore, ProcessNode};

/// Timeout (30 days) that stands for an unlimited wait. If another process is lost, the heartbeat thread terminates
/// this process during the wait.
const UNLIMITED: Duration = Duration::from_secs(30 * 86_400);
/// Pause between attempts to reach process 0, which may start later.
const PAUSE: Duration = Duration::from_millis(200);

/// Timeouts for other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Time for all processes to register.
    pub start: Duration,
    /// Time without a heartbeat after which a process counts as lost.
    pub lost: Duration,
}

/// An error of a multi-process run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// The key-value store failed.
    #[error("multi-process run: {0}")]
    Store(#[from] KvError),
    /// The coordinator's host name does not resolve.
    #[error(
        "multi-process run: the coordinator's host '{name}' does not resolve: {reason}; correct --coordinator or the launcher's settings ({how})"
    )]
    Unresolved {
        /// Host name of the coordinator.
        name: String,
        /// Message of the resolver.
        reason: String,
        /// Launcher or options that set the coordinator.
        how: String,
    },
    /// Process 0 cannot start the server of the store.
    #[error("process 0 cannot listen on {place}: {reason}")]
    Listen {
        /// Address `HOST:PORT` of the server.
        place: String,
        /// Message of the operating system.
        reason: String,
    },
    /// This process could not register in the store in time.
    #[error("process 0 did not respond within {seconds} s: {error}")]
    Absent {
        /// Timeout in seconds.
        seconds: u64,
        /// Error of the last attempt.
        error: KvError,
    },
    /// Processes, by id, that did not register in time.
    #[error(
        "{missing} of {count} did not register within {seconds} s; give all processes the same --coordinator and each a different --process-id"
    )]
    Missing {
        /// Ids of the missing processes, for example `processes 1, 3`.
        missing: String,
        /// Number of processes of the run.
        count: usize,
        /// Seconds that process 0 waited for the missing processes.
        seconds: u64,
    },
    /// The processes run different programs, versions or flags.
    #[error("{0}")]
    Differ(String),
}

/// Registration record of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ProcessInfo {
    host: String,
    pid: u32,
    count: usize,
}

/// The group of processes of a run, from the point of view of this process.
pub struct Group {
    launch: Launch,
    store: Arc<dyn KvStore>,
    hosts: Vec<String>,
    all_gathers: AtomicUsize,
    left: AtomicBool,
    heartbeat: Mutex<Heartbeat>,
    peers: Arc<Peers>,
    /// Server of the key-value store; `None` except on process 0. This is the last field, so that the server is dropped
    /// last.
    server: Option<StoreServer>,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} of {}", self.launch.id, self.launch.count)
    }
}

impl Group {
    /// Joins the other processes; returns when all have registered. `on_abort` is called on the heartbeat thread with a
    /// one-line reason if the run must be aborted later; it must exit the process.
    ///
    /// # Errors
    /// Returns an error if an address is unusable, if processes do not register in time, or if their settings conflict.
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
            .map_err(|e| GroupError::Differ(format!("cannot start the heartbeat thread: {e}")))?;
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
            // Process 0 reports which processes are missing, so wait long enough to receive its report.
            _ => {
                let whom = || format!("the other processes (of {}) at {}", launch.count, launch.coordinator);
                let met = PeerWait::start(left + timeouts.lost).get(&*store, "processes", whom);
                met.map_err(GroupError::from).and_then(|text| list(&text))
            }
        };
        match met {
            Ok(hosts) => {
                let _ = peers.hosts.set(hosts.clone());
                Ok(group(hosts))
            }
            Err(error) => {
                // Reports the reason to the processes that did register.
                group(Vec::new()).fail(&format!("failed: {error}"));
                Err(error)
            }
        }
    }

    /// Returns the id of this process, from 0.
    pub fn id(&self) -> usize {
        self.launch.id
    }

    /// Returns the number of processes of the run.
    pub fn count(&self) -> usize {
        self.launch.count
    }

    /// Returns the host name of each process, by process id.
    pub fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// Returns the index of this process among those on its host, from 0.
    pub fn local_rank(&self) -> usize {
        let own = self.hosts.get(self.id());
        self.hosts.iter().take(self.id()).filter(|host| Some(*host) == own).count()
    }

    /// Returns the number of keys in the store that this process serves; `None` if it serves no store.
    pub fn served_keys(&self) -> Option<usize> {
        self.server.as_ref().map(StoreServer::keys)
    }

    /// Returns the id, the number of processes and the store, for the PJRT client.
    pub fn node(&self) -> ProcessNode {
        ProcessNode { id: self.id(), count: self.count(), store: self.store.clone() }
    }

    /// Returns one line for the log: process id, count, host, launcher and coordinator.
    pub fn describe(&self) -> String {
        let Launch { id, count, coordinator, how } = &self.launch;
        format!("process {id} of {count} on {} ({how}), coordinator {coordinator}", self.hosts[*id])
    }

    /// Returns a process's name for messages: `process 2 (host b)`.
    pub fn name(&self, process: usize) -> String {
        self.peers.name(process)
    }

    /// All-gathers a text: returns the texts of all processes, ordered by process id. The n-th call of each process is
    /// matched with the n-th call of the others. Waits as long as all processes are alive.
    ///
    /// # Errors
    /// Returns the store's error.
    pub fn all_gather(&self, text: &str) -> Result<Vec<String>, GroupError> {
        let n = self.all_gathers.fetch_add(1, Ordering::SeqCst);
        let key = |process: usize| format!("all_gather/{n}/{process}");
        let all = format!("all_gather/{n}");
        if self.id() != 0 {
            self.store.put(&key(self.id()), text.as_bytes())?;
            return list(&self.store.get(&all, UNLIMITED)?);
        }
        let mut texts = vec![text.to_string()];
        for process in 1..self.count() {
            texts.push(String::from_utf8_lossy(&self.store.get(&key(process), UNLIMITED)?).into_owned());
            self.store.remove(&key(process))?;
        }
        // Every process that takes part in this call has read the result of the previous call, so that result can be
        // removed.
        if let Some(before) = n.checked_sub(1) {
            self.store.remove(&format!("all_gather/{before}"))?;
        }
        self.store.put(&all, &serde_json::to_vec(&texts).expect("strings serialize to JSON"))?;
        Ok(texts)
    }

    /// Checks that `text` is equal in all processes. Otherwise returns the error `differ(name, text,
    /// text_of_process_0)` for the first process that differs from process 0; the error is the same in every process.
    pub fn ensure_equal(&self, text: &str, differ: impl Fn(&str, &str, &str) -> String) -> Result<(), GroupError> {
        let texts = self.all_gather(text)?;
        match texts.iter().position(|t| *t != texts[0]) {
            None => Ok(()),
            Some(other) => Err(GroupError::Differ(differ(&self.name(other), &texts[other], &texts[0]))),
        }
    }

    /// Checks that all processes run the same program, by hashes of its text and of its compile options. Returns
    /// whether all processes have it cached.
    ///
    /// # Errors
    /// Returns an error, equal in every process, that lists the program of the first process that differs and that of
    /// process 0.
    pub fn ensure_same_program(&self, name: &str, text: &str, options: &str, cached: bool) -> Result<bool, GroupError> {
        let own = format!("program '{name}' {text} with options {options}");
        let texts = self.all_gather(&format!("{cached} {own}"))?;
        let all: Vec<(&str, &str)> = texts.iter().map(|text| text.split_once(' ').unwrap_or(("", text))).collect();
        match all.iter().position(|(_, program)| *program != all[0].1) {
            None => Ok(all.iter().all(|(cached, _)| *cached == "true")),
            Some(other) => Err(GroupError::Differ(format!(
                "{} runs {}, but process 0 runs {}; all processes need the same binary, plugin, model and configuration",
                self.name(other),
                all[other].1,
                all[0].1
            ))),
        }
    }

    /// Leaves the group after success. Process 0 waits for the others, because it serves their store.
    pub fn finish(&self) {
        if !self.leave() {
            return;
        }
        if self.id() == 0 {
            let late = self.peers.wait_for_others(self.count(), self.peers.timeout);
            if let Some(first) = late.first() {
                tracing::warn!("{} did not exit in time after the run succeeded", self.name(*first));
            }
        }
        self.peers.done();
    }

    /// Aborts the run: every other process exits and reports the name of this process, followed by `message`, a verb
    /// phrase.
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

    /// Stops the heartbeat, so that this process no longer exits with the others. Returns `false` if it was already
    /// stopped.
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

/// Opens the store; process 0 also starts its server.
fn open(launch: &Launch, timeouts: Timeouts) -> Result<(Option<StoreServer>, Arc<dyn KvStore>), GroupError> {
    let place = &launch.coordinator;
    // JobSet pods get their DNS names only when they start, which may be later.
    if !place.starts_with(ETCD) && !launch.how.contains(JOBSET) {
        let unresolved = |(name, reason)| GroupError::Unresolved { name, reason, how: launch.how.clone() };
        resolve(place).map_err(unresolved)?;
    }
    if launch.id == 0 && !place.starts_with(ETCD) {
        let (host, port) = place.rsplit_once(':').unwrap_or((place, ""));
        let host = if host == "localhost" { "127.0.0.1" } else { host };
        let near = host.parse::<Ipv4Addr>().is_ok_and(|address| address.is_loopback());
        // Listen at all addresses, because other hosts may reach this host at any of its addresses.
        let at = format!("{}:{port}", if near { host } else { "0.0.0.0" });
        let listen = |e: std::io::Error| GroupError::Listen { place: at.clone(), reason: e.to_string() };
        let server = StoreServer::start(&at).map_err(listen)?;
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
        (format!("process/{id}"), serde_json::to_vec(own).expect("structs of strings and numbers serialize to JSON"));
    let mut waiting = PeerWait::start(patience);
    loop {
        match store.put(&key, &text) {
            Ok(()) => return Ok(()),
            Err(KvError::AlreadyExists(_)) => {
                let other = store.try_get(&key)?;
                // An earlier attempt succeeded, but its response was lost.
                if other == text {
                    return Ok(());
                }
                let other: Option<ProcessInfo> = serde_json::from_slice(&other).ok();
                let other = other.map_or("another process".into(), |c| format!("pid {} on {}", c.pid, c.host));
                return Err(GroupError::Differ(format!(
                    "process {id} is already registered ({other}); each process needs a unique --process-id, and each run a unique coordinator address"
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

/// Waits until all processes have registered, and publishes their hosts. Called on process 0.
fn rendezvous(store: &dyn KvStore, launch: &Launch, patience: Duration) -> Result<Vec<String>, GroupError> {
    let mut waiting = PeerWait::start(patience);
    let mut hosts = Vec::new();
    let mut missing = Vec::new();
    let key = |id: usize| format!("process/{id}");
    let absent = |first: usize| {
        let absent = (first..launch.count).filter(|id| store.try_get(&key(*id)).is_err());
        format!("{} of {} to register at {}", numbered(absent), launch.count, launch.coordinator)
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
            .map_err(|e| GroupError::Differ(format!("process {id} runs another version of ltx2: {e}")))?;
        if info.count != launch.count {
            return Err(GroupError::Differ(format!(
                "process {id} ({}) expects {} processes, process 0 expects {}; pass the same --num-processes to all processes",
                info.host, info.count, launch.count
            )));
        }
        hosts.push(info.host);
    }
    if !missing.is_empty() {
        let missing = numbered(missing);
        return Err(GroupError::Missing { missing, count: launch.count, seconds: patience.as_secs() });
    }
    store.put("processes", &serde_json::to_vec(&hosts).expect("strings serialize to JSON"))?;
    Ok(hosts)
}

/// Formats process ids: `processes 1, 3`.
fn numbered(ids: impl IntoIterator<Item = usize>) -> String {
    let ids: Vec<String> = ids.into_iter().map(|id| id.to_string()).collect();
    format!("process{} {}", if ids.len() > 1 { "es" } else { "" }, ids.join(", "))
}

fn list(text: &[u8]) -> Result<Vec<String>, GroupError> {
    serde_json::from_slice(text).map_err(|e| GroupError::Differ(format!("process 0 runs another version of ltx2: {e}")))
}

/// Returns this host's name.
pub fn host() -> String {
    match std::fs::read_to_string("/proc/sys/kernel/hostname") {
        Ok(name) if !name.trim().is_empty() => name.trim().into(),
        _ => "unknown host".into(),
    }
}
