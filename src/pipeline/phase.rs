//! Phases of a run, as progress and timings name them.

use std::ops::ControlFlow;

use super::program_table::ProgramKind;

/// Phase of a run, named after the program that most of it is.
pub type Phase = ProgramKind;

/// Receiver of a request's progress (phase, steps done, steps in all); its answer says whether to go on. A phase without steps is
/// told of when it begins, as none of one.
pub type Watch<'a> = &'a mut dyn FnMut(Phase, usize, usize) -> ControlFlow<()>;
