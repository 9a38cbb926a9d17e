//! Selects jobs for the device and tracks the batches that run.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Jobs;
use super::index::{JobIndex, JobLifecycle, QueuePosition, RunningBatch};
use super::progress::BatchProgress;
use crate::device::{JobBatch, PreviewImage, StepProgress, Stop};
use crate::id::VideoId;
use crate::job::{AcceptedJob, JobPhase, JobState, Record};
use crate::schedule::{self, ScheduleCandidate};
use crate::settings::Drain;
use crate::store::STEPS;

/// Interval at which the device thread checks a full disk again or retries a batch that could not be started.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A batch for the device, and a cancellation flag for each of its jobs.
pub struct Running {
    /// The batch for the device.
    pub order: JobBatch,
    /// One flag per job, set when that job is cancelled.
    pub cancelled: Vec<Arc<AtomicBool>>,
    /// Shapes whose programs the device must unload before the run.
    pub evict: Vec<String>,
    number: u64,
}

impl Running {
    /// Returns whether all jobs of the batch are cancelled.
    pub fn is_unwanted(&self) -> bool {
        self.cancelled.iter().all(|cancelled| cancelled.load(Ordering::Acquire))
    }

    /// Splits the batch into runs of one job each, which do not resume from a checkpoint.
    pub fn alone(&self) -> Vec<Running> {
        let one = |(job, cancelled): (&Arc<AcceptedJob>, &Arc<AtomicBool>)| Running {
            order: JobBatch { jobs: vec![Arc::clone(job)], steps: None, resume: false },
            cancelled: vec![Arc::clone(cancelled)],
            evict: Vec::new(),
            number: self.number,
        };
        self.order.jobs.iter().zip(&self.cancelled).map(one).collect()
    }

    fn ids(&self) -> impl Iterator<Item = &VideoId> {
        self.order.jobs.iter().map(|job| &job.id)
    }
}

/// Jobs selected to start together as a batch.
struct SelectedJobs {
    members: Vec<VideoId>,
    places: Vec<QueuePosition>,
    records: Vec<Record>,
    resume: bool,
}

