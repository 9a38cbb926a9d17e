//! Admission of requests to the queue.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::index::{IdempotentJob, JobEntry, JobIndex, JobLifecycle, QueuePosition, QueuedJob, RequestName, key_of};
use super::waiters::{Waiter, count};
use super::{Caller, Jobs, Submitted, Ticket, retry_after};
use crate::error::ApiError;
use crate::job::{AcceptedJob, Record, Snapshot};
use crate::schedule::ScheduleCandidate;
use crate::store::{no_room, unstored};

/// Lifetime of an idempotency key.
pub(super) const NAMED: Duration = Duration::from_secs(24 * 3600);

/// Guard that frees a request's idempotency key unless the job is stored, even after a panic.
struct KeyGuard<'a> {
    jobs: &'a Jobs,
    accepted: &'a AcceptedJob,
}

impl Drop for KeyGuard<'_> {
    fn drop(&mut self) {
        self.jobs.release_key(self.accepted);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.is_used {
            self.jobs.release(&mut self.jobs.lock(), &self.owner);
        }
    }
}

impl Ticket {
    /// Marks the client as waiting for its job. [`Jobs::submit`] then counts it among the job's waiting clients.
    pub fn waits(mut self) -> Self {
        self.waits = true;
        self
    }
}

impl Jobs {
    /// Checks for a free queue slot before the body is read, without reserving it, so that slow uploads do not block
    /// other requests. If the disk is full, removes expired and old jobs first. Blocks: do not call it from async code.
    ///
    /// # Errors
    /// Same as [`Jobs::admit`].
    pub fn check_place(&self, caller: &Caller) -> Result<(), ApiError> {
        self.check_open()?;
        self.check_bounds(&self.lock(), caller)
    }

    /// Reserves a queue slot once the body has been read. Blocks: do not call it from async code.
    ///
    /// # Errors
    /// Returns `queue_full`, `key_queue_full`, `draining`, `device_failed` or `insufficient_storage`.
    pub fn admit(self: &Arc<Self>, caller: &Caller) -> Result<Ticket, ApiError> {
        self.check_open()?;
        let mut index = self.lock();
        self.check_bounds(&index, caller)?;
        *index.tickets.entry(caller.name.clone()).or_default() += 1;
        Ok(Ticket { jobs: Arc::clone(self), owner: caller.name.clone(), is_used: false, waits: false })
    }

    /// Rejects requests during shutdown, after a device failure, and while the disk is full.
    fn check_open(&self) -> Result<(), ApiError> {
        if self.is_draining() {
            return Err(ApiError::new(503, "draining", "the server is shutting down; try again later").retry_after(5));
        }
        if self.device_failure().is_some() {
            let message = "the server's device has failed and the server is restarting; try again later";
            return Err(ApiError::new(503, "device_failed", message).retry_after(30));
        }
        if self.has_room() { Ok(()) } else { Err(no_room()) }
    }

    /// Rejects requests that exceed the queue limits. The limit per key applies only to servers with keys.
    fn check_bounds(&self, index: &JobIndex, caller: &Caller) -> Result<(), ApiError> {
        let (most, most_own) = (self.settings.queue, self.settings.queue_per_key);
        let full = |code, queue: &str, most: usize| {
            let seconds = retry_after(index);
            ApiError::new(429, code, format!("{queue} is full (limit: {most} videos); try again later"))
                .retry_after(seconds)
        };
        if index.waiting.len() + index.tickets.values().sum::<usize>() >= most {
            return Err(full("queue_full", "the queue", most));
        }
        if !caller.name.is_empty() && own_places(index, &caller.name) >= most_own {
            return Err(full("key_queue_full", "the queue of this API key", most_own));
        }
        Ok(())
    }

    fn release(&self, index: &mut JobIndex, owner: &str) {
        if let Some(held) = index.tickets.get_mut(owner) {
            *held -= 1;
            if *held == 0 {
                index.tickets.remove(owner);
            }
        }
    }

    /// Stores a job and adds it to the queue. Blocks while writing to disk: do not call it from async code.
    ///
    /// # Errors
    /// Returns `idempotency_conflict` or `insufficient_storage`, or an error if the job cannot be stored.
    pub fn submit(&self, mut ticket: Ticket, accepted: AcceptedJob) -> Result<Submitted, ApiError> {
        if let Some(before) = self.name(&accepted, ticket.waits)? {
            return Ok(Submitted::Again(before));
        }
        let unkept = KeyGuard { jobs: self, accepted: &accepted };
        if let Err(error) = self.store.create(&accepted) {
            tracing::error!(id = %accepted.id, "cannot store a new job: {error}");
            return Err(unstored(&error, "the job"));
        }
        std::mem::forget(unkept);
        let id = accepted.id.clone();
        let mut index = self.lock();
        if let Some(named) = key_of(&accepted).and_then(|key| index.named.get_mut(&key)) {
            named.is_kept = true;
        }
        enqueue(&mut index, accepted, Record::queued(), None);
        if ticket.waits {
            count(&mut index, &id);
        }
        self.release(&mut index, &ticket.owner);
        ticket.is_used = true;
        let snapshot = index.jobs.get(&id).map(|entry| index.snapshot(entry));
        drop(index);
        self.work.notify_all();
        self.freed.notify_all();
        self.is_changed();
        snapshot.map(Submitted::New).ok_or_else(ApiError::video_not_found)
    }

