//! All jobs of a server, in memory, with their durable transitions.
//!
//! A transition is on the disk before anyone sees it; progress never is. The index is locked for moments only: a thread that
//! writes a job's state marks it as busy, writes without the lock, and shows the new state then.

mod end;
mod index;
mod progress;
mod recovery;
mod run;
mod submit;
mod sweep;
#[cfg(test)]
mod tests;
mod waiters;

use std::fs::File;
use std::io;
use std::ops::Bound;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::watch;

use self::index::{At, Index};
use super::descriptors::is_exhausted;
use super::error::ApiError;
use super::id::VideoId;
use super::job::{Accepted, Record, Snapshot, State};
use super::store::{JobStore, Variant, is_full};
use crate::config::Serve;

/// Whose request it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Name of its key; empty on a server without keys.
    pub name: String,
    /// Whether it sees every key's videos.
    pub sees_all: bool,
}

impl Caller {
    /// Whether a job is its own to see.
    pub fn sees(&self, accepted: &Accepted) -> bool {
        self.sees_all || self.name == accepted.owner
    }
}

/// A place in the queue that is held while a request's body is read; dropped, it is free again.
pub struct Ticket {
    jobs: Arc<Jobs>,
    owner: String,
    /// Whether its job has the place now.
    is_used: bool,
    /// Whether its client waits for the job.
    waits: bool,
}

/// Result of a request to make a video.
#[derive(Clone, Debug)]
pub enum Submitted {
    New(Snapshot),
    /// The same `Idempotency-Key` and body came before.
    Again(Snapshot),
}

/// A page of jobs.
#[derive(Clone, Debug)]
pub struct Page {
    pub jobs: Vec<Snapshot>,
    pub has_more: bool,
}

/// Part of the list that is wanted.
#[derive(Clone, Debug)]
pub struct ListQuery {
    /// Ids behind this one, in the order of the list; it need not be there any more.
    pub after: Option<VideoId>,
    pub limit: usize,
    /// Newest first.
    pub descending: bool,
    pub state: Option<State>,
}

/// Times that tests have shorter, and the wall's clock.
#[derive(Clone)]
pub struct Pace {
    /// Finished jobs that are younger stay, however full the disk is.
    pub young: Duration,
    /// How long a finished video waits for room on the disk.
    pub patience: Duration,
    /// Seconds since 1970.
    pub clock: Arc<dyn Fn() -> u64 + Send + Sync>,
}

impl Default for Pace {
    fn default() -> Self {
        let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Pace { young: Duration::from_secs(600), patience: Duration::from_secs(60), clock: Arc::new(clock) }
    }
}

/// Jobs of a server.
pub struct Jobs {
    store: Arc<dyn JobStore>,
    settings: Serve,
    pace: Pace,
    index: Mutex<Index>,
    /// A state was written, or a job came that a request waits for.
    freed: Condvar,
    /// There may be work for the device.
    work: Condvar,
    version: watch::Sender<u64>,
    is_draining: AtomicBool,
    has_failed: AtomicBool,
    /// Calls of [`Jobs::sweep`] that were asked for.
    sweeps: (Mutex<bool>, Condvar),
    /// Held by a request that has the disk swept.
    sweeping: Mutex<()>,
}

pub use self::run::Running;
pub use self::waiters::Waiter;

/// For HTTP.
impl Jobs {
    /// A job, where it is the caller's.
    ///
    /// # Errors
    /// `video_not_found`; `expired` for one that was there, as long as that is known.
    pub fn get(&self, caller: &Caller, id: &VideoId) -> Result<Snapshot, ApiError> {
        let index = self.lock();
        index.seen(caller, id).map(|entry| index.snapshot(entry)).ok_or_else(|| missing(&index, caller, id))
    }

    /// A page of the caller's jobs.
    pub fn list(&self, caller: &Caller, query: &ListQuery) -> Page {
        let index = self.lock();
        let wanted = |(id, _): (&VideoId, _)| -> Option<Snapshot> {
            let entry = index.seen(caller, id)?;
            query.state.is_none_or(|state| entry.record.state == state).then(|| index.snapshot(entry))
        };
        let after = query.after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let most = query.limit + 1;
        let mut jobs: Vec<Snapshot> = if query.descending {
            index.jobs.range((Bound::Unbounded, after)).rev().filter_map(wanted).take(most).collect()
        } else {
            index.jobs.range((after, Bound::Unbounded)).filter_map(wanted).take(most).collect()
        };
        let has_more = jobs.len() > query.limit;
        jobs.truncate(query.limit);
        Page { jobs, has_more }
    }

    /// A job's snapshots as they come, the latest wins; it ends when the job is removed.
    ///
    /// # Errors
    /// As [`Jobs::get`].
    pub fn watch(&self, caller: &Caller, id: &VideoId) -> Result<watch::Receiver<Snapshot>, ApiError> {
        let mut index = self.lock();
        let snapshot = match index.seen(caller, id) {
            Some(entry) => index.snapshot(entry),
            None => return Err(missing(&index, caller, id)),
        };
        let entry = index.jobs.get_mut(id).ok_or_else(ApiError::video_not_found)?;
        Ok(entry.sender.get_or_insert_with(|| watch::channel(snapshot).0).subscribe())
    }

