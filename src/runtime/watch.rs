//! Waits of a tensor: what is waited for, where, and how long that should take.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::flags::Toolchain;
use super::watchdog::{self, Guard, Watchdog};
use crate::analysis::Chip;
use crate::hlo::Program;
use crate::pjrt::Device;

/// Seconds that a first execution may surely take: kernels are loaded, and convolutions are not among the counted FLOPs. So long
/// one of several processes may also wait for another, which loads, or writes a video.
const LONG: f64 = 60.0;
/// Fraction of a chip's peak in bf16 that a program surely reaches, in f32 too.
const SURE: f64 = 0.05;
/// Matmul FLOP/s of devices that no chip file names, as surely: a core's, and an accelerator's.
const SLOW_CPU: f64 = 1e9;
const SLOW_DEVICE: f64 = 1e12;

/// Seconds of a program's executions, a loop's by evaluation.
#[derive(Debug)]
pub(super) struct Pace {
    predicted: f64,
    /// Least that is expected.
    least: f64,
    /// The slowest so far, as the bits of a number; 0 before the first has ended.
    slowest: AtomicU64,
}

impl Pace {
    /// The prediction for a program on a plugin's devices, until an execution has ended. A program that has `peers` runs in
    /// several processes.
    pub(super) fn of(program: &Program, toolchain: &Toolchain, peers: bool) -> Self {
        let slow = if toolchain.platform == "cpu" { SLOW_CPU } else { SLOW_DEVICE };
        let rate = Chip::of_device(&toolchain.kind).map_or(slow, |chip| chip.peak_bf16 * SURE);
        let predicted = program.dot_flops / program.devices() as f64 / rate;
        Pace { predicted, least: if peers { LONG } else { 0.0 }, slowest: AtomicU64::new(0) }
    }

    fn expected(&self, evaluations: usize) -> Duration {
        let measured = f64::from_bits(self.slowest.load(Ordering::Relaxed));
        let seconds = if measured > 0.0 {
            (measured * evaluations as f64).max(self.least)
        } else {
            (self.predicted * evaluations as f64).max(LONG)
        };
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    fn took(&self, time: Duration, evaluations: usize) {
        let seconds = time.as_secs_f64() / evaluations as f64;
        // Times are not negative, and so are ordered as their bits are.
        self.slowest.fetch_max(seconds.to_bits(), Ordering::Relaxed);
    }
}

/// When the devices will have done all that they were given, by what is expected of it.
#[derive(Debug, Default)]
pub(super) struct Queue(Mutex<Option<Instant>>);

impl Queue {
    /// Adds work; when it should be done, none if that is beyond all clocks.
    fn add(&self, work: Duration) -> Option<Instant> {
        let mut until = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        *until = until.map_or(now, |until| until.max(now)).checked_add(work);
        *until
    }

    /// Takes out what should have been done by `due` and is done now.
    fn done(&self, due: Option<Instant>) {
        let mut until = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(last), Some(due)) = (*until, due) {
            *until = Some(last.min(Instant::now() + last.saturating_duration_since(due)));
        }
    }
}

/// Waits for a tensor. Clones are of the same execution.
#[derive(Clone)]
pub(crate) struct Watch(Arc<Watched>);

struct Watched {
    watchdog: Watchdog,
    stage: String,
    /// Devices of this process, in the order of the tensor's buffers.
    devices: Vec<Device>,
    execution: Option<Execution>,
}

/// The execution that the tensor is a result of.
struct Execution {
    pace: Arc<Pace>,
    queue: Arc<Queue>,
    evaluations: usize,
    started: Instant,
    due: Option<Instant>,
    ended: AtomicBool,
}

impl Watch {
    /// Waits for a component's parameters on their way.
    pub(super) fn load(watchdog: &Watchdog, component: &str, devices: &[(usize, &Device)]) -> Option<Watch> {
        Watch::new(watchdog, &format!("loading {component}"), devices, None)
    }

    /// Waits for a transfer of a stage.
    pub(super) fn transfer(watchdog: &Watchdog, stage: &str, devices: &[(usize, &Device)]) -> Option<Watch> {
        Watch::new(watchdog, stage, devices, None)
    }

    /// Waits for an execution of a stage that begins now.
    pub(super) fn execution(
        watchdog: &Watchdog,
        stage: &str,
        devices: &[(usize, &Device)],
        pace: &Arc<Pace>,
        queue: &Arc<Queue>,
    ) -> Option<Watch> {
        let evaluations = watchdog::evaluations();
        let due = queue.add(pace.expected(evaluations));
        let (pace, queue, started, ended) = (pace.clone(), queue.clone(), Instant::now(), AtomicBool::new(false));
        Watch::new(watchdog, stage, devices, Some(Execution { pace, queue, evaluations, started, due, ended }))
    }

