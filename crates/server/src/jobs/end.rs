//! Completes, fails, cancels and deletes jobs.

use std::io;
use std::sync::atomic::Ordering;

use super::index::{JobEntry, JobIndex, JobLifecycle};
use super::{Caller, Jobs, missing};
use crate::error::{ApiError, Failure};
use crate::id::VideoId;
use crate::job::{JobState, Record, Snapshot, VideoProperties};
use crate::store::{is_full, unstored};

/// Expiry time of a job that was deleted while it ran. The next start of the server removes such a job before clients
/// can see it.
pub(super) const DELETED: u64 = 0;
/// Failure message of a job whose waiting clients have all disconnected. Recovery identifies such jobs by this message
/// and frees their idempotency keys.
pub(super) const GONE: &str = "the client that waited for the video disconnected";

impl Jobs {
    /// Cancels a job and returns it as failed. A job that has ended is returned unchanged. A running job stops at the
    /// device's next progress report.
    ///
    /// # Errors
    /// Returns `video_not_found`, `expired` for a job that was removed recently, or an error if the state cannot be
    /// written.
    pub fn cancel(&self, caller: &Caller, id: &VideoId) -> Result<Snapshot, ApiError> {
        self.cancel_for(caller, id, Failure::new("cancelled", "the video was cancelled"))
    }

    /// Cancels a job like [`Jobs::cancel`], but records the failure `why`.
    pub(super) fn cancel_for(&self, caller: &Caller, id: &VideoId, why: Failure) -> Result<Snapshot, ApiError> {
        let index = self.lock();
        if index.seen(caller, id).is_none() {
            return Err(missing(&index, caller, id));
        }
        let (mut index, is_there) = self.reserve(index, id);
        if !is_there {
            return Err(missing(&index, caller, id));
        }
        let Some(entry) = index.jobs.get(id) else { return Err(ApiError::video_not_found()) };
        if entry.record.state.is_terminal() || entry.is_hidden {
            let snapshot = index.snapshot(entry);
            self.settle(&mut index, id, None);
            return Ok(snapshot);
        }
        let record = self.failed_record(&entry.record, why);
        drop(index);
        let written = self.write(id, &record);
        let mut index = self.lock();
        if written.is_ok() {
            self.leave(&mut index, id);
        }
        self.settle(&mut index, id, written.is_ok().then_some(record));
        let snapshot = index.jobs.get(id).map(|entry| index.snapshot(entry));
        drop(index);
        match written {
            Ok(()) => snapshot.ok_or_else(ApiError::video_not_found),
            Err(error) => Err(unwritten(id, &error)),
        }
    }

    /// Cancels a job and removes it with its files.
    ///
    /// # Errors
    /// Returns `video_not_found`, `expired` for a job that was removed recently, or an error if the job's state cannot
    /// be written or its folder cannot be moved.
    pub fn delete(&self, caller: &Caller, id: &VideoId) -> Result<(), ApiError> {
        let index = self.lock();
        if index.seen(caller, id).is_none() {
            return Err(missing(&index, caller, id));
        }
        let (mut index, is_there) = self.reserve(index, id);
        let Some(entry) = index.jobs.get(id).filter(|entry| is_there && !entry.is_hidden) else {
            self.settle(&mut index, id, None);
            return Err(ApiError::video_not_found());
        };
        let (at, before) = (entry.at.clone(), entry.record.clone());
        drop(index);
        if matches!(at, JobLifecycle::Run(_)) {
            // The run may still write to the job's folder, so the folder is removed when the run ends.
            let failure = Failure::new("cancelled", "the video was deleted");
            let record = Record { expires_at: Some(DELETED), ..self.failed_record(&before, failure) };
            let written = self.write(id, &record);
            let mut index = self.lock();
            if written.is_ok() {
                self.leave(&mut index, id);
                if let Some(entry) = index.jobs.get_mut(id) {
                    entry.is_hidden = true;
                    // Ends the job's event streams.
                    entry.sender = None;
                }
            }
            self.settle(&mut index, id, written.is_ok().then_some(record));
            return written.map_err(|error| unwritten(id, &error));
        }
        let removed = self.store.remove(id);
        let mut index = self.lock();
        match removed {
            Ok(()) => {
                self.leave(&mut index, id);
                self.settle(&mut index, id, None);
                index.forget(id);
                Ok(())
            }
            Err(error) => {
                self.settle(&mut index, id, None);
                Err(unwritten(id, &error))
            }
        }
    }

    /// Removes a cancelled job from the queue or, if it runs, signals the device to stop it.
    fn leave(&self, index: &mut JobIndex, id: &VideoId) {
        let Some(entry) = index.jobs.get(id) else { return };
        entry.cancelled.store(true, Ordering::Release);
        if let JobLifecycle::Queue(place) = entry.at.clone() {
            index.waiting.remove(&place);
            index.notify_queued();
        }
        // The job may have been the only work for the device thread.
        self.work.notify_all();
    }

