//! Settings of a server.

use std::time::Duration;

/// Network, limits and storage of a server. The error messages call each field `serve.FIELD`, its key in the YAML file.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Address and port to listen on. An address other than loopback requires `api_key_file` or `insecure`.
    pub listen: String,
    /// Additional address and port on which `/metrics` is served; `None`: it is served only on `listen`.
    pub metrics_listen: Option<String>,
    /// Whether clients on other machines may use the server without an API key.
    pub insecure: bool,
    /// File of API keys.
    pub api_key_file: Option<String>,
    /// Folder of the job queue and the videos; `None`: the user's state folder.
    pub state: Option<String>,
    /// Accepted host names of requests, in addition to loopback and the bound address.
    pub allow_host: Vec<String>,
    /// Origins that may call the API from a browser (CORS).
    pub cors_origin: Vec<String>,
    /// Whether the access log has a JSON object per line.
    pub json_log: bool,
    /// Whether to log prompts.
    pub log_prompts: bool,
    /// Maximum size of a request body, in bytes.
    pub body_limit: u64,
    /// Minimum upload rate, in bytes per second; 0 disables the check.
    pub min_upload_rate: u64,
    /// Timeout of `POST /v1/videos/sync`.
    pub sync_timeout: Duration,
    /// Maximum number of queued videos.
    pub queue: usize,
    /// Maximum number of queued videos per API key.
    pub queue_per_key: usize,
    /// Maximum number of videos per batch.
    pub max_batch: usize,
    /// Maximum number of shapes whose programs stay loaded.
    pub max_shapes: usize,
    /// How long finished videos are kept.
    pub keep: Duration,
    /// Disk space for finished videos, in bytes; the oldest videos are deleted first.
    pub disk: u64,
    /// Disk space to keep free, in bytes.
    pub min_free: u64,
    /// Whether a running video is finished when the server shuts down. Otherwise the device saves a checkpoint, and the
    /// next start resumes the video.
    pub finish_at_shutdown: bool,
    /// Maximum duration of the shutdown.
    pub drain_timeout: Duration,
}
