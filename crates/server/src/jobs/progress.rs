//! Estimates the progress of a run from the stage durations of earlier runs of the same shape.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use crate::device::StepProgress;
use crate::job::{JobPhase, Progress};

/// Maximum number of shapes with recorded durations, to bound memory.
const SHAPES: usize = 256;
/// Weight of the latest run in the moving averages.
const LATEST: f64 = 0.3;
/// Assumed share of each stage in the duration of a run, if its shape has no recorded durations.
const SHARES: [(JobPhase, f64); 5] = [
    (JobPhase::TextEncoder, 0.04),
    (JobPhase::Denoise, 0.70),
    (JobPhase::VideoDecoder, 0.12),
    (JobPhase::AudioDecoder, 0.02),
    (JobPhase::Encoding, 0.12),
];

/// Average duration of a stage.
#[derive(Clone, Copy, Debug)]
struct StageDuration {
    /// Seconds per step; for a stage without steps, seconds for the entire stage.
    step: f64,
    steps: usize,
}

impl StageDuration {
    fn seconds(self) -> f64 {
        self.step * self.steps.max(1) as f64
    }
}

/// Average duration of each stage, by shape.
#[derive(Debug, Default)]
pub(super) struct Profiles(HashMap<Arc<str>, Vec<(JobPhase, StageDuration)>>);

impl Profiles {
    fn learn(&mut self, shape: &Arc<str>, stage: JobPhase, cost: StageDuration) {
        if self.0.len() >= SHAPES && !self.0.contains_key(shape) {
            self.0.clear();
        }
        let stages = self.0.entry(Arc::clone(shape)).or_default();
        match stages.iter_mut().find(|(known, _)| *known == stage) {
            Some((_, known)) => {
                known.step += LATEST * (cost.step - known.step);
                known.steps = cost.steps;
            }
            None => stages.push((stage, cost)),
        }
    }
}

/// Returns whether every run has this stage, not only the first run of a shape.
fn recurs(stage: JobPhase) -> bool {
    !matches!(stage, JobPhase::Queued | JobPhase::WaitingForDisk | JobPhase::Compiling | JobPhase::Loading)
}

/// Progress of a run.
#[derive(Debug)]
pub(super) struct BatchProgress {
    shape: Arc<str>,
    begun: Instant,
    stage: JobPhase,
    /// Time at which the current stage began. `first` is the stage's first step, which is not 0 in a resumed run.
    since: Instant,
    first: usize,
    step: usize,
    steps: usize,
    over: Vec<JobPhase>,
    best: u8,
}

impl BatchProgress {
    pub(super) fn new(shape: Arc<str>) -> Self {
        let now = Instant::now();
        BatchProgress {
            shape,
            begun: now,
            stage: JobPhase::Loading,
            since: now,
            first: 0,
            step: 0,
            steps: 0,
            over: Vec::new(),
            best: 0,
        }
    }

    /// Records the duration of the current stage, which has ended.
    pub(super) fn end_stage(&mut self, profiles: &mut Profiles) {
        let seconds = self.since.elapsed().as_secs_f64();
        let made = self.steps.saturating_sub(self.first);
        if recurs(self.stage) && (self.steps <= 1 || made > 0) {
            let cost = StageDuration { step: seconds / made.max(1) as f64, steps: self.steps.max(1) };
            profiles.learn(&self.shape, self.stage, cost);
        }
        self.over.push(self.stage);
    }

    /// Updates the progress from a report of the device and returns it.
    pub(super) fn at(&mut self, moment: StepProgress, profiles: &mut Profiles) -> Progress {
        if moment.stage != self.stage {
            self.end_stage(profiles);
            self.stage = moment.stage;
            self.since = Instant::now();
            self.first = moment.step;
        }
        self.step = moment.step;
        self.steps = moment.steps;
        self.progress(profiles)
    }

    /// Computes the current progress.
    pub(super) fn progress(&mut self, profiles: &Profiles) -> Progress {
        let (share, left) = self.share(profiles);
        // The percentage never decreases, and 100 is reported only once the files are written.
        self.best = self.best.max((share * 100.0).clamp(0.0, 99.0) as u8);
        let BatchProgress { stage, step, steps, best, .. } = *self;
        Progress { stage, step, steps, percent: best, eta_s: left }
    }

