#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

mod calibration;
mod category;
mod chip;
mod collective;
mod comparison;
mod cost;
mod groups;
mod intervals;
mod level;
mod listing;
mod module;
mod proto;
mod report;
mod shape;
#[cfg(test)]
mod sketch;
mod stacks;
mod trace;
mod trace_text;
mod trips;
mod walk;
mod xplane;

pub use calibration::{
    AlphaBeta, Calibration, CollectiveCost, Contention, FitError, Measurements, Microbenchmark, Provenance, Sample,
    Shares, fit,
};
pub use category::{OpCategory, Purpose};
pub use chip::{Chip, ChipError, Links, OpTime};
pub use collective::{Collective, CollectiveKind};
pub use comparison::{Pair, ScopeComparison, TraceComparison};
pub use cost::Work;
pub use level::LoopLevel;
pub use module::{Instruction, Loop, Module, StoredArray};
pub use report::{Predicted, Report, ScopePrediction, Traffic, report};
pub use stacks::StackCopy;
pub use trace::{CategoryTime, DeviceTime, Operation, ScopeTime, Trace};
pub use xplane::XSpace;
