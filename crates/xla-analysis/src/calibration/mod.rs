//! What a chip was measured to reach, in place of its data sheet.
//!
//! `ltx2 bench --micro` times small programs ([`Sample`]); [`fit`] draws lines through the times; the constants lie in
//! one file a chip beside this one, which names the command and the card they come from. A chip without a file keeps
//! the figures of its data sheet.

mod fit;

use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use super::collective::Kind;

pub use fit::{FitError, fit};

/// The files that there are, by chip.
const FILES: [(&str, &str); 1] = [("h200", include_str!("h200.json"))];

/// A time that begins with a fixed part: `seconds + amount / rate`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// Seconds however small the amount.
    pub seconds: f64,
    /// Operations or bytes a second.
    pub rate: f64,
}

impl Line {
    /// Seconds of an amount.
    pub fn of(&self, amount: f64) -> f64 {
        self.seconds + amount / self.rate
    }
}

/// An exchange between so many devices.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exchange {
    /// What is exchanged.
    pub kind: Kind,
    /// Devices that exchange with each other.
    pub devices: usize,
    /// Seconds, and received bytes a second.
    pub line: Line,
}

/// Where constants come from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// What was run.
    pub command: String,
    /// The plugin's name of the card.
    pub device: String,
    /// Devices of the host.
    pub devices: usize,
    /// Plugin and platform.
    pub versions: serde_json::Value,
    /// Day of the measurement, UTC.
    pub date: String,
}

/// A chip's measured constants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// As targets name it.
    pub chip: String,
    /// How the file is made again.
    pub fit: String,
    /// Where the measurements come from.
    pub source: Vec<Origin>,
    /// Seconds of a kernel that does nothing, beside others.
    pub kernel_seconds: f64,
    /// Bytes a second of device memory, read and written.
    pub bandwidth: f64,
    /// Products of bf16 operands: seconds, and operations a second.
    pub product: Line,
    /// The same of a fused attention kernel.
    pub attention: Option<Line>,
    /// Exchanges that were measured.
    pub exchanges: Vec<Exchange>,
}

impl Calibration {
    /// The constants of a chip, where it was measured.
    pub fn of(chip: &str) -> Option<&'static Calibration> {
        static ALL: OnceLock<Vec<Calibration>> = OnceLock::new();
        // A test reads every file, so that none is left out here.
        let all = ALL.get_or_init(|| FILES.iter().filter_map(|(_, text)| serde_json::from_str(text).ok()).collect());
        all.iter().find(|c| c.chip == chip)
    }

    /// The line of an exchange: of as many devices, else of the measured number that is nearest.
    pub fn exchange(&self, kind: Kind, devices: usize) -> Option<Line> {
        // A broadcast is a permute from one.
        let kind = if kind == Kind::CollectiveBroadcast { Kind::CollectivePermute } else { kind };
        let own = self.exchanges.iter().filter(|e| e.kind == kind);
        own.min_by_key(|e| e.devices.abs_diff(devices)).map(|e| e.line)
    }
}

/// What a small program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// A kernel that does nothing worth mentioning.
    Kernel,
    /// A product.
    Product,
    /// Fused attention.
    Attention,
    /// Reads an array and writes one.
    Memory,
    /// Reads an array twice, for a mean and what it scales, and writes one.
    Norm,
    /// An exchange between devices.
    Exchange,
}

/// A small program's time, for one of its operations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// What it does.
    pub what: What,
    /// Of exchanges.
    pub kind: Option<Kind>,
    /// Sizes, to read.
    pub name: String,
    /// Devices that work together.
    pub devices: usize,
    /// Operations of products, as the optimized program has them.
    pub flops: f64,
    /// Bytes of device memory read and written.
    pub bytes: f64,
    /// Bytes received from other devices.
    pub wire_bytes: f64,
    /// Kernels, exchanges not among them.
    pub kernels: f64,
    /// Seconds.
    pub seconds: f64,
}

/// What `ltx2 bench --micro` found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measurements {
    /// Where it was.
    pub source: Origin,
    /// Of the platform, in lower case.
    pub platform: String,
    /// Seconds of a turn of a loop around nothing: taken off the samples.
    pub turn_seconds: f64,
    /// Everything timed.
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
            assert!(file.product.rate > 0.0 && file.bandwidth > 0.0 && file.kernel_seconds > 0.0);
        }
    }

    #[test]
    fn an_exchange_takes_the_nearest_number_of_devices() {
        let line = |seconds: f64| Line { seconds, rate: 1.0 };
        let exchange = |devices, seconds| Exchange { kind: Kind::AllGather, devices, line: line(seconds) };
        let c = Calibration {
            chip: "x".into(),
            fit: String::new(),
            source: vec![],
            kernel_seconds: 1.0,
            bandwidth: 1.0,
            product: line(0.0),
            attention: None,
            exchanges: vec![exchange(2, 2.0), exchange(4, 4.0)],
        };
        let of = |devices| c.exchange(Kind::AllGather, devices).map(|l| l.seconds);
        assert_eq!([of(2), of(4), of(8)], [Some(2.0), Some(4.0), Some(4.0)]);
        assert_eq!(c.exchange(Kind::AllReduce, 2), None);
        assert_eq!(Line { seconds: 1.0, rate: 4.0 }.of(2.0), 1.5);
    }
}
