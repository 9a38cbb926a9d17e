//! The YAML section `serve`: network, limits, storage and defaults of `ltx2 serve`.

use std::collections::BTreeMap;
use std::time::Duration;

use ltx2_base::with_defaults;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

with_defaults! {
    /// HTTP server, `ltx2 serve`.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Serve {
        /// Address and port to listen on. An address other than loopback requires `api_key_file` or `insecure`.
        pub listen: String = "127.0.0.1:8000".into(),
        /// Whether clients on other machines may use the server without an API key.
        pub insecure: bool = false,
        /// File of API keys, one `name:key` per line; its mode must be 0600. A key written as `name*:key` has access to
        /// the videos of every key. The file is reloaded on SIGHUP.
        pub api_key_file: Option<String> = None,
        /// Folder of the job queue and the videos; null uses the user's state folder.
        pub state: Option<String> = None,
        /// Model names that clients may use. If empty: the preset and the last component of `model.path`.
        pub served_model_name: Vec<String> = Vec::new(),
        /// Whether to accept any model name.
        pub any_model: bool = false,
        /// Pipelines that requests may select, in addition to the configured one.
        pub pipelines: Vec<String> = Vec::new(),
        /// Sizes to compile and run before the server reports ready, as `WxHxF` or `WxHxF@pipeline`; `none` disables
        /// warming. If empty: the configured size. Each size is compiled without added LoRAs, and for the rank of each LoRA in
        /// `loras` with `apply: add`.
        pub warm: Vec<String> = Vec::new(),
        /// Whether to reject sizes other than those of `warm`, and added LoRAs whose total rank is not compiled at startup.
        pub only_warm: bool = false,
        /// Maximum number of queued videos.
        #[schemars(range(min = 1))]
        pub queue: usize = 64,
        /// Maximum number of queued videos per API key.
        #[schemars(range(min = 1))]
        pub queue_per_key: usize = 32,
        /// Maximum number of videos per batch; null uses the batch size of the layout.
        #[schemars(range(min = 1))]
        pub max_batch: Option<usize> = None,
        /// Maximum number of sizes whose programs stay loaded. A size counts again for each rank of added LoRAs.
        #[schemars(range(min = 1))]
        pub max_shapes: usize = 8,
        /// Maximum number of video tokens in the last stage of a request.
        #[schemars(range(min = 1))]
        pub max_tokens: usize = 32768,
        /// Maximum number of frames of a video.
        #[schemars(range(min = 1))]
        pub max_frames: usize = 289,
        /// Maximum number of denoising steps.
        #[schemars(range(min = 1))]
        pub max_steps: usize = 100,
        /// Maximum number of images per request.
        pub max_images: usize = 8,
        /// Maximum size of a request body, in bytes or with a unit (`KiB`, `MiB`, `GiB`).
        pub body_limit: Bytes = Bytes(32 << 20),
        /// Minimum upload rate, in bytes per second or with a unit (`KiB`, `MiB`, `GiB`), checked every 10 s; a slower
        /// upload fails with 408. 0 disables the check.
        pub min_upload_rate: Bytes = Bytes(4 << 10),
        /// Retention time of finished videos, in seconds or with a unit (`s`, `m`, `h`, `d`).
        pub keep: Seconds = Seconds(24.0 * 3600.0),
        /// Disk space for finished videos, in bytes or with a unit (`KiB`, `MiB`, `GiB`); the oldest videos are deleted
        /// first.
        pub disk: Bytes = Bytes(20 << 30),
        /// Disk space to keep free, in bytes or with a unit (`KiB`, `MiB`, `GiB`).
        pub min_free: Bytes = Bytes(2 << 30),
        /// Denoising time between two checkpoints of a running video, in seconds or with a unit (`s`, `m`, `h`, `d`).
        pub checkpoint: Seconds = Seconds(30.0),
        /// Handling of a running video when the server shuts down.
        pub drain: Drain = Drain::Checkpoint,
        /// Maximum duration of the shutdown, in seconds or with a unit (`s`, `m`, `h`, `d`).
        pub drain_timeout: Seconds = Seconds(30.0),
        /// Timeout of `POST /v1/videos/sync`, in seconds or with a unit (`s`, `m`, `h`, `d`).
        pub sync_timeout: Seconds = Seconds(600.0),
        /// Accepted host names of requests, in addition to loopback and the bound address.
        pub allow_host: Vec<String> = Vec::new(),
        /// Origins that may call the API from a browser (CORS).
        pub cors_origin: Vec<String> = Vec::new(),
        /// Additional address and port on which `/metrics` is served; null serves it only on `listen`.
        pub metrics_listen: Option<String> = None,
        /// Format of log lines.
        pub log_format: LogFormat = LogFormat::Text,
        /// Whether to log prompts.
        pub log_prompts: bool = false,
        /// Seed of requests without a seed.
        pub seed: ServeSeed = ServeSeed::Random,
        /// LoRAs that requests may select, by name.
        pub loras: BTreeMap<String, NamedLora> = BTreeMap::new(),
        /// Published IC-LoRAs that requests may select, by name, such as `union-control`; their files must be in the
        /// Hugging Face cache.
        pub ic_loras: Vec<String> = Vec::new(),
        /// Aliases of sizes: requested size to actual size; null removes a default alias.
        pub size_aliases: BTreeMap<String, Option<String>> = BTreeMap::from([
            ("1280x720".into(), Some("1280x704".into())),
            ("720x1280".into(), Some("704x1280".into())),
        ]),
    }
}

