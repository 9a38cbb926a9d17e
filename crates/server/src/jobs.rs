//! The server's jobs: an index in memory whose state transitions are also written to disk.
//!
//! A transition is written to disk before it becomes visible; progress is not stored. The index lock is held only
//! briefly: a thread that changes a job's state marks the job as busy, writes without the lock, then publishes the new
//! state.

mod end;
mod index;
mod prepare;
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

use self::index::{JobIndex, JobLifecycle};
use super::descriptors::is_exhausted;
use super::error::ApiError;
use super::id::VideoId;
use super::job::{AcceptedJob, JobState, Record, Snapshot};
use super::settings::Serve;
use super::store::{JobStore, Variant, is_full};

/// The client that sends a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Name of the client's API key; empty on a server without keys.
    pub name: String,
    /// Whether the client may see the videos of all keys.
    pub sees_all: bool,
}

impl Caller {
    /// Returns whether the caller may see a job.
    pub fn sees(&self, accepted: &AcceptedJob) -> bool {
        self.sees_all || self.name == accepted.owner
    }
}

/// Guard that reserves a slot in the queue while a request is processed; dropping it frees the slot.
pub struct Ticket {
    jobs: Arc<Jobs>,
    owner: String,
    /// Whether a submitted job has taken over the slot.
    is_used: bool,
    /// Whether the client waits for the job in a synchronous request.
    waits: bool,
}

/// Result of submitting a job.
#[derive(Clone, Debug)]
pub enum Submitted {
    /// A new job.
    New(Snapshot),
    /// The request had been submitted before: the earlier job with the same `Idempotency-Key` and body.
    Again(Snapshot),
}

/// One page of a list of jobs.
#[derive(Clone, Debug)]
pub struct JobPage {
    /// Jobs of the page.
    pub jobs: Vec<Snapshot>,
    /// Whether more jobs follow.
    pub has_more: bool,
}

/// Selection of the jobs in a list request.
#[derive(Clone, Debug)]
pub struct ListQuery {
    /// Id after which the page starts, in list order. The job with this id may have been removed.
    pub after: Option<VideoId>,
    /// Maximum number of jobs.
    pub limit: usize,
    /// Whether the newest jobs come first.
    pub descending: bool,
    /// State of the jobs; `None`: any.
    pub state: Option<JobState>,
}

/// Clock and timing parameters. Tests use shorter times.
#[derive(Clone)]
pub struct JobTiming {
    /// Minimum age of a finished job before it is removed because the disk is full.
    pub young: Duration,
    /// Maximum time that a job waits for disk space or a file descriptor before it fails.
    pub patience: Duration,
    /// Returns the Unix time in seconds.
    pub clock: Arc<dyn Fn() -> u64 + Send + Sync>,
}

impl Default for JobTiming {
    fn default() -> Self {
        let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        JobTiming { young: Duration::from_secs(600), patience: Duration::from_secs(60), clock: Arc::new(clock) }
    }
}

/// The jobs of a server, with their queue, their runs and their store.
pub struct Jobs {
    store: Arc<dyn JobStore>,
    settings: Serve,
    pace: JobTiming,
    index: Mutex<JobIndex>,
    /// Condition variable that is notified when a job is no longer busy, when storing a new job succeeds or fails, and
    /// when the server drains.
    freed: Condvar,
    /// Condition variable that is notified when there may be work for the device.
    work: Condvar,
    version: watch::Sender<u64>,
    is_draining: AtomicBool,
    has_failed: AtomicBool,
    /// Whether a [`Jobs::sweep`] is requested, and a condition variable that is notified of requests.
    sweeps: (Mutex<bool>, Condvar),
    /// Lock held while a request sweeps a full disk, so that concurrent requests do not all sweep.
    sweeping: Mutex<()>,
}

pub use self::run::Running;
pub use self::waiters::Waiter;

/// Operations that the HTTP endpoints use.
impl Jobs {
    /// Returns a job that the caller may see.
    ///
    /// # Errors
    /// Returns `video_not_found`, or `expired` for a job that was removed recently.
    pub fn get(&self, caller: &Caller, id: &VideoId) -> Result<Snapshot, ApiError> {
        let index = self.lock();
        index.seen(caller, id).map(|entry| index.snapshot(entry)).ok_or_else(|| missing(&index, caller, id))
    }

    /// Returns a page of the jobs that the caller may see.
    pub fn list(&self, caller: &Caller, query: &ListQuery) -> JobPage {
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
        JobPage { jobs, has_more }
    }

    /// Returns a receiver of a job's snapshots. A slow receiver skips intermediate snapshots. The channel closes when
    /// the job is removed.
    ///
    /// # Errors
    /// Same as [`Jobs::get`].
    pub fn watch(&self, caller: &Caller, id: &VideoId) -> Result<watch::Receiver<Snapshot>, ApiError> {
        let mut index = self.lock();
        let snapshot = match index.seen(caller, id) {
            Some(entry) => index.snapshot(entry),
            None => return Err(missing(&index, caller, id)),
        };
        let entry = index.jobs.get_mut(id).ok_or_else(ApiError::video_not_found)?;
        Ok(entry.sender.get_or_insert_with(|| watch::channel(snapshot).0).subscribe())
    }

    /// Opens a file of a job without following symbolic links. Checks neither whether the caller may see the job nor
    /// the job's state.
    ///
    /// # Errors
    /// Returns an error if the file does not exist.
    pub fn open_file(&self, id: &VideoId, variant: Variant) -> io::Result<File> {
        self.store.open(id, variant)
    }

