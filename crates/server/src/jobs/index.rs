//! In-memory index of the jobs.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use tokio::sync::watch;

use super::Caller;
use super::progress::{BatchProgress, Profiles};
use crate::device::PreviewImage;
use crate::id::VideoId;
use crate::job::{AcceptedJob, JobPhase, JobState, Progress, Record, Snapshot};
use crate::schedule::{LoadedPrograms, ScheduleCandidate};

/// Number of expired jobs that are remembered, so that requests for them get 410 instead of 404.
const MAX_EXPIRED: usize = 1024;

/// Position in the queue. Jobs that an earlier server process started come before new ones.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QueuePosition {
    pub(super) is_new: bool,
    pub(super) id: VideoId,
}

/// A job in the queue.
#[derive(Debug)]
pub(super) struct QueuedJob {
    pub(super) candidate: ScheduleCandidate,
    /// Members of the batch in which an earlier server process started the job; `None` if no earlier process has
    /// started the job.
    pub(super) batch: Option<Arc<Vec<VideoId>>>,
}

/// Position of a job in its lifecycle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum JobLifecycle {
    Queue(QueuePosition),
    /// The job belongs to the run with this number: it is on the device, or its files are being written.
    Run(u64),
    Ended,
}

/// State of the work that a [`Preparer`](crate::device::Preparer) does for a queued job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Preparation {
    Missing,
    Running,
    /// Done, or not needed.
    Done,
}

/// A job with its state and the clients that watch it.
#[derive(Debug)]
pub(super) struct JobEntry {
    pub(super) accepted: Arc<AcceptedJob>,
    pub(super) record: Arc<Record>,
    pub(super) progress: Progress,
    /// Latest preview. `None`: the job is not running, or has no previews.
    pub(super) preview: Option<Arc<PreviewImage>>,
    pub(super) at: JobLifecycle,
    /// Channel to the clients that watch the job; `None` if no clients watch it.
    pub(super) sender: Option<watch::Sender<Snapshot>>,
    /// Flag that makes the device stop running the job when it is set.
    pub(super) cancelled: Arc<AtomicBool>,
    /// Number of clients that wait for the job in a synchronous request.
    pub(super) waiters: usize,
    /// Whether a thread is changing the job's state. Only one thread may do so at a time.
    pub(super) is_busy: bool,
    pub(super) preparation: Preparation,
    /// Whether the job was deleted while it ran. It is then invisible, and its folder is removed when the run ends.
    pub(super) is_hidden: bool,
    /// Monotonic time at which the job ended. `None`: not ended yet.
    pub(super) ended: Option<Instant>,
    /// Monotonic time at which the job expires.
    pub(super) deadline: Option<Instant>,
}

impl JobEntry {
    pub(super) fn new(accepted: AcceptedJob, record: Record, at: JobLifecycle) -> Self {
        let needs_preparation = accepted.config.summary().asks_endpoint;
        JobEntry {
            preparation: if needs_preparation { Preparation::Missing } else { Preparation::Done },
            accepted: Arc::new(accepted),
            record: Arc::new(record),
            progress: Progress::default(),
            preview: None,
            at,
            sender: None,
            cancelled: Arc::default(),
            waiters: 0,
            is_busy: false,
            is_hidden: false,
            ended: None,
            deadline: None,
        }
    }
}

/// A batch that is running.
#[derive(Debug)]
pub(super) struct RunningBatch {
    pub(super) members: Vec<VideoId>,
    pub(super) track: BatchProgress,
    /// Whether the device is done with the batch.
    pub(super) is_device_done: bool,
    /// Number of videos of the batch that the finisher thread is writing.
    pub(super) writing: usize,
}

/// The job to which an idempotency key belongs.
#[derive(Debug)]
pub(super) struct IdempotentJob {
    pub(super) id: VideoId,
    pub(super) body_sha256: String,
    pub(super) until: Instant,
    /// Whether the job has been stored on disk.
    pub(super) is_kept: bool,
}

/// All jobs, the queue and the batches that run.
#[derive(Debug, Default)]
pub(super) struct JobIndex {
    pub(super) jobs: BTreeMap<VideoId, JobEntry>,
    pub(super) waiting: BTreeMap<QueuePosition, QueuedJob>,
    /// Number of reserved queue slots for each API key.
    pub(super) tickets: HashMap<String, usize>,
    pub(super) named: HashMap<RequestName, IdempotentJob>,
    pub(super) runs: BTreeMap<u64, RunningBatch>,
    pub(super) begun: u64,
    pub(super) loaded: LoadedPrograms,
    /// Whether jobs are prepared before they run.
    pub(super) has_preparer: bool,
    pub(super) profiles: Profiles,
    /// Whether the disk has too little space for another video.
    pub(super) is_short: bool,
    /// Reason why the device failed; `None` if it has not failed.
    pub(super) failed: Option<String>,
    /// Time at which the device last made progress. `None`: it has not run a batch yet.
    pub(super) last_progress: Option<Instant>,
    /// Expired jobs and the names of their API keys, oldest first.
    expired: VecDeque<(VideoId, String)>,
    expired_ids: BTreeSet<VideoId>,
}

