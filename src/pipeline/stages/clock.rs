//! Measures the phases of a request: the time spent waiting for the devices, and the time spent on the host.

use crate::pipeline::phase::Phase;
use std::time::{Duration, Instant};

use crate::pipeline::error::Result;
use crate::pipeline::programs::executor::Executor;
use crate::runtime::{Outputs, ShardedTensor, SpanKind};

/// Duration of a phase, excluding compilation and the loading of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseTime {
    pub phase: Phase,
    /// Time since the end of the previous phase.
    pub total: Duration,
    /// Part of `total` during which the host waited for a program.
    pub device: Duration,
}

impl PhaseTime {
    /// Returns the part of `total` during which the host did not wait: building programs, uploading inputs, downloading
    /// and converting results.
    pub fn host(&self) -> Duration {
        self.total.saturating_sub(self.device)
    }
}

/// Clock for the phases of a request. Each phase begins when the previous one ends.
pub struct Clock {
    took: Vec<PhaseTime>,
    since: Instant,
    set_up: Duration,
    waited: Duration,
}

impl Clock {
    /// Creates a clock and starts the first phase.
    pub fn start(executor: &Executor) -> Self {
        Clock { took: Vec::new(), since: Instant::now(), set_up: executor.set_up_time(), waited: Duration::ZERO }
    }

    /// Adds a phase that was measured before this clock started.
    pub(in crate::pipeline) fn add(&mut self, took: Option<PhaseTime>) {
        self.took.extend(took);
    }

    /// Waits until all results are ready and counts the elapsed time as device time.
    ///
    /// # Errors
    /// Returns an error if the program failed on the device.
    pub fn wait(&mut self, results: &Outputs) -> Result<()> {
        self.wait_for(results.iter().map(|(_, result)| result))
    }

    /// Same as [`Clock::wait`], for results that were taken out of [`Outputs`].
    ///
    /// # Errors
    /// Returns an error if the program failed on the device.
    pub fn wait_for<'a>(&mut self, mut results: impl Iterator<Item = &'a ShardedTensor>) -> Result<()> {
        let started = Instant::now();
        let waited = results.try_for_each(ShardedTensor::wait);
        self.waited_since(started);
        Ok(waited?)
    }

    /// Counts the time since `started` as device time.
    pub fn waited_since(&mut self, started: Instant) {
        self.waited += started.elapsed();
    }

    /// Ends the current phase, records it as `phase`, and starts the next one.
    pub fn ends(&mut self, phase: Phase, executor: &Executor) {
        let next = Clock { took: std::mem::take(&mut self.took), ..Clock::start(executor) };
        let total = next.since.duration_since(self.since).saturating_sub(next.set_up.saturating_sub(self.set_up));
        let device = self.waited;
        executor.engine().timeline().add(SpanKind::Run, phase.name(), self.since, None);
        *self = next;
        self.took.push(PhaseTime { phase, total, device });
    }

    /// Returns the recorded phases.
    pub fn took(self) -> Vec<PhaseTime> {
        self.took
    }
}
