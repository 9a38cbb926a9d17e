//! Whether the server can do its work.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

/// How far the server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The model is loaded and its warm shapes are compiled.
    Starting,
    /// Videos are made.
    Ready,
    /// The device failed; the text is for clients.
    Failed(String),
}

/// State of the server, as probes are told.
#[derive(Debug)]
pub struct Health {
    condition: watch::Sender<Condition>,
    /// A failure, as the log and the operator are told.
    failure: Mutex<Option<String>>,
    /// How long the device may stand, whatever it takes as a rule.
    patience: Duration,
}

impl Default for Health {
    fn default() -> Self {
        Health::new(Duration::from_secs(30))
    }
}

impl Health {
    /// A server that starts, whose device may stand so long.
    pub fn new(patience: Duration) -> Self {
        Health { condition: watch::Sender::new(Condition::Starting), failure: Mutex::default(), patience }
    }

    /// How long the device may stand, whatever it takes as a rule.
    pub fn patience(&self) -> Duration {
        self.patience
    }

    /// The condition now.
    pub fn now(&self) -> Condition {
        self.condition.borrow().clone()
    }

    /// Warm shapes are warm. A device that failed stays failed.
    pub fn ready(&self) {
        self.condition.send_if_modified(|condition| {
            let was = *condition == Condition::Starting;
            if was {
                *condition = Condition::Ready;
            }
            was
        });
    }

    /// The device failed, for a reason that may name files.
    pub fn fail(&self, why: &str) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| why.into());
        self.condition.send_replace(Condition::Failed("the device failed; the server ends".into()));
    }

    /// Why the device failed.
    pub fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The condition as it changes.
    pub fn watch(&self) -> watch::Receiver<Condition> {
        self.condition.subscribe()
    }
}
