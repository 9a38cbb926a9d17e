//! Worker threads of the server.
//!
//! The `device` thread creates and exclusively owns the device. The `finisher` thread writes the videos of a batch
//! while the next batch runs. The `sweeper` thread removes expired jobs. The `prepare` threads, which the device thread
//! starts, prepare queued jobs that need it.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ltx2_base::catch_panic::panic_message;
use tokio::sync::watch;

use super::descriptors::is_exhausted;
use super::device::{GeneratedVideo, JobBatch, JobDevice, Preparer, RunError, Stop};
use super::error::{Failure, OUT_OF_FILES};
use super::id::VideoId;
use super::job::VideoProperties;
use super::jobs::{Jobs, Running};
use super::store::is_full;

/// Function that creates the device. It is called on the thread that will own the device.
pub type Factory = Box<dyn FnOnce() -> Result<Box<dyn JobDevice>, String> + Send>;

/// Retry interval while the disk is full or the process is out of file descriptors.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Number of jobs that are prepared at the same time.
const PREPARE_THREADS: usize = 4;

/// Status of the worker threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// The device is being created and the warm-up batches run.
    Starting,
    /// The device runs jobs.
    Ready,
    /// The server has drained: all job states are written to disk.
    Drained,
    /// The device failed for this reason. The process should call [`Worker::join`] and exit with code 1.
    Failed(String),
}

/// Handles of the running threads.
pub struct Worker {
    status: watch::Receiver<Status>,
    threads: Vec<JoinHandle<()>>,
}

impl Worker {
    /// Starts the threads. The device runs the batches in `warm` before any job.
    ///
    /// # Errors
    /// Returns an error if a thread cannot be started.
    pub fn start(jobs: &Arc<Jobs>, factory: Factory, warm: Vec<JobBatch>) -> std::io::Result<Worker> {
        let (status, published) = watch::channel(Status::Starting);
        let status = Arc::new(status);
        let (sender, receiver) = sync_channel(1);
        let device = {
            let (jobs, status) = (Arc::clone(jobs), Arc::clone(&status));
            move || own_device(&jobs, &status, factory, &warm, sender)
        };
        let finisher = {
            let (jobs, status) = (Arc::clone(jobs), Arc::clone(&status));
            move || finish_all(&jobs, &status, &receiver)
        };
        let sweeper = {
            let jobs = Arc::clone(jobs);
            move || jobs.sweep_until_stopped()
        };
        let named = |name: &str| std::thread::Builder::new().name(name.into());
        let threads =
            vec![named("device").spawn(device)?, named("finisher").spawn(finisher)?, named("sweeper").spawn(sweeper)?];
        Ok(Worker { status: published, threads })
    }

    /// Returns a receiver that is notified when the status changes.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// Returns whether all threads have finished.
    pub fn is_over(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }

    /// Waits until the threads have finished. Call it after [`Jobs::drain`] or a device failure.
    ///
    /// # Errors
    /// Returns the reason if the device has failed.
    pub fn join(self) -> Result<(), String> {
        for thread in self.threads {
            thread.join().map_err(|panic| panic_message(&*panic))?;
        }
        match &*self.status.borrow() {
            Status::Failed(reason) => Err(reason.clone()),
            _ => Ok(()),
        }
    }
}

/// A generated video that the finisher thread has to write.
struct WriteTask {
    id: VideoId,
    made: Box<dyn GeneratedVideo>,
    folder: PathBuf,
    cancelled: Arc<AtomicBool>,
    run: Arc<Running>,
}

type StatusSender = Arc<watch::Sender<Status>>;

/// Records a device failure, after which no job runs.
fn fail(jobs: &Jobs, status: &StatusSender, reason: &str) {
    tracing::error!("the device failed: {reason}");
    jobs.device_failed(reason);
    status.send_if_modified(|status| {
        let is_first = !matches!(status, Status::Failed(_));
        if is_first {
            *status = Status::Failed(reason.into());
        }
        is_first
    });
}

