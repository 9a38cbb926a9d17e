//! Thread that computes previews, so that the denoising loop does not wait for them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use ndarray::{Array3, Array5, Axis as Dim, s};

use super::latent_map::{LatentMap, MapStatistics};
use super::map_file::MapFile;
use super::{Preview, PreviewSink};
use crate::media::Frames;
use crate::pipeline::error::{PipelineError, Result, one_line};
use crate::pipeline::phase::Phase;
use crate::sampling::latents::{VideoGrid, VideoShape};
use crate::sampling::{AnySampler, StepRecord};

/// Maximum number of previews that wait for the thread. If there are more, the oldest is skipped.
const MAX_WAITING: usize = 4;
/// Weight of the cells of this run's predictions, relative to the cells of earlier videos.
const OWN_WEIGHT: f64 = 16.0;

/// Sums of a decoder that the runs of a process share.
pub(crate) type SharedStatistics = Arc<Mutex<MapStatistics>>;

/// The map of a run.
#[derive(Clone, Debug)]
pub(crate) enum MapSource {
    /// A map that the user passed.
    Given(Arc<LatentMap>),
    /// A map that is fitted to the decoder. `file`: where the sums are stored; `None`: they are kept in memory only.
    Fitted { known: SharedStatistics, file: Option<MapFile> },
}

/// A finished step whose preview is wanted.
pub(crate) struct StepTask {
    pub(crate) sampler: AnySampler,
    /// Video latents before and after the step, as tokens.
    pub(crate) record: StepRecord,
    pub(crate) layout: TokenLayout,
    pub(crate) phase: Phase,
    pub(crate) step: usize,
    pub(crate) steps: usize,
    /// Number of videos, without the padding of the batch.
    pub(crate) videos: usize,
    pub(crate) clip: Option<usize>,
    /// Frames per second of the preview.
    pub(crate) frame_rate: f64,
}

/// Arrangement of a pass's video tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenLayout {
    pub(crate) grid: VideoGrid,
    /// Shape of the latents of the batch.
    pub(crate) shape: VideoShape,
    /// Number of tokens without appended ones.
    pub(crate) own: usize,
}

impl TokenLayout {
    /// Unpacks tokens `[b, n, c]` to normalized latents `[b, C, F, H, W]`.
    pub(crate) fn latents(&self, tokens: &Array3<f32>) -> Result<Array5<f32>> {
        let shape = VideoShape { batch: tokens.dim().0, ..self.shape };
        Ok(self.grid.unpack(tokens.slice(s![.., ..self.own, ..]), &shape)?)
    }
}

/// Latents and the frames decoded from them, to which the map is fitted.
pub(crate) struct DecodedTask {
    /// Normalized latents `[b, C, F, H, W]`.
    pub(crate) latents: Array5<f32>,
    /// Decoded frames of each video, one for each latent frame
    /// ([`CellSize::shown_frames`](super::latent_map::CellSize::shown_frames)).
    pub(crate) frames: Vec<Frames>,
    /// Number of frames, rows and columns of the latents that are not padding.
    pub(crate) counted: [usize; 3],
}

#[derive(Default)]
struct Queue {
    steps: VecDeque<StepTask>,
    decoded: VecDeque<DecodedTask>,
    is_closed: bool,
}

