//! Jobs in memory.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use tokio::sync::watch;

use super::Caller;
use super::progress::{Profiles, Track};
use crate::serve::id::VideoId;
use crate::serve::job::{Accepted, JobPhase, Progress, Record, Snapshot, State};
use crate::serve::schedule::{Candidate, Loaded};

/// Removed jobs that are remembered as such.
const REMEMBERED: usize = 1024;

/// Place in the queue: those that an ended server began come first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) is_new: bool,
    pub(super) id: VideoId,
}

/// A job that waits.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) candidate: Candidate,
    /// The batch whose steps an ended server has kept.
    pub(super) batch: Option<Arc<Vec<VideoId>>>,
}

/// Where a job is, beside its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum At {
    Queue(Place),
    /// On the device, or on the way to its files.
    Run(u64),
    Over,
}

/// A job with those that watch it.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) accepted: Arc<Accepted>,
    pub(super) record: Arc<Record>,
    pub(super) progress: Progress,
    pub(super) at: At,
    /// Those that watch it.
    pub(super) sender: Option<watch::Sender<Snapshot>>,
    /// Tells the device that nobody wants it.
    pub(super) cancelled: Arc<AtomicBool>,
    /// Clients that wait for it in their requests.
    pub(super) waiters: usize,
    /// Whether its state is being written: it is one thread's at a time.
    pub(super) is_busy: bool,
    /// Whether it was deleted while it ran: nobody sees it, and its folder goes once the run is over.
    pub(super) is_hidden: bool,
    /// When it ended, and when it goes. Of this process's own clock, which nobody sets.
    pub(super) ended: Option<Instant>,
    pub(super) deadline: Option<Instant>,
}

impl Entry {
    pub(super) fn new(accepted: Accepted, record: Record, at: At) -> Self {
        Entry {
            accepted: Arc::new(accepted),
            record: Arc::new(record),
            progress: Progress::default(),
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

/// An order under way.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) members: Vec<VideoId>,
    pub(super) track: Track,
    /// Whether the device is through with it.
    pub(super) is_made: bool,
    /// Videos of it that the finisher has.
    pub(super) writing: usize,
}

/// A request that named an idempotency key.
#[derive(Debug)]
pub(super) struct Named {
    pub(super) id: VideoId,
    pub(super) body_sha256: String,
    pub(super) until: Instant,
    /// Whether the job is there yet.
    pub(super) is_kept: bool,
}

/// All jobs.
#[derive(Debug, Default)]
pub(super) struct Index {
    pub(super) jobs: BTreeMap<VideoId, Entry>,
    pub(super) waiting: BTreeMap<Place, Waiting>,
    /// Places that are held, by key.
    pub(super) tickets: HashMap<String, usize>,
    pub(super) named: HashMap<RequestName, Named>,
    pub(super) runs: BTreeMap<u64, Run>,
    pub(super) begun: u64,
    pub(super) loaded: Loaded,
    pub(super) profiles: Profiles,
    /// Whether the disk has too little room for another video.
    pub(super) is_short: bool,
    /// Why the device is gone.
    pub(super) failed: Option<String>,
    /// When the device last moved.
    pub(super) moved: Option<Instant>,
    /// Removed jobs with their owners, the oldest first.
    gone: VecDeque<(VideoId, String)>,
    gone_ids: BTreeSet<VideoId>,
}

impl Index {
    /// A job that a caller may see.
    pub(super) fn seen(&self, caller: &Caller, id: &VideoId) -> Option<&Entry> {
        self.jobs.get(id).filter(|entry| !entry.is_hidden && caller.sees(&entry.accepted))
    }

    /// A job as it is now.
    pub(super) fn snapshot(&self, entry: &Entry) -> Snapshot {
        let position = match &entry.at {
            At::Queue(place) => Some(self.waiting.range(..place).count()),
            At::Run(_) | At::Over => None,
        };
        self.snapshot_at(entry, position)
    }

    fn snapshot_at(&self, entry: &Entry, queue_position: Option<usize>) -> Snapshot {
        let queue_position = queue_position.filter(|_| entry.record.state == State::Queued);
        let mut progress = entry.progress.clone();
        if entry.record.state == State::Queued {
            let stage = if self.is_short { JobPhase::WaitingForDisk } else { JobPhase::Queued };
            progress = Progress { stage, ..Progress::default() };
        }
        Snapshot { accepted: Arc::clone(&entry.accepted), record: Arc::clone(&entry.record), progress, queue_position }
    }

    /// Tells those that watch a job.
    pub(super) fn tell(&self, id: &VideoId) {
        let Some(entry) = self.jobs.get(id) else { return };
        if let Some(sender) = &entry.sender {
            sender.send_replace(self.snapshot(entry));
        }
    }

    /// Tells those that watch waiting jobs: the places of these are others now.
    pub(super) fn tell_waiting(&self) {
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

    /// Waiting jobs with their snapshots, in order.
    pub(super) fn queued(&self, caller: &Caller) -> Vec<Snapshot> {
        let places = self.waiting.keys().enumerate();
        places.filter_map(|(n, place)| Some(self.snapshot_at(self.seen(caller, &place.id)?, Some(n)))).collect()
    }

    /// Forgets a job that is removed, but for its id.
    pub(super) fn forget(&mut self, id: &VideoId) {
        self.forget_key(id);
        self.jobs.remove(id);
    }

    /// Frees the idempotency key that stands for a job.
    pub(super) fn forget_key(&mut self, id: &VideoId) {
        let Some(key) = self.jobs.get(id).and_then(|entry| key_of(&entry.accepted)) else { return };
        if self.named.get(&key).is_some_and(|named| named.id == *id) {
            self.named.remove(&key);
        }
    }

    /// Remembers that a job has expired.
    pub(super) fn remember(&mut self, id: &VideoId, owner: &str) {
        if self.gone_ids.insert(id.clone()) {
            self.gone.push_back((id.clone(), owner.to_string()));
        }
        if self.gone.len() > REMEMBERED
            && let Some((oldest, _)) = self.gone.pop_front()
        {
            self.gone_ids.remove(&oldest);
        }
    }

    /// Whether a job of the caller's has expired, as far as that is known.
    pub(super) fn has_expired(&self, caller: &Caller, id: &VideoId) -> bool {
        let owns = |owner: &str| caller.sees_all || caller.name == owner;
        self.gone_ids.contains(id) && self.gone.iter().any(|(known, owner)| known == id && owns(owner))
    }
}

/// A request's idempotency key, each caller's own.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct RequestName {
    owner: String,
    key: String,
}

impl RequestName {
    pub(super) fn of(caller: &Caller, key: &str) -> Self {
        RequestName { owner: caller.name.clone(), key: key.into() }
    }
}

/// The name of a request that has one.
pub(super) fn key_of(accepted: &Accepted) -> Option<RequestName> {
    Some(RequestName { owner: accepted.owner.clone(), key: accepted.idempotency_key.clone()? })
}
