//! Prepares queued jobs on other threads than that of the device.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};

use ltx2_base::catch_panic::panic_message;

use super::Jobs;
use super::index::{JobIndex, JobLifecycle, Preparation};
use crate::device::Preparer;
use crate::id::VideoId;
use crate::job::AcceptedJob;
use crate::store::STEPS;

impl JobIndex {
    /// Returns whether a job is in the queue and must be prepared before it runs.
    pub(super) fn is_unprepared(&self, id: &VideoId) -> bool {
        let is_unprepared = |entry: &super::index::JobEntry| {
            matches!(entry.at, JobLifecycle::Queue(_)) && entry.preparation != Preparation::Done
        };
        self.has_preparer && self.jobs.get(id).is_some_and(is_unprepared)
    }
}

impl Jobs {
    /// Keeps jobs that need preparation in the queue until [`Jobs::prepare_until_stopped`] has prepared them. Call it
    /// before the first [`Jobs::next`].
    pub(crate) fn require_preparation(&self) {
        self.lock().has_preparer = true;
    }

    /// Prepares queued jobs, in the order of the queue, until the server drains or its device fails.
    pub(crate) fn prepare_until_stopped(&self, preparer: &dyn Preparer) {
        while let Some(job) = self.next_unprepared() {
            let steps = self.store.folder(&job.id).join(STEPS);
            let is_wanted = || self.is_queued(&job.id);
            let prepare = AssertUnwindSafe(|| preparer.prepare(&job, &steps, &is_wanted));
            if let Err(panic) = catch_unwind(prepare) {
                // The device finds that the result is missing.
                tracing::error!(id = %job.id, "preparing a job failed: {}", panic_message(&*panic));
            }
            if let Some(entry) = self.lock().jobs.get_mut(&job.id) {
                entry.preparation = Preparation::Done;
            }
            self.work.notify_all();
        }
    }

    /// Waits for a job that needs preparation. `None`: the server drains, or its device has failed.
    fn next_unprepared(&self) -> Option<Arc<AcceptedJob>> {
        let mut index = self.lock();
        loop {
            if self.is_draining() || index.failed.is_some() {
                return None;
            }
            let JobIndex { waiting, jobs, .. } = &mut *index;
            let is_missing = |id: &&VideoId| jobs.get(*id).is_some_and(|job| job.preparation == Preparation::Missing);
            let next = waiting.keys().map(|place| &place.id).find(is_missing).cloned();
            if let Some(entry) = next.and_then(|id| jobs.get_mut(&id)) {
                entry.preparation = Preparation::Running;
                return Some(Arc::clone(&entry.accepted));
            }
            index = self.work.wait(index).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn is_queued(&self, id: &VideoId) -> bool {
        let index = self.lock();
        let is_queued = index.jobs.get(id).is_some_and(|entry| matches!(entry.at, JobLifecycle::Queue(_)));
        is_queued && !self.is_draining() && index.failed.is_none()
    }
}
