//! An HTTP server that generates videos as jobs; its API follows OpenAI's `/v1/videos`.
//!
//! ```text
//! HTTP (tokio) -> Jobs (index in memory) -> device thread -> finisher thread -> store
//!    polls, SSE, files    durable transitions     owns the model    MP4, JPEG, sidecar
//! ```
//!
//! A [`Generator`](generator::Generator) converts a request into an [`Accepted`](job::AcceptedJob) job,
//! [`Jobs`](jobs::Jobs) holds every job and its state, [`worker`] runs jobs on a [`Device`](device::JobDevice) in an order
//! that needs few changes of programs and LoRAs, and [`store`] persists them. This crate contains no model code: the
//! generator and the device are passed to [`Server::start`](server::Server::start).

#![warn(missing_docs)]

mod access;
mod api;
mod auth;
mod body;
mod connection;
pub mod descriptors;
pub mod device;
pub mod error;
pub mod form;
pub mod generator;
pub mod health;
pub mod id;
pub mod inputs;
pub mod job;
pub mod job_config;
pub mod jobs;
pub mod listen;
mod metrics; // alias: of a server, the field's word
mod objects;
pub mod query;
mod schedule;
pub mod server;
pub mod settings;
pub mod store;
mod streams;
mod traffic;
pub mod worker;
