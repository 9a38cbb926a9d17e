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

/// Everything but parameters that a program needs on a device, in bytes; none where the plugin does not say.
pub(crate) fn work(network: &Network, compiled: &Executable) -> Option<usize> {
    let parameters: usize = network.params.iter().map(|p| device_bytes(&network.program, p)).sum();
    let memory = compiled.compiled().memory().ok()?;
    let all = memory.arguments + memory.outputs - memory.aliased + memory.temporaries + memory.generated_code;
    Some(usize::try_from(all).ok()?.saturating_sub(parameters))
}