fn own_device(
    jobs: &Arc<Jobs>,
    status: &StatusSender,
    factory: Factory,
    warm: &[JobBatch],
    finisher: SyncSender<WriteTask>,
) {
    let mut owned: Option<Box<dyn JobDevice>> = None;
    let mut tells_other_processes = false;
    let mut helpers = Vec::new();
    let work = AssertUnwindSafe(|| -> Result<(), String> {
        let device = owned.insert(factory()?);
        // A device that panicked may never be dropped, and must not keep the store locked.
        let receiver = Arc::downgrade(jobs);
        device.send_previews(Arc::new(move |id, preview| {
            if let Some(jobs) = receiver.upgrade() {
                jobs.show_preview(id, preview);
            }
        }));
        for order in warm {
            if jobs.is_draining() {
                return Ok(());
            }
            match device.warm(order) {
                Ok(()) => order.jobs.iter().for_each(|job| jobs.is_warm(job)),
                Err(RunError::Stopped(_)) => return Ok(()),
                // No process has enough memory for the shape, so all have ended the call and can be told to exit.
                Err(RunError::Job(failure)) => {
                    tells_other_processes = true;
                    return Err(failure.message);
                }
                Err(RunError::Device(reason)) => return Err(reason),
            }
        }
        if let Some(preparer) = device.preparer() {
            helpers = start_preparing(jobs, &preparer)?;
        }
        status.send_replace(Status::Ready);
        while let Some(running) = jobs.next() {
            for shape in &running.evict {
                device.evict(shape);
            }
            run(jobs, &mut **device, running, &finisher)?;
        }
        Ok(())
    });
    if let Err(reason) = catch_unwind(work).unwrap_or_else(|panic| Err(panic_message(&*panic))) {
        fail(jobs, status, &reason);
        // After a device failure, skip the device's destructor, which would tell the other processes to exit: they may
        // be in another call. They exit when they lose the connection to this process.
        if !tells_other_processes {
            std::mem::forget(owned);
        }
    }
    for helper in helpers {
        if let Err(panic) = helper.join() {
            tracing::error!("a thread that prepares jobs failed: {}", panic_message(&*panic));
        }
    }
}

/// Starts the threads that prepare queued jobs.
fn start_preparing(jobs: &Arc<Jobs>, preparer: &Arc<dyn Preparer>) -> Result<Vec<JoinHandle<()>>, String> {
    jobs.require_preparation();
    let start = |_| {
        let (jobs, preparer) = (Arc::clone(jobs), Arc::clone(preparer));
        let prepare = move || jobs.prepare_until_stopped(&*preparer);
        let thread = std::thread::Builder::new().name("prepare".into()).spawn(prepare);
        thread.map_err(|error| format!("cannot start a thread: {error}"))
    };
    (0..PREPARE_THREADS).map(start).collect()
}

/// Runs a batch and passes its videos to the finisher thread. An error means that the device is unusable.
fn run(
    jobs: &Jobs,
    device: &mut dyn JobDevice,
    running: Running,
    finisher: &SyncSender<WriteTask>,
) -> Result<(), String> {
    let running = Arc::new(running);
    let result = run_and_hand_to_finisher(jobs, device, &running, finisher);
    if let Err(reason) = &result {
        for job in &running.order.jobs {
            jobs.failed(&job.id, Failure::new("device_error", "the device failed while generating the video"));
        }
        tracing::error!("a batch failed: {reason}");
    }
    jobs.left(&running);
    result
}

fn run_and_hand_to_finisher(
    jobs: &Jobs,
    device: &mut dyn JobDevice,
    running: &Arc<Running>,
    finisher: &SyncSender<WriteTask>,
) -> Result<(), String> {
    match run_with_retries(jobs, device, running) {
        Ok(made) => {
            // The shape may be marked as not loaded, because another job of this shape did not fit.
            running.order.jobs.iter().for_each(|job| jobs.is_warm(job));
            jobs.mark_generated(running);
            hand_to_finisher(jobs, running, made, finisher)
        }
        Err(RunError::Stopped(Stop::Draining)) => {
            jobs.requeue(running);
            Ok(())
        }
        Err(RunError::Stopped(Stop::Cancelled)) => Ok(()),
        // Return the jobs to the queue: the next server process may have enough file descriptors.
        Err(RunError::Job(failure)) if failure.code == OUT_OF_FILES && jobs.is_draining() => {
            jobs.requeue(running);
            Ok(())
        }
        Err(RunError::Device(reason)) => Err(reason),
        Err(RunError::Job(failure)) if running.order.jobs.len() == 1 => {
            let job = &running.order.jobs[0];
            if failure.code == "too_large" && failure.param.as_deref() == Some("size") {
                jobs.is_not_loaded(job);
                device.evict(&job.shape);
            }
            jobs.failed(&job.id, failure);
            Ok(())
        }
        // One job of the batch caused the failure. Run each job alone, so that the others can succeed.
        Err(RunError::Job(_)) => {
            let each = running.alone().into_iter().filter(|alone| !alone.is_unwanted());
            each.map(Arc::new).try_for_each(|alone| run_and_hand_to_finisher(jobs, device, &alone, finisher))
        }
    }
}