impl Serve {
    /// Returns the size aliases as (requested, actual), without removed ones.
    pub fn aliases(&self) -> impl Iterator<Item = (&String, &String)> {
        self.size_aliases.iter().filter_map(|(name, size)| Some((name, size.as_ref()?)))
    }

    /// Returns whether no setting differs from its default.
    pub fn is_default(&self) -> bool {
        *self == Serve::default()
    }
}

/// Handling of a running video when the server shuts down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Drain {
    /// Saves a checkpoint; the next start resumes the video.
    Checkpoint,
    /// Finishes the video first.
    Finish,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// Human-readable text.
    Text,
    /// One JSON object per line.
    Json,
}

/// Seed of requests without a seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ServeSeed {
    /// A random seed per request; the response contains it.
    Random,
    /// The configured `request.seed`.
    Fixed,
}

/// LoRA that requests select by name; its path stays private to the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NamedLora {
    /// Safetensors file.
    pub path: String,
    /// Stages that use the LoRA: 1, 2 or both.
    #[serde(default = "both_stages")]
    pub stages: Vec<u8>,
    /// Whether the LoRA is merged or added; requests cannot choose.
    #[serde(default)]
    pub apply: LoraApply,
}

/// How a LoRA takes effect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LoraApply {
    /// The host merges it into the weights when they are loaded; steps take the same time as without LoRAs.
    #[default]
    Merge,
    /// Programs apply the LoRA's matrices in each step. Other LoRAs of similar rank replace it without reloading
    /// weights or compiling programs, and quantized weights stay unchanged. Only for LoRAs of transformer blocks.
    Add,
}

fn both_stages() -> Vec<u8> {
    vec![1, 2]
}

/// Number of bytes. In YAML, a number of bytes or a number with a unit (`B`, `KiB`, `MiB`, `GiB`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "Amount", into = "String")]
#[schemars(with = "Amount")]
pub struct Bytes(pub u64);

/// Duration in seconds. In YAML, a number of seconds or a number with a unit (`ms`, `s`, `m`, `h`, `d`).
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "Amount", into = "String")]
#[schemars(with = "Amount")]
pub struct Seconds(pub f64);

/// Number, optionally with a unit.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
enum Amount {
    /// Number of bytes or seconds.
    Number(f64),
    /// Number with a unit, such as `32MiB` or `30s`.
    Text(String),
}

