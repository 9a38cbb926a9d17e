//! Requests on their way into the queue.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::index::{At, Entry, Index, Named, Place, RequestName, Waiting, key_of};
use super::waiters::{Waiter, count};
use super::{Caller, Jobs, Submitted, Ticket, no_room, retry_after};
use crate::serve::descriptors::{busy, is_exhausted};
use crate::serve::error::ApiError;
use crate::serve::job::{Accepted, Record, Snapshot};
use crate::serve::schedule::Candidate;
use crate::serve::store::is_full;

/// How long an idempotency key stands for its job.
pub(super) const NAMED: Duration = Duration::from_secs(24 * 3600);

/// A request whose key is its own again where it is not kept, also by a panic.
struct Unkept<'a> {
    jobs: &'a Jobs,
    accepted: &'a Accepted,
}

impl Drop for Unkept<'_> {
    fn drop(&mut self) {
        self.jobs.unname(self.accepted);
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
    /// The same of a client that waits for its job: [`Jobs::submit`] counts it.
    pub fn waits(mut self) -> Self {
        self.waits = true;
        self
    }
}

impl Jobs {
    /// Whether a request would find a place now, before its body is read: none is held meanwhile, or slow bodies would keep
    /// others out. On a full disk it removes what can go: not to be called where waiting is forbidden.
    ///
    /// # Errors
    /// As [`Jobs::admit`].
    pub fn check_place(&self, caller: &Caller) -> Result<(), ApiError> {
        self.check_open()?;
        self.check_bounds(&self.lock(), caller)
    }

    /// Holds a place in the queue, once a body is read. Waits as [`Jobs::check_place`].
    ///
    /// # Errors
    /// `queue_full`, `key_queue_full`, `draining`, `device_failed`, `insufficient_storage`.
    pub fn admit(self: &Arc<Self>, caller: &Caller) -> Result<Ticket, ApiError> {
        self.check_open()?;
        let mut index = self.lock();
        self.check_bounds(&index, caller)?;
        *index.tickets.entry(caller.name.clone()).or_default() += 1;
        Ok(Ticket { jobs: Arc::clone(self), owner: caller.name.clone(), is_used: false, waits: false })
    }

    /// Refuses a request that the server takes no more, or has no room for.
    fn check_open(&self) -> Result<(), ApiError> {
        if self.is_draining() {
            return Err(ApiError::new(503, "draining", "the server ends: try again later").retry_after(5));
        }
        if self.device_failure().is_some() {
            let message = "the server's device has failed and the server starts again: try again later";
            return Err(ApiError::new(503, "device_failed", message).retry_after(30));
        }
        if self.has_room() { Ok(()) } else { Err(no_room()) }
    }

    /// Refuses a request beyond the queue's bounds; that of a key holds where there are keys.
    fn check_bounds(&self, index: &Index, caller: &Caller) -> Result<(), ApiError> {
        let (most, most_own) = (self.settings.queue, self.settings.queue_per_key);
        let full = |code, queue: &str, most: usize| {
            let seconds = retry_after(index);
            ApiError::new(429, code, format!("{queue} is full: {most} videos wait")).retry_after(seconds)
        };
        if index.waiting.len() + index.tickets.values().sum::<usize>() >= most {
            return Err(full("queue_full", "the queue", most));
        }
        if !caller.name.is_empty() && own_places(index, &caller.name) >= most_own {
            return Err(full("key_queue_full", "the queue of this key", most_own));
        }
        Ok(())
    }

    fn release(&self, index: &mut Index, owner: &str) {
        if let Some(held) = index.tickets.get_mut(owner) {
            *held -= 1;
            if *held == 0 {
                index.tickets.remove(owner);
            }
        }
    }

