//! Reading optimized programs: loops, collectives, work, copies of stacks, predicted time.

mod calibration;
mod cause;
mod chip;
mod collective;
mod cost;
mod groups;
mod listing;
mod module;
mod proto;
mod reason;
mod report;
mod shape;
mod stacks;
mod trips;
mod walk;

pub use calibration::{Calibration, Exchange, FitError, Line, Measurements, Origin, Sample, What, fit};
pub use cause::cause;
pub use chip::{CHIPS, Chip, Links, Seconds};
pub use collective::Kind;
pub use cost::Work;
pub use module::{Instruction, Loop, Module, Stored};
pub use reason::{Reason, reason};
pub use report::{Predicted, Report, Traffic, report};
pub use stacks::StackCopy;
pub use walk::{Collective, Phase};
