//! Several processes, one a host, that run one request together: how they find each other, agree on what they run, and
//! end together when one is lost.
//!
//! Every process runs the same binary with the same request. [`Launch`] says which of them this is; [`Group::join`] waits
//! for all at a store ([`KvStore`](crate::pjrt::KvStore)) that process 0 serves, or in etcd; the plugin meets its peers in
//! that store too. `Group::ensure_equal` compares configurations and programs before they run. A thread in each process
//! (`heartbeat`) tells the others that it lives, and ends the process when one of them does not.

mod group;
mod heartbeat;
mod launch;
pub mod store;
mod waiting;

pub use group::{Group, Timeouts};
pub(crate) use group::{GroupError, host};
pub use launch::Launch;
pub(crate) use launch::{LaunchError, LaunchOptions};
