//! Measured constants of a chip, which replace its data sheet.
//!
//! `ltx2 bench --micro` times small programs ([`Sample`]); [`mod@fit`] fits a latency and a rate to the times; the constants
//! are stored in one JSON file a chip, beside its data sheet in `chips/`, which names the command and the device they come
//! from. A chip without a file keeps the figures of its data sheet.

mod fit;

use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use super::collective::CollectiveKind;

pub use fit::{FitError, fit};

/// Embedded calibrations, by chip.
const FILES: [(&str, &str); 1] = [("h200", include_str!("../chips/h200.calibration.json"))];

/// The alpha-beta model of a cost: `latency + amount / rate` seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AlphaBeta {
    /// Seconds, whatever the amount.
    #[serde(rename = "seconds")]
    pub latency: f64,
    /// FLOP/s or bytes/s.
    pub rate: f64,
}

impl AlphaBeta {
    /// Seconds of an amount.
    pub fn seconds(&self, amount: f64) -> f64 {
        self.latency + amount / self.rate
    }
}

/// Cost of a collective over a number of devices.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CollectiveCost {
    pub kind: CollectiveKind,
    /// Devices of a group.
    pub devices: usize,
    /// Cost by received bytes.
    #[serde(rename = "line")]
    pub cost: AlphaBeta,
}

/// Provenance of measurements.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    pub command: String,
    /// Device kind, as the plugin names it.
    pub device: String,
    pub devices: usize,
    pub versions: serde_json::Value,
    /// Day of the measurement, UTC.
    pub date: String,
}

/// Measured constants of a chip.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// Name in compile targets.
    pub chip: String,
    pub fit: String,
    pub source: Vec<Provenance>,
    /// Seconds of an empty kernel among others.
    pub kernel_seconds: f64,
    /// Bytes a second of device memory, reads and writes.
    pub bandwidth: f64,
    /// Cost of a bf16 matmul, by FLOPs.
    #[serde(rename = "product")]
    pub matmul: AlphaBeta,
    /// Cost of a fused attention kernel, by FLOPs.
    pub attention: Option<AlphaBeta>,
    #[serde(rename = "exchanges")]
    pub collectives: Vec<CollectiveCost>,
}

impl Calibration {
    /// The embedded calibration of a chip.
    pub fn of(chip: &str) -> Option<&'static Calibration> {
        static ALL: OnceLock<Vec<Calibration>> = OnceLock::new();
        // A test reads every file, so that none is left out here.
        let all = ALL.get_or_init(|| FILES.iter().filter_map(|(_, text)| serde_json::from_str(text).ok()).collect());
        all.iter().find(|c| c.chip == chip)
    }

    /// Cost of a collective over `devices`, or over the measured number that is nearest.
    pub fn collective(&self, kind: CollectiveKind, devices: usize) -> Option<AlphaBeta> {
        // A broadcast is a permute from one.
        let kind = if kind == CollectiveKind::CollectiveBroadcast { CollectiveKind::CollectivePermute } else { kind };
        let own = self.collectives.iter().filter(|c| c.kind == kind);
        own.min_by_key(|c| c.devices.abs_diff(devices)).map(|c| c.cost)
    }
}

/// Operation of a small program that is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Microbenchmark {
    /// A kernel that does almost nothing.
    Kernel,
    #[serde(rename = "product")]
    Matmul,
    Attention,
    /// A copy: reads an array and writes one.
    Memory,
    /// A norm: reads an array twice and writes one.
    Norm,
    #[serde(rename = "exchange")]
    Collective,
}

/// Time of one operation of a small program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    #[serde(rename = "what")]
    pub benchmark: Microbenchmark,
    #[serde(rename = "kind")]
    pub collective: Option<CollectiveKind>,
    /// Sizes, in words.
    pub name: String,
    pub devices: usize,
    /// FLOPs of matmuls in the optimized program.
    pub flops: f64,
    /// Bytes of device memory read and written.
    pub bytes: f64,
    /// Bytes received from other devices.
    pub wire_bytes: f64,
    /// Kernels, collectives not among them.
    pub kernels: f64,
    pub seconds: f64,
}

/// Output of `ltx2 bench --micro`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measurements {
    pub source: Provenance,
    /// Platform name, in lower case.
    pub platform: String,
    /// Seconds of an iteration of an empty loop, already subtracted from the samples.
    #[serde(rename = "turn_seconds")]
    pub iteration_seconds: f64,
    pub samples: Vec<Sample>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_read_and_says_where_it_comes_from() {
        for (chip, text) in FILES {
            let file: Calibration = serde_json::from_str(text).unwrap_or_else(|e| panic!("{chip}.json: {e}"));
            assert_eq!(file.chip, chip);
            assert!(!file.source.is_empty() && file.source.iter().all(|s| !s.command.is_empty() && !s.date.is_empty()));
            assert!(file.matmul.rate > 0.0 && file.bandwidth > 0.0 && file.kernel_seconds > 0.0);
        }
    }

    #[test]
    fn a_collective_takes_the_nearest_number_of_devices() {
        let cost = |latency: f64| AlphaBeta { latency, rate: 1.0 };
        let collective =
            |devices, latency| CollectiveCost { kind: CollectiveKind::AllGather, devices, cost: cost(latency) };
        let c = Calibration {
            chip: "x".into(),
            fit: String::new(),
            source: vec![],
            kernel_seconds: 1.0,
            bandwidth: 1.0,
            matmul: cost(0.0),
            attention: None,
            collectives: vec![collective(2, 2.0), collective(4, 4.0)],
        };
        let of = |devices| c.collective(CollectiveKind::AllGather, devices).map(|c| c.latency);
        assert_eq!([of(2), of(4), of(8)], [Some(2.0), Some(4.0), Some(4.0)]);
        assert_eq!(c.collective(CollectiveKind::AllReduce, 2), None);
        assert_eq!(AlphaBeta { latency: 1.0, rate: 4.0 }.seconds(2.0), 1.5);
    }
}
