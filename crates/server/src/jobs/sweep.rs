//! Removes expired jobs, and the oldest jobs if disk space or memory runs short.

use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Jobs;
use super::index::{JobEntry, JobLifecycle};
use crate::id::VideoId;
use crate::job::JobState;
use crate::store::Usage;

/// Maximum number of ended jobs in memory, regardless of `serve.keep`.
const MOST: usize = 10_000;

/// Minimum free disk space, in bytes, before the disk reserve is allocated again.
const RESERVE_AGAIN: u64 = 64 << 20;

impl Jobs {
    /// Removes expired jobs, ended jobs beyond the maximum number in memory, the oldest completed jobs while the disk
    /// has too little space, and input files that no job uses.
    pub fn sweep(&self) {
        let now = Instant::now();
        let over = |entry: &JobEntry| entry.at == JobLifecycle::Ended && !entry.is_busy && !entry.is_hidden;
        let (expired, old): (BTreeSet<VideoId>, Vec<VideoId>) = {
            let mut index = self.lock();
            index.named.retain(|_, named| named.until > now);
            for entry in index.jobs.values_mut() {
                // Drop the channels that no client watches any more.
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
                index.jobs.get(id).is_some_and(|entry| entry.record.state == JobState::Completed)
            };
            if surplus > 0 {
                surplus -= 1;
                self.expire(id);
            } else if !is_over || self.has_enough(usage) {
                break;
            } else if gives_room() && !is_young() {
                tracing::info!(%id, "removed before its expiry: the disk is full");
                self.expire(id);
            }
        }
        let used: BTreeSet<String> = {
            let index = self.lock();
            index.jobs.values().flat_map(|entry| entry.accepted.inputs.iter().cloned()).collect()
        };
        self.store.sweep(&used);
        let usage = self.store.usage();
        // The limit exceeds the reserve, so that the reserve does not use up space that was just freed for a video.
        if usage.free > self.settings.min_free.0.max(RESERVE_AGAIN) {
            self.store.give_reserve(false);
        }
        let mut index = self.lock();
        let is_short = self.is_over(usage);
        if index.is_short != is_short {
            index.is_short = is_short;
            index.notify_queued();
        }
        drop(index);
        self.work.notify_all();
    }

    /// Removes a job that has ended, and remembers that it has expired.
    fn expire(&self, id: &VideoId) {
        let (mut index, is_there) = self.reserve(self.lock(), id);
        let Some(entry) = index.jobs.get(id).filter(|_| is_there) else { return };
        let owner = entry.accepted.owner.clone();
        if entry.at != JobLifecycle::Ended {
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
            Err(error) => tracing::error!(%id, "cannot remove an expired job: {error}"),
        }
    }

    /// Returns whether the disk has too little space for another video.
    pub(super) fn is_over(&self, usage: Usage) -> bool {
        usage.free < self.settings.min_free.0 || usage.bytes > self.settings.disk.0
    }

    /// Returns whether enough jobs were removed. The disk usage must be 5 % below `serve.disk`, so that the next video
    /// does not immediately cause another removal.
    fn has_enough(&self, usage: Usage) -> bool {
        let most = self.settings.disk.0;
        usage.free >= self.settings.min_free.0 && usage.bytes <= most - most / 20
    }

    /// Frees the disk reserve and removes jobs, to make space for a finished video.
    pub fn make_room(&self) {
        self.store.give_reserve(true);
        self.sweep();
    }

    /// Returns whether the disk has space for another request. If not, sweeps first.
    pub(super) fn has_room(&self) -> bool {
        if !self.is_over(self.store.usage()) {
            return true;
        }
        // Only one of several concurrent requests sweeps; the others wait for it.
        let _one = self.sweeping.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_over(self.store.usage()) {
            self.sweep();
        }
        !self.is_over(self.store.usage())
    }

    /// Returns whether new jobs are rejected for lack of disk space. If the disk has filled up since the last sweep,
    /// requests another sweep and returns false.
    pub fn lacks_room(&self) -> bool {
        let is_over = self.is_over(self.store.usage());
        if is_over && !self.is_short_of_disk() {
            self.ask_sweep();
            return false;
        }
        is_over
    }

    /// Requests a sweep by the thread that runs [`Jobs::sweep_until_stopped`].
    pub(super) fn ask_sweep(&self) {
        *self.sweeps.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.sweeps.1.notify_all();
    }

    /// Returns whether no more jobs will run, because the server drains or the device has failed.
    pub(super) fn has_stopped(&self) -> bool {
        self.is_draining() || self.has_failed.load(Ordering::Acquire)
    }

    /// Sweeps every minute and on request, until the server drains or the device fails. Blocks: call it on a dedicated
    /// thread.
    pub fn sweep_until_stopped(&self) {
        /// Minimum interval between two sweeps. Without requests, the interval is `MOST`.
        const LEAST: Duration = Duration::from_millis(200);
        const MOST: Duration = Duration::from_secs(60);
        let (asked, changed) = &self.sweeps;
        while !self.has_stopped() {
            self.sweep();
            let guard = asked.lock().unwrap_or_else(PoisonError::into_inner);
            let rested = changed.wait_timeout_while(guard, LEAST, |_| !self.has_stopped());
            let (guard, _) = rested.unwrap_or_else(PoisonError::into_inner);
            let waited = changed.wait_timeout_while(guard, MOST, |asked| !*asked && !self.has_stopped());
            *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
        }
    }
}
