//! Tracks the clients that wait for a video in a synchronous request.

use std::sync::Arc;

use super::Jobs;
use super::end::GONE;
use super::index::JobIndex;
use crate::error::Failure;
use crate::id::VideoId;

/// Guard of a client that waits for a job. Requests with the same `Idempotency-Key` wait for the same job. When the
/// last guard of a job is dropped before a response was sent, the job is cancelled and its key is freed, so that a
/// retry creates a new job.
#[must_use]
pub struct Waiter {
    jobs: Arc<Jobs>,
    id: VideoId,
    is_answered: bool,
}

impl Waiter {
    /// Returns the guard of a client that [`Jobs::submit`] or [`Jobs::replayed`] has counted.
    pub(super) fn counted(jobs: &Arc<Jobs>, id: &VideoId) -> Self {
        Waiter { jobs: Arc::clone(jobs), id: id.clone(), is_answered: false }
    }

    /// Disarms the guard, because the client has received the result or was told that the job continues.
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
            // The job may have been removed already.
            let _ = jobs.cancel_for(&caller, &id, Failure::new("cancelled", GONE));
        };
        // Cancelling writes the job's state to disk, which blocks.
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(cancel)),
            Err(_) => cancel(),
        }
    }
}

impl Jobs {
    /// Decrements the number of clients that wait for a job. If none is left and the job has not ended, frees its
    /// idempotency key and returns true.
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

/// Increments the number of clients that wait for a job.
pub(super) fn count(index: &mut JobIndex, id: &VideoId) {
    if let Some(entry) = index.jobs.get_mut(id) {
        entry.waiters += 1;
    }
}
