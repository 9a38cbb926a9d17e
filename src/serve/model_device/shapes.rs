//! Shapes and what is known of each: what stays on the devices while one runs, its programs, the time of a step.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::{Config, Generated, Phase, PipelineError};
use crate::pipeline::memory::{self, Planned};
use crate::pipeline::programs::Programs;
use crate::pipeline::runner::Runner;
use crate::runtime::processes::Group;

/// Plans of one shape, whose frames may be predicted: with more of them its programs go first.
const MOST_PLANS: usize = 16;

/// All shapes whose programs are loaded.
#[derive(Default)]
pub(super) struct Shapes(BTreeMap<String, Shape>);

#[derive(Default)]
struct Shape {
    /// By what programs and parameters follow from beside it.
    plans: BTreeMap<String, Planned>,
    /// Hashes of those that it used.
    programs: BTreeSet<String>,
    /// Seconds of a step, by the number of videos made at once.
    step: BTreeMap<usize, f64>,
}

/// Everything that a plan follows from, of requests of one shape: frames may have been predicted, and LoRAs take room by stage.
fn plan_key(config: &Config, rows: usize) -> String {
    let loras: Vec<_> = config.model.loras.iter().map(|lora| (&lora.path, &lora.stages)).collect();
    format!("{rows} {:?} {loras:?}", config.request.num_frames)
}

impl Shapes {
    /// Whether a shape has been run or planned.
    pub(super) fn is_planned(&self, shape: &str, config: &Config, rows: usize) -> bool {
        self.0.get(shape).is_some_and(|known| known.plans.contains_key(&plan_key(config, rows)))
    }

    /// Compiles the programs of a shape, where that has not been done, and decides what stays on the devices.
    pub(super) fn plan(
        &mut self,
        shape: &str,
        config: &Config,
        rows: usize,
        runner: &mut Runner,
        group: Option<&Arc<Group>>,
    ) -> Result<(), PipelineError> {
        let key = plan_key(config, rows);
        let known = self.0.get(shape).and_then(|known| known.plans.get(&key));
        let planned = match known {
            Some(planned) => planned.clone(),
            None => {
                if self.0.get(shape).is_some_and(|known| known.plans.len() >= MOST_PLANS) {
                    self.evict(shape, runner);
                }
                let programs = Programs::of(config, None)?.of_rows(rows);
                programs.check(&runner.build)?;
                let planned = memory::plan(config, &programs, &mut runner.executor, &runner.build, group);
                planned.inspect_err(|_| self.drop_unknown(runner))?
            }
        };
        runner.follow(planned.clone());
        self.0.entry(shape.into()).or_default().plans.insert(key, planned);
        Ok(())
    }

    /// Drops programs of a shape that cannot be run.
    fn drop_unknown(&self, runner: &mut Runner) {
        let known: BTreeSet<&String> = self.0.values().flat_map(|known| &known.programs).collect();
        let dropped = runner.executor.used().iter().filter(|hash| !known.contains(hash)).cloned().collect();
        runner.drop_programs(&dropped);
    }

    /// Steps that last about as long as a call should.
    pub(super) fn chunk(&self, shape: &str, rows: usize, call: Duration) -> usize {
        let step = self.0.get(shape).and_then(|known| known.step.get(&rows));
        step.map_or(1, |seconds| ((call.as_secs_f64() / seconds) as usize).max(1))
    }

    /// Learns the time of a step.
    pub(super) fn took(&mut self, shape: &str, rows: usize, made: &[Generated]) {
        let Some(generated) = made.first() else { return };
        let denoise = generated.timings.iter().find(|took| took.phase == Phase::Denoise);
        let Some(denoise) = denoise.filter(|_| generated.steps > 0) else { return };
        let seconds = (denoise.total.as_secs_f64() / generated.steps as f64).max(1e-6);
        let known = self.0.entry(shape.into()).or_default().step.entry(rows).or_insert(seconds);
        // The first has more to do beside its steps.
        *known = known.min(seconds);
    }

    /// Programs that a run of a shape used.
    pub(super) fn used(&mut self, shape: &str, programs: &BTreeSet<String>) {
        self.0.entry(shape.into()).or_default().programs.extend(programs.iter().cloned());
    }

    /// Forgets a shape; programs of no other one go.
    pub(super) fn evict(&mut self, shape: &str, runner: &mut Runner) {
        let Some(own) = self.0.remove(shape) else { return };
        let others: BTreeSet<&String> = self.0.values().flat_map(|known| &known.programs).collect();
        let dropped: BTreeSet<String> = own.programs.iter().filter(|hash| !others.contains(hash)).cloned().collect();
        let before = runner.executor.program_count();
        runner.drop_programs(&dropped);
        tracing::info!(
            "programs of {shape} leave the devices: {} of {before}",
            before - runner.executor.program_count()
        );
    }
}