    /// Returns the completed fraction of the run, and the remaining seconds if they can be estimated.
    fn share(&self, profiles: &Profiles) -> (f64, Option<f64>) {
        let known =
            profiles.0.get(&self.shape).filter(|stages| stages.iter().any(|(stage, _)| *stage == JobPhase::Encoding));
        let costs: Vec<(JobPhase, f64)> = match known {
            // For the current stage, use the number of steps of this run instead of the recorded one.
            Some(stages) => stages
                .iter()
                .map(|(stage, cost)| match *stage == self.stage && self.steps > 0 {
                    true => (*stage, StageDuration { steps: self.steps, ..*cost }.seconds()),
                    false => (*stage, cost.seconds()),
                })
                .collect(),
            None => SHARES.to_vec(),
        };
        let all: f64 = costs.iter().map(|(_, seconds)| seconds).sum();
        let here = costs.iter().find(|(stage, _)| *stage == self.stage).map_or(0.0, |(_, seconds)| *seconds);
        let over = costs.iter().filter(|(stage, _)| *stage != self.stage && self.over.contains(stage));
        let over: f64 = over.map(|(_, seconds)| seconds).sum();
        let elapsed = self.since.elapsed().as_secs_f64();
        // Completed fraction of the current stage: by steps, or by elapsed time if the stage has none.
        let part = match self.steps {
            0 | 1 if known.is_some() && here > 0.0 => (elapsed / here).min(1.0),
            0 | 1 => 0.0,
            steps => (self.step as f64 / steps as f64).min(1.0),
        };
        let share = if all > 0.0 { (over + here * part) / all } else { 0.0 };
        let left = match known {
            Some(_) => Some((all - over - here * part).max(0.0)),
            None if share > 0.05 => Some(self.begun.elapsed().as_secs_f64() * (1.0 - share) / share),
            None => None,
        };
        (share, left)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const STAGES: [(JobPhase, usize); 4] =
        [(JobPhase::TextEncoder, 0), (JobPhase::Denoise, 8), (JobPhase::VideoDecoder, 0), (JobPhase::Encoding, 0)];

    fn run(profiles: &mut Profiles, from: usize) -> Vec<Progress> {
        let mut track = BatchProgress::new(Arc::from("s"));
        let mut seen = Vec::new();
        for (stage, steps) in STAGES {
            for step in if stage == JobPhase::Denoise { from } else { 0 }..=steps {
                seen.push(track.at(StepProgress { stage, step, steps }, profiles));
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        track.end_stage(profiles);
        seen
    }

    #[test]
    fn progress_never_decreases_and_stays_below_100() {
        let mut profiles = Profiles::default();
        for from in [0, 0, 5] {
            let seen = run(&mut profiles, from);
            assert!(seen.windows(2).all(|pair| pair[0].percent <= pair[1].percent), "{seen:?}");
            assert!(seen.iter().all(|progress| progress.percent <= 99));
            assert!(seen.last().is_some_and(|last| last.percent >= 70), "{seen:?}");
        }
    }

    #[test]
    fn eta_comes_from_the_previous_run_of_the_shape() {
        let mut profiles = Profiles::default();
        assert_eq!(run(&mut profiles, 0)[0].eta_s, None);
        let left: Vec<f64> = run(&mut profiles, 0).iter().map(|progress| progress.eta_s.expect("known")).collect();
        // The estimate is about 24 ms; sleeping takes longer on a busy machine.
        assert!((0.015..1.0).contains(&left[0]), "{left:?}");
        assert!(left.last().is_some_and(|last| *last < left[0]), "{left:?}");
    }

    #[test]
    fn number_of_recorded_shapes_is_bounded() {
        let mut profiles = Profiles::default();
        for n in 0..3 * SHAPES {
            profiles.learn(&Arc::from(format!("{n}")), JobPhase::Denoise, StageDuration { step: 1.0, steps: 1 });
            assert!(profiles.0.len() <= SHAPES);
        }
    }
}
