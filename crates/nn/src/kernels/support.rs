//! Handles operands that a fused kernel does not support: reports an error, or logs a warning or a debug message.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use super::Kernel;
use ltx2_stablehlo::Value;

impl Kernel {
    /// Returns whether the fused kernel supports the operands, that is, whether `reason` is `None`. If not, logs the
    /// reason, and the caller falls back to plain XLA operations. If the configuration requires cuDNN, the reason
    /// becomes an error of the program instead.
    pub(super) fn supports(self, q: &Value, k: &Value, reason: Option<String>) -> bool {
        let Some(reason) = reason else { return true };
        match self {
            Kernel::Cudnn { required: true } => {
                let message = format!(
                    "runtime.attention: cudnn does not support {reason} (queries {}); use auto or plain",
                    q.ty()
                );
                q.builder().reject("attention", message);
            }
            Kernel::Cudnn { required: false } if is_new(&reason) => {
                tracing::warn!("using plain XLA attention: cuDNN does not support {reason} (queries {})", q.ty());
            }
            _ => {
                tracing::debug!(queries = %q.ty(), keys = %k.ty(), "using plain XLA attention: {reason}");
            }
        }
        false
    }

    /// Returns whether the window attention kernel supports the queries, that is, whether `reason` is `None`. If not,
    /// logs the reason, and the caller falls back to regular attention on blocks of queries.
    pub(super) fn supports_windows(self, q: &Value, reason: Option<String>) -> bool {
        let Some(reason) = reason else { return true };
        if is_new(&format!("windows: {reason}")) {
            tracing::warn!(
                "using window attention without the fused kernel, which does not support {reason} (queries {})",
                q.ty()
            );
        }
        false
    }
}

/// Returns whether the reason is new, and records it. This prevents repeated warnings: programs have many layers and
/// are built more than once.
fn is_new(reason: &str) -> bool {
    static GIVEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    GIVEN.lock().unwrap_or_else(PoisonError::into_inner).insert(reason.to_owned())
}
