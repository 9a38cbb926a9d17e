//! Key-value stores of a run: in memory, served by process 0, or in etcd.

mod etcd;
mod memory;
mod remote;
mod served;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

pub(crate) use etcd::EtcdStore;
pub use memory::MemoryStore;
pub use remote::RemoteStore;
pub use served::StoreServer;

use ltx2_pjrt::{KvError, KvStore};

/// Prefix of a coordinator address that refers to etcd: `etcd://HOST:PORT/RUN`.
pub(crate) const ETCD: &str = "etcd://";

/// Opens the store of a run, for a process that does not serve the store itself. `answer` is the timeout of a single
/// request.
///
/// # Errors
/// Returns an error if etcd cannot be reached. Process 0, which may start later, is not contacted yet.
pub fn connect(coordinator: &str, answer: Duration) -> Result<Arc<dyn KvStore>, KvError> {
    match coordinator.strip_prefix(ETCD) {
        None => Ok(Arc::new(RemoteStore::new(coordinator, answer))),
        Some(place) => Ok(Arc::new(EtcdStore::connect(place, answer)?)),
    }
}
