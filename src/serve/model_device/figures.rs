//! Measurements of the device for the server's metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::super::device::Figures;
use crate::pipeline::output::report::peak_memory;
use crate::pipeline::programs::executor::Executor;
use crate::runtime::ExecutableOrigin;

/// Counts and durations since the previous call of [`Counts::take`].
#[derive(Debug, Default)]
pub(super) struct Counts {
    compiled: u64,
    cached: u64,
    pub(super) lora_switches: Vec<Duration>,
    pub(super) checkpoints: Arc<AtomicU64>,
    pub(super) resumed: u64,
}

impl Counts {
    /// Adds the programs that the executor has compiled or loaded since the previous call, and resets its set-up time.
    /// Called before each batch and warm-up run, and by [`Self::take`].
    pub(super) fn begin(&mut self, executor: &mut Executor) {
        for program in executor.new_programs() {
            match program.origin() {
                ExecutableOrigin::Compiled => self.compiled += 1,
                ExecutableOrigin::CacheHit => self.cached += 1,
            }
        }
        executor.reset_set_up_time();
    }

    /// Returns all measurements and resets them.
    pub(super) fn take(&mut self, executor: &mut Executor) -> Figures {
        self.begin(executor);
        Figures {
            programs: executor.program_count(),
            compiled: std::mem::take(&mut self.compiled),
            cached: std::mem::take(&mut self.cached),
            checkpoints: self.checkpoints.swap(0, Ordering::Relaxed),
            resumed: std::mem::take(&mut self.resumed),
            lora_switches: std::mem::take(&mut self.lora_switches),
            memory: memory(executor),
        }
    }
}

/// Returns the memory use of this process's devices, or of the process itself if the devices do not report theirs.
fn memory(executor: &Executor) -> Vec<(String, &'static str, u64)> {
    let mut found = Vec::new();
    for (place, device) in executor.engine().own_devices().iter().enumerate() {
        let Ok(memory) = device.memory() else { continue };
        let kinds = [("in_use", Some(memory.in_use)), ("peak", memory.peak), ("limit", memory.limit)];
        for (kind, bytes) in kinds {
            let bytes = bytes.and_then(|bytes| u64::try_from(bytes).ok());
            found.extend(bytes.map(|bytes| (place.to_string(), kind, bytes)));
        }
    }
    if found.is_empty() {
        found.extend(peak_memory(executor).map(|bytes| ("host".to_string(), "peak", bytes)));
    }
    found
}
