//! How much of what is loaded stays on the devices.

use crate::models::Network;
use crate::runtime::{Executable, device_bytes};

/// How many of the loaded parameters stay on the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    All,
    /// As many as leave room, in so many bytes, for what is loaded and runs next.
    Most(usize),
    /// Those of the components that the next program reads.
    OneComponent,
}

/// Everything but parameters that a program needs on a device, in bytes.
pub(crate) fn work(network: &Network, compiled: &Executable) -> usize {
    let parameters: usize = network.params.iter().map(|p| device_bytes(&network.program, p)).sum();
    let memory = compiled.compiled().memory().unwrap_or_default();
    let all = memory.arguments + memory.outputs - memory.aliased + memory.temporaries + memory.generated_code;
    usize::try_from(all).unwrap_or(0).saturating_sub(parameters)
}
