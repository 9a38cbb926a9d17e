//! Bench report: timings and output checks of each program, as `bench --json` writes them.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::pipeline::text_to_video::Stage;
use crate::pjrt::CompiledMemory;
use crate::runtime::Ceiling;
use crate::tensor::Tensor;

/// The figures of everything timed.
#[derive(Debug, Serialize)]
pub struct BenchReport {
    /// Of the platform, in lower case.
    pub platform: String,
    /// The plugin's name of a device.
    pub device: String,
    /// Devices the programs run on.
    pub devices: usize,
    /// Program, plugin, platform.
    pub versions: Value,
    /// The model, as a sidecar names it.
    pub model: Value,
    /// Everything else that was asked for.
    pub config: Value,
    /// Videos a run makes together.
    pub videos: usize,
    /// What a large product reaches on one device.
    pub matmul: Ceiling,
    /// The programs, and `end_to_end`, by name.
    pub programs: BTreeMap<&'static str, ProgramTiming>,
    /// Seconds of writing one MP4, where a whole request was run.
    pub mp4_seconds: Option<f64>,
    /// Parameters on one device, in bytes.
    pub parameter_bytes: usize,
    /// Seconds of loading or making all parameters.
    pub load_seconds: f64,
    /// Seconds of compiling all programs.
    pub compile_seconds: f64,
    /// The most memory in use at any time, in bytes: on a device where the platform says it, else of the process.
    pub peak_memory_bytes: Option<u64>,
}

/// The figures of one program.
#[derive(Debug, Serialize)]
pub struct ProgramTiming {
    /// The program that ran; none for a whole request.
    pub program: Option<ProgramInfo>,
    /// Steps in a call, where it takes steps.
    pub steps: Option<usize>,
    /// Seconds of a run, or of a step where it takes steps.
    pub median: f64,
    /// The shortest.
    pub min: f64,
    /// Nine of ten were at most this long.
    pub p90: f64,
    /// All of them, in order.
    pub seconds: Vec<f64>,
    /// Runs before them.
    pub warmup: usize,
    /// Floating-point operations of products and convolutions a second, on one device.
    pub flops_per_second: Option<f64>,
    /// The same as a part of what a large product reaches.
    pub share_of_matmul: Option<f64>,
    /// Results by name.
    pub outputs: BTreeMap<String, OutputCheck>,
    /// Of a whole request: where its last run spent the time. The shares of all stages add up to the run.
    pub parts: Option<BTreeMap<Stage, HostDevice>>,
}

/// Seconds of a stage.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct HostDevice {
    /// In which nothing was left to do but wait for its programs.
    pub device: f64,
    /// In which the host worked.
    pub host: f64,
}

/// What is known of a program without running it, on one device.
#[derive(Clone, Debug, Serialize)]
pub struct ProgramInfo {
    /// As `ltx2 compile` says it.
    pub hash: String,
    /// Seconds of compiling.
    pub compile_seconds: f64,
    /// Operations of products and convolutions in a run or step; none where the plugin does not show its program.
    pub flops: Option<f64>,
    /// Bytes of the parameters it reads.
    pub parameter_bytes: usize,
    /// Bytes that it needs, where the plugin says so.
    pub memory: Option<CompiledMemory>,
}

/// A result, after the last run.
#[derive(Debug, Serialize)]
pub struct OutputCheck {
    /// Sizes.
    pub shape: Vec<usize>,
    /// SHA-256 of its row-major bytes.
    pub sha256: String,
    /// Whether all of it are numbers; of a flag, whether it is set.
    pub finite: bool,
    /// Whether all of it, where it is several, are one number.
    pub constant: bool,
}

impl OutputCheck {
    pub(super) fn of(tensor: &Tensor) -> Self {
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

/// A program that has become slower than it was.
#[derive(Debug, PartialEq)]
pub struct Regression {
    /// Its name.
    pub name: String,
    /// Median seconds then.
    pub was: f64,
    /// Median seconds now.
    pub now: f64,
}

impl std::fmt::Display for Regression {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let more = (self.now / self.was - 1.0) * 100.0;
        write!(f, "{} is {more:.1} % slower: {:.6} s, was {:.6} s", self.name, self.now, self.was)
    }
}

impl BenchReport {
    /// Results that cannot be right, a line each.
    pub fn wrong(&self) -> Vec<String> {
        let each =
            self.programs.iter().flat_map(|(name, m)| m.outputs.iter().map(move |(output, c)| (name, output, c)));
        let what = each.filter_map(|(name, output, c)| match (c.finite, c.constant) {
            (false, _) => Some(format!("'{output}' of {name} holds values that are not finite")),
            (true, true) => Some(format!("all values of '{output}' of {name} are the same")),
            (true, false) => None,
        });
        what.collect()
    }

    /// Programs whose median exceeds that of an earlier report by more than `tolerance`, a fraction of it.
    ///
    /// # Errors
    /// Not a report, or none of anything timed now.
    pub fn slower_than(&self, baseline: &Value, tolerance: f64) -> std::result::Result<Vec<Regression>, String> {
        let medians = self.programs.iter().filter_map(|(name, m)| {
            let was = baseline.get("programs")?.get(name)?.get("median")?.as_f64()?;
            Some(Regression { name: (*name).to_string(), was, now: m.median })
        });
        let medians: Vec<Regression> = medians.collect();
        if medians.is_empty() {
            return Err("has no median of anything timed now; give an earlier --json of this command".into());
        }
        Ok(medians.into_iter().filter(|m| m.now > m.was * (1.0 + tolerance)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_that_say_nothing_are_found() {
        let of = |values: Vec<f32>| OutputCheck::of(&Tensor::from(ndarray::Array1::from(values)));
        let (good, flat, broken) = (of(vec![1.0, 2.0]), of(vec![1.0, 1.0]), of(vec![1.0, f32::NAN]));
        assert_eq!([good.finite, flat.finite, broken.finite], [true, true, false]);
        assert_eq!([good.constant, flat.constant], [false, true]);
        assert_ne!(good.sha256, flat.sha256);
    }
}
