//! Wrappers that measure a device and a job store.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Metrics, OutcomeLabels, PhaseLabels, PipelineLabel, StateLabel};
use crate::device::{
    BatchWatch, Figures, GeneratedVideo, JobBatch, JobDevice, Preparer, PreviewSink, RunError, StepProgress, Stop,
};
use crate::error::Failure;
use crate::id::VideoId;
use crate::job::{AcceptedJob, JobPhase, JobState, Record, VideoProperties};
use crate::store::{JobStore, StoredJob, Usage, Variant};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Times of a job that has not ended.
#[derive(Debug)]
struct JobTimes {
    state: JobState,
    pipeline: String,
    created: Instant,
    /// Time at which the job was started. `None`: not started yet.
    begun: Option<Instant>,
    /// Time at which the job's files were written. `None`: not written yet.
    written: Option<Instant>,
    /// Time that the job has spent outside the queue, the device and encoding.
    overhead: Duration,
}

/// Progress of the jobs and of the device, shared by [`ObservedDevice`] and [`ObservedStore`].
#[derive(Debug)]
pub(crate) struct ObservedState {
    metrics: Arc<Metrics>,
    job_times: Mutex<HashMap<VideoId, JobTimes>>,
    device: Mutex<DeviceProgress>,
}

/// Progress of the device, and the usual durations of its stages.
#[derive(Debug, Default)]
struct DeviceProgress {
    /// Current stage, and the time at which the device last reported progress in it; `None` while the device is idle.
    at: Option<(StageKey, Instant)>,
    /// Moving average of the seconds between two progress reports, by shape and stage.
    means: HashMap<StageKey, f64>,
}

/// Shape and stage. Times are averaged separately for each shape and stage, because large shapes take longer.
type StageKey = (Arc<str>, JobPhase);

/// Time without progress after which the device counts as stuck if the stage has no average. Loading and compiling
/// always use this time, because their durations vary too much: a program may come from the cache, and a LoRA may have
/// to be loaded.
const UNKNOWN: Duration = Duration::from_secs(1800);
/// Maximum number of stored averages, to bound memory. Beyond it, all averages are discarded.
const MEANS: usize = 1024;

impl ObservedState {
    /// Creates the state of an idle device without jobs.
    pub(crate) fn new(metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(ObservedState { metrics, job_times: Mutex::default(), device: Mutex::default() })
    }

    /// Returns the current stage if the device is stuck in it: the time without progress exceeds ten times the average
    /// of the stage and exceeds `floor`.
    pub(crate) fn stuck(&self, floor: Duration) -> Option<JobPhase> {
        let progress = lock(&self.device);
        let (stage, since) = progress.at.as_ref()?;
        let learns = !matches!(stage.1, JobPhase::Loading | JobPhase::Compiling);
        let mean = progress.means.get(stage).filter(|_| learns).map(|mean| Duration::from_secs_f64(10.0 * mean));
        (since.elapsed() > mean.unwrap_or(UNKNOWN).max(floor)).then_some(stage.1)
    }

    /// Records that the device has reported progress in a stage, or is idle. Returns the stage of the previous report
    /// and the time since then.
    fn record_progress(&self, stage: Option<StageKey>) -> Option<(JobPhase, Duration)> {
        let now = Instant::now();
        let mut progress = lock(&self.device);
        let before = progress.at.take().map(|(stage, since)| (stage, now - since));
        if let Some((stage, took)) = &before {
            if progress.means.len() >= MEANS && !progress.means.contains_key(stage) {
                progress.means.clear();
            }
            let took = took.as_secs_f64();
            let mean = progress.means.entry(stage.clone()).or_insert(took);
            *mean += 0.2 * (took - *mean);
        }
        progress.at = stage.map(|stage| (stage, now));
        before.map(|((_, stage), took)| (stage, took))
    }

    /// Updates the number of jobs by state. Call this before the metrics are read.
    pub(crate) fn settle(&self) {
        let job_times = lock(&self.job_times);
        for state in [JobState::Queued, JobState::InProgress, JobState::Completed, JobState::Failed] {
            let count = job_times.values().filter(|times| times.state == state).count();
            self.metrics.jobs.get_or_create(&StateLabel { state: state.name() }).set(count as i64);
        }
    }

    fn enter(&self, accepted: &AcceptedJob, state: JobState, overhead: Duration) {
        let times = JobTimes {
            state,
            pipeline: accepted.config.summary().pipeline.clone(),
            created: Instant::now(),
            begun: None,
            written: None,
            overhead,
        };
        lock(&self.job_times).insert(accepted.id.clone(), times);
    }

