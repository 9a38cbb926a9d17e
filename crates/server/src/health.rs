//! Health of the server, as reported by the probes.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

/// Condition of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HealthState {
    /// The model is loading and the warm-up shapes are compiling.
    Starting,
    /// The server can generate videos.
    Ready,
    /// The device failed; contains a message for clients.
    Failed(String),
}

/// Condition of the server and, if the device failed, the reason for the failure.
#[derive(Debug)]
pub struct Health {
    condition: watch::Sender<HealthState>,
    /// Reason for the device failure, for the log and the operator.
    failure: Mutex<Option<String>>,
    /// Minimum time without progress before the device counts as stuck.
    patience: Duration,
}

impl Default for Health {
    fn default() -> Self {
        Health::new(Duration::from_secs(30))
    }
}

impl Health {
    /// Returns the health of a server that is starting. `patience` is the minimum time without progress before the
    /// device counts as stuck.
    pub fn new(patience: Duration) -> Self {
        Health { condition: watch::Sender::new(HealthState::Starting), failure: Mutex::default(), patience }
    }

    /// Returns the minimum time without progress before the device counts as stuck.
    pub fn patience(&self) -> Duration {
        self.patience
    }

    /// Returns the current condition.
    pub fn now(&self) -> HealthState {
        self.condition.borrow().clone()
    }

    /// Marks the server as ready. Has no effect after a device failure.
    pub fn ready(&self) {
        self.condition.send_if_modified(|condition| {
            let was = *condition == HealthState::Starting;
            if was {
                *condition = HealthState::Ready;
            }
            was
        });
    }

    /// Records a device failure. `why` may contain file names; clients receive a fixed message instead.
    pub fn fail(&self, why: &str) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| why.into());
        self.condition.send_replace(HealthState::Failed("the device failed; the server is shutting down".into()));
    }

    /// Returns the reason for the device failure; `None` if the device has not failed.
    pub fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns a receiver that is notified when the condition changes.
    pub fn watch(&self) -> watch::Receiver<HealthState> {
        self.condition.subscribe()
    }
}