const BYTES: [(&str, f64); 4] = [("GiB", 1_073_741_824.0), ("MiB", 1_048_576.0), ("KiB", 1024.0), ("B", 1.0)];
const SECONDS: [(&str, f64); 5] = [("ms", 0.001), ("d", 86400.0), ("h", 3600.0), ("m", 60.0), ("s", 1.0)];

impl Amount {
    fn read(self, units: &[(&str, f64)]) -> Result<f64, String> {
        let text = match self {
            Amount::Number(value) => value.to_string(),
            Amount::Text(text) => text,
        };
        let trimmed = text.trim();
        let unit = units.iter().find_map(|(name, factor)| Some((trimmed.strip_suffix(name)?, *factor)));
        let (number, factor) = unit.unwrap_or((trimmed, 1.0));
        let value = number.trim().parse::<f64>().ok().map(|value| value * factor);
        let all = || units.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        value.filter(|v| v.is_finite() && *v >= 0.0).ok_or_else(|| {
            format!("'{text}' must be a number of at least 0, optionally with one of the units {}", all())
        })
    }

    /// Formats `value` in the largest unit of which it is a whole multiple.
    fn write(value: f64, units: &[(&str, f64)]) -> String {
        let mut sorted = units.to_vec();
        sorted.sort_by(|a, b| b.1.total_cmp(&a.1));
        let whole = sorted.iter().find(|(_, factor)| value >= *factor && (value / factor).fract() == 0.0);
        let smallest = ("", 1.0);
        let (name, factor) = whole.unwrap_or(&smallest);
        format!("{}{name}", value / factor)
    }
}

impl TryFrom<Amount> for Bytes {
    type Error = String;
    fn try_from(amount: Amount) -> Result<Self, String> {
        amount.read(&BYTES).map(|value| Bytes(value as u64))
    }
}

impl From<Bytes> for String {
    fn from(Bytes(value): Bytes) -> String {
        Amount::write(value as f64, &BYTES)
    }
}

impl TryFrom<Amount> for Seconds {
    type Error = String;
    fn try_from(amount: Amount) -> Result<Self, String> {
        amount.read(&SECONDS).map(Seconds)
    }
}

impl From<Seconds> for String {
    fn from(Seconds(value): Seconds) -> String {
        Amount::write(value, &SECONDS)
    }
}

impl std::str::FromStr for Bytes {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Amount::Text(text.into()).try_into()
    }
}

impl std::str::FromStr for Seconds {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Amount::Text(text.into()).try_into()
    }
}

impl Seconds {
    /// Returns the duration, or [`Duration::MAX`] if the number of seconds is too large for the type.
    pub fn duration(self) -> Duration {
        Duration::try_from_secs_f64(self.0).unwrap_or(Duration::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_durations_with_units_are_parsed() {
        let bytes = |text: &str| text.parse::<Bytes>().map(|b| b.0);
        assert_eq!(bytes("32MiB"), Ok(32 << 20));
        assert_eq!(bytes("20 GiB"), Ok(20 << 30));
        assert_eq!(bytes("1000"), Ok(1000));
        assert!(bytes("12 MB").is_err() && bytes("-1").is_err() && bytes("inf").is_err());
        let seconds = |text: &str| text.parse::<Seconds>().map(|s| s.0);
        assert_eq!(seconds("24h"), Ok(86400.0));
        assert_eq!(seconds("500ms"), Ok(0.5));
        assert_eq!(seconds("90"), Ok(90.0));
    }

    #[test]
    fn sizes_and_durations_round_trip() {
        for text in ["32MiB", "20GiB", "1000B"] {
            assert_eq!(String::from(text.parse::<Bytes>().expect("bytes")), text);
        }
        for text in ["1d", "30s", "10m", "500ms"] {
            assert_eq!(String::from(text.parse::<Seconds>().expect("seconds")), text);
        }
    }
}
