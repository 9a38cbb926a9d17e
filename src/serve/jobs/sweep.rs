//! Removal of jobs: expired ones, and the oldest where they take too much.

use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Jobs;
use super::index::{At, Entry};
use crate::serve::id::VideoId;
use crate::serve::job::State;
use crate::serve::store::Usage;

/// Jobs that are over and kept in memory, however long `keep` is.
const MOST: usize = 10_000;

/// Free bytes at which the room for a full disk is taken again.
const RESERVE_AGAIN: u64 = 64 << 20;

impl Jobs {
    /// Removes what has expired, and the oldest while too many bytes are taken.
    pub fn sweep(&self) {
        let now = Instant::now();
        let over = |entry: &Entry| entry.at == At::Over && !entry.is_busy && !entry.is_hidden;
        let (expired, old): (BTreeSet<VideoId>, Vec<VideoId>) = {
            let mut index = self.lock();
            index.named.retain(|_, named| named.until > now);
            for entry in index.jobs.values_mut() {
                // Nobody listens any more.
                entry.sender.take_if(|sender| sender.is_closed());
            }
            let ended = || index.jobs.iter().filter(|(_, entry)| over(entry));
            let expired = ended().filter(|(_, entry)| entry.deadline.is_some_and(|deadline| deadline <= now));
            let mut old: Vec<(Instant, VideoId)> =
                ended().filter_map(|(id, entry)| Some((entry.ended?, id.clone()))).collect();
            old.sort();
            (expired.map(|(id, _)| id.clone()).collect(), old.into_iter().map(|(_, id)| id).collect())
        };
        for id in &expired {
            self.expire(id);
        }
        let is_over = self.is_over(self.store.usage());
        let mut surplus = old.len().saturating_sub(expired.len()).saturating_sub(MOST);
        for id in old.iter().filter(|id| !expired.contains(id)) {
            let usage = self.store.usage();
            let is_young = || {
                let index = self.lock();
                let ended = index.jobs.get(id).and_then(|entry| entry.ended);
                ended.is_none_or(|ended| ended.elapsed() < self.pace.young)
            };
            let gives_room = || {
                let index = self.lock();
                index.jobs.get(id).is_some_and(|entry| entry.record.state == State::Completed)
            };
            if surplus > 0 {
                surplus -= 1;
                self.expire(id);
            } else if !is_over || self.has_enough(usage) {
                break;
            } else if gives_room() && !is_young() {
                tracing::info!(%id, "removed before its time: the disk is full");
                self.expire(id);
            }
        }
        let used: BTreeSet<String> = {
            let index = self.lock();
            index.jobs.values().flat_map(|entry| entry.accepted.inputs.iter().cloned()).collect()
        };
        self.store.sweep(&used);
        let usage = self.store.usage();
        // Twice the reserve, so that what was freed for a video is not taken from it.
        if usage.free > self.settings.min_free.0.max(RESERVE_AGAIN) {
            self.store.give_reserve(false);
        }
        let mut index = self.lock();
        let is_short = self.is_over(usage);
        if index.is_short != is_short {
            index.is_short = is_short;
            index.tell_waiting();
        }
        drop(index);
        self.work.notify_all();
    }

    /// Removes a job that is over.
    fn expire(&self, id: &VideoId) {
        let (mut index, is_there) = self.claim(self.lock(), id);
        let Some(entry) = index.jobs.get(id).filter(|_| is_there) else { return };
        let owner = entry.accepted.owner.clone();
        if entry.at != At::Over {
            self.settle(&mut index, id, None);
            return;
        }
        drop(index);
        let removed = self.store.remove(id);
        let mut index = self.lock();
        self.settle(&mut index, id, None);
        match removed {
            Ok(()) => {
                index.forget(id);
                index.remember(id, &owner);
            }
            Err(error) => tracing::error!(%id, "an expired job stays: {error}"),
        }
    }

    /// Whether the disk has too little room for another video.
    pub(super) fn is_over(&self, usage: Usage) -> bool {
        usage.free < self.settings.min_free.0 || usage.bytes > self.settings.disk.0
    }

    /// Whether so much was removed that the next video does not need another removed at once.
    fn has_enough(&self, usage: Usage) -> bool {
        let most = self.settings.disk.0;
        usage.free >= self.settings.min_free.0 && usage.bytes <= most - most / 20
    }

    /// Frees what there is to free, for a video that is made.
    pub fn make_room(&self) {
        self.store.give_reserve(true);
        self.sweep();
    }

    /// Whether another request may be taken; on a full disk after a look at what can go.
    pub(super) fn has_room(&self) -> bool {
        if !self.is_over(self.store.usage()) {
            return true;
        }
        // Many requests at once are answered by one sweep after another.
        let _one = self.sweeping.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_over(self.store.usage()) {
            self.sweep();
        }
        !self.is_over(self.store.usage())
    }

    /// Whether requests are refused for want of room, after what can be removed was; asks for a sweep where none was made yet.
    pub fn lacks_room(&self) -> bool {
        let is_over = self.is_over(self.store.usage());
        if is_over && !self.is_short_of_disk() {
            self.ask_sweep();
            return false;
        }
        is_over
    }

    /// Asks the thread in [`Jobs::sweep_for_good`] for a sweep.
    pub(super) fn ask_sweep(&self) {
        *self.sweeps.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.sweeps.1.notify_all();
    }

    /// Whether nothing runs any more.
    pub(super) fn is_over_now(&self) -> bool {
        self.is_draining() || self.has_failed.load(Ordering::Acquire)
    }

    /// Sweeps every minute and when asked to, until the server drains or its device fails. For a thread of its own.
    pub fn sweep_for_good(&self) {
        /// Sweeps that are asked for are at least so far apart.
        const LEAST: Duration = Duration::from_millis(200);
        const MOST: Duration = Duration::from_secs(60);
        let (asked, told) = &self.sweeps;
        while !self.is_over_now() {
            self.sweep();
            let guard = asked.lock().unwrap_or_else(PoisonError::into_inner);
            let rested = told.wait_timeout_while(guard, LEAST, |_| !self.is_over_now());
            let (guard, _) = rested.unwrap_or_else(PoisonError::into_inner);
            let waited = told.wait_timeout_while(guard, MOST, |asked| !*asked && !self.is_over_now());
            *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
        }
    }
}
