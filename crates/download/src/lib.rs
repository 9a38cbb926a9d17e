//! HTTP downloads that resume, retry and compute checksums, and repositories of the Hugging Face hub with the layout of
//! its local cache.

#![warn(missing_docs)]

// The stand-in hub in tests/support uses this name.
#[cfg(test)]
extern crate self as ltx2_download;

mod error;
pub mod http;
pub mod hub;
mod hub_cache;
mod partial_file;

pub use error::{DownloadError, RequestFailure};
pub use http::{HttpClient, HttpSettings};
pub use hub_cache::CachedRepository;
pub use partial_file::{Checksum, PartialFile};
/// HTTP types of this crate's functions.
pub use ureq::http::{HeaderName, Response, StatusCode, header};
pub use ureq::{Body, ResponseExt};