    fn moved(&self, id: &VideoId, record: &Record) {
        let metrics = &self.metrics;
        let mut job_times = lock(&self.job_times);
        let Some(times) = job_times.get_mut(id) else { return };
        let before = std::mem::replace(&mut times.state, record.state);
        match record.state {
            JobState::InProgress if before == JobState::Queued => {
                times.begun = Some(Instant::now());
                metrics.queue_seconds.observe(times.created.elapsed().as_secs_f64());
            }
            JobState::Completed | JobState::Failed if !before.is_terminal() => {
                let outcome = record.failure.as_ref().map_or("completed", |failure| failure.code.as_str());
                let outcome = OutcomeLabels { outcome: outcome.to_string(), pipeline: times.pipeline.clone() };
                metrics.jobs_ended.get_or_create(&outcome).inc();
                if let Some(written) = times.written.filter(|_| record.state == JobState::Completed) {
                    metrics.overhead_seconds.observe((times.overhead + written.elapsed()).as_secs_f64());
                }
                record.produced.iter().for_each(|made| self.count_video(made));
            }
            _ => {}
        }
    }

    fn count_video(&self, made: &VideoProperties) {
        let metrics = &self.metrics;
        metrics.frames.inc_by(made.num_frames as u64);
        if made.fps > 0.0 {
            metrics.video_seconds.inc_by(made.num_frames as f64 / made.fps);
        }
    }
}

/// Job store that measures its state transitions.
pub(crate) struct ObservedStore {
    inner: Arc<dyn JobStore>,
    observed: Arc<ObservedState>,
}

impl ObservedStore {
    /// Wraps the store `inner`.
    pub(crate) fn new(inner: Arc<dyn JobStore>, observed: Arc<ObservedState>) -> Self {
        ObservedStore { inner, observed }
    }

    fn timed<T>(&self, write: impl FnOnce(&dyn JobStore) -> io::Result<T>) -> io::Result<T> {
        let since = Instant::now();
        let result = write(&*self.inner);
        let metrics = &self.observed.metrics;
        metrics.store_write_seconds.observe(since.elapsed().as_secs_f64());
        if result.is_err() {
            metrics.store_errors.inc();
        }
        result
    }
}

impl JobStore for ObservedStore {
    fn create(&self, accepted: &AcceptedJob) -> io::Result<()> {
        let since = Instant::now();
        self.timed(|store| store.create(accepted))?;
        self.observed.enter(accepted, JobState::Queued, since.elapsed());
        Ok(())
    }

    fn transition(&self, id: &VideoId, record: &Record) -> io::Result<()> {
        self.timed(|store| store.transition(id, record))?;
        self.observed.moved(id, record);
        Ok(())
    }

    fn begin(&self, members: &[VideoId]) -> io::Result<()> {
        self.timed(|store| store.begin(members))
    }

    fn remove(&self, id: &VideoId) -> io::Result<()> {
        self.timed(|store| store.remove(id))?;
        lock(&self.observed.job_times).remove(id);
        Ok(())
    }

    fn load_all(&self) -> io::Result<Vec<StoredJob>> {
        let all = self.inner.load_all()?;
        for stored in &all {
            self.observed.enter(&stored.accepted, stored.record.state, Duration::ZERO);
        }
        Ok(all)
    }

    fn usage(&self) -> Usage {
        self.inner.usage()
    }

    fn give_reserve(&self, free: bool) {
        self.inner.give_reserve(free);
    }

    fn forget_run(&self, id: &VideoId, keep_video: bool) {
        self.inner.forget_run(id, keep_video);
    }

    fn sweep(&self, used: &BTreeSet<String>) {
        self.inner.sweep(used);
    }

    fn open(&self, id: &VideoId, variant: Variant) -> io::Result<File> {
        self.inner.open(id, variant)
    }

    fn folder(&self, id: &VideoId) -> PathBuf {
        self.inner.folder(id)
    }
}

/// Device whose runs are measured.
pub(crate) struct ObservedDevice {
    inner: Box<dyn JobDevice>,
    observed: Arc<ObservedState>,
}

impl ObservedDevice {
    /// Wraps the device `inner`.
    pub(crate) fn new(inner: Box<dyn JobDevice>, observed: Arc<ObservedState>) -> Self {
        ObservedDevice { inner, observed }
    }

    /// Adds the time between the start of each job and the start of its run on the device to the job's overhead.
    fn begun(&self, order: &JobBatch) {
        let mut job_times = lock(&self.observed.job_times);
        for job in &order.jobs {
            if let Some(times) = job_times.get_mut(&job.id) {
                times.overhead += times.begun.map_or(Duration::ZERO, |begun| begun.elapsed());
            }
        }
    }
}

