//! Measured constants of a chip, which replace the figures of its data sheet.
//!
//! `ltx2 bench --micro` times small programs (each result is a [`Sample`]), and [`mod@fit`] fits a latency and a rate
//! for each kind of operation. The constants are stored in the section `calibration` of the chip's TOML file, together
//! with the command and the device with which they were measured. For a chip without a calibration, the data sheet
//! applies.

mod fit;

use serde::{Deserialize, Serialize};

use super::collective::CollectiveKind;

pub use fit::{FitError, fit};

/// The alpha-beta cost model: an operation takes `latency + amount / rate` seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AlphaBeta {
    /// Latency in seconds, independent of the amount.
    pub latency: f64,
    /// Rate in FLOP/s or bytes/s.
    pub rate: f64,
}

impl AlphaBeta {
    /// Returns the seconds that an operation takes on this amount of FLOPs or bytes.
    pub fn seconds(&self, amount: f64) -> f64 {
        self.latency + amount / self.rate
    }
}

/// Cost of one kind of collective for one group size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CollectiveCost {
    /// Kind of the collective.
    pub kind: CollectiveKind,
    /// Number of devices per group.
    pub devices: usize,
    /// Cost as a function of the bytes that a device receives.
    pub cost: AlphaBeta,
}

/// Provenance of measurements: command, device, versions and date.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// Command line that took the measurements.
    pub command: String,
    /// Device kind as the plugin reports it.
    pub device: String,
    /// Number of devices of the PJRT client.
    pub devices: usize,
    /// Versions of this program, the plugin and the platform, as a JSON object.
    pub versions: serde_json::Value,
    /// Date of the measurements in UTC, as `YYYY-MM-DD`.
    pub date: String,
}

/// Measured constants of a chip.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// Command line that fitted the constants.
    pub fit: String,
    /// Provenance of the measurements, with one entry per file of measurements.
    pub source: Vec<Provenance>,
    /// Seconds that each kernel adds to a sequence of kernels that do almost nothing.
    pub kernel_seconds: f64,
    /// Device memory bandwidth in bytes/s; bytes read and bytes written both count.
    pub bandwidth: f64,
    /// Cost of a bf16 matmul as a function of FLOPs.
    pub matmul: AlphaBeta,
    /// Cost of a fused attention kernel as a function of FLOPs.
    pub attention: Option<AlphaBeta>,
    /// Cost of a copy from host memory to the device as a function of bytes; `None` if not measured.
    pub host: Option<AlphaBeta>,
    /// Costs of collectives within a host.
    pub collectives: Vec<CollectiveCost>,
    /// Slowdown of a collective and of other work while they overlap; `None` if not measured.
    pub contention: Option<Contention>,
}

/// Slowdown of a collective and of other work while they overlap.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contention {
    /// Slowdown if the other work is matmuls or attention.
    pub compute: Shares,
    /// Slowdown if the other work is limited by memory bandwidth.
    pub memory: Shares,
}

/// Fractions, 0 to 1, of their rates that a collective and other work lose while they overlap. On a GPU, the
/// collective's kernel occupies multiprocessors, and both use memory bandwidth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shares {
    /// Fraction of its rate that the other work loses.
    pub work: f64,
    /// Fraction of its rate that the collective loses.
    pub collective: f64,
}

impl Shares {
    /// Predicts the overlap of `work` and `collective`, the seconds that each would take alone. Returns the seconds
    /// until the first of the two finishes, and the parts of `work` and of `collective` that are complete by then, in
    /// the seconds that these parts would take alone.
    pub(crate) fn together(self, work: f64, collective: f64) -> (f64, f64, f64) {
        let rates = [1.0 - self.work, 1.0 - self.collective];
        let both = (work / rates[0]).min(collective / rates[1]);
        (both, both * rates[0], both * rates[1])
    }
}

impl Calibration {
    /// Returns the cost of a collective in groups of `devices` devices. If this group size was not measured, returns
    /// the cost for the closest one. `None`: this kind of collective was not measured.
    pub fn collective(&self, kind: CollectiveKind, devices: usize) -> Option<AlphaBeta> {
        // A broadcast has the cost of a permute: each device receives the value of one other device.
        let kind = if kind == CollectiveKind::CollectiveBroadcast { CollectiveKind::CollectivePermute } else { kind };
        let own = self.collectives.iter().filter(|c| c.kind == kind);
        own.min_by_key(|c| c.devices.abs_diff(devices)).map(|c| c.cost)
    }
}

/// The operation that a microbenchmark times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Microbenchmark {
    /// A kernel that does almost nothing.
    Kernel,
    /// A matmul of the sizes and type in [`Sample::name`].
    #[serde(rename = "product")]
    Matmul,
    /// A fused attention kernel.
    Attention,
    /// A copy: reads one array and writes one array.
    Memory,
    /// A norm: reads an array twice and writes one array.
    Norm,
    /// A copy from host memory to the device.
    HostCopy,
    /// A collective that runs alone.
    #[serde(rename = "exchange")]
    Collective,
    /// A collective that runs while matmuls run.
    OverlappedMatmul,
    /// A collective that runs while copies run.
    OverlappedMemory,
}

/// The measured time of one operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Operation that was timed.
    #[serde(rename = "what")]
    pub benchmark: Microbenchmark,
    /// Kind of the collective; `None` if the operation has none.
    #[serde(rename = "kind")]
    pub collective: Option<CollectiveKind>,
    /// Description of the operand sizes, with the element type for matmuls and attention.
    pub name: String,
    /// Number of devices per group of the collective; 1 without a collective.
    pub devices: usize,
    /// FLOPs of the matmuls in the optimized program.
    pub flops: f64,
    /// FLOPs that idle multiprocessors could have done while the others computed attention.
    #[serde(default)]
    pub idle: f64,
    /// Bytes of device memory read and written.
    pub bytes: f64,
    /// Bytes received from other devices.
    pub wire_bytes: f64,
    /// Bytes copied from host memory.
    #[serde(default)]
    pub host_bytes: f64,
    /// Number of kernels, without those of collectives.
    pub kernels: f64,
    /// Measured seconds.
    pub seconds: f64,
}

/// The output of `ltx2 bench --micro`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measurements {
    /// Provenance of the measurements.
    pub source: Provenance,
    /// Platform name in lower case.
    pub platform: String,
    /// Seconds that one iteration of an empty loop takes. They are already subtracted from the samples.
    #[serde(rename = "turn_seconds")]
    pub iteration_seconds: f64,
    /// Measured times, one per operation and operand size.
    pub samples: Vec<Sample>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collective_cost_uses_nearest_measured_group_size() {
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
            host: None,
            collectives: vec![collective(2, 2.0), collective(4, 4.0)],
            contention: None,
        };
        let of = |devices| c.collective(CollectiveKind::AllGather, devices).map(|c| c.latency);
        assert_eq!([of(2), of(4), of(8)], [Some(2.0), Some(4.0), Some(4.0)]);
        assert_eq!(c.collective(CollectiveKind::AllReduce, 2), None);
        assert_eq!(AlphaBeta { latency: 1.0, rate: 4.0 }.seconds(2.0), 1.5);
    }
}