    /// Returns a receiver of a counter that increases with every change of any job.
    pub fn version(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Returns the running and the queued jobs that the caller may see, in order.
    pub fn queue(&self, caller: &Caller) -> (Vec<Snapshot>, Vec<Snapshot>) {
        let index = self.lock();
        let running = index.runs.values().flat_map(|run| &run.members);
        let running = running.filter_map(|id| index.seen(caller, id));
        let running = running.filter(|entry| entry.record.state == JobState::InProgress);
        (running.map(|entry| index.snapshot(entry)).collect(), index.queued(caller))
    }

    /// Returns the cancelled or deleted jobs of the caller that still run on the device.
    pub fn stopping(&self, caller: &Caller) -> Vec<VideoId> {
        let index = self.lock();
        let on_device = index.runs.values().filter(|run| !run.is_device_done).flat_map(|run| &run.members);
        let entries = on_device.filter_map(|id| index.jobs.get(id).filter(|entry| caller.sees(&entry.accepted)));
        entries.filter(|entry| entry.record.state.is_terminal()).map(|entry| entry.accepted.id.clone()).collect()
    }

    /// Returns whether the device runs videos and all of them were cancelled or deleted.
    pub fn runs_only_cancelled(&self) -> bool {
        let index = self.lock();
        let running = index.runs.values().filter(|run| !run.is_device_done);
        let mut on_device = running.flat_map(|run| &run.members).peekable();
        let is_over = |id: &VideoId| index.jobs.get(id).is_none_or(|entry| entry.record.state.is_terminal());
        on_device.peek().is_some() && on_device.all(is_over)
    }

    /// Returns the folder of a job's files.
    pub fn folder(&self, id: &VideoId) -> PathBuf {
        self.store.folder(id)
    }

    /// Returns the maximum time that a job waits for disk space or a file descriptor before it fails.
    pub fn patience(&self) -> Duration {
        self.pace.patience
    }

    /// Returns whether the disk had too little space for another video when it was last checked.
    pub fn is_short_of_disk(&self) -> bool {
        self.lock().is_short
    }

    /// Returns the reason why the device failed; `None` if it has not failed.
    pub fn device_failure(&self) -> Option<String> {
        self.lock().failed.clone()
    }
}

impl Jobs {
    fn lock(&self) -> MutexGuard<'_, JobIndex> {
        // A poisoned index is usable, because it is consistent at every point that can panic.
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> u64 {
        (self.pace.clock)()
    }

    fn is_changed(&self) {
        self.version.send_modify(|version| *version += 1);
    }

    /// Waits until no other thread is changing the job's state, then marks the job as busy. Returns false if the job
    /// does not exist.
    fn reserve<'a>(&'a self, mut index: MutexGuard<'a, JobIndex>, id: &VideoId) -> (MutexGuard<'a, JobIndex>, bool) {
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

    /// Ends the exclusive access that [`Jobs::reserve`] granted, publishes the new state, if any, and notifies watchers.
    fn settle(&self, index: &mut JobIndex, id: &VideoId, record: Option<Record>) {
        if let Some(entry) = index.jobs.get_mut(id) {
            entry.is_busy = false;
            if let Some(record) = record {
                if record.state.is_terminal() {
                    entry.at = match entry.at {
                        JobLifecycle::Run(run) => JobLifecycle::Run(run),
                        JobLifecycle::Queue(_) | JobLifecycle::Ended => JobLifecycle::Ended,
                    };
                    let now = Instant::now();
                    entry.ended = Some(now);
                    entry.deadline = now.checked_add(self.settings.keep.duration());
                }
                if record.state != JobState::InProgress {
                    entry.preview = None;
                }
                entry.record = Arc::new(record);
                index.tell(id);
            }
        }
        self.freed.notify_all();
        // If a cancellation could not be written to disk, the job is still queued and may be the only work for the
        // device thread.
        self.work.notify_all();
        self.is_changed();
    }

    /// Writes a job's state. If the disk is full, frees the disk reserve and tries again.
    fn write(&self, id: &VideoId, record: &Record) -> io::Result<()> {
        match self.store.transition(id, record) {
            Err(error) if is_full(&error) => {
                self.store.give_reserve(true);
                self.store.transition(id, record)
            }
            other => other,
        }
    }

    /// Writes a job's state like [`Jobs::write`], but retries for up to [`JobTiming::patience`] if too many files are
    /// open. Blocks: call it only from the device and finisher threads.
    fn write_with_retry(&self, id: &VideoId, record: &Record) -> io::Result<()> {
        let until = Instant::now() + self.pace.patience;
        loop {
            match self.write(id, record) {
                Err(error) if is_exhausted(&error) && Instant::now() < until => std::thread::sleep(LOOK_AGAIN),
                other => return other,
            }
        }
    }
}

/// Retry interval for writing a job's state while no file descriptor is available.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// Returns the `Retry-After` of a full queue: the estimated remaining seconds of the running batch.
fn retry_after(index: &JobIndex) -> u32 {
    let ids = index.runs.values().filter(|run| !run.is_device_done).flat_map(|run| &run.members);
    let left = ids.filter_map(|id| index.jobs.get(id)?.progress.eta_s).reduce(f64::max);
    // Clients give up after two minutes. If the remaining time is unknown, it may be short.
    left.map_or(5, |left| left.ceil().clamp(1.0, 120.0) as u32)
}

fn missing(index: &JobIndex, caller: &Caller, id: &VideoId) -> ApiError {
    match index.has_expired(caller, id) {
        true => ApiError::new(410, "expired", "the video has expired and was removed"),
        false => ApiError::video_not_found(),
    }
}