/// Operations that the device and finisher threads use.
impl Jobs {
    /// Waits for the next batch and starts it. Returns `None` once the server drains or the device has failed.
    pub fn next(&self) -> Option<Running> {
        let mut index = self.lock();
        loop {
            if self.is_draining() || index.failed.is_some() {
                return None;
            }
            let waits = !index.waiting.is_empty();
            if waits && !self.room_for(&mut index) {
                index = self.work.wait_timeout(index, LOOK_AGAIN).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            let Some(picked) = self.choose(&mut index) else {
                index = self.work.wait(index).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(index);
            let begun = self.begin(&picked);
            index = self.lock();
            match begun {
                Ok(records) => return Some(self.start(index, &picked, records)),
                Err(error) => {
                    tracing::error!("cannot start the next job: {error}");
                    self.put_back(&mut index, &picked);
                    index = self.work.wait_timeout(index, LOOK_AGAIN).unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }

    /// Returns whether the disk has space for another video. If the answer has changed, notifies the watchers of queued
    /// jobs.
    fn room_for(&self, index: &mut MutexGuard<'_, JobIndex>) -> bool {
        let usage = self.store.usage();
        let is_short = self.is_over(usage);
        if is_short != index.is_short {
            index.is_short = is_short;
            index.notify_queued();
            self.is_changed();
            if is_short {
                self.ask_sweep();
            }
        }
        !is_short
    }

    /// Selects the jobs of the next batch and marks them as busy.
    fn choose(&self, index: &mut JobIndex) -> Option<SelectedJobs> {
        let is_ready = |place: &QueuePosition| match index.waiting.get(place).and_then(|job| job.batch.as_ref()) {
            // An interrupted batch resumes only as a whole.
            Some(batch) => !batch.iter().any(|id| index.is_unprepared(id)),
            None => !index.is_unprepared(&place.id),
        };
        // A queued job that is busy is being cancelled.
        let free =
            |place: &&QueuePosition| index.jobs.get(&place.id).is_some_and(|entry| !entry.is_busy) && is_ready(place);
        let places: Vec<QueuePosition> = index.waiting.keys().filter(free).take(schedule::AHEAD + 1).cloned().collect();
        let (chosen, resume) = match self.resumable_batch(index, places.first()?) {
            Some(batch) => (batch, true),
            None => {
                let candidates: Vec<ScheduleCandidate> =
                    places.iter().filter_map(|place| Some(index.waiting.get(place)?.candidate.clone())).collect();
                let picked = schedule::pick(&candidates, &index.loaded, self.settings.max_batch.unwrap_or(1));
                for n in schedule::overtaken(&picked) {
                    if let Some(waiting) = index.waiting.get_mut(&places[n]) {
                        waiting.candidate.overtaken += picked.len();
                    }
                }
                (picked.iter().map(|n| places[*n].clone()).collect(), false)
            }
        };
        let mut picked = SelectedJobs { members: Vec::new(), places: chosen, records: Vec::new(), resume };
        for place in &picked.places {
            let entry = index.jobs.get_mut(&place.id)?;
            entry.is_busy = true;
            picked.members.push(place.id.clone());
            picked.records.push(Record::clone(&entry.record));
        }
        Some(picked)
    }

    /// Returns the queue positions, in batch order, of the jobs that an earlier server process started in one batch
    /// with `first`. `None` if there is no such batch, or if one of its jobs is not waiting: saved denoising steps can
    /// only be resumed by the complete batch.
    fn resumable_batch(&self, index: &JobIndex, first: &QueuePosition) -> Option<Vec<QueuePosition>> {
        let batch = index.waiting.get(first)?.batch.as_ref()?;
        let waits = |place: &QueuePosition| {
            index.waiting.contains_key(place) && index.jobs.get(&place.id).is_some_and(|job| !job.is_busy)
        };
        let places: Vec<QueuePosition> =
            batch.iter().map(|id| QueuePosition { is_new: false, id: id.clone() }).collect();
        places.iter().all(waits).then_some(places)
    }

    /// Records on disk that the selected jobs are running, and returns their new states.
    fn begin(&self, picked: &SelectedJobs) -> std::io::Result<Vec<Record>> {
        self.store.begin(&picked.members)?;
        let mut records = Vec::new();
        for (id, before) in picked.members.iter().zip(&picked.records) {
            let record = Record {
                state: JobState::InProgress,
                started_at: Some(self.now()),
                attempts: before.attempts + 1,
                batch: picked.members.len(),
                ..before.clone()
            };
            self.write(id, &record)?;
            records.push(record);
        }
        Ok(records)
    }

    /// Keeps the selected jobs in the queue after their start has failed.
    fn put_back(&self, index: &mut JobIndex, picked: &SelectedJobs) {
        picked.members.iter().for_each(|id| self.settle(index, id, None));
    }

    /// Moves the selected jobs from the queue to a new run.
    fn start(&self, mut index: MutexGuard<'_, JobIndex>, picked: &SelectedJobs, records: Vec<Record>) -> Running {
        index.begun += 1;
        let number = index.begun;
        let (mut jobs, mut cancelled, mut candidate) = (Vec::new(), Vec::new(), None);
        for ((id, place), record) in picked.members.iter().zip(&picked.places).zip(records) {
            let waiting = index.waiting.remove(place);
            candidate = candidate.or(waiting.map(|waiting| waiting.candidate));
            let Some(entry) = index.jobs.get_mut(id) else { continue };
            entry.at = JobLifecycle::Run(number);
            entry.progress.stage = JobPhase::Loading;
            jobs.push(Arc::clone(&entry.accepted));
            cancelled.push(Arc::clone(&entry.cancelled));
            self.settle(&mut index, id, Some(record));
        }
        let mut evict = Vec::new();
        let shape = candidate.as_ref().map_or_else(|| Arc::from(""), |job| Arc::clone(&job.shape));
        if let Some(candidate) = &candidate {
            let gone = index.loaded.use_shape(&candidate.shape, self.settings.max_shapes);
            evict.extend(gone.iter().map(ToString::to_string));
            index.loaded.use_loras(&candidate.loras);
        }
        let run = RunningBatch {
            members: picked.members.clone(),
            track: BatchProgress::new(shape),
            is_device_done: false,
            writing: 0,
        };
        index.runs.insert(number, run);
        index.last_progress = Some(Instant::now());
        index.notify_queued();
        drop(index);
        self.is_changed();
        let steps: Option<PathBuf> = picked.members.first().map(|id| self.store.folder(id).join(STEPS));
        Running { order: JobBatch { jobs, steps, resume: picked.resume }, cancelled, evict, number }
    }

    /// Records that the programs for a job's shape are loaded on the device.
    pub fn is_warm(&self, job: &AcceptedJob) {
        let mut index = self.lock();
        index.loaded.use_shape(&Arc::from(job.shape.as_str()), usize::MAX);
    }

    /// Records that the programs for a job's shape are not loaded, because they did not fit on the device.
    pub fn is_not_loaded(&self, job: &AcceptedJob) {
        self.lock().loaded.forget(&job.shape);
    }

    /// Records the progress of a run. Returns whether the run continues, or why it must stop.
    pub fn moment(&self, running: &Running, moment: StepProgress) -> ControlFlow<Stop> {
        let mut index = self.lock();
        index.last_progress = Some(Instant::now());
        self.show(&mut index, running, moment);
        drop(index);
        self.is_changed();
        if running.is_unwanted() {
            return ControlFlow::Break(Stop::Cancelled);
        }
        if self.is_draining() && self.settings.drain == Drain::Checkpoint {
            return ControlFlow::Break(Stop::Draining);
        }
        ControlFlow::Continue(())
    }

    /// Publishes a preview of a running job. Only the latest one is kept, and only until the job ends.
    pub fn show_preview(&self, id: &VideoId, preview: PreviewImage) {
        let mut index = self.lock();
        let entry = index.jobs.get_mut(id).filter(|entry| entry.record.state == JobState::InProgress);
        let Some(entry) = entry else { return };
        entry.preview = Some(Arc::new(preview));
        index.tell(id);
        drop(index);
        self.is_changed();
    }

    fn show(&self, index: &mut JobIndex, running: &Running, moment: StepProgress) {
        let JobIndex { runs, profiles, jobs, .. } = index;
        let Some(run) = runs.get_mut(&running.number) else { return };
        let progress = run.track.at(moment, profiles);
        for id in running.ids() {
            if let Some(entry) = jobs.get_mut(id).filter(|entry| !entry.record.state.is_terminal()) {
                entry.progress = progress.clone();
            }
        }
        running.ids().for_each(|id| index.tell(id));
    }

    /// Records that the device has generated the videos of a batch. Their files are written next.
    pub fn mark_generated(&self, running: &Running) {
        let mut index = self.lock();
        index.last_progress = Some(Instant::now());
        self.show(&mut index, running, StepProgress { stage: JobPhase::Encoding, step: 0, steps: 0 });
        drop(index);
        self.is_changed();
    }

    /// Records that the device is done with a batch, whether or not the batch succeeded.
    pub fn left(&self, running: &Running) {
        if let Some(run) = self.lock().runs.get_mut(&running.number) {
            run.is_device_done = true;
        }
        self.close(running.number);
    }

    /// Records that a video of the batch was handed to the finisher thread, which writes its files.
    pub fn handed_to_finisher(&self, running: &Running) {
        if let Some(run) = self.lock().runs.get_mut(&running.number) {
            run.writing += 1;
        }
    }

    /// Records that the finisher thread is done with a video of the batch, whether or not the video was written.
    pub fn written(&self, running: &Running) {
        if let Some(run) = self.lock().runs.get_mut(&running.number) {
            run.writing = run.writing.saturating_sub(1);
        }
        self.close(running.number);
    }

    /// Returns the jobs of a running batch to the queue, because the server is shutting down.
    pub fn requeue(&self, running: &Running) {
        self.requeue_each(running.ids());
    }

    /// Returns all running jobs to the queue, because the server shuts down without waiting for the device thread.
    pub fn requeue_running(&self) {
        let ids: Vec<VideoId> = {
            let index = self.lock();
            let running = index.jobs.iter().filter(|(_, entry)| entry.record.state == JobState::InProgress);
            running.map(|(id, _)| id.clone()).collect()
        };
        self.requeue_each(&ids);
    }

    fn requeue_each<'a>(&self, ids: impl IntoIterator<Item = &'a VideoId>) {
        for id in ids {
            let (index, is_there) = self.reserve(self.lock(), id);
            let Some(entry) = index.jobs.get(id).filter(|_| is_there) else { continue };
            // The job did not cause the interruption, so this attempt does not count.
            let attempts = entry.record.attempts.saturating_sub(1);
            let record = Record { state: JobState::Queued, attempts, ..Record::clone(&entry.record) };
            let is_over = entry.record.state.is_terminal();
            drop(index);
            let written = if is_over { Ok(()) } else { self.write_with_retry(id, &record) };
            if let Err(error) = &written {
                tracing::error!(%id, "cannot write the job's state; the next start finds it in progress: {error}");
            }
            let mut index = self.lock();
            self.settle(&mut index, id, (written.is_ok() && !is_over).then_some(record));
        }
    }

    /// Records that the device or one of its threads has failed. No more jobs will run.
    pub fn device_failed(&self, reason: &str) {
        self.lock().failed.get_or_insert_with(|| reason.to_string());
        self.has_failed.store(true, Ordering::Release);
        self.work.notify_all();
        self.ask_sweep();
        self.is_changed();
    }

    /// Returns the time since the device last made progress; zero while it has no work.
    pub fn time_since_progress(&self) -> Duration {
        let index = self.lock();
        let is_running = index.runs.values().any(|run| !run.is_device_done);
        index.last_progress.filter(|_| is_running).map_or(Duration::ZERO, |last_progress| last_progress.elapsed())
    }
}