    /// Returns the state of a job that fails now with `failure`.
    fn failed_record(&self, before: &Record, failure: Failure) -> Record {
        Record { state: JobState::Failed, failure: Some(failure), ..self.ended_record(before) }
    }

    fn ended_record(&self, before: &Record) -> Record {
        let now = self.now();
        let expires = now.saturating_add(self.settings.keep.duration().as_secs());
        Record { completed_at: Some(now), expires_at: Some(expires), ..before.clone() }
    }

    /// Marks a job as completed.
    ///
    /// # Errors
    /// Returns an error if the state cannot be written.
    pub fn completed(&self, id: &VideoId, produced: VideoProperties) -> io::Result<()> {
        let end = |before: &Record| Record {
            state: JobState::Completed,
            produced: Some(produced.clone()),
            ..self.ended_record(before)
        };
        self.end(id, end, false)
    }

    /// Marks a job as failed.
    pub fn failed(&self, id: &VideoId, failure: Failure) {
        let trace = self.lock().jobs.get(id).and_then(|entry| entry.accepted.traceparent.clone());
        tracing::warn!(%id, trace, code = failure.code, "job failed: {}", failure.message);
        let end = |before: &Record| self.failed_record(before, failure.clone());
        if let Err(error) = self.end(id, end, true) {
            tracing::error!(%id, "cannot write the job's state; the next start finds the old state: {error}");
        }
    }

    /// Changes the state of a running job to the one that `end` returns. Does nothing if the job has ended in the
    /// meantime. If `even_if_unwritten` is true, the job ends in this process even if its state cannot be written to
    /// disk.
    fn end(&self, id: &VideoId, end: impl Fn(&Record) -> Record, even_if_unwritten: bool) -> io::Result<()> {
        let (mut index, is_there) = self.reserve(self.lock(), id);
        let Some(entry) = index.jobs.get(id).filter(|_| is_there) else { return Ok(()) };
        if entry.record.state.is_terminal() {
            self.settle(&mut index, id, None);
            return Ok(());
        }
        let record = end(&entry.record);
        drop(index);
        let mut written = self.write_with_retry(id, &record);
        if written.as_ref().is_err_and(is_full) && record.state == JobState::Failed {
            // The partially written video may be what fills the disk.
            self.store.forget_run(id, false);
            written = self.write(id, &record);
        }
        let mut index = self.lock();
        let is_over = written.is_ok() || even_if_unwritten;
        if let Some(JobEntry { at: JobLifecycle::Run(run), .. }) =
            index.jobs.get(id).filter(|_| record.state == JobState::Completed)
        {
            let run = *run;
            let JobIndex { runs, profiles, .. } = &mut *index;
            runs.get_mut(&run).into_iter().for_each(|run| run.track.end_stage(profiles));
        }
        self.settle(&mut index, id, is_over.then_some(record));
        drop(index);
        if self.is_over(self.store.usage()) {
            self.ask_sweep();
        }
        written
    }

    /// If the device and the finisher thread are done with a run and its jobs have ended, removes the run, the jobs'
    /// temporary files, and the jobs that were deleted while they ran.
    pub(super) fn close(&self, number: u64) {
        let mut index = self.lock();
        let is_over = index.runs.get(&number).is_some_and(|run| {
            let ended = |id: &VideoId| index.jobs.get(id).is_none_or(|entry| entry.record.state.is_terminal());
            run.is_device_done && run.writing == 0 && run.members.iter().all(ended)
        });
        if !is_over {
            return;
        }
        let members = index.runs.remove(&number).map(|run| run.members).unwrap_or_default();
        drop(index);
        for id in &members {
            let (mut index, is_there) = self.reserve(self.lock(), id);
            let is_completed = index.jobs.get(id).is_some_and(|entry| entry.record.state == JobState::Completed);
            let is_hidden = index.jobs.get_mut(id).filter(|_| is_there).is_some_and(|entry| {
                entry.at = JobLifecycle::Ended;
                entry.is_hidden
            });
            drop(index);
            self.store.forget_run(id, is_completed);
            if is_hidden && let Err(error) = self.store.remove(id) {
                tracing::error!(%id, "cannot remove the job's files; they remain until the next start: {error}");
            }
            let mut index = self.lock();
            if is_there {
                self.settle(&mut index, id, None);
            }
            if is_hidden {
                index.forget(id);
            }
        }
    }
}

fn unwritten(id: &VideoId, error: &io::Error) -> ApiError {
    tracing::error!(%id, "cannot write the job's state: {error}");
    unstored(error, "the job's state")
}
