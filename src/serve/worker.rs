//! The threads of device and finisher.
//!
//! One thread builds the device and alone touches it; another writes what is made while the next order runs; a third sweeps.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::descriptors::is_exhausted;
use super::device::{Device, Made, Order, RunError, Stop};
use super::error::{Failure, OUT_OF_FILES};
use super::id::VideoId;
use super::job::Produced;
use super::jobs::{Jobs, Running};
use super::store::is_full;
use crate::contained::panic_message;

/// Builds the device, on the thread that owns it.
pub type Factory = Box<dyn FnOnce() -> Result<Box<dyn Device>, String> + Send>;

/// How often a video tries again on a full disk, or where no file can be opened.
const TRY_AGAIN: Duration = Duration::from_millis(500);

/// Where the threads are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// The device is built, and its warm shapes run.
    Starting,
    /// Orders are taken.
    Ready,
    /// The server drained: every state is written.
    Drained,
    /// Nothing runs any more, and the process is to end with exit code 1, after [`Worker::join`].
    Failed(String),
}

/// The running threads.
pub struct Worker {
    status: watch::Receiver<Status>,
    threads: Vec<JoinHandle<()>>,
}

impl Worker {
    /// Starts them. The device is warmed by each of the orders first.
    ///
    /// # Errors
    /// A thread that cannot be started.
    pub fn start(jobs: &Arc<Jobs>, factory: Factory, warm: Vec<Order>) -> std::io::Result<Worker> {
        let (status, told) = watch::channel(Status::Starting);
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
            move || jobs.sweep_for_good()
        };
        let named = |name: &str| std::thread::Builder::new().name(name.into());
        let threads =
            vec![named("device").spawn(device)?, named("finisher").spawn(finisher)?, named("sweeper").spawn(sweeper)?];
        Ok(Worker { status: told, threads })
    }

    /// Where they are, as it changes.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// Whether all of them have ended.
    pub fn is_over(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }

    /// Waits until they have ended: after [`Jobs::drain`], or because the device failed.
    ///
    /// # Errors
    /// Why the device failed.
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

/// A video on its way to its files.
struct Finishing {
    id: VideoId,
    made: Box<dyn Made>,
    folder: PathBuf,
    cancelled: Arc<AtomicBool>,
    run: Arc<Running>,
}

type Told = Arc<watch::Sender<Status>>;

/// Says that nothing runs any more.
fn fail(jobs: &Jobs, status: &Told, reason: &str) {
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

fn own_device(jobs: &Jobs, status: &Told, factory: Factory, warm: &[Order], finisher: SyncSender<Finishing>) {
    let mut owned: Option<Box<dyn Device>> = None;
    let mut says_farewell = false;
    let work = AssertUnwindSafe(|| -> Result<(), String> {
        let device = owned.insert(factory()?);
        for order in warm {
            if jobs.is_draining() {
                return Ok(());
            }
            match device.warm(order) {
                Ok(()) => order.jobs.iter().for_each(|job| jobs.is_warm(job)),
                Err(RunError::Stopped(_)) => return Ok(()),
                // A shape that does not fit, in all processes alike: they are told to end.
                Err(RunError::Job(failure)) => {
                    says_farewell = true;
                    return Err(failure.message);
                }
                Err(RunError::Device(reason)) => return Err(reason),
            }
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
        // One that failed says no farewell to its other processes, which may wait for something else: they end by its loss.
        if !says_farewell {
            std::mem::forget(owned);
        }
    }
}

/// Runs an order and hands on what it made.
///
/// # Errors
/// The device is of no use any more.
fn run(jobs: &Jobs, device: &mut dyn Device, running: Running, finisher: &SyncSender<Finishing>) -> Result<(), String> {
    let running = Arc::new(running);
    let result = run_and_hand_on(jobs, device, &running, finisher);
    if let Err(reason) = &result {
        for job in &running.order.jobs {
            jobs.failed(&job.id, Failure::new("device_error", "the device failed while the video was made"));
        }
        tracing::error!("an order failed: {reason}");
    }
    jobs.left(&running);
    result
}

fn run_and_hand_on(
    jobs: &Jobs,
    device: &mut dyn Device,
    running: &Arc<Running>,
    finisher: &SyncSender<Finishing>,
) -> Result<(), String> {
    match run_patiently(jobs, device, running) {
        Ok(made) => {
            // It may have been noted as not loaded: another job of its shape did not fit.
            running.order.jobs.iter().for_each(|job| jobs.is_warm(job));
            jobs.made(running);
            hand_on(jobs, running, made, finisher)
        }
        Err(RunError::Stopped(Stop::Draining)) => {
            jobs.requeue(running);
            Ok(())
        }
        Err(RunError::Stopped(Stop::Cancelled)) => Ok(()),
        // The next start may find what this one lacks.
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
        // One of them is at fault, and the others are not to fail for it.
        Err(RunError::Job(_)) => {
            let each = running.alone().into_iter().filter(|alone| !alone.is_unwanted());
            each.map(Arc::new).try_for_each(|alone| run_and_hand_on(jobs, device, &alone, finisher))
        }
    }
}

/// Runs an order. Where no file can be opened, it is tried again for a while.
fn run_patiently(jobs: &Jobs, device: &mut dyn Device, running: &Arc<Running>) -> Result<Vec<Box<dyn Made>>, RunError> {
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
                tracing::warn!("too many files are open: the running video waits");
                std::thread::sleep(TRY_AGAIN);
            }
            _ => return result,
        }
    }
}