impl JobIndex {
    /// Returns a job; `None` if it does not exist or the caller may not see it.
    pub(super) fn seen(&self, caller: &Caller, id: &VideoId) -> Option<&JobEntry> {
        self.jobs.get(id).filter(|entry| !entry.is_hidden && caller.sees(&entry.accepted))
    }

    pub(super) fn snapshot(&self, entry: &JobEntry) -> Snapshot {
        let position = match &entry.at {
            JobLifecycle::Queue(place) => Some(self.waiting.range(..place).count()),
            JobLifecycle::Run(_) | JobLifecycle::Ended => None,
        };
        self.snapshot_at(entry, position)
    }

    fn snapshot_at(&self, entry: &JobEntry, queue_position: Option<usize>) -> Snapshot {
        let queue_position = queue_position.filter(|_| entry.record.state == JobState::Queued);
        let mut progress = entry.progress.clone();
        if entry.record.state == JobState::Queued {
            let stage = if self.is_short { JobPhase::WaitingForDisk } else { JobPhase::Queued };
            progress = Progress { stage, ..Progress::default() };
        }
        let (accepted, record) = (Arc::clone(&entry.accepted), Arc::clone(&entry.record));
        Snapshot { accepted, record, progress, queue_position, preview: entry.preview.clone() }
    }

    /// Sends the current snapshot of a job to its watchers.
    pub(super) fn tell(&self, id: &VideoId) {
        let Some(entry) = self.jobs.get(id) else { return };
        if let Some(sender) = &entry.sender {
            sender.send_replace(self.snapshot(entry));
        }
    }

    /// Notifies the watchers of queued jobs whose position or stage has changed.
    pub(super) fn notify_queued(&self) {
        for (position, place) in self.waiting.keys().enumerate() {
            let Some(entry) = self.jobs.get(&place.id) else { continue };
            if let Some(sender) = &entry.sender {
                let snapshot = self.snapshot_at(entry, Some(position));
                let is_other = {
                    let before = sender.borrow();
                    before.queue_position != snapshot.queue_position || before.progress != snapshot.progress
                };
                if is_other {
                    sender.send_replace(snapshot);
                }
            }
        }
    }

    /// Returns the queued jobs that the caller may see, in order.
    pub(super) fn queued(&self, caller: &Caller) -> Vec<Snapshot> {
        let places = self.waiting.keys().enumerate();
        places.filter_map(|(n, place)| Some(self.snapshot_at(self.seen(caller, &place.id)?, Some(n)))).collect()
    }

    /// Removes a job and its idempotency key.
    pub(super) fn forget(&mut self, id: &VideoId) {
        self.forget_key(id);
        self.jobs.remove(id);
    }

    /// Frees a job's idempotency key.
    pub(super) fn forget_key(&mut self, id: &VideoId) {
        let Some(key) = self.jobs.get(id).and_then(|entry| key_of(&entry.accepted)) else { return };
        if self.named.get(&key).is_some_and(|named| named.id == *id) {
            self.named.remove(&key);
        }
    }

    /// Records that a job has expired, so that requests for it get 410.
    pub(super) fn remember(&mut self, id: &VideoId, owner: &str) {
        if self.expired_ids.insert(id.clone()) {
            self.expired.push_back((id.clone(), owner.to_string()));
        }
        if self.expired.len() > MAX_EXPIRED
            && let Some((oldest, _)) = self.expired.pop_front()
        {
            self.expired_ids.remove(&oldest);
        }
    }

    /// Returns whether a job that the caller may see expired recently.
    pub(super) fn has_expired(&self, caller: &Caller, id: &VideoId) -> bool {
        let owns = |owner: &str| caller.sees_all || caller.name == owner;
        self.expired_ids.contains(id) && self.expired.iter().any(|(known, owner)| known == id && owns(owner))
    }
}

/// An idempotency key together with the name of the API key that used it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct RequestName {
    owner: String,
    key: String,
}

impl RequestName {
    pub(super) fn new(caller: &Caller, key: &str) -> Self {
        RequestName { owner: caller.name.clone(), key: key.into() }
    }
}

pub(super) fn key_of(accepted: &AcceptedJob) -> Option<RequestName> {
    Some(RequestName { owner: accepted.owner.clone(), key: accepted.idempotency_key.clone()? })
}