    /// A file of a job, open. No link is followed; whether it is the caller's and finished, its snapshot says.
    ///
    /// # Errors
    /// No such file.
    pub fn open_file(&self, id: &VideoId, variant: Variant) -> io::Result<File> {
        self.store.open(id, variant)
    }

    /// A number that grows with every change of any job.
    pub fn version(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// The caller's running and waiting jobs, in order.
    pub fn queue(&self, caller: &Caller) -> (Vec<Snapshot>, Vec<Snapshot>) {
        let index = self.lock();
        let running = index.runs.values().flat_map(|run| &run.members);
        let running = running.filter_map(|id| index.seen(caller, id));
        let running = running.filter(|entry| entry.record.state == State::InProgress);
        (running.map(|entry| index.snapshot(entry)).collect(), index.queued(caller))
    }

    /// The caller's jobs that nobody wants any more and that the device has not left yet, deleted ones too.
    pub fn stopping(&self, caller: &Caller) -> Vec<VideoId> {
        let index = self.lock();
        let on_device = index.runs.values().filter(|run| !run.is_made).flat_map(|run| &run.members);
        let entries = on_device.filter_map(|id| index.jobs.get(id).filter(|entry| caller.sees(&entry.accepted)));
        entries.filter(|entry| entry.record.state.is_terminal()).map(|entry| entry.accepted.id.clone()).collect()
    }

    /// Folder of a job's files.
    pub fn folder(&self, id: &VideoId) -> PathBuf {
        self.store.folder(id)
    }

    /// How long a finished video waits for room on the disk.
    pub fn patience(&self) -> Duration {
        self.pace.patience
    }

    /// Whether the disk has too little room for another video, as it was last seen.
    pub fn is_short_of_disk(&self) -> bool {
        self.lock().is_short
    }

    /// Why nothing runs any more, where the device failed.
    pub fn device_failure(&self) -> Option<String> {
        self.lock().failed.clone()
    }
}

impl Jobs {
    fn lock(&self) -> MutexGuard<'_, Index> {
        // What a thread changes under the lock is whole at every step that can panic.
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> u64 {
        (self.pace.clock)()
    }

    fn is_changed(&self) {
        self.version.send_modify(|version| *version += 1);
    }

    /// Makes the state of a job this thread's to write, once no other does. False for a job that is not there.
    fn claim<'a>(&'a self, mut index: MutexGuard<'a, Index>, id: &VideoId) -> (MutexGuard<'a, Index>, bool) {
        loop {
            match index.jobs.get_mut(id) {
                None => return (index, false),
                Some(entry) if !entry.is_busy => {
                    entry.is_busy = true;
                    return (index, true);
                }
                Some(_) => index = self.freed.wait(index).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Gives a claimed job back, with its new state where there is one, and tells of it.
    fn settle(&self, index: &mut Index, id: &VideoId, record: Option<Record>) {
        if let Some(entry) = index.jobs.get_mut(id) {
            entry.is_busy = false;
            if let Some(record) = record {
                if record.state.is_terminal() {
                    entry.at = match entry.at {
                        At::Run(run) => At::Run(run),
                        At::Queue(_) | At::Over => At::Over,
                    };
                    let now = Instant::now();
                    entry.ended = Some(now);
                    entry.deadline = now.checked_add(self.settings.keep.duration());
                }
                entry.record = Arc::new(record);
                index.tell(id);
            }
        }
        self.freed.notify_all();
        // One whose end could not be kept still waits, and may be all that the device's thread saw.
        self.work.notify_all();
        self.is_changed();
    }

    /// Writes a state; on a full disk into the room that is kept for that.
    fn write(&self, id: &VideoId, record: &Record) -> io::Result<()> {
        match self.store.transition(id, record) {
            Err(error) if is_full(&error) => {
                self.store.give_reserve(true);
                self.store.transition(id, record)
            }
            other => other,
        }
    }

    /// The same for the threads of device and finisher: where too many files are open, it waits for one.
    fn write_patiently(&self, id: &VideoId, record: &Record) -> io::Result<()> {
        let until = Instant::now() + self.pace.patience;
        loop {
            match self.write(id, record) {
                Err(error) if is_exhausted(&error) && Instant::now() < until => std::thread::sleep(LOOK_AGAIN),
                other => return other,
            }
        }
    }
}

/// Between two attempts to write a state where no file can be opened.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// Seconds until the running job should end.
fn retry_after(index: &Index) -> u32 {
    let ids = index.runs.values().filter(|run| !run.is_made).flat_map(|run| &run.members);
    let left = ids.filter_map(|id| index.jobs.get(id)?.progress.eta_s).reduce(f64::max);
    // Beyond two minutes clients give up; what is not known yet may be short.
    left.map_or(5, |left| left.ceil().clamp(1.0, 120.0) as u32)
}

fn missing(index: &Index, caller: &Caller, id: &VideoId) -> ApiError {
    match index.has_expired(caller, id) {
        true => ApiError::new(410, "expired", "the video has expired and was removed"),
        false => ApiError::video_not_found(),
    }
}

/// Too little room on the disk.
fn no_room() -> ApiError {
    ApiError::new(507, "insufficient_storage", "the server's disk is full: delete videos, or try again later")
        .should_retry(false)
}
