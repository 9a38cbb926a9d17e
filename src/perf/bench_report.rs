//! The report of `bench --json`: timings and output checks of each program.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::pipeline::phase::Phase;
use crate::pjrt::CompiledMemory;
use crate::runtime::PeakMatmul;
use crate::tensor::Tensor;

#[derive(Debug, Serialize)]
pub(crate) struct BenchReport {
    /// Platform name in lower case.
    pub(crate) platform: String,
    /// Device kind as reported by the plugin.
    pub(crate) device: String,
    pub(crate) devices: usize,
    pub(crate) versions: Value,
    /// Path or preset of the model and fingerprints of its components, as in the sidecar JSON file of a video.
    pub(crate) model: Value,
    pub(crate) config: Value,
    pub(crate) videos: usize,
    /// Measured peak rate of matmuls on one device.
    pub(crate) matmul: PeakMatmul,
    /// Timings by program name; `end_to_end` is one of the names.
    pub(crate) programs: BTreeMap<String, ProgramTiming>,
    /// Seconds to write the MP4 file, or the WAV file of a request without frames. `None`: `end_to_end` was not
    /// benchmarked.
    pub(crate) mp4_seconds: Option<f64>,
    /// Bytes of all parameters per device.
    pub(crate) parameter_bytes: usize,
    /// Seconds to load or initialize all parameters.
    pub(crate) load_seconds: f64,
    pub(crate) compile_seconds: f64,
    /// Peak memory in bytes: that of one device if the platform reports it, otherwise that of the process.
    pub(crate) peak_memory_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ProgramTiming {
    /// Properties of the program; `None` for `end_to_end`.
    pub(crate) program: Option<ProgramInfo>,
    /// Denoising steps per call; `None` if the program has no steps.
    pub(crate) steps: Option<usize>,
    /// Median seconds per run, or per step if the program has steps.
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) p90: f64,
    pub(crate) seconds: Vec<f64>,
    pub(crate) warmup: usize,
    /// Floating-point operations of matmuls and convolutions, per second and device.
    pub(crate) flops_per_second: Option<f64>,
    /// `flops_per_second` as a fraction of the measured peak matmul rate.
    pub(crate) share_of_matmul: Option<f64>,
    pub(crate) outputs: BTreeMap<String, OutputCheck>,
    /// Phases of the last `end_to_end` run. Their times add up to the time of the run.
    pub(crate) parts: Option<BTreeMap<Phase, HostDevice>>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct HostDevice {
    pub(crate) device: f64,
    pub(crate) host: f64,
}

/// Static properties of a program, per device.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ProgramInfo {
    /// Hash of the program, as in `ltx2 compile`.
    pub(crate) hash: String,
    pub(crate) compile_seconds: f64,
    /// Floating-point operations of matmuls and convolutions per step, or per run if the program has no steps. `None`:
    /// the plugin does not return the optimized program.
    pub(crate) flops: Option<f64>,
    /// Predicted seconds per step, or per run if the program has no steps; `None` if the chip is unknown.
    pub(crate) predicted: Option<f64>,
    /// Bytes of the parameters that the program reads.
    pub(crate) parameter_bytes: usize,
    pub(crate) memory: Option<CompiledMemory>,
}

/// Shape, hash and plausibility checks of one output of the last run.
#[derive(Debug, Serialize)]
pub(crate) struct OutputCheck {
    pub(crate) shape: Vec<usize>,
    /// SHA-256 of the row-major bytes.
    pub(crate) sha256: String,
    /// Whether all values are finite; for a boolean output, whether all values are true.
    pub(crate) finite: bool,
    /// Whether the output has more than one value and all values are equal.
    pub(crate) constant: bool,
}

impl OutputCheck {
    pub(super) fn measure(tensor: &Tensor) -> Self {
        let mut finite = true;
        let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
        let mut look = |v: f32| {
            finite &= v.is_finite();
            (low, high) = (low.min(v), high.max(v));
        };
        match tensor {
            Tensor::F32(a) => a.iter().for_each(|v| look(*v)),
            Tensor::Bool(a) => a.iter().for_each(|v| look(if *v { 1.0 } else { f32::NAN })),
            Tensor::BF16(a) => a.iter().for_each(|v| look(v.to_f32())),
            other => other.to_f32().iter().for_each(|v| look(*v)),
        }
        let sha256 = hex::encode(Sha256::digest(tensor.bytes()));
        OutputCheck { shape: tensor.shape().to_vec(), sha256, finite, constant: tensor.len() > 1 && low >= high }
    }
}

/// A program that is slower than in the baseline report.
#[derive(Debug, PartialEq)]
pub(crate) struct Regression {
    pub(crate) name: String,
    /// Median seconds in the baseline.
    pub(crate) was: f64,
    /// Median seconds in this run.
    pub(crate) now: f64,
}

impl std::fmt::Display for Regression {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let more = (self.now / self.was - 1.0) * 100.0;
        write!(f, "{} is {more:.1} % slower: {:.6} s, baseline {:.6} s", self.name, self.now, self.was)
    }
}

impl BenchReport {
    /// Returns messages about outputs that must be wrong because they are not finite or are constant.
    pub(crate) fn wrong(&self) -> Vec<String> {
        let each =
            self.programs.iter().flat_map(|(name, m)| m.outputs.iter().map(move |(output, c)| (name, output, c)));
        let what = each.filter_map(|(name, output, c)| match (c.finite, c.constant) {
            (false, _) => Some(format!("'{output}' of {name} contains NaN or infinite values")),
            (true, true) => Some(format!("all values of '{output}' of {name} are equal")),
            (true, false) => None,
        });
        what.collect()
    }

    /// Returns the programs whose median exceeds that of the baseline by more than the fraction `tolerance`.
    ///
    /// # Errors
    /// Returns an error if the baseline is not a report or has no program in common with this report.
    pub(crate) fn slower_than(&self, baseline: &Value, tolerance: f64) -> std::result::Result<Vec<Regression>, String> {
        let medians = self.programs.iter().filter_map(|(name, m)| {
            let was = baseline.get("programs")?.get(name)?.get("median")?.as_f64()?;
            Some(Regression { name: (*name).to_string(), was, now: m.median })
        });
        let medians: Vec<Regression> = medians.collect();
        if medians.is_empty() {
            return Err(
                "contains none of the programs of this run; pass a file that an earlier `bench --json` wrote".into()
            );
        }
        Ok(medians.into_iter().filter(|m| m.now > m.was * (1.0 + tolerance)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constant_and_non_finite_outputs_are_reported() {
        let of = |values: Vec<f32>| OutputCheck::measure(&Tensor::from(ndarray::Array1::from(values)));
        let (good, flat, broken) = (of(vec![1.0, 2.0]), of(vec![1.0, 1.0]), of(vec![1.0, f32::NAN]));
        assert_eq!([good.finite, flat.finite, broken.finite], [true, true, false]);
        assert_eq!([good.constant, flat.constant], [false, true]);
        assert_ne!(good.sha256, flat.sha256);
    }
}
