//! Descriptions of waits, for the watchdog: the work, the device, and the expected time.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::flags::Toolchain;
use super::watchdog::{self, DeviceWatchdog, WaitGuard};
use ltx2_pjrt::Device;
use ltx2_stablehlo::Program;
use ltx2_xla_analysis::Chip;

/// Minimum expected seconds of a first execution, which loads kernels and may contain convolutions that the FLOP count
/// omits. Also the minimum for every execution in a multi-process run, which may wait for a process that loads
/// parameters or writes a video.
const LONG: f64 = 60.0;
/// Fraction of a chip's bf16 peak that every program is assumed to reach, even in f32.
const MIN_UTILIZATION: f64 = 0.05;

/// Predicted and measured execution times of a program, in seconds per model evaluation.
#[derive(Debug)]
pub(super) struct ExecutionTimes {
    predicted: f64,
    /// Lower limit of the expected duration of an execution, in seconds.
    least: f64,
    /// Longest measured time, as the bits of an f64; 0 until the first execution has finished.
    slowest: AtomicU64,
}

impl ExecutionTimes {
    /// Predicts the time of a program from its FLOPs; the prediction is used until an execution has finished. `peers`:
    /// whether the program runs across several processes.
    pub(super) fn predict(program: &Program, toolchain: &Toolchain, peers: bool) -> Self {
        let slow = toolchain.spec().assumed_flops;
        let rate = Chip::of_device(&toolchain.kind).map_or(slow, |chip| chip.peak_bf16 * MIN_UTILIZATION);
        let predicted = program.dot_flops / program.devices() as f64 / rate;
        ExecutionTimes { predicted, least: if peers { LONG } else { 0.0 }, slowest: AtomicU64::new(0) }
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
        // Non-negative floats are ordered like their bits.
        self.slowest.fetch_max(seconds.to_bits(), Ordering::Relaxed);
    }
}

/// The time at which the devices are expected to finish all queued work.
#[derive(Debug, Default)]
pub(super) struct Queue(Mutex<Option<Instant>>);

impl Queue {
    /// Adds work and returns the time at which it should be finished; `None` if that time is beyond the clock's range.
    fn add(&self, work: Duration) -> Option<Instant> {
        let mut until = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        *until = until.map_or(now, |until| until.max(now)).checked_add(work);
        *until
    }

    /// Removes finished work that was expected to finish at `due`.
    fn done(&self, due: Option<Instant>) {
        let mut until = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(last), Some(due)) = (*until, due) {
            *until = Some(last.min(Instant::now() + last.saturating_duration_since(due)));
        }
    }
}

/// Description of the waits for a tensor. Clones refer to the same execution.
#[derive(Clone)]
pub struct WaitDescription(Arc<WaitState>);

struct WaitState {
    watchdog: DeviceWatchdog,
    stage: String,
    /// Devices of this process, in the order of the tensor's buffers.
    devices: Vec<Device>,
    execution: Option<Execution>,
}

/// The execution that produces the tensor.
struct Execution {
    execution_times: Arc<ExecutionTimes>,
    queue: Arc<Queue>,
    evaluations: usize,
    started: Instant,
    due: Option<Instant>,
    ended: AtomicBool,
}

impl WaitDescription {
    /// Returns a description of the waits for the upload of a component's parameters; `None` without a watchdog.
    pub(super) fn load(
        watchdog: &DeviceWatchdog,
        component: &str,
        devices: &[(usize, &Device)],
    ) -> Option<WaitDescription> {
        WaitDescription::new(watchdog, &format!("loading {component}"), devices, None)
    }

    /// Returns a description of the waits for the upload of a program's input, where `stage` is the program's name;
    /// `None` without a watchdog.
    pub(super) fn transfer(
        watchdog: &DeviceWatchdog,
        stage: &str,
        devices: &[(usize, &Device)],
    ) -> Option<WaitDescription> {
        WaitDescription::new(watchdog, stage, devices, None)
    }

    /// Returns a description of the waits for an execution that starts now, where `stage` is the program's name; `None`
    /// without a watchdog.
    pub(super) fn execution(
        watchdog: &DeviceWatchdog,
        stage: &str,
        devices: &[(usize, &Device)],
        execution_times: &Arc<ExecutionTimes>,
        queue: &Arc<Queue>,
    ) -> Option<WaitDescription> {
        let evaluations = watchdog::evaluations();
        let due = queue.add(execution_times.expected(evaluations));
        let (execution_times, queue, started, ended) =
            (execution_times.clone(), queue.clone(), Instant::now(), AtomicBool::new(false));
        WaitDescription::new(
            watchdog,
            stage,
            devices,
            Some(Execution { execution_times, queue, evaluations, started, due, ended }),
        )
    }

    fn new(
        watchdog: &DeviceWatchdog,
        stage: &str,
        devices: &[(usize, &Device)],
        execution: Option<Execution>,
    ) -> Option<WaitDescription> {
        watchdog.is_on().then(|| {
            let devices = devices.iter().map(|(_, device)| (*device).clone()).collect();
            WaitDescription(Arc::new(WaitState { watchdog: watchdog.clone(), stage: stage.into(), devices, execution }))
        })
    }

