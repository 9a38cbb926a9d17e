//! The files of experiments/, read as the command reads them.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use crate::support::needs;
use ltx2::config::presets::CONFIGS;
use ltx2::config::read_experiment;

/// Cases of a file, as values.
fn cases(name: &str) -> Vec<Value> {
    let file = read_experiment(&Path::new("experiments").join(name)).unwrap_or_else(|e| panic!("{e}"));
    file.cases().iter().map(|case| serde_json::to_value(case).expect("a case has a JSON form")).collect()
}

#[needs(nothing)]
fn every_file_is_read() {
    let files = std::fs::read_dir("experiments").expect("a folder").map(|e| e.expect("an entry").file_name());
    let counts: BTreeSet<(String, usize)> =
        files.map(|name| name.into_string().expect("UTF-8")).map(|name| (name.clone(), cases(&name).len())).collect();
    let expected = [
        ("ablation.yml", 27),
        ("calibration-2.yml", 24),
        ("calibration-4.yml", 26),
        ("tpu-int8.yml", 9),
        ("tpu-refine.yml", 28),
        ("tpu.yml", 98),
        ("v6e-8.yml", 4),
    ];
    assert_eq!(counts, expected.map(|(name, count)| (name.to_string(), count)).into());
}

/// Every shipped slice in both generations; those in bf16 in two sizes, and beside two other layouts.
#[needs(nothing)]
fn the_tpu_file_names_every_shipped_slice() {
    let cases = cases("tpu.yml");
    for (slice, _) in CONFIGS.iter().filter(|(name, _)| name.starts_with("tpu/")) {
        let own: Vec<&Value> = cases.iter().filter(|case| case["slice"] == *slice).collect();
        // The one size of a slice's further file.
        let only = match *slice {
            name if name.ends_with("int8") || name.ends_with("two-stage") => Some("768x512x121"),
            name if name.ends_with("large") => Some("1280x768x121"),
            _ => None,
        };
        for (config, shape) in ["ltx2", "ltx2_3"].iter().flat_map(|c| [(c, "768x512x121"), (c, "1280x768x121")]) {
            let here = || own.iter().filter(|case| case["config"] == *config && case["shape"] == shape);
            let (all, others) = (here().count(), here().filter(|case| case["layout"].is_string()).count());
            let expected = match only {
                None => (3, 2),
                Some(size) => (usize::from(size == shape), 0),
            };
            assert_eq!((all, others), expected, "{slice}, {config}, {shape}");
        }
        let targets: BTreeSet<&str> = own.iter().filter_map(|case| case["target"].as_str()).collect();
        assert_eq!(targets.len(), 1, "{slice}: {targets:?}");
        let chip = slice.trim_start_matches("tpu/").split('-').next().expect("a chip");
        assert!(targets.iter().all(|target| target.starts_with(&format!("tpu:{chip}:"))), "{slice}: {targets:?}");
    }
}
