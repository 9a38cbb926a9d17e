//! `tests/thresholds.yml`: how near whole runs must be to the reference's.

use serde::Deserialize;

/// Limits of one case.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// `component/name` of a fixture, or of a test that computes its own reference.
    pub case: String,
    /// Largest relative L2 of an output in f32.
    pub f32: Option<f64>,
    /// Largest of an output in bf16, in units of what the reference's own bf16 is away from f32.
    pub bf16: Option<f64>,
    /// Why `bf16` is more than 1.
    pub reason: Option<String>,
    /// Least PSNR in dB: in f32, in bf16.
    pub psnr: Option<[f64; 2]>,
    /// Bounds of `ltx2 compare`, by their flags.
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
    /// Largest distance in f32.
    pub fn f32(&self) -> f64 {
        self.f32.unwrap_or_else(|| panic!("{}: no limit in f32", self.case))
    }

    /// Largest distance in bf16, in units of the reference's own.
    pub fn bf16(&self) -> f64 {
        self.bf16.unwrap_or_else(|| panic!("{}: no limit in bf16", self.case))
    }
}

/// All rows.
pub fn rows() -> Vec<Row> {
    let text = std::fs::read_to_string("tests/thresholds.yml").expect("a file");
    serde_saphyr::from_str(&text).expect("rows")
}

/// The row of a case.
pub fn row(case: &str) -> Row {
    rows().into_iter().find(|row| row.case == case).unwrap_or_else(|| panic!("tests/thresholds.yml: no row of {case}"))
}