/// Duration of each stage of a run.
struct StageTimes<'a> {
    observed: &'a ObservedState,
    shape: Arc<str>,
    spent: HashMap<JobPhase, Duration>,
    last: Option<StepProgress>,
}

impl StageTimes<'_> {
    fn at(&mut self, moment: Option<StepProgress>) {
        let before = self.observed.record_progress(moment.map(|moment| (Arc::clone(&self.shape), moment.stage)));
        if let Some((stage, took)) = before {
            *self.spent.entry(stage).or_default() += took;
            let steps = match (self.last, moment) {
                (Some(last), Some(now)) if last.stage == now.stage => now.step.saturating_sub(last.step),
                _ => 0,
            };
            if steps > 0 && matches!(stage, JobPhase::Denoise | JobPhase::Refine) {
                // One device call may run several steps; record each of them.
                let each = took.as_secs_f64() / steps as f64;
                (0..steps).for_each(|_| self.observed.metrics.step_seconds.observe(each));
            }
        }
        self.last = moment;
    }

    fn end(mut self) {
        self.at(None);
        for (stage, took) in self.spent {
            let seconds = took.as_secs_f64();
            let phase = serde_json::to_value(stage).ok().and_then(|word| word.as_str().map(str::to_string));
            self.observed
                .metrics
                .phase_seconds
                .get_or_create(&PhaseLabels { phase: phase.unwrap_or_default() })
                .observe(seconds);
            if stage == JobPhase::Compiling {
                self.observed.metrics.compile_seconds.observe(seconds);
            }
        }
    }
}

fn shape_of(order: &JobBatch) -> Arc<str> {
    order.jobs.first().map_or_else(|| Arc::from(""), |job| Arc::from(job.shape.as_str()))
}

impl JobDevice for ObservedDevice {
    fn warm(&mut self, order: &JobBatch) -> Result<(), RunError> {
        self.observed.record_progress(Some((shape_of(order), JobPhase::Compiling)));
        let result = self.inner.warm(order);
        self.observed.record_progress(None);
        self.observed.metrics.device(&self.inner.figures());
        result
    }

    fn run(&mut self, order: &JobBatch, watch: BatchWatch) -> Result<Vec<Box<dyn GeneratedVideo>>, RunError> {
        let metrics = Arc::clone(&self.observed.metrics);
        self.begun(order);
        let since = Instant::now();
        let observed = Arc::clone(&self.observed);
        let mut stages = StageTimes { observed: &observed, shape: shape_of(order), spent: HashMap::new(), last: None };
        stages.at(Some(StepProgress { stage: JobPhase::Loading, step: 0, steps: 0 }));
        let mut measured = |moment: StepProgress| -> ControlFlow<Stop> {
            stages.at(Some(moment));
            watch(moment)
        };
        let result = self.inner.run(order, &mut measured);
        stages.end();
        metrics.device(&self.inner.figures());
        let seconds = since.elapsed().as_secs_f64();
        metrics.busy_seconds.inc_by(seconds);
        metrics.batch_videos.observe(order.jobs.len() as f64);
        if result.is_ok() {
            let pipeline = order.jobs.first().map(|job| job.config.summary().pipeline.clone()).unwrap_or_default();
            metrics.run_seconds.get_or_create(&PipelineLabel { pipeline }).observe(seconds);
        }
        let ids = order.jobs.iter().map(|job| job.id.clone());
        let measured = |(inner, id)| {
            Box::new(ObservedVideo { inner, id, observed: Arc::clone(&observed) }) as Box<dyn GeneratedVideo>
        };
        result.map(|made| made.into_iter().zip(ids).map(measured).collect())
    }

    fn send_previews(&mut self, sink: PreviewSink) {
        self.inner.send_previews(sink);
    }

    fn preparer(&mut self) -> Option<Arc<dyn Preparer>> {
        self.inner.preparer()
    }

    fn evict(&mut self, shape: &str) {
        self.inner.evict(shape);
    }

    fn figures(&mut self) -> Figures {
        self.inner.figures()
    }
}

/// Generated video whose encoding is measured.
struct ObservedVideo {
    inner: Box<dyn GeneratedVideo>,
    id: VideoId,
    observed: Arc<ObservedState>,
}

impl GeneratedVideo for ObservedVideo {
    fn keep(&mut self, folder: &Path) {
        self.inner.keep(folder);
    }