    /// Takes a job into the queue. It is on the disk when this returns: not to be called where waiting is forbidden.
    ///
    /// # Errors
    /// `idempotency_conflict`, `insufficient_storage`.
    pub fn submit(&self, mut ticket: Ticket, accepted: Accepted) -> Result<Submitted, ApiError> {
        if let Some(before) = self.name(&accepted, ticket.waits)? {
            return Ok(Submitted::Again(before));
        }
        let unkept = Unkept { jobs: self, accepted: &accepted };
        if let Err(error) = self.store.create(&accepted) {
            tracing::error!(id = %accepted.id, "a job is not taken: {error}");
            return Err(match error {
                error if is_full(&error) => no_room(),
                error if is_exhausted(&error) => busy(),
                _ => ApiError::new(500, "internal", "the job could not be kept"),
            });
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

    /// Whether a caller's idempotency key stands for a job.
    pub fn is_named(&self, caller: &Caller, key: &str) -> bool {
        let index = self.lock();
        index.named.get(&RequestName::of(caller, key)).is_some_and(|named| named.until > Instant::now())
    }

    /// The job of a request that came before with the same idempotency key; a client that `waits` for it is counted. Waits for
    /// one that is being kept: not to be called where waiting is forbidden.
    ///
    /// # Errors
    /// `idempotency_conflict`.
    pub fn replayed(
        &self,
        caller: &Caller,
        key: &str,
        body_sha256: &str,
        waits: bool,
    ) -> Result<Option<Snapshot>, ApiError> {
        let (mut index, found) = self.named(self.lock(), &RequestName::of(caller, key), body_sha256)?;
        if let Some(found) = found.as_ref().filter(|_| waits) {
            count(&mut index, &found.accepted.id);
        }
        Ok(found)
    }

    /// The client of a request that waits for its job, once it is counted.
    pub fn waiter(self: &Arc<Self>, snapshot: &Snapshot) -> Waiter {
        Waiter::counted(self, &snapshot.accepted.id)
    }

    /// The job that a key stands for, where it is the same request's.
    fn named<'a>(
        &'a self,
        mut index: MutexGuard<'a, Index>,
        key: &RequestName,
        body_sha256: &str,
    ) -> Result<(MutexGuard<'a, Index>, Option<Snapshot>), ApiError> {
        loop {
            let Some(named) = index.named.get(key).filter(|named| named.until > Instant::now()) else {
                return Ok((index, None));
            };
            if named.body_sha256 != body_sha256 {
                let message = "Idempotency-Key: another request has this key: give each request its own";
                return Err(ApiError::new(409, "idempotency_conflict", message).should_retry(false));
            }
            if !named.is_kept {
                // The same request is being kept by another thread.
                index = self.freed.wait(index).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let found = index.jobs.get(&named.id).filter(|entry| !entry.is_hidden).map(|entry| index.snapshot(entry));
            if found.is_some() {
                return Ok((index, found));
            }
            // Deleted while it runs: the key is free again.
            index.named.remove(key);
        }
    }

    /// Takes the request's idempotency key, or says which job has it.
    fn name(&self, accepted: &Accepted, waits: bool) -> Result<Option<Snapshot>, ApiError> {
        let Some(key) = key_of(accepted) else { return Ok(None) };
        let (mut index, found) = self.named(self.lock(), &key, &accepted.body_sha256)?;
        if let Some(found) = &found {
            if waits {
                count(&mut index, &found.accepted.id);
            }
        } else {
            let (id, body_sha256) = (accepted.id.clone(), accepted.body_sha256.clone());
            index.named.insert(key, Named { id, body_sha256, until: Instant::now() + NAMED, is_kept: false });
        }
        Ok(found)
    }

    fn unname(&self, accepted: &Accepted) {
        if let Some(key) = key_of(accepted) {
            self.lock().named.remove(&key);
            self.freed.notify_all();
        }
    }

    /// Whether [`Jobs::drain`] was called.
    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Acquire)
    }

    /// No more jobs are taken; the device's watch hears of it.
    pub fn drain(&self) {
        self.is_draining.store(true, Ordering::Release);
        // Under the lock, so that the device's thread does not look before and wait after.
        drop(self.lock());
        self.work.notify_all();
        self.freed.notify_all();
        self.ask_sweep();
        self.is_changed();
    }
}

/// Waiting jobs of a key, and places that it holds.
fn own_places(index: &Index, owner: &str) -> usize {
    let waits = |place: &&Place| index.jobs.get(&place.id).is_some_and(|entry| entry.accepted.owner == owner);
    index.tickets.get(owner).copied().unwrap_or(0) + index.waiting.keys().filter(waits).count()
}

/// Puts a job into the queue: at its head where it comes from an ended server that had begun with its batch.
pub(super) fn enqueue(
    index: &mut Index,
    accepted: Accepted,
    record: Record,
    batch: Option<Arc<Vec<crate::serve::id::VideoId>>>,
) {
    let place = Place { is_new: batch.is_none(), id: accepted.id.clone() };
    let waiting = Waiting { candidate: candidate(&accepted), batch };
    let entry = Entry::new(accepted, record, At::Queue(place.clone()));
    index.jobs.insert(place.id.clone(), entry);
    index.waiting.insert(place, waiting);
}

fn candidate(accepted: &Accepted) -> Candidate {
    let loras = &accepted.config.model.loras;
    let names = loras.iter().map(|lora| serde_json::to_string(lora).unwrap_or_else(|error| error.to_string()));
    Candidate {
        shape: Arc::from(accepted.shape.as_str()),
        batch_key: Arc::from(accepted.batch_key.as_str()),
        loras: Arc::from(names.collect::<Vec<_>>().join(" ")),
        overtaken: 0,
    }
}
