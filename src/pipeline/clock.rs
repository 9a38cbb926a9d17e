//! Where a request's time goes, phase by phase: what waits for the devices, and what the host does itself.

use super::phase::Phase;
use std::time::{Duration, Instant};

use super::error::Result;
use super::executor::Executor;
use crate::runtime::{Outputs, ShardedTensor, SpanKind};

/// The time of a phase; compiling and loading left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseTime {
    pub phase: Phase,
    /// From the end of the phase before.
    pub total: Duration,
    /// The part of it in which nothing was left to do but wait for a program.
    pub device: Duration,
}

impl PhaseTime {
    /// The rest: writing programs, inputs, copies, results.
    pub fn host(&self) -> Duration {
        self.total.saturating_sub(self.device)
    }
}

/// A clock over the phases of a request, each beginning where the last ended.
pub struct Clock {
    took: Vec<PhaseTime>,
    since: Instant,
    set_up: Duration,
    waited: Duration,
}

impl Clock {
    /// The first phase begins.
    pub fn start(executor: &Executor) -> Self {
        Clock { took: Vec::new(), since: Instant::now(), set_up: executor.set_up_time(), waited: Duration::ZERO }
    }

    /// Waits until all results are there.
    ///
    /// # Errors
    /// What went wrong on the device.
    pub fn wait(&mut self, results: &Outputs) -> Result<()> {
        self.wait_for(results.iter().map(|(_, result)| result))
    }

    /// Waits for results that were taken out, see [`Clock::wait`].
    ///
    /// # Errors
    /// What went wrong on the device.
    pub fn wait_for<'a>(&mut self, mut results: impl Iterator<Item = &'a ShardedTensor>) -> Result<()> {
        let started = Instant::now();
        let waited = results.try_for_each(ShardedTensor::wait);
        self.waited_since(started);
        Ok(waited?)
    }

    /// Counts what passed since `started` as waiting.
    pub fn waited_since(&mut self, started: Instant) {
        self.waited += started.elapsed();
    }

    /// Ends a phase.
    pub fn ends(&mut self, phase: Phase, executor: &Executor) {
        let next = Clock { took: std::mem::take(&mut self.took), ..Clock::start(executor) };
        let total = next.since.duration_since(self.since).saturating_sub(next.set_up.saturating_sub(self.set_up));
        let device = self.waited;
        executor.engine().timeline().add(SpanKind::Run, phase.name(), self.since, None);
        *self = next;
        self.took.push(PhaseTime { phase, total, device });
    }

    /// The phases that ended.
    pub fn took(self) -> Vec<PhaseTime> {
        self.took
    }
}
