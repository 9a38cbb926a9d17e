//! The HTTP server of `ltx2 serve`. Videos are generated as jobs; the API follows OpenAI's `/v1/videos`.
//!
//! ```text
//! HTTP (tokio) -> Jobs (index in memory) -> device thread -> finisher thread -> store
//!    polls, SSE, files    durable transitions     owns the model    MP4, JPEG, sidecar
//! ```
//!
//! HTTP handlers do not depend on the pipeline, and devices do not depend on HTTP. [`fields`] converts a request into
//! an [`Accepted`](job::Accepted) job, [`Jobs`](jobs::Jobs) holds every job and its state, [`worker`] runs jobs on a
//! [`Device`](device::Device) in the order that [`schedule`] chooses, and [`store`] persists them.

mod access;
mod api;
pub mod auth;
mod body;
mod connection;
pub mod descriptors;
pub mod device;
pub mod error;
pub mod fields;
pub mod form;
pub mod health;
pub mod id;
pub mod inputs;
pub mod job;
pub mod jobs;
pub mod listen;
pub mod metrics; // alias: of a server, the field's word
pub mod model_device;
pub mod objects;
pub mod query;
pub mod schedule;
pub mod server;
pub mod store;
mod streams;
mod traffic;
mod warm;
pub mod worker;