    /// Returns the time until the pending work should be finished.
    fn expected(&self) -> Duration {
        let Some(execution) = &self.0.execution else { return Duration::ZERO };
        let queued = execution.due.map_or(Duration::MAX, |due| due.saturating_duration_since(Instant::now()));
        queued.max(execution.execution_times.expected(execution.evaluations))
    }

    fn device(&self, index: usize) -> String {
        let device = self.0.devices.get(index).or(self.0.devices.first());
        device.map_or_else(|| "the device".into(), |device| format!("device {} ({})", device.id(), device.kind()))
    }

    fn guard(&self, bytes: usize, work: impl FnOnce() -> String) -> WaitGuard {
        self.0.watchdog.guard(self.expected(), bytes, || (self.0.stage.clone(), work()))
    }

    /// Guards the call that starts the execution. On some platforms the call returns only when the execution ends.
    pub(super) fn guard_start(&self) -> WaitGuard {
        self.guard(0, || match self.0.devices.len() {
            0 | 1 => format!("execution on {}", self.device(0)),
            count => format!("execution on {count} devices, the first of which is {}", self.device(0)),
        })
    }

    /// Guards a wait for the buffer of the device at index `index`.
    pub(super) fn guard_wait(&self, index: usize) -> WaitGuard {
        let what = if self.0.execution.is_some() { "execution" } else { "upload" };
        self.guard(0, || format!("{what} on {}", self.device(index)))
    }

    /// Guards an upload to the device at index `index`.
    pub(super) fn guard_upload(&self, index: usize, bytes: usize) -> WaitGuard {
        self.guard(bytes, || format!("upload to {}", self.device(index)))
    }

    /// Guards a download from the device at index `index`, including the wait for the execution.
    pub(super) fn guard_download(&self, index: usize, bytes: usize) -> WaitGuard {
        self.guard(bytes, || format!("download from {}", self.device(index)))
    }

    /// Records that the execution has ended.
    pub(super) fn ended(&self) {
        let Some(execution) = &self.0.execution else { return };
        if !execution.ended.swap(true, Ordering::Relaxed) {
            execution.execution_times.took(execution.started.elapsed(), execution.evaluations);
            execution.queue.done(execution.due);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ltx2_stablehlo::{Builder, DType, Type};

    fn execution_times(predicted: f64) -> ExecutionTimes {
        ExecutionTimes { predicted, least: 0.0, slowest: AtomicU64::new(0) }
    }

    #[test]
    fn predicted_time_assumes_a_low_utilization() {
        let b = Builder::new("f");
        let x = b.argument("x", Type::new(DType::F32, [1 << 16, 1 << 16]));
        let program = b.finish(&[("y", &b.einsum("ij,jk->ik", &x, &x, DType::F32))]).expect("builds");
        let predicted = |platform: &str, kind: &str| {
            let toolchain = Toolchain::of_kind(platform, kind);
            ExecutionTimes::predict(&program, &toolchain, false).predicted.round()
        };
        let flops = 2f64.powi(49);
        assert_eq!(predicted("cpu", "cpu"), (flops / 1e9).round());
        assert_eq!(predicted("cuda", "an unknown one"), (flops / 1e12).round());
        let h100 = predicted("cuda", "NVIDIA H100 80GB HBM3");
        assert!((5.0..20.0).contains(&h100), "{h100} s");
        let shared = ExecutionTimes::predict(&program, &Toolchain::default(), true);
        shared.took(Duration::from_millis(1), 1);
        assert_eq!(shared.expected(1), Duration::from_secs(60), "other processes may load or write meanwhile");
    }

    #[test]
    fn measured_times_replace_the_prediction() {
        let seconds =
            |execution_times: &ExecutionTimes, evaluations| execution_times.expected(evaluations).as_secs_f64();
        let (small, large) = (execution_times(0.5), execution_times(30.0));
        assert_eq!((seconds(&small, 4), seconds(&large, 4)), (60.0, 120.0));
        large.took(Duration::from_secs(8), 4);
        assert_eq!((seconds(&large, 1), seconds(&large, 8)), (2.0, 16.0));
        large.took(Duration::from_secs(1), 1);
        assert_eq!(seconds(&large, 1), 2.0, "the slowest execution counts");
        assert_eq!(execution_times(1e300).expected(2), Duration::MAX);
    }

    #[test]
    fn expected_time_includes_queued_work() {
        let queue = Queue::default();
        let [first, second] = [30, 40].map(|seconds| queue.add(Duration::from_secs(seconds)).unwrap());
        assert_eq!(second - first, Duration::from_secs(40));
        // The first execution ends long before its expected time.
        queue.done(Some(first));
        let left = queue.0.lock().unwrap().unwrap().saturating_duration_since(Instant::now());
        assert!(left <= Duration::from_secs(40) && left > Duration::from_secs(30), "{left:?}");
        assert_eq!(queue.add(Duration::MAX), None, "beyond the clock's range");
    }
}
