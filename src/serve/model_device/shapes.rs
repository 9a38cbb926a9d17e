//! State of each shape: memory plans, programs and step times.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::{Generated, PipelineError};
use crate::config::{Lora, LoraApply};
use crate::pipeline::plan::memory::{self, FittedPlan};
use crate::pipeline::plan::run_plan::RunPlan;
use crate::pipeline::runner::Runner;
use crate::runtime::processes::Group;

/// Maximum number of plans for one shape. Each predicted frame count (`num_frames: auto`) needs a separate plan. If a
/// new plan would exceed the maximum, all plans and programs of the shape are evicted first.
const MAX_PLANS: usize = 16;

/// The shapes that have plans or loaded programs.
#[derive(Default)]
pub(super) struct PreparedShapes(BTreeMap<String, ShapePlans>);

#[derive(Default)]
struct ShapePlans {
    /// Memory plans by the key that [`plan_key`] returns.
    plans: BTreeMap<String, FittedPlan>,
    /// Hashes of the programs that runs of the shape have used.
    programs: BTreeSet<String>,
    /// Seconds per denoising step that runs the transformer, by batch size.
    step: BTreeMap<usize, f64>,
}

/// Returns a key that distinguishes the plans for one shape. It contains the batch size, the number of frames, which
/// may be predicted, the LoRAs ([`lora_keys`]), the ranks of added LoRAs, and the program that enhances prompts.
fn plan_key(plan: &RunPlan, rows: usize) -> String {
    let config = &plan.config;
    let loras = lora_keys(&config.model.loras);
    let (added, generation) = (plan.programs.added_loras(), plan.programs.generation());
    format!("{rows} {:?} {loras:?} {added:?} {generation:?}", config.request.num_frames)
}

/// What the memory of a run depends on, besides the ranks of added LoRAs, for one LoRA.
#[derive(Debug, PartialEq)]
struct LoraKey<'a> {
    /// Path of a merged LoRA, whose components may have weights for each stage. `None`: an added LoRA.
    merged: Option<&'a str>,
    stages: &'a [u8],
    /// Index of the first LoRA with the same file and strength. `None`: the strength is 0.
    first: Option<usize>,
}

/// Returns the keys of LoRAs. A run has two copies of weights or of LoRA matrices if the two stages have different LoRAs.
/// Strengths matter only because the same file may have a different strength in each stage, so the keys contain which
/// strengths are equal, and not their values: requests that differ only in scales usually share a plan.
fn lora_keys(loras: &[Lora]) -> Vec<LoraKey<'_>> {
    let is_same = |a: &Lora, b: &Lora| a.path == b.path && a.strength.to_bits() == b.strength.to_bits();
    let first = |lora: &Lora| loras.iter().position(|other| is_same(lora, other)).filter(|_| lora.strength != 0.0);
    loras
        .iter()
        .map(|lora| LoraKey {
            merged: (lora.apply == LoraApply::Merge).then_some(lora.path.as_str()),
            stages: &lora.stages,
            first: first(lora),
        })
        .collect()
}

impl PreparedShapes {
    /// Returns whether there is a memory plan for a run of the shape.
    pub(super) fn is_planned(&self, shape: &str, plan: &RunPlan, rows: usize) -> bool {
        self.0.get(shape).is_some_and(|known| known.plans.contains_key(&plan_key(plan, rows)))
    }

