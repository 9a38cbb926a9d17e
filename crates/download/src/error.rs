//! Errors of downloads. Every message is one line and contains no credentials.

use std::io;
use std::path::{Path, PathBuf};

use ureq::Proxy;
use ureq::http::StatusCode;

/// Failure of a request before a response arrived, without the URL.
#[derive(Debug, thiserror::Error)]
#[error("{}{source}", proxy.as_ref().map_or(String::new(), |proxy| format!("through the proxy {proxy}: ")))]
pub struct RequestFailure {
    /// The error of the HTTP client.
    source: Box<ureq::Error>,
    /// The proxy, without credentials. `None`: the request was sent without a proxy.
    pub proxy: Option<String>,
}

/// An error of a download.
#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    /// A setting of the HTTP client, such as a proxy or a certificate file, is invalid.
    #[error("{0}")]
    Settings(String),
    /// A request failed before a response arrived.
    #[error("{url}: {failure}")]
    Request {
        /// The URL, without credentials.
        url: String,
        /// The failure.
        failure: RequestFailure,
    },
    /// The server answered with an error status.
    #[error("{url}: {status}")]
    Status {
        /// The URL, without credentials.
        url: String,
        /// The status.
        status: StatusCode,
    },
    /// Several attempts in a row received nothing. `reason` contains the URL.
    #[error("{reason}; gave up after {tries} attempts and {have} bytes; run the same command again to resume")]
    Broken {
        /// The URL, without credentials.
        url: String,
        /// Number of attempts without progress.
        tries: u32,
        /// Number of bytes received, including those of earlier attempts.
        have: u64,
        /// The error of the last attempt.
        reason: String,
    },
    /// A local file operation failed.
    #[error("{}: cannot {action}: {source}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// Verb of the failed operation, such as `write`.
        action: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The storage server to which the hub redirects refused the request.
    #[error("{url}: the storage server {server} answered {status}")]
    Storage {
        /// The URL of the file on the hub.
        url: String,
        /// Host of the storage server.
        server: String,
        /// The status.
        status: StatusCode,
    },
    /// A server's answer does not have the expected form.
    #[error("{url}: {reason}")]
    Answer {
        /// The URL, without credentials.
        url: String,
        /// What is wrong with the answer.
        reason: String,
    },
    /// The downloaded file has other contents than the repository states. The file was deleted.
    #[error(
        "{file}: the {kind} of the download is {got}, expected {want}; the file was deleted, so run the command again"
    )]
    Checksum {
        /// Repository and path of the file.
        file: String,
        /// Name of the checksum.
        kind: &'static str,
        /// Checksum of the downloaded bytes.
        got: String,
        /// Checksum that the repository states.
        want: String,
    },
    /// The repository or one of its files requires access that the request lacks.
    #[error("{repository}: access denied ({status}): {advice}")]
    Denied {
        /// `org/name`.
        repository: String,
        /// The status, 401 or 403.
        status: StatusCode,
        /// How to get access.
        advice: String,
    },
    /// The hub has no such repository, revision or file.
    #[error("{name}: {reason}")]
    NotFound {
        /// The repository, with revision or path.
        name: String,
        /// What does not exist, and what to do.
        reason: String,
    },
    /// A file's checksum differs from that in the listing, because the repository changed after it was listed.
    #[error("{file}: changed on the hub since it was listed")]
    Changed {
        /// Repository and path of the file.
        file: String,
    },
}

impl DownloadError {
    /// Returns a closure for `map_err` that creates a [`DownloadError::File`].
    pub fn file(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| DownloadError::File { path, action, source }
    }

    /// Returns the error of a request to `url` that failed before a response arrived.
    pub(crate) fn request(url: String, source: ureq::Error, proxy: Option<&Proxy>) -> Self {
        let proxy = proxy.map(|proxy| format!("{}:{}", proxy.host(), proxy.port()));
        DownloadError::Request { url, failure: RequestFailure { source: Box::new(source), proxy } }
    }

    /// Returns whether no response arrived in time.
    pub fn is_timeout(&self) -> bool {
        matches!(self, DownloadError::Request { failure, .. } if matches!(*failure.source, ureq::Error::Timeout(_)))
    }

    /// Returns whether another attempt may succeed: the connection failed, or the server is overloaded.
    pub fn is_temporary(&self) -> bool {
        match self {
            DownloadError::Request { .. } => true,
            DownloadError::Status { status, .. } => is_temporary(*status),
            // The address of a storage server is valid for a limited time; the next request gets another.
            DownloadError::Storage { .. } => true,
            _ => false,
        }
    }
}

/// Returns whether a server that answers with this status may accept the same request later.
pub(crate) fn is_temporary(status: StatusCode) -> bool {
    status.is_server_error() || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT)
}
