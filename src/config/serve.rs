//! The YAML's section `serve`: how `ltx2 serve` listens, what it takes and what it keeps.

use std::collections::BTreeMap;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::pipeline::Pipeline;
use crate::defaults::with_defaults;

with_defaults! {
    /// The server, `ltx2 serve`.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Serve {
        /// Address and port to listen on. One other than loopback needs `api_key_file` or `insecure`.
        pub listen: String = "127.0.0.1:8000".into(),
        /// Whether other machines may use the server without a key.
        pub insecure: bool = false,
        /// A file of lines `name:key`, of mode 0600; `name*:key` sees every key's videos. Read again on SIGHUP.
        pub api_key_file: Option<String> = None,
        /// Folder of the queue and the videos; null takes the user's state folder.
        pub state: Option<String> = None,
        /// Names that clients may give the model; none takes the preset and the last part of `model.path`.
        pub served_model_name: Vec<String> = Vec::new(),
        /// Whether other names are taken, too.
        pub any_model: bool = false,
        /// Pipelines that requests may name beside the configuration's own.
        pub pipelines: Vec<Pipeline> = Vec::new(),
        /// Sizes that are compiled and run before the server is ready, as `WxHxF` or `WxHxF@pipeline`; `none` for none, and an
        /// empty list takes the configuration's own.
        pub warm: Vec<String> = Vec::new(),
        /// Whether other sizes are refused.
        pub only_warm: bool = false,
        /// Videos that may wait.
        #[schemars(range(min = 1))]
        pub queue: usize = 64,
        /// Videos of one key that may wait, on a server with keys.
        #[schemars(range(min = 1))]
        pub queue_per_key: usize = 32,
        /// Videos that are made together; null takes as many as the layout makes at once.
        #[schemars(range(min = 1))]
        pub max_batch: Option<usize> = None,
        /// Sizes whose programs stay loaded.
        #[schemars(range(min = 1))]
        pub max_shapes: usize = 8,
        /// Video tokens of the last stage.
        #[schemars(range(min = 1))]
        pub max_tokens: usize = 32768,
        /// Frames of a video.
        #[schemars(range(min = 1))]
        pub max_frames: usize = 289,
        /// Denoising steps.
        #[schemars(range(min = 1))]
        pub max_steps: usize = 100,
        /// Images of a request.
        pub max_images: usize = 8,
        /// Bytes of a request's body, with a unit: `KiB`, `MiB`, `GiB`.
        pub body_limit: Bytes = Bytes(32 << 20),
        /// Bytes a second that an upload must send, judged every 10 s; a slower one is answered with 408. 0 sets no minimum.
        pub min_upload_rate: Bytes = Bytes(4 << 10),
        /// How long finished videos are kept, with a unit: `s`, `m`, `h`, `d`.
        pub keep: Seconds = Seconds(24.0 * 3600.0),
        /// Bytes that finished videos may take; the oldest go first.
        pub disk: Bytes = Bytes(20 << 30),
        /// Bytes of the disk that stay free.
        pub min_free: Bytes = Bytes(2 << 30),
        /// Time of denoising between two savings of the steps behind a video.
        pub checkpoint: Seconds = Seconds(30.0),
        /// End of a running video when the server is asked to end.
        pub drain: Drain = Drain::Checkpoint,
        /// Time that this may take.
        pub drain_timeout: Seconds = Seconds(30.0),
        /// Time that `POST /v1/videos/sync` waits.
        pub sync_timeout: Seconds = Seconds(600.0),
        /// Host names beside loopback and the bound address that requests may name.
        pub allow_host: Vec<String> = Vec::new(),
        /// Origins whose pages may use the API.
        pub cors_origin: Vec<String> = Vec::new(),
        /// Another address and port for `/metrics`.
        pub metrics_listen: Option<String> = None,
        /// Form of the log's lines.
        pub log_format: LogFormat = LogFormat::Text,
        /// Whether prompts are logged.
        pub log_prompts: bool = false,
        /// Seed of a request that gives none.
        pub seed: ServeSeed = ServeSeed::Random,
        /// LoRAs that requests may name.
        pub loras: BTreeMap<String, NamedLora> = BTreeMap::new(),
        /// Sizes that stand for others; null takes one away.
        pub size_aliases: BTreeMap<String, Option<String>> = BTreeMap::from([
            ("1280x720".into(), Some("1280x704".into())),
            ("720x1280".into(), Some("704x1280".into())),
        ]),
    }
}

impl Serve {
    /// Sizes that stand for others, without those that are taken away.
    pub(crate) fn aliases(&self) -> impl Iterator<Item = (&String, &String)> {
        self.size_aliases.iter().filter_map(|(name, size)| Some((name, size.as_ref()?)))
    }

    /// Whether nothing is said of a server.
    pub(crate) fn is_default(&self) -> bool {
        *self == Serve::default()
    }
}

/// End of a running video when the server is asked to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Drain {
    /// Its steps are kept, and the next start goes on with them.
    Checkpoint,
    /// It is finished first.
    Finish,
}

/// Form of the log's lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// For people.
    Text,
    /// An object a line.
    Json,
}

/// Seed of a request that gives none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ServeSeed {
    /// Drawn, and said in the answer.
    Random,
    /// The configuration's.
    Fixed,
}

/// A LoRA that requests name, never by its path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NamedLora {
    /// A safetensors file.
    pub path: String,
    /// The stages it holds for.
    #[serde(default = "super::schema::both_stages")]
    pub stages: Vec<u8>,
}

/// A number of bytes, written with a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "Amount", into = "String")]
#[schemars(with = "Amount")]
pub struct Bytes(pub u64);

/// A time in seconds, written with a unit.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "Amount", into = "String")]
#[schemars(with = "Amount")]
pub struct Seconds(pub f64);

/// A number, or a number with its unit.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
enum Amount {
    /// In bytes, or in seconds.
    Number(f64),
    /// With a unit.
    Text(String),
}

const BYTES: [(&str, f64); 4] = [("GiB", 1_073_741_824.0), ("MiB", 1_048_576.0), ("KiB", 1024.0), ("B", 1.0)];
const SECONDS: [(&str, f64); 5] = [("ms", 0.001), ("d", 86400.0), ("h", 3600.0), ("m", 60.0), ("s", 1.0)];

impl Amount {
    /// The value in the smallest unit.
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
        value
            .filter(|v| v.is_finite() && *v >= 0.0)
            .ok_or_else(|| format!("{text}: give a number with one of {}", all()))
    }

    /// A value in the largest unit that it is a whole number of.
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
    /// The same as a duration.
    pub fn duration(self) -> Duration {
        Duration::from_secs_f64(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_with_their_units() {
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
    fn amounts_are_written_as_they_are_read() {
        for text in ["32MiB", "20GiB", "1000B"] {
            assert_eq!(String::from(text.parse::<Bytes>().expect("bytes")), text);
        }
        for text in ["1d", "30s", "10m", "500ms"] {
            assert_eq!(String::from(text.parse::<Seconds>().expect("seconds")), text);
        }
    }
}