    /// Makes the runner use the memory plan for a configuration of the shape. If there is no plan yet, compiles the
    /// programs and determines which parameters stay on the devices.
    pub(super) fn plan(
        &mut self,
        shape: &str,
        plan: &RunPlan,
        rows: usize,
        runner: &mut Runner,
        group: Option<&Arc<Group>>,
    ) -> Result<(), PipelineError> {
        let key = plan_key(plan, rows);
        let known = self.0.get(shape).and_then(|known| known.plans.get(&key));
        let planned = match known {
            Some(planned) => planned.clone(),
            None => {
                if self.0.get(shape).is_some_and(|known| known.plans.len() >= MAX_PLANS) {
                    self.evict(shape, runner);
                }
                plan.programs.check(&runner.build)?;
                let planned = memory::plan(plan, &mut runner.executor, &runner.build, group);
                planned.inspect_err(|_| self.drop_unknown(runner))?
            }
        };
        runner.follow(planned.clone());
        self.0.entry(shape.into()).or_default().plans.insert(key, planned);
        Ok(())
    }

    /// After a failed plan, drops the programs that no shape uses.
    fn drop_unknown(&self, runner: &mut Runner) {
        let known: BTreeSet<&String> = self.0.values().flat_map(|known| &known.programs).collect();
        let dropped = runner.executor.used().iter().filter(|hash| !known.contains(hash)).cloned().collect();
        runner.drop_programs(&dropped);
    }

    /// Returns the number of steps that take about as long as `call` if none is skipped, at least 1.
    pub(super) fn chunk(&self, shape: &str, rows: usize, call: Duration) -> usize {
        let step = self.0.get(shape).and_then(|known| known.step.get(&rows));
        step.map_or(1, |seconds| ((call.as_secs_f64() / seconds) as usize).max(1))
    }

    /// Records the duration of a computed denoising step. Skipped steps, and steps that an interrupted run has finished,
    /// take no time and would make later calls too long.
    pub(super) fn took(&mut self, shape: &str, rows: usize, made: &[Generated]) {
        let Some(time) = made.first().and_then(Generated::step_time) else { return };
        let seconds = time.as_secs_f64().max(1e-6);
        let known = self.0.entry(shape.into()).or_default().step.entry(rows).or_insert(seconds);
        // Keep the shortest duration, because the first run includes one-time work.
        *known = known.min(seconds);
    }

    /// Records which programs a run of a shape has used.
    pub(super) fn used(&mut self, shape: &str, programs: &BTreeSet<String>) {
        self.0.entry(shape.into()).or_default().programs.extend(programs.iter().cloned());
    }

    /// Removes a shape, and drops the programs that no other shape uses.
    pub(super) fn evict(&mut self, shape: &str, runner: &mut Runner) {
        let Some(own) = self.0.remove(shape) else { return };
        let others: BTreeSet<&String> = self.0.values().flat_map(|known| &known.programs).collect();
        let dropped: BTreeSet<String> = own.programs.iter().filter(|hash| !others.contains(hash)).cloned().collect();
        let before = runner.executor.program_count();
        runner.drop_programs(&dropped);
        tracing::info!("unloaded programs of {shape}: {} of {before}", before - runner.executor.program_count());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file whose strengths differ between the stages needs memory for two copies of the weights that it changes.
    #[test]
    fn keys_contain_which_strengths_are_equal() {
        for apply in [LoraApply::Merge, LoraApply::Add] {
            let lora = |path: &str, strength, stage| Lora { path: path.into(), strength, stages: vec![stage], apply };
            let by_stage = |first, second| [lora("a", first, 1), lora("a", second, 2)];
            let [same, other, differ, off] =
                [(1.0, 1.0), (0.5, 0.5), (1.0, 0.5), (1.0, 0.0)].map(|(first, second)| by_stage(first, second));
            assert_eq!(lora_keys(&same), lora_keys(&other), "{apply:?}");
            assert_ne!(lora_keys(&same), lora_keys(&differ), "{apply:?}");
            assert_ne!(lora_keys(&off), lora_keys(&differ), "{apply:?}");
            assert_eq!(lora_keys(&differ), lora_keys(&by_stage(-1.0, 2.0)), "{apply:?}");
            let files = [lora("b", 1.0, 1), lora("b", 1.0, 2)];
            assert_eq!(lora_keys(&same) == lora_keys(&files), apply == LoraApply::Add);
        }
    }
}