    /// Returns whether one of the caller's requests has already used an idempotency key.
    pub fn is_named(&self, caller: &Caller, key: &str) -> bool {
        let index = self.lock();
        index.named.get(&RequestName::new(caller, key)).is_some_and(|named| named.until > Instant::now())
    }

    /// Returns the earlier job with the same idempotency key, if there is one. If `waits`, counts the client among the
    /// job's waiting clients. Blocks while that job is being stored: do not call it from async code.
    ///
    /// # Errors
    /// Returns `idempotency_conflict` if the body of the earlier request differs.
    pub fn replayed(
        &self,
        caller: &Caller,
        key: &str,
        body_sha256: &str,
        waits: bool,
    ) -> Result<Option<Snapshot>, ApiError> {
        let (mut index, found) = self.named(self.lock(), &RequestName::new(caller, key), body_sha256)?;
        if let Some(found) = found.as_ref().filter(|_| waits) {
            count(&mut index, &found.accepted.id);
        }
        Ok(found)
    }

    /// Returns the guard of a client that waits for the job in `snapshot`. [`Jobs::submit`] or [`Jobs::replayed`] must
    /// have counted the client.
    pub fn waiter(self: &Arc<Self>, snapshot: &Snapshot) -> Waiter {
        Waiter::counted(self, &snapshot.accepted.id)
    }

    /// Returns the job to which an idempotency key belongs. Fails if its request had a different body.
    fn named<'a>(
        &'a self,
        mut index: MutexGuard<'a, JobIndex>,
        key: &RequestName,
        body_sha256: &str,
    ) -> Result<(MutexGuard<'a, JobIndex>, Option<Snapshot>), ApiError> {
        loop {
            let Some(named) = index.named.get(key).filter(|named| named.until > Instant::now()) else {
                return Ok((index, None));
            };
            if named.body_sha256 != body_sha256 {
                let message = "Idempotency-Key: already used by a request with a different body; use a new key";
                return Err(ApiError::new(409, "idempotency_conflict", message).should_retry(false));
            }
            if !named.is_kept {
                // Another thread is storing the job of the same request.
                index = self.freed.wait(index).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let found = index.jobs.get(&named.id).filter(|entry| !entry.is_hidden).map(|entry| index.snapshot(entry));
            if found.is_some() {
                return Ok((index, found));
            }
            // The job was deleted while it ran, so the key is free again.
            index.named.remove(key);
        }
    }

    /// Reserves the idempotency key of a request, or returns the job to which the key already belongs.
    fn name(&self, accepted: &AcceptedJob, waits: bool) -> Result<Option<Snapshot>, ApiError> {
        let Some(key) = key_of(accepted) else { return Ok(None) };
        let (mut index, found) = self.named(self.lock(), &key, &accepted.body_sha256)?;
        if let Some(found) = &found {
            if waits {
                count(&mut index, &found.accepted.id);
            }
        } else {
            let (id, body_sha256) = (accepted.id.clone(), accepted.body_sha256.clone());
            index.named.insert(key, IdempotentJob { id, body_sha256, until: Instant::now() + NAMED, is_kept: false });
        }
        Ok(found)
    }

    fn release_key(&self, accepted: &AcceptedJob) {
        if let Some(key) = key_of(accepted) {
            self.lock().named.remove(&key);
            self.freed.notify_all();
        }
    }

    /// Returns whether [`Jobs::drain`] was called.
    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Acquire)
    }

    /// Stops accepting jobs, and wakes the device thread so that it stops.
    pub fn drain(&self) {
        self.is_draining.store(true, Ordering::Release);
        // Without the lock, the device thread could miss the notification just before it starts to wait.
        drop(self.lock());
        self.work.notify_all();
        self.freed.notify_all();
        self.ask_sweep();
        self.is_changed();
    }
}

/// Returns how many queued jobs and reserved queue slots an API key has.
fn own_places(index: &JobIndex, owner: &str) -> usize {
    let waits = |place: &&QueuePosition| index.jobs.get(&place.id).is_some_and(|entry| entry.accepted.owner == owner);
    index.tickets.get(owner).copied().unwrap_or(0) + index.waiting.keys().filter(waits).count()
}

/// Adds a job to the queue. With `batch`, adds it before new jobs, because an earlier server process has started it.
pub(super) fn enqueue(
    index: &mut JobIndex,
    accepted: AcceptedJob,
    record: Record,
    batch: Option<Arc<Vec<crate::id::VideoId>>>,
) {
    let place = QueuePosition { is_new: batch.is_none(), id: accepted.id.clone() };
    let waiting = QueuedJob { candidate: candidate(&accepted), batch };
    let entry = JobEntry::new(accepted, record, JobLifecycle::Queue(place.clone()));
    index.jobs.insert(place.id.clone(), entry);
    index.waiting.insert(place, waiting);
}

fn candidate(accepted: &AcceptedJob) -> ScheduleCandidate {
    ScheduleCandidate {
        shape: Arc::from(accepted.shape.as_str()),
        batch_key: Arc::from(accepted.batch_key.as_str()),
        loras: Arc::from(accepted.config.summary().merged_loras.as_str()),
        overtaken: 0,
    }
}
