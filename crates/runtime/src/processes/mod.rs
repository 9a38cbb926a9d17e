//! Multi-process runs, usually one process per host, that execute one request together: how processes find each other,
//! check that they run the same programs, and exit together when one is lost.
//!
//! Every process runs the same binary with the same request. [`Launch`] identifies the process. [`Group::join`] waits
//! for all processes through a key-value store ([`KvStore`](ltx2_pjrt::KvStore)) that process 0 serves, or through
//! etcd; the plugin uses the same store. `Group::ensure_equal` compares configurations and programs before they run. A
//! thread in each process (`heartbeat`) reports that the process is alive, and terminates it when another process is
//! lost.

mod group;
mod heartbeat;
mod launch;
pub mod store;
mod waiting;

pub use group::{Group, Timeouts};
pub use group::{GroupError, host};
pub use launch::Launch;
pub use launch::{LaunchError, LaunchOptions};
