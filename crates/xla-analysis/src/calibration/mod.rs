//! Measured constants of a chip, which replace its data sheet.
//!
//! `ltx2 bench --micro` times small programs ([`Sample`]); [`mod@fit`] fits a latency and a rate to the times; the constants
//! are the `calibration` of the chip's TOML file, which names the command and the device they come from. A chip without
//! them keeps the figures of its data sheet.

mod fit;

use serde::{Deserialize, Serialize};

use super::collective::CollectiveKind;

pub use fit::{FitError, fit};

/// The alpha-beta model of a cost: `latency + amount / rate` seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AlphaBeta {
    /// Seconds, whatever the amount.
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
    /// Command that made it.
    pub fit: String,
    pub source: Vec<Provenance>,
    /// Seconds of an empty kernel among others.
    pub kernel_seconds: f64,
    /// Bytes a second of device memory, reads and writes.
    pub bandwidth: f64,
    /// Cost of a bf16 matmul, by FLOPs.
    pub matmul: AlphaBeta,
    /// Cost of a fused attention kernel, by FLOPs.
    pub attention: Option<AlphaBeta>,
    pub collectives: Vec<CollectiveCost>,
    /// Rates that a running collective and other work take from each other; nothing where it was not measured.
    pub contention: Option<Contention>,
}

/// Rates that a collective and other work take from each other while both run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contention {
    /// Beside matmuls and attention.
    pub compute: Shares,
    /// Beside work that memory bounds.
    pub memory: Shares,
}

/// Parts of their rates that two lose while both run, from 0 to 1: of a GPU, the collective's kernel holds processors, and the
/// bytes of both pass through device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shares {
    /// Loss of the work.
    pub work: f64,
    /// Loss of the collective.
    pub collective: f64,
}

impl Shares {
    /// How long both run, until one of them ends that would take so long alone, and the seconds that each gets done.
    pub(crate) fn together(self, work: f64, collective: f64) -> (f64, f64, f64) {
        let rates = [1.0 - self.work, 1.0 - self.collective];
        let both = (work / rates[0]).min(collective / rates[1]);
        (both, both * rates[0], both * rates[1])
    }
}

impl Calibration {
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
    /// A collective while matmuls run.
    OverlappedMatmul,
    /// A collective while copies run.
    OverlappedMemory,
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
    /// FLOPs that idle processors could do meanwhile.
    #[serde(default)]
    pub idle: f64,
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
    fn a_collective_takes_the_nearest_number_of_devices() {
        let cost = |latency: f64| AlphaBeta { latency, rate: 1.0 };
        let collective =
            |devices, latency| CollectiveCost { kind: CollectiveKind::AllGather, devices, cost: cost(latency) };
        let c = Calibration {
            fit: String::new(),
            source: vec![],
            kernel_seconds: 1.0,
            bandwidth: 1.0,
            matmul: cost(0.0),
            attention: None,
            collectives: vec![collective(2, 2.0), collective(4, 4.0)],
            contention: None,
        };
        let of = |devices| c.collective(CollectiveKind::AllGather, devices).map(|c| c.latency);
        assert_eq!([of(2), of(4), of(8)], [Some(2.0), Some(4.0), Some(4.0)]);
        assert_eq!(c.collective(CollectiveKind::AllReduce, 2), None);
        assert_eq!(AlphaBeta { latency: 1.0, rate: 4.0 }.seconds(2.0), 1.5);
    }
}
