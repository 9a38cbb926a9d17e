//! All jobs of a server, in memory, with their durable transitions.
//!
//! A transition is on the disk before anyone sees it; progress never is.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::sync::watch;

use super::device::{Moment, Stop};
use super::error::{ApiError, Failure};
use super::id::VideoId;
use super::job::{Accepted, Produced, Snapshot, State};
use super::store::JobStore;
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
}

/// What became of a request to make a video.
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

/// What of a list is wanted.
#[derive(Clone, Debug)]
pub struct ListQuery {
    /// Ids behind this one, in the order of the list; it need not be there any more.
    pub after: Option<VideoId>,
    pub limit: usize,
    /// Newest first.
    pub descending: bool,
    pub state: Option<State>,
}

/// Jobs of a server.
pub struct Jobs {
    store: Arc<dyn JobStore>,
    settings: Serve,
}

/// An order for the device, with what its watch asks of.
pub struct Running {
    pub order: super::device::Order,
    /// Set when nobody wants a row's video any more.
    pub cancelled: Vec<Arc<AtomicBool>>,
}

/// For HTTP.
impl Jobs {
    /// The jobs that a store holds: those that waited wait again, those that ran wait before them.
    ///
    /// # Errors
    /// A store that cannot be read.
    pub fn open(store: Arc<dyn JobStore>, settings: Serve) -> std::io::Result<Arc<Jobs>> {
        todo!()
    }

    /// Holds a place in the queue, before a body is read.
    ///
    /// # Errors
    /// `queue_full`, `key_queue_full`, `draining`, `insufficient_storage`.
    pub fn admit(self: &Arc<Self>, caller: &Caller) -> Result<Ticket, ApiError> {
        todo!()
    }

    /// Takes a job into the queue. It is on the disk when this returns: not to be called where waiting is forbidden.
    ///
    /// # Errors
    /// `idempotency_conflict`, `insufficient_storage`.
    pub fn submit(&self, ticket: Ticket, accepted: Accepted) -> Result<Submitted, ApiError> {
        todo!()
    }

    /// A job, where it is the caller's.
    ///
    /// # Errors
    /// `video_not_found`; `expired` for one that was there, as long as that is known.
    pub fn get(&self, caller: &Caller, id: &VideoId) -> Result<Snapshot, ApiError> {
        todo!()
    }

    /// A page of the caller's jobs.
    pub fn list(&self, caller: &Caller, query: &ListQuery) -> Page {
        todo!()
    }

    /// Cancels a job; a finished one is as it was. A running one fails at its next moment, and this does not wait for it, but the
    /// snapshot says so.
    ///
    /// # Errors
    /// `video_not_found`.
    pub fn cancel(&self, caller: &Caller, id: &VideoId) -> Result<Snapshot, ApiError> {
        todo!()
    }

    /// Cancels and removes a job.
    ///
    /// # Errors
    /// `video_not_found`.
    pub fn delete(&self, caller: &Caller, id: &VideoId) -> Result<(), ApiError> {
        todo!()
    }

    /// A job's snapshots as they come, the latest wins; it ends when the job is removed.
    ///
    /// # Errors
    /// `video_not_found`.
    pub fn watch(&self, caller: &Caller, id: &VideoId) -> Result<watch::Receiver<Snapshot>, ApiError> {
        todo!()
    }

    /// A number that grows with every change of any job.
    pub fn version(&self) -> watch::Receiver<u64> {
        todo!()
    }

    /// The caller's running and waiting jobs, in order.
    pub fn queue(&self, caller: &Caller) -> (Vec<Snapshot>, Vec<Snapshot>) {
        todo!()
    }

    /// Seconds until the running job should end.
    pub fn retry_after(&self) -> u32 {
        todo!()
    }

    /// No more jobs are taken; the device's watch hears of it.
    pub fn drain(&self) {
        todo!()
    }

    /// Whether [`Jobs::drain`] was called.
    pub fn is_draining(&self) -> bool {
        todo!()
    }

    /// Removes what has expired, and the oldest while too many bytes are taken.
    pub fn sweep(&self) {
        todo!()
    }
}

/// For the threads of device and finisher.
impl Jobs {
    /// The next order; waits for one. Nothing once the server drains.
    pub fn next(&self) -> Option<Running> {
        todo!()
    }

    /// Tells of a running order's moment, and whether it goes on.
    pub fn moment(&self, running: &Running, moment: Moment) -> ControlFlow<Stop> {
        todo!()
    }

    /// A job's files are there.
    pub fn completed(&self, id: &VideoId, produced: Produced) {
        todo!()
    }

    /// A job failed.
    pub fn failed(&self, id: &VideoId, failure: Failure) {
        todo!()
    }

    /// A running order waits again: the server ends.
    pub fn requeue(&self, running: &Running) {
        todo!()
    }

    /// Time since the device's thread last moved.
    pub fn since_moment(&self) -> Duration {
        todo!()
    }
}
