//! Reports on a compiled program on one device: collectives, work, copies of stacked weights, and predicted time (see
//! `chip.rs` for the formulas).

use super::category::OpCategory;
use super::chip::Chip;
use super::collective::Collective;
use super::cost::Work;
use super::level::{LoopLevel, in_blocks};
use super::module::Module;
use super::stacks::StackCopy;
use super::walk::{Cost, Walk};

/// Figures of an optimized program on one device.
///
/// A *step* is one iteration of the denoising loop: the loop whose trip count depends on an input. If a program has no
/// such loop, a step is one run of the program. A *layer* is one iteration of the loop over transformer blocks; if the
/// blocks are unrolled, figures are the mean over all blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Number of transformer blocks per step; 0 for a program without transformer blocks.
    pub layers: f64,
    /// Collectives in schedule order. A collective that the compiler split into several instructions is one entry.
    pub collectives: Vec<Collective>,
    /// Work per step, including all blocks.
    pub step: Work,
    /// Work per block.
    pub layer: Work,
    /// Work per call outside the loop over steps.
    pub call: Work,
    /// Operations that copy all layers of stacked weights.
    pub stack_copies: Vec<StackCopy>,
    /// Predicted time of a step; `None` if the chip is unknown.
    pub predicted: Option<Predicted>,
    /// Predicted time of one transformer block; `None` if the chip is unknown.
    pub predicted_layer: Option<Predicted>,
    /// Predicted time of a step by name scope and category, longest first; empty if the chip is unknown.
    pub scopes: Vec<ScopePrediction>,
}

/// Predicted time of the operations of one category in one name scope, without overlap.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub struct ScopePrediction {
    /// Name scope; empty for operations that have none.
    pub scope: String,
    /// Category of the operations.
    pub category: OpCategory,
    /// Predicted milliseconds per step.
    pub ms: f64,
}

/// Predicted milliseconds per step, from the roofline and link model.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub struct Predicted {
    /// Compute time of all operations.
    pub compute: f64,
    /// Memory access time of all operations.
    pub memory: f64,
    /// Launch latency of kernels; 0 for a chip without a calibration.
    pub launch: f64,
    /// Transfer time of all collectives.
    pub collective: f64,
    /// Time of all copies between host memory and the device; 0 if the rate of the link is unknown.
    #[serde(default)]
    pub host_copy: f64,
    /// Part of `host_copy` in which the device waits for a copy.
    #[serde(default)]
    pub exposed_host_copy: f64,
    /// Time of the complete step, in which asynchronous collectives and copies from host memory overlap with the work
    /// between their start and end.
    pub step: f64,
}

/// Sums over several collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Size in bytes of the results on one device.
    pub bytes: f64,
    /// Bytes that one device receives.
    pub wire_bytes: f64,
    /// Size in bytes of the results of overlapped collectives; `bytes` includes it.
    pub overlapped: f64,
    /// Number of collectives.
    pub count: f64,
}

/// Analyzes an optimized program that is partitioned over `mesh` (names and sizes of the axes, outermost first).
/// `layers` has the leading dimensions of stacked block weights: first the total number of blocks and, if the model has
/// kinds of blocks that differ in shape, then the number of blocks of each kind.
pub fn report(module: &Module, mesh: &[(String, usize)], layers: &[usize], chip: Option<&Chip>) -> Report {
    let mut walk = Walk::new(module, mesh, layers, chip);
    let call = walk.run();
    let step = walk.step.unwrap_or_default();
    let mut collectives = walk.collectives;
    let (mut layer, mut runs) = walk.layer.unwrap_or_default();
    if walk.layer.is_none() && (walk.unrolled.work.bytes > 0.0 || collectives.iter().any(|c| in_blocks(&c.scope))) {
        // Unrolled blocks run one after the other in the step.
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
        host_copy: ms(t.host),
        exposed_host_copy: ms(t.exposed_host),
        step: ms(t.total),
    }
}

impl Predicted {
    /// Returns the sum of these times and `more` times those of `other`.
    #[must_use]
    pub fn with(&self, more: f64, other: &Predicted) -> Predicted {
        Predicted {
            compute: self.compute + more * other.compute,
            memory: self.memory + more * other.memory,
            launch: self.launch + more * other.launch,
            collective: self.collective + more * other.collective,
            host_copy: self.host_copy + more * other.host_copy,
            exposed_host_copy: self.exposed_host_copy + more * other.exposed_host_copy,
            step: self.step + more * other.step,
        }
    }
}

impl Report {
    /// Returns the sums over the collectives of one block.
    pub fn per_layer(&self) -> Traffic {
        self.traffic(|c| if c.level == LoopLevel::Block { c.times } else { 0.0 })
    }

    /// Returns the sums over the collectives of one step, including all blocks.
    pub fn per_step(&self) -> Traffic {
        self.traffic(|c| self.trips(c))
    }

    /// Returns how often a collective runs per step; 0 if it is outside the loop over steps.
    pub fn trips(&self, c: &Collective) -> f64 {
        match c.level {
            LoopLevel::Outside => 0.0,
            LoopLevel::Step => c.times,
            LoopLevel::Block => c.times * self.layers,
        }
    }

    /// Returns the sums over all collectives, each multiplied by `times`.
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
