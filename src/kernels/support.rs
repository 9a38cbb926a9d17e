//! Operands that a fused kernel does not take: an error, a warning or a line of the log.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use super::Kernel;
use crate::hlo::Value;

impl Kernel {
    /// Whether a fused kernel supports these operands. If not, XLA's own operations take them, and the reason is said; or
    /// the program is refused, where the configuration names the kernel.
    pub(super) fn supports(self, q: &Value, k: &Value, reason: Option<String>) -> bool {
        let Some(reason) = reason else { return true };
        match self {
            Kernel::Cudnn { required: true } => {
                let message = format!("runtime.attention: cudnn does not take {reason} (queries {})", q.ty());
                q.builder().reject("attention", message);
            }
            Kernel::Cudnn { required: false } if is_new(&reason) => {
                tracing::warn!("attention in XLA's own operations: cuDNN does not take {reason} (queries {})", q.ty());
            }
            _ => {
                tracing::debug!(queries = %q.ty(), keys = %k.ty(), "attention in XLA's own operations: {reason}");
            }
        }
        false
    }

    /// Whether the windows' kernel supports these queries. If not, blocks of them are attention like any other, and the reason
    /// is said.
    pub(super) fn supports_windows(self, q: &Value, reason: Option<String>) -> bool {
        let Some(reason) = reason else { return true };
        if is_new(&format!("windows: {reason}")) {
            tracing::warn!("windows in blocks of a bias each: the kernel does not take {reason} (queries {})", q.ty());
        }
        false
    }
}

/// Whether a reason is given for the first time: a program has many layers, and is written more than once.
fn is_new(reason: &str) -> bool {
    static GIVEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    GIVEN.lock().unwrap_or_else(PoisonError::into_inner).insert(reason.to_owned())
}
