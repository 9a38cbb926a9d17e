//! The HTTP server of `ltx2 serve`: videos as jobs, in the dialect of OpenAI's `/v1/videos`.
//!
//! ```text
//! HTTP (tokio) -> Jobs (index in memory) -> device thread -> finisher thread -> store
//!    polls, SSE, files    durable transitions     owns the model    MP4, JPEG, sidecar
//! ```
//!
//! No handler knows the pipeline, no device knows HTTP. [`fields`] turns a request into an [`Accepted`](job::Accepted) job, [`Jobs`](jobs::Jobs) holds every
//! job and its state, [`worker`] runs them in the order that [`schedule`] gives on a [`Device`](device::Device), [`store`] keeps them.

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
