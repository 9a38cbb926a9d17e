//! Recovers jobs from disk when the server starts.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::end::{DELETED, GONE};
use super::index::{IdempotentJob, JobEntry, JobIndex, JobLifecycle, key_of};
use super::submit::{NAMED, enqueue};
use super::{JobTiming, Jobs};
use crate::error::Failure;
use crate::id::VideoId;
use crate::job::{JobState, Record};
use crate::settings::Serve;
use crate::store::{JobStore, StoredJob};

/// Number of interrupted attempts after which a job is marked as failed.
const CRASHES: u32 = 2;

impl Jobs {
    /// Loads the jobs of a store. Jobs that were queued are queued again. A job that was running is completed if its
    /// video is complete, fails if it was interrupted twice, and is otherwise queued before the others.
    ///
    /// # Errors
    /// Returns an error if the store cannot be read.
    pub fn open(store: Arc<dyn JobStore>, settings: Serve) -> std::io::Result<Arc<Jobs>> {
        Jobs::open_at(store, settings, JobTiming::default())
    }

    /// Loads the jobs of a store like [`Jobs::open`], but with a custom clock and timing.
    ///
    /// # Errors
    /// Same as [`Jobs::open`].
    pub fn open_at(store: Arc<dyn JobStore>, settings: Serve, pace: JobTiming) -> std::io::Result<Arc<Jobs>> {
        let all = store.load_all()?;
        let jobs = Jobs {
            store,
            settings,
            pace,
            index: Mutex::new(JobIndex::default()),
            freed: Condvar::new(),
            work: Condvar::new(),
            version: tokio::sync::watch::channel(0).0,
            is_draining: false.into(),
            has_failed: false.into(),
            sweeps: (Mutex::new(false), Condvar::new()),
            sweeping: Mutex::new(()),
        };
        let mut index = JobIndex::default();
        for stored in all {
            jobs.recover(&mut index, stored);
        }
        *jobs.lock() = index;
        jobs.sweep();
        Ok(Arc::new(jobs))
    }

    /// Returns the id of the newest job.
    pub fn last_id(&self) -> Option<VideoId> {
        self.lock().jobs.keys().next_back().cloned()
    }

    fn recover(&self, index: &mut JobIndex, stored: StoredJob) {
        let StoredJob { accepted, record, order, has_steps, produced } = stored;
        let id = accepted.id.clone();
        if record.expires_at == Some(DELETED) {
            if let Err(error) = self.store.remove(&id) {
                tracing::error!(%id, "cannot remove a deleted job: {error}");
            }
            return;
        }
        let is_left = record.failure.as_ref().is_some_and(|failure| failure.message == GONE);
        if let Some(key) = key_of(&accepted).filter(|_| !is_left) {
            let age = Duration::from_secs(self.now().saturating_sub(accepted.created_at));
            if let Some(left) = NAMED.checked_sub(age) {
                let body_sha256 = accepted.body_sha256.clone();
                let until = Instant::now() + left;
                index.named.insert(key, IdempotentJob { id: id.clone(), body_sha256, until, is_kept: true });
            }
        }
        if record.state.is_terminal() && (has_steps || !order.is_empty()) {
            self.store.forget_run(&id, record.state == JobState::Completed);
        }
        let batch = match order.contains(&id) {
            true => Arc::new(order),
            false => Arc::new(vec![id.clone()]),
        };
        match record.state {
            JobState::Queued => {
                let batch = (has_steps || batch.len() > 1).then_some(batch);
                enqueue(index, accepted, record, batch);
            }
            JobState::Completed | JobState::Failed => {
                let entry = self.over(JobEntry::new(accepted, record, JobLifecycle::Ended));
                index.jobs.insert(id, entry);
            }
            JobState::InProgress => {
                let now = self.now();
                let ended = Record {
                    completed_at: Some(now),
                    expires_at: Some(now.saturating_add(self.settings.keep.duration().as_secs())),
                    ..record.clone()
                };
                let found = if produced.is_some() {
                    Record { state: JobState::Completed, produced, ..ended }
                } else if record.attempts >= CRASHES {
                    let message = "the server stopped twice while it generated the video";
                    Record { state: JobState::Failed, failure: Some(Failure::new("crashed", message)), ..ended }
                } else {
                    Record { state: JobState::Queued, ..record }
                };
                tracing::info!(%id, "the job was in progress at start; its new state is {}", found.state.name());
                if let Err(error) = self.write(&id, &found) {
                    tracing::error!(%id, "cannot write the job's state; the next start finds the old state: {error}");
                }
                if found.state == JobState::Queued {
                    enqueue(index, accepted, found, Some(batch));
                } else {
                    self.store.forget_run(&id, found.state == JobState::Completed);
                    let entry = self.over(JobEntry::new(accepted, found, JobLifecycle::Ended));
                    index.jobs.insert(id, entry);
                }
            }
        }
    }

    /// Sets the remaining lifetime of a job that has ended. It is at most `serve.keep`, even if the clock was set back.
    fn over(&self, entry: JobEntry) -> JobEntry {
        let now = self.now();
        let left = entry.record.expires_at.map_or(0, |at| at.saturating_sub(now));
        let left = Duration::from_secs(left).min(self.settings.keep.duration());
        let age = Duration::from_secs(now.saturating_sub(entry.record.completed_at.unwrap_or(now)));
        let instant = Instant::now();
        JobEntry { ended: instant.checked_sub(age).or(Some(instant)), deadline: instant.checked_add(left), ..entry }
    }
}
