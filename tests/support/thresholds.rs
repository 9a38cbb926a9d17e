//! Reads `tests/thresholds.yml`: how close complete runs must be to the reference.

use serde::Deserialize;

/// Limits of one case.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// `component/name` of a fixture, or the name of a test that computes its own reference.
    pub case: String,
    /// Maximum relative L2 distance of an output in f32.
    pub f32: Option<f64>,
    /// Maximum distance of an output in bf16, in units of the distance between the reference's own bf16 and f32.
    pub bf16: Option<f64>,
    /// Reason for a `bf16` limit above 1.
    pub reason: Option<String>,
    /// Minimum PSNR in dB: in f32, in bf16.
    pub psnr: Option<[f64; 2]>,
    /// Bounds of `ltx2 compare`, named like its flags.
    pub compare: Option<Bounds>,
}

/// Bounds of `ltx2 compare`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bounds {
    pub min_psnr: f64,
    pub min_ssim: f64,
    pub max_mad: f64,
    pub max_audio_l2: f64,
    pub min_audio_cosine: f64,
}

impl Row {
    /// Returns the maximum distance in f32.
    pub fn f32(&self) -> f64 {
        self.f32.unwrap_or_else(|| panic!("{}: no limit in f32", self.case))
    }

    /// Returns the maximum distance in bf16, in units of the reference's own.
    pub fn bf16(&self) -> f64 {
        self.bf16.unwrap_or_else(|| panic!("{}: no limit in bf16", self.case))
    }
}

/// Reads all rows.
pub fn rows() -> Vec<Row> {
    let text = std::fs::read_to_string("tests/thresholds.yml").expect("a file");
    serde_saphyr::from_str(&text).expect("rows")
}

/// Returns the row of a case.
pub fn row(case: &str) -> Row {
    rows().into_iter().find(|row| row.case == case).unwrap_or_else(|| panic!("tests/thresholds.yml: no row of {case}"))
}
