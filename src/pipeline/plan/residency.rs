//! Residency policy: decides which loaded parameters stay on the devices.

use crate::models::Network;
use crate::runtime::{CompiledProgram, device_bytes};

/// Choice of the loaded parameters that stay on the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    All,
    /// As many as fit. Total memory use, including the parameters and buffers of the next program, stays within this
    /// many bytes.
    Most(usize),
    /// Only the parameters of the components that the next program reads.
    OneComponent,
}

/// Returns the bytes that a program needs on a device in addition to its parameters. `None`: the plugin does not report
/// them.
pub(crate) fn work(network: &Network, compiled: &CompiledProgram) -> Option<usize> {
    let parameters: usize = network.params.iter().map(|p| device_bytes(&network.program, p)).sum();
    let memory = compiled.compiled().memory().ok()?;
    let all = memory.arguments + memory.outputs - memory.aliased + memory.temporaries + memory.generated_code;
    Some(usize::try_from(all).ok()?.saturating_sub(parameters))
}