/// Runs a batch. Retries for up to [`Jobs::patience`] if the process is out of file descriptors.
fn run_with_retries(
    jobs: &Jobs,
    device: &mut dyn JobDevice,
    running: &Arc<Running>,
) -> Result<Vec<Box<dyn GeneratedVideo>>, RunError> {
    let until = Instant::now() + jobs.patience();
    loop {
        let mut watch = |moment| jobs.moment(running, moment);
        let result = AssertUnwindSafe(|| device.run(&running.order, &mut watch));
        let result = catch_unwind(result).unwrap_or_else(|panic| Err(RunError::Device(panic_message(&*panic))));
        let waits = |failure: &Failure| {
            let has_time = Instant::now() < until && !running.is_unwanted() && !jobs.is_draining();
            failure.code == OUT_OF_FILES && has_time
        };
        match &result {
            Err(RunError::Job(failure)) if waits(failure) => {
                tracing::warn!("too many open files; the running video waits for a free file descriptor");
                std::thread::sleep(RETRY_INTERVAL);
            }
            _ => return result,
        }
    }
}

/// Passes videos to the finisher thread. Blocks while the thread's queue is full.
fn hand_to_finisher(
    jobs: &Jobs,
    running: &Arc<Running>,
    made: Vec<Box<dyn GeneratedVideo>>,
    finisher: &SyncSender<WriteTask>,
) -> Result<(), String> {
    let count = made.len();
    let rows = running.order.jobs.iter().zip(&running.cancelled);
    for ((job, cancelled), made) in rows.zip(made) {
        if cancelled.load(Ordering::Acquire) {
            continue;
        }
        let (id, cancelled) = (job.id.clone(), Arc::clone(cancelled));
        let finishing = WriteTask { folder: jobs.folder(&id), id, made, cancelled, run: Arc::clone(running) };
        jobs.handed_to_finisher(running);
        finisher.send(finishing).map_err(|_| "the thread that writes videos has stopped".to_string())?;
    }
    for job in running.order.jobs.iter().skip(count) {
        jobs.failed(&job.id, Failure::new("internal", "the device returned no video"));
    }
    Ok(())
}

/// Runs the finisher thread: writes videos until the device thread has finished, then sets the final status.
fn finish_all(jobs: &Jobs, status: &StatusSender, receiver: &Receiver<WriteTask>) {
    while let Ok(finishing) = receiver.recv() {
        let (id, run) = (finishing.id.clone(), Arc::clone(&finishing.run));
        let finished = catch_unwind(AssertUnwindSafe(|| finish(jobs, finishing)));
        if let Err(panic) = finished {
            jobs.failed(&id, Failure::new("internal", "writing the video failed"));
            fail(jobs, status, &panic_message(&*panic));
        }
        jobs.written(&run);
    }
    status.send_if_modified(|status| {
        let is_drained = !matches!(status, Status::Failed(_));
        if is_drained {
            *status = Status::Drained;
        }
        is_drained
    });
}

/// Writes a video. If the disk is full or the process is out of file descriptors, retries for up to [`Jobs::patience`].
/// Frees disk space before it retries on a full disk.
fn finish(jobs: &Jobs, mut finishing: WriteTask) {
    let WriteTask { id, made, folder, cancelled, .. } = &mut finishing;
    let until = Instant::now() + jobs.patience();
    let mut written: Option<VideoProperties> = None;
    loop {
        if cancelled.load(Ordering::Acquire) {
            return;
        }
        let attempt = match written.clone() {
            None => {
                let attempt = catch_unwind(AssertUnwindSafe(|| made.write(folder)));
                let attempt = attempt.unwrap_or_else(|panic| {
                    made.keep(folder);
                    resume_unwind(panic)
                });
                attempt.map(|produced| written = Some(produced))
            }
            Some(_) => Ok(()),
        };
        let kept = attempt.and_then(|()| match written.clone().map(|produced| jobs.completed(id, produced)) {
            None | Some(Ok(())) => Ok(()),
            Some(Err(error)) if is_full(&error) => {
                Err(Failure::new("storage_full", "the server's disk is full: delete videos, or try again later"))
            }
            Some(Err(error)) if is_exhausted(&error) => Err(Failure::out_of_files()),
            Some(Err(error)) => {
                tracing::error!(%id, "cannot write the job's state: {error}");
                Err(Failure::new("internal", "the server cannot store the job's state"))
            }
        });
        match kept {
            Ok(()) => return,
            Err(failure) if failure.is_transient() && Instant::now() < until => {
                if jobs.is_draining() {
                    // The next start of the server finds that the job was running, and resumes it from its checkpoint.
                    tracing::warn!(%id, "the video is generated again at the next start: {}", failure.message);
                    return;
                }
                if failure.code != OUT_OF_FILES {
                    jobs.make_room();
                }
                std::thread::sleep(RETRY_INTERVAL);
            }
            Err(failure) => {
                // On a full disk there is no space for the frames and latents either.
                if written.is_none() && !failure.is_transient() {
                    made.keep(folder);
                }
                jobs.failed(id, failure);
                return;
            }
        }
    }
}