    fn new(
        watchdog: &Watchdog,
        stage: &str,
        devices: &[(usize, &Device)],
        execution: Option<Execution>,
    ) -> Option<Watch> {
        watchdog.is_on().then(|| {
            let devices = devices.iter().map(|(_, device)| (*device).clone()).collect();
            Watch(Arc::new(Watched { watchdog: watchdog.clone(), stage: stage.into(), devices, execution }))
        })
    }

    /// Time until what is under way should have ended.
    fn expected(&self) -> Duration {
        let Some(execution) = &self.0.execution else { return Duration::ZERO };
        let queued = execution.due.map_or(Duration::MAX, |due| due.saturating_duration_since(Instant::now()));
        queued.max(execution.pace.expected(execution.evaluations))
    }

    fn device(&self, place: usize) -> String {
        let device = self.0.devices.get(place).or(self.0.devices.first());
        device.map_or_else(|| "the device".into(), |device| format!("device {} ({})", device.id(), device.kind()))
    }

    fn guard(&self, bytes: usize, work: impl FnOnce() -> String) -> Guard {
        self.0.watchdog.guard(self.expected(), bytes, || (self.0.stage.clone(), work()))
    }

    /// Stands over the call that starts the execution, which on some platforms waits for its end.
    pub(super) fn over_start(&self) -> Guard {
        self.guard(0, || match self.0.devices.len() {
            0 | 1 => format!("execution on {}", self.device(0)),
            count => format!("execution on {count} devices from {}", self.device(0)),
        })
    }

    /// Stands over a wait for the buffer of the device at this place.
    pub(super) fn over_wait(&self, place: usize) -> Guard {
        let what = if self.0.execution.is_some() { "execution" } else { "upload" };
        self.guard(0, || format!("{what} on {}", self.device(place)))
    }

    /// Stands over an upload to the device at this place.
    pub(super) fn over_upload(&self, place: usize, bytes: usize) -> Guard {
        self.guard(bytes, || format!("upload to {}", self.device(place)))
    }

    /// Stands over a download from the device at this place, which waits for the execution too.
    pub(super) fn over_download(&self, place: usize, bytes: usize) -> Guard {
        self.guard(bytes, || format!("download from {}", self.device(place)))
    }

    /// Notes that the execution has ended.
    pub(super) fn ended(&self) {
        let Some(execution) = &self.0.execution else { return };
        if !execution.ended.swap(true, Ordering::Relaxed) {
            execution.pace.took(execution.started.elapsed(), execution.evaluations);
            execution.queue.done(execution.due);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hlo::{Builder, DType, Type};

    fn pace(predicted: f64) -> Pace {
        Pace { predicted, least: 0.0, slowest: AtomicU64::new(0) }
    }

    #[test]
    fn predictions_are_what_a_chip_surely_reaches() {
        let b = Builder::new("f");
        let x = b.argument("x", Type::new(DType::F32, [1 << 16, 1 << 16]));
        let program = b.finish(&[("y", &b.einsum("ij,jk->ik", &x, &x, DType::F32))]).expect("builds");
        let predicted = |platform: &str, kind: &str| {
            let toolchain = Toolchain { platform: platform.into(), kind: kind.into(), ..Toolchain::default() };
            Pace::of(&program, &toolchain, false).predicted.round()
        };
        let flops = 2f64.powi(49);
        assert_eq!(predicted("cpu", "cpu"), (flops / 1e9).round());
        assert_eq!(predicted("cuda", "an unknown one"), (flops / 1e12).round());
        let h100 = predicted("cuda", "NVIDIA H100 80GB HBM3");
        assert!((5.0..20.0).contains(&h100), "{h100} s");
        let shared = Pace::of(&program, &Toolchain::default(), true);
        shared.took(Duration::from_millis(1), 1);
        assert_eq!(shared.expected(1), Duration::from_secs(60), "others may load or write meanwhile");
    }

    #[test]
    fn measured_times_replace_the_prediction() {
        let seconds = |pace: &Pace, evaluations| pace.expected(evaluations).as_secs_f64();
        let (small, large) = (pace(0.5), pace(30.0));
        assert_eq!((seconds(&small, 4), seconds(&large, 4)), (60.0, 120.0));
        large.took(Duration::from_secs(8), 4);
        assert_eq!((seconds(&large, 1), seconds(&large, 8)), (2.0, 16.0));
        large.took(Duration::from_secs(1), 1);
        assert_eq!(seconds(&large, 1), 2.0, "the slowest counts");
        assert_eq!(pace(1e300).expected(2), Duration::MAX);
    }

    #[test]
    fn what_is_queued_is_waited_for_too() {
        let queue = Queue::default();
        let [first, second] = [30, 40].map(|seconds| queue.add(Duration::from_secs(seconds)).unwrap());
        assert_eq!(second - first, Duration::from_secs(40));
        // The first has ended long before it was due.
        queue.done(Some(first));
        let left = queue.0.lock().unwrap().unwrap().saturating_duration_since(Instant::now());
        assert!(left <= Duration::from_secs(40) && left > Duration::from_secs(30), "{left:?}");
        assert_eq!(queue.add(Duration::MAX), None, "beyond all clocks");
    }
}
