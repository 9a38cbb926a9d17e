//! Clients that wait for their videos in the answers to their requests.

use std::sync::Arc;

use super::Jobs;
use super::end::GONE;
use super::index::Index;
use crate::serve::error::Failure;
use crate::serve::id::VideoId;

/// A client that waits for a job, of several where the same `Idempotency-Key` came again. When the last of them goes before its
/// answer, the job is cancelled and its key is free: the request that comes again is a new one.
#[must_use]
pub struct Waiter {
    jobs: Arc<Jobs>,
    id: VideoId,
    is_answered: bool,
}

impl Waiter {
    /// One of a job's clients, which [`Jobs::submit`] or [`Jobs::replayed`] has counted.
    pub(super) fn counted(jobs: &Arc<Jobs>, id: &VideoId) -> Self {
        Waiter { jobs: Arc::clone(jobs), id: id.clone(), is_answered: false }
    }

    /// Its client is told how the job ended, or that it goes on: from now on it is nobody's to cancel by going.
    pub fn answered(mut self) {
        self.is_answered = true;
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if self.is_answered || !self.jobs.goes(&self.id) {
            return;
        }
        let (jobs, id) = (Arc::clone(&self.jobs), self.id.clone());
        let cancel = move || {
            let caller = super::Caller { name: String::new(), sees_all: true };
            // A job that is not there any more needs no cancelling.
            let _ = jobs.cancel_for(&caller, &id, Failure::new("cancelled", GONE));
        };
        // A transition is written to the disk.
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(cancel)),
            Err(_) => cancel(),
        }
    }
}

impl Jobs {
    /// A client waits no more; whether nobody does now. From then on no other request is answered with the job.
    fn goes(&self, id: &VideoId) -> bool {
        let mut index = self.lock();
        let Some(entry) = index.jobs.get_mut(id) else { return false };
        entry.waiters = entry.waiters.saturating_sub(1);
        let is_left = entry.waiters == 0 && !entry.record.state.is_terminal();
        if is_left {
            index.forget_key(id);
        }
        is_left
    }
}

/// Counts a client that waits for a job.
pub(super) fn count(index: &mut Index, id: &VideoId) {
    if let Some(entry) = index.jobs.get_mut(id) {
        entry.waiters += 1;
    }
}
