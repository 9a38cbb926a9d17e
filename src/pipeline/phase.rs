//! The phases of a run, for progress reports and timings.

use std::ops::ControlFlow;

use super::programs::program_table::ProgramKind;

/// A phase of a run, identified by its main program.
pub type Phase = ProgramKind;

/// Progress callback of a request, with the arguments (phase, finished steps, total steps). `Break` stops the request.
/// When a phase without steps begins, the callback reports 0 of 1 steps.
pub type Watch<'a> = &'a mut dyn FnMut(Phase, usize, usize) -> ControlFlow<()>;
