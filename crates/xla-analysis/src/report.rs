//! Report on a compiled program, on one device: collectives, work, copies, and the predicted time.

use super::category::OpCategory;
use super::chip::Chip;
use super::collective::Collective;
use super::cost::Work;
use super::level::{LoopLevel, in_blocks};
use super::module::Module;
use super::stacks::StackCopy;
use super::walk::{Cost, Walk};

/// Figures of an optimized program, on one device.
///
/// A *step* is one iteration of the loop whose bound is an input (the denoising loop), or the whole run of a program
/// without one; a *layer* is one iteration of the loop over transformer blocks, or their mean where they are unrolled.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Blocks of a step; 0 without any.
    pub layers: f64,
    /// Logical collectives, in schedule order.
    pub collectives: Vec<Collective>,
    pub step: Work,
    pub layer: Work,
    /// Work outside the loop over steps.
    pub call: Work,
    /// Copies of whole stacks of layers.
    pub stack_copies: Vec<StackCopy>,
    /// Predicted time of a step, where the chip is known.
    pub predicted: Option<Predicted>,
    /// Predicted time of one block.
    pub predicted_layer: Option<Predicted>,
    /// Predicted time of a step by name scope and category, longest first; empty where the chip is unknown.
    pub scopes: Vec<ScopePrediction>,
}

/// Predicted time of the operations of a name scope, without overlap.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub struct ScopePrediction {
    /// Name scope; empty where there is none.
    pub scope: String,
    pub category: OpCategory,
    /// Milliseconds per step.
    pub ms: f64,
}

/// Milliseconds of a step, by the roofline and the link model (the module of [`Chip`] has the formulas).
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub struct Predicted {
    pub compute: f64,
    pub memory: f64,
    /// Launch latency alone; 0 of a chip without a calibration.
    pub launch: f64,
    pub collective: f64,
    /// Whole step, asynchronous collectives overlapped with the work between their ends.
    pub step: f64,
}

/// Sums over collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Bytes of results on one device.
    pub bytes: f64,
    /// Bytes received.
    pub wire_bytes: f64,
    /// Bytes of overlapped collectives, a part of `bytes`.
    pub overlapped: f64,
    /// Number of collectives.
    pub count: f64,
}

/// Analyzes an optimized program that was partitioned over `mesh`, the names and sizes of its axes, outer first, and has
/// stacks of `layers` blocks: first of all of them, then, where kinds of blocks differ in shape, of each kind.
pub fn report(module: &Module, mesh: &[(String, usize)], layers: &[usize], chip: Option<&Chip>) -> Report {
    let mut walk = Walk::new(module, mesh, layers, chip);
    let call = walk.run();
    let step = walk.step.unwrap_or_default();
    let mut collectives = walk.collectives;
    let (mut layer, mut runs) = walk.layer.unwrap_or_default();
    if walk.layer.is_none() && (walk.unrolled.work.bytes > 0.0 || collectives.iter().any(|c| in_blocks(&c.scope))) {
        // Unrolled blocks follow each other in the step.
        runs = layers.first().map_or(1, |&n| n.max(1)) as f64;
        layer.add(walk.unrolled, 1.0 / runs);
        for c in collectives.iter_mut().filter(|c| c.level == LoopLevel::Step && in_blocks(&c.scope)) {
            c.level = LoopLevel::Block;
            c.times /= runs;
        }
    }
    let mut scopes: Vec<ScopePrediction> = walk
        .scopes
        .into_iter()
        .map(|((scope, category), seconds)| ScopePrediction { scope, category, ms: seconds * 1e3 })
        .collect();
    scopes.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    Report {
        layers: runs,
        collectives,
        step: step.work,
        layer: layer.work,
        call: call.work,
        stack_copies: walk.copies,
        predicted: chip.map(|_| predicted(&step)),
        predicted_layer: chip.map(|_| predicted(&layer)),
        scopes,
    }
}

fn predicted(step: &Cost) -> Predicted {
    let ms = |seconds: f64| seconds * 1e3;
    let t = step.time;
    Predicted {
        compute: ms(t.compute),
        memory: ms(t.memory),
        launch: ms(t.launch),
        collective: ms(t.collective),
        step: ms(t.total),
    }
}

impl Predicted {
    /// Sum of this time and `more` times another.
    #[must_use]
    pub fn with(&self, more: f64, other: &Predicted) -> Predicted {
        Predicted {
            compute: self.compute + more * other.compute,
            memory: self.memory + more * other.memory,
            launch: self.launch + more * other.launch,
            collective: self.collective + more * other.collective,
            step: self.step + more * other.step,
        }
    }
}

impl Report {
    /// Collectives of one block.
    pub fn per_layer(&self) -> Traffic {
        self.traffic(|c| if c.level == LoopLevel::Block { c.times } else { 0.0 })
    }

    /// Collectives of one step, all blocks included.
    pub fn per_step(&self) -> Traffic {
        self.traffic(|c| self.trips(c))
    }

    /// Runs of a collective in a step; 0 for what happens outside the loop over steps.
    pub fn trips(&self, c: &Collective) -> f64 {
        match c.level {
            LoopLevel::Outside => 0.0,
            LoopLevel::Step => c.times,
            LoopLevel::Block => c.times * self.layers,
        }
    }

    /// Sums over the collectives, each counted `times`.
    pub fn traffic(&self, times: impl Fn(&Collective) -> f64) -> Traffic {
        let mut sum = Traffic::default();
        for c in &self.collectives {
            let n = times(c);
            sum.bytes += c.bytes * n;
            sum.wire_bytes += c.wire_bytes * n;
            sum.overlapped += if c.overlapped { c.bytes * n } else { 0.0 };
            sum.count += n;
        }
        sum
    }
}