/// Hands videos to the finisher; waits while it has two.
fn hand_on(
    jobs: &Jobs,
    running: &Arc<Running>,
    made: Vec<Box<dyn Made>>,
    finisher: &SyncSender<Finishing>,
) -> Result<(), String> {
    let count = made.len();
    let rows = running.order.jobs.iter().zip(&running.cancelled);
    for ((job, cancelled), made) in rows.zip(made) {
        if cancelled.load(Ordering::Acquire) {
            continue;
        }
        let (id, cancelled) = (job.id.clone(), Arc::clone(cancelled));
        let finishing = Finishing { folder: jobs.folder(&id), id, made, cancelled, run: Arc::clone(running) };
        jobs.handed_on(running);
        finisher.send(finishing).map_err(|_| "the thread that writes videos is gone".to_string())?;
    }
    for job in running.order.jobs.iter().skip(count) {
        jobs.failed(&job.id, Failure::new("internal", "the device made no video"));
    }
    Ok(())
}

/// Writes videos until the device's thread has ended; then says how it all ended.
fn finish_all(jobs: &Jobs, status: &Told, receiver: &Receiver<Finishing>) {
    while let Ok(finishing) = receiver.recv() {
        let (id, run) = (finishing.id.clone(), Arc::clone(&finishing.run));
        let finished = catch_unwind(AssertUnwindSafe(|| finish(jobs, finishing)));
        if let Err(panic) = finished {
            jobs.failed(&id, Failure::new("internal", "the video could not be written"));
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

/// Writes a video. On a full disk it frees what there is, and tries for a while; so it does where no file can be opened.
fn finish(jobs: &Jobs, mut finishing: Finishing) {
    let Finishing { id, made, folder, cancelled, .. } = &mut finishing;
    let until = Instant::now() + jobs.patience();
    let mut written: Option<Produced> = None;
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
            Some(Err(error)) if is_full(&error) => Err(Failure::new("storage_full", "the server's disk is full")),
            Some(Err(error)) if is_exhausted(&error) => Err(Failure::out_of_files()),
            Some(Err(error)) => {
                tracing::error!(%id, "its end cannot be kept: {error}");
                Err(Failure::new("internal", "the job's end could not be kept"))
            }
        });
        match kept {
            Ok(()) => return,
            Err(failure) if failure.is_passing() && Instant::now() < until => {
                if jobs.is_draining() {
                    // The next start finds it running, with its steps.
                    tracing::warn!(%id, "{}: the video is made again at the next start", failure.message);
                    return;
                }
                if failure.code != OUT_OF_FILES {
                    jobs.make_room();
                }
                std::thread::sleep(TRY_AGAIN);
            }
            Err(failure) => {
                // A full disk has no room for them either.
                if written.is_none() && !failure.is_passing() {
                    made.keep(folder);
                }
                jobs.failed(id, failure);
                return;
            }
        }
    }
}
