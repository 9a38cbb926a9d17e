#![doc = include_str!("../README.md")]

mod activity;
mod calibration;
mod chip;
mod collective;
mod cost;
mod groups;
mod intervals;
mod listing;
mod module;
mod proto;
mod report;
mod shape;
mod stacks;
mod trace;
mod trace_text;
mod trips;
mod walk;
mod xplane;

pub use activity::{Activity, Purpose};
pub use calibration::{Calibration, Exchange, FitError, Line, Measurements, Origin, Sample, What, fit};
pub use chip::{CHIPS, Chip, Links, Seconds};
pub use collective::Kind;
pub use cost::Work;
pub use intervals::Intervals;
pub use module::{Instruction, Loop, Module, Stored};
pub use report::{Predicted, Report, Traffic, report};
pub use stacks::StackCopy;
pub use trace::{DeviceTime, Operation, ScopeTime, Share, Trace};
pub use walk::{Collective, Phase};
pub use xplane::XSpace;