/// Queue of the thread, and a condition variable that is notified when it changes.
#[derive(Default)]
struct SharedQueue {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl SharedQueue {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Handle of the thread. Dropping it waits until the queued previews are finished and the map is stored.
pub(crate) struct PreviewThread {
    shared: Arc<SharedQueue>,
    /// `None`: the thread has ended.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl PreviewThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// Returns an error if the system cannot start a thread.
    pub(crate) fn start(source: MapSource, sink: PreviewSink) -> Result<Self> {
        let shared = Arc::new(SharedQueue::default());
        let queue = Arc::clone(&shared);
        let work = move || Worker::new(source, sink).run(&queue);
        let thread = std::thread::Builder::new().name("previews".into()).spawn(work);
        let thread = thread.map_err(|error| PipelineError::Bug(format!("cannot start the preview thread: {error}")))?;
        Ok(PreviewThread { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Requests a preview. Does not block.
    pub(crate) fn step(&self, task: StepTask) {
        let mut queue = self.shared.lock();
        queue.steps.push_back(task);
        if queue.steps.len() > MAX_WAITING {
            queue.steps.pop_front();
        }
        self.shared.changed.notify_one();
    }

    /// Queues latents and their decoded frames for fitting the map. Later previews use the refitted map.
    pub(crate) fn decoded(&self, task: DecodedTask) {
        self.shared.lock().decoded.push_back(task);
        self.shared.changed.notify_one();
    }

    /// Waits until the queued previews are finished and the map is stored. No more previews can be requested.
    pub(crate) fn wait(&self) {
        self.shared.lock().is_closed = true;
        self.shared.changed.notify_one();
        // Other callers wait for the lock.
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::warn!("the thread that computes previews panicked");
        }
    }
}

impl Drop for PreviewThread {
    fn drop(&mut self) {
        self.wait();
    }
}

enum Task {
    Step(Box<StepTask>),
    Decoded(DecodedTask),
}

/// State of the thread.
struct Worker {
    source: MapSource,
    sink: PreviewSink,
    /// Cells of this run. `None`: the map is not fitted, or this run has decoded nothing yet.
    own: Option<MapStatistics>,
    /// The current map. `None`: it must be computed first.
    map: Option<Arc<LatentMap>>,
}

impl Worker {
    fn new(source: MapSource, sink: PreviewSink) -> Self {
        Worker { source, sink, own: None, map: None }
    }

    fn run(mut self, shared: &SharedQueue) {
        while let Some(task) = next(shared) {
            match task {
                Task::Decoded(task) => self.learn(&task),
                Task::Step(task) => {
                    if let Err(error) = self.show(&task) {
                        tracing::warn!("no preview of step {}: {}", task.step, one_line(&error));
                    }
                }
            }
        }
        self.store();
    }

    fn learn(&mut self, task: &DecodedTask) {
        let MapSource::Fitted { known, .. } = &self.source else { return };
        let cell = known.lock().unwrap_or_else(PoisonError::into_inner).cell;
        let own = self.own.get_or_insert_with(|| MapStatistics::new(cell));
        for (latents, frames) in task.latents.outer_iter().zip(&task.frames) {
            own.add(latents, frames, task.counted);
        }
        self.map = None;
    }

    /// Returns the map. `None`: there is nothing to fit it to.
    fn map(&mut self) -> Option<Arc<LatentMap>> {
        if self.map.is_none() {
            self.map = match &self.source {
                MapSource::Given(map) => Some(Arc::clone(map)),
                MapSource::Fitted { known, .. } => {
                    let mut all = known.lock().unwrap_or_else(PoisonError::into_inner).clone();
                    self.own.iter().for_each(|own| all.add_weighted(own, OWN_WEIGHT));
                    all.map().map(Arc::new)
                }
            };
        }
        self.map.clone()
    }

    fn show(&mut self, task: &StepTask) -> Result<()> {
        let Some(map) = self.map() else { return Ok(()) };
        let clean = task.sampler.clean_prediction(&task.record);
        let latents = task.layout.latents(&clean)?;
        for (video, latents) in latents.axis_iter(Dim(0)).take(task.videos).enumerate() {
            let &StepTask { clip, phase, step, steps, frame_rate, .. } = task;
            (self.sink)(Preview { video, clip, phase, step, steps, frames: map.frames(latents), frame_rate });
        }
        Ok(())
    }

    /// Adds the cells of this run to the shared sums, and stores them.
    fn store(&mut self) {
        let (MapSource::Fitted { known, file }, Some(own)) = (&self.source, self.own.take()) else { return };
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        known.add_weighted(&own, 1.0);
        if let Some(Err(error)) = file.as_ref().map(|file| file.write(&known)) {
            tracing::warn!("cannot store the preview map, so the next run must fit it again: {}", one_line(&error));
        }
    }
}

/// Waits for the next task; decoded frames come before steps. `None`: the queue is closed and empty.
fn next(shared: &SharedQueue) -> Option<Task> {
    let mut queue = shared.lock();
    loop {
        if let Some(task) = queue.decoded.pop_front() {
            return Some(Task::Decoded(task));
        }
        if let Some(task) = queue.steps.pop_front() {
            return Some(Task::Step(Box::new(task)));
        }
        if queue.is_closed {
            return None;
        }
        queue = shared.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
    }
}
