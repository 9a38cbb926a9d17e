//! `tests/thresholds.yml` has a row of limits for every end-to-end run that is compared with a reference.

use std::collections::BTreeSet;
use std::path::Path;

use crate::support::needs;
use crate::support::thresholds::{row, rows};

/// Folders of `tests/fixtures/cases` in which every case is an end-to-end run.
const WHOLE_RUNS: [&str; 14] = [
    "pipeline",
    "dfr",
    "pipeline_2_5",
    "official",
    "official_1_0",
    "official_by_step",
    "official_guidance",
    "given_video",
    "given_video_1_0",
    "references",
    "dub_it",
    "hdr",
    "by_diffusers",
    "upsampling",
];
/// End-to-end runs stored elsewhere, and those that compute their own reference.
const OTHERS: [&str; 4] = ["images/image_to_video", "nano/reference", "gpu/one", "gpu/layouts"];

#[needs(nothing)]
fn every_end_to_end_run_has_one_threshold_row() {
    let files = |folder: &str| {
        let at = Path::new("tests/fixtures").join(if folder == "seeds" { "" } else { "cases" }).join(folder);
        let entries = std::fs::read_dir(&at).unwrap_or_else(|e| panic!("{}: {e}", at.display()));
        let stem = |path: &Path| {
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            name.split('.').next().expect("a name").to_string()
        };
        entries.map(|entry| format!("{folder}/{}", stem(&entry.expect("an entry").path()))).collect::<Vec<_>>()
    };
    let runs: BTreeSet<String> =
        WHOLE_RUNS.iter().chain([&"seeds"]).flat_map(|folder| files(folder)).chain(OTHERS.map(String::from)).collect();
    let rows = rows();
    let named: BTreeSet<String> = rows.iter().map(|row| row.case.clone()).collect();
    assert_eq!(named.len(), rows.len(), "a case has two rows");
    assert_eq!(named, runs);
    for row in &rows {
        assert!(row.f32.is_some() || row.psnr.is_some(), "{}: no limit in f32", row.case);
        assert_eq!(row.bf16.is_some_and(|limit| limit > 1.0), row.reason.is_some(), "{}: reason", row.case);
        let pipeline = row.case.starts_with("pipeline/");
        assert_eq!(pipeline, row.compare.is_some(), "{}: bounds of ltx2 compare", row.case);
        assert!(!pipeline || row.bf16.is_some(), "{}: no limit in bf16", row.case);
    }
}

/// The GPU tests are compiled on machines without a GPU, but do not run there.
#[needs(nothing)]
fn gpu_limits_equal_the_constants_of_the_tests() {
    let source = std::fs::read_to_string("tests/gpu/agreement.rs").expect("a file");
    let constant = |name: &str| -> f64 {
        let line = source.lines().find_map(|l| l.strip_prefix(&format!("const {name}: f64 = "))).expect("a constant");
        line.trim_end_matches(';').parse().expect("a number")
    };
    for case in ["gpu/one", "gpu/layouts"] {
        let row = row(case);
        assert_eq!((row.f32(), row.bf16()), (constant("F32"), constant("SPREAD")), "{case}");
    }
}