    fn write(&mut self, folder: &Path) -> Result<VideoProperties, Failure> {
        let since = Instant::now();
        let result = self.inner.write(folder);
        let phase = PhaseLabels { phase: "encoding".into() };
        self.observed.metrics.phase_seconds.get_or_create(&phase).observe(since.elapsed().as_secs_f64());
        if let Some(times) = lock(&self.observed.job_times).get_mut(&self.id) {
            times.written = Some(Instant::now());
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test device that reports a fixed number of resumed runs.
    struct ResumingDevice(u64);

    impl JobDevice for ResumingDevice {
        fn warm(&mut self, _: &JobBatch) -> Result<(), RunError> {
            Ok(())
        }

        fn run(&mut self, _: &JobBatch, _: BatchWatch) -> Result<Vec<Box<dyn GeneratedVideo>>, RunError> {
            Ok(Vec::new())
        }

        fn evict(&mut self, _: &str) {}

        fn figures(&mut self) -> Figures {
            Figures { resumed: self.0, ..Figures::default() }
        }
    }

    /// A batch may request to resume although no checkpoint exists.
    #[test]
    fn resumed_metric_counts_only_runs_with_a_checkpoint() {
        let metrics = Arc::new(Metrics::new("cpu", "nano", 64));
        for (found, all) in [(0, 0), (1, 1), (0, 1)] {
            let mut device =
                ObservedDevice::new(Box::new(ResumingDevice(found)), ObservedState::new(Arc::clone(&metrics)));
            let order = JobBatch { jobs: Vec::new(), steps: None, resume: true };
            assert!(device.run(&order, &mut |_| ControlFlow::Continue(())).is_ok());
            assert_eq!(metrics.resumed.get(), all);
        }
    }

    /// Device that runs several steps in one call.
    struct GroupingDevice;

    impl JobDevice for GroupingDevice {
        fn warm(&mut self, _: &JobBatch) -> Result<(), RunError> {
            Ok(())
        }

        fn run(&mut self, _: &JobBatch, watch: BatchWatch) -> Result<Vec<Box<dyn GeneratedVideo>>, RunError> {
            let groups =
                [(JobPhase::TextEncoder, 0), (JobPhase::Denoise, 0), (JobPhase::Denoise, 5), (JobPhase::Denoise, 8)];
            for (stage, step) in groups {
                assert!(watch(StepProgress { stage, step, steps: 8 }).is_continue());
            }
            Ok(Vec::new())
        }

        fn evict(&mut self, _: &str) {}

        fn figures(&mut self) -> Figures {
            Figures::default()
        }
    }

    #[test]
    fn steps_of_a_multi_step_call_are_counted() {
        let metrics = Arc::new(Metrics::new("cpu", "nano", 64));
        let mut device = ObservedDevice::new(Box::new(GroupingDevice), ObservedState::new(Arc::clone(&metrics)));
        let order = JobBatch { jobs: Vec::new(), steps: None, resume: false };
        assert!(device.run(&order, &mut |_| ControlFlow::Continue(())).is_ok());
        let text = metrics.text(crate::metrics::MeasuredValues::default());
        assert!(text.contains("ltx2_step_seconds_count 8\n"), "{text}");
    }

    /// Loading and compiling may take anything from milliseconds to half an hour. Step times are learned for each
    /// shape.
    #[test]
    fn device_counts_as_stuck_only_in_stages_with_learned_step_times() {
        let observed = ObservedState::new(Arc::new(Metrics::new("cpu", "nano", 64)));
        let at = |shape: &str, stage| {
            observed.record_progress(Some((Arc::from(shape), stage)));
        };
        let wait = || std::thread::sleep(Duration::from_millis(60));
        let all = [JobPhase::Loading, JobPhase::Compiling, JobPhase::Denoise, JobPhase::VideoDecoder];
        for _ in 0..3 {
            all.into_iter().for_each(|stage| at("small", stage));
        }
        for (shape, stage, stuck) in [
            ("small", JobPhase::Loading, false),
            ("small", JobPhase::Compiling, false),
            ("small", JobPhase::Denoise, true),
            ("large", JobPhase::Denoise, false),
        ] {
            at(shape, stage);
            wait();
            assert_eq!(observed.stuck(Duration::from_millis(1)).is_some(), stuck, "{shape} {stage:?}");
            assert_eq!(observed.stuck(Duration::from_secs(30)), None);
        }
        observed.record_progress(None);
        assert_eq!(observed.stuck(Duration::ZERO), None);
        for n in 0..3 * MEANS {
            at(&n.to_string(), JobPhase::Denoise);
        }
        assert!(lock(&observed.device).means.len() <= MEANS);
    }
}
