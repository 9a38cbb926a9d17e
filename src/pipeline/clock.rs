//! Where a request's time goes, stage by stage: what waits for the devices, and what the host does itself.

use std::time::{Duration, Instant};

use super::error::Result;
use super::stages::Stages;
use super::text_to_video::Stage;
use crate::runtime::{Outputs, ShardedTensor};

/// The time of a stage; compiling and loading left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Took {
    /// Which.
    pub stage: Stage,
    /// From the end of the stage before.
    pub total: Duration,
    /// The part of it in which nothing was left to do but wait for a program.
    pub device: Duration,
}

impl Took {
    /// The rest: writing programs, inputs, copies, results.
    pub fn host(&self) -> Duration {
        self.total.saturating_sub(self.device)
    }
}

/// A clock over the stages of a request, each beginning where the last ended.
pub struct Clock {
    took: Vec<Took>,
    since: Instant,
    set_up: Duration,
    waited: Duration,
}

impl Clock {
    /// The first stage begins.
    pub fn start(stages: &Stages) -> Self {
        Clock { took: Vec::new(), since: Instant::now(), set_up: stages.set_up_time(), waited: Duration::ZERO }
    }

    /// Waits until all results are there.
    ///
    /// # Errors
    /// What went wrong on the device.
    pub fn wait(&mut self, results: &Outputs) -> Result<()> {
        self.wait_for(results.iter().map(|(_, result)| result))
    }

    /// As [`Clock::wait`], for results that were taken out.
    ///
    /// # Errors
    /// What went wrong on the device.
    pub fn wait_for<'a>(&mut self, mut results: impl Iterator<Item = &'a ShardedTensor>) -> Result<()> {
        Ok(self.during(|| results.try_for_each(ShardedTensor::wait))?)
    }

    /// What `run` returns, all of its time as waiting: where a loop ends by what it computes, as the denoising loop does on
    /// CUDA, starting a program is waiting for it.
    pub fn during<T>(&mut self, run: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = run();
        self.waited += started.elapsed();
        result
    }

    /// Ends a stage.
    pub fn ends(&mut self, stage: Stage, stages: &Stages) {
        let next = Clock { took: std::mem::take(&mut self.took), ..Clock::start(stages) };
        let total = next.since.duration_since(self.since).saturating_sub(next.set_up.saturating_sub(self.set_up));
        let device = self.waited;
        *self = next;
        self.took.push(Took { stage, total, device });
    }

    /// The stages that ended.
    pub fn took(self) -> Vec<Took> {
        self.took
    }
}
