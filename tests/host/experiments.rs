//! The files in experiments/, read like the command reads them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

use crate::support::needs;
use ltx2::config::presets::CONFIGS;
use ltx2::config::read_experiment;

/// Returns the cases of a file as JSON values.
fn cases(name: &str) -> Vec<Value> {
    let file = read_experiment(&Path::new("experiments").join(name)).unwrap_or_else(|e| panic!("{e}"));
    file.cases().iter().map(|case| serde_json::to_value(case).expect("a case has a JSON form")).collect()
}

#[needs(nothing)]
fn every_experiment_file_has_the_expected_cases() {
    let files = std::fs::read_dir("experiments").expect("a folder").map(|e| e.expect("an entry").file_name());
    let counts: BTreeSet<(String, usize)> =
        files.map(|name| name.into_string().expect("UTF-8")).map(|name| (name.clone(), cases(&name).len())).collect();
    let expected = [
        ("ablation.yml", 27),
        ("calibration-2.yml", 24),
        ("calibration-4.yml", 26),
        ("held-out-1.yml", 8),
        ("held-out-2_0-full.yml", 3),
        ("held-out-2_0.yml", 36),
        ("held-out-2_3-full.yml", 3),
        ("held-out-2_3.yml", 18),
        ("tpu-2_5.yml", 9),
        ("tpu-int8.yml", 9),
        ("tpu-refine.yml", 31),
        ("tpu.yml", 98),
        ("v6e-8.yml", 4),
    ];
    assert_eq!(counts, expected.map(|(name, count)| (name.to_string(), count)).into());
}

/// Every shipped slice appears in both generations and, unless its file is for one size or generation, in two sizes,
/// each together with two other layouts on the same devices. LTX-2.5 slices are in a separate file.
#[needs(nothing)]
fn tpu_experiments_cover_every_shipped_slice() {
    let (cases, of_2_5) = (cases("tpu.yml"), cases("tpu-2_5.yml"));
    for (slice, _) in CONFIGS.iter().filter(|(name, _)| name.starts_with("tpu/")) {
        let cases = if slice.ends_with("2_5") { &of_2_5 } else { &cases };
        let own: Vec<&Value> = cases.iter().filter(|case| case["slice"] == *slice).collect();
        // A slice's additional file is for one size and one generation.
        let size = match *slice {
            name if name.ends_with("int8") => Some("768x512x121"),
            name if name.ends_with("large") => Some("1280x768x121"),
            _ => None,
        };
        let generation = [("2_3", "ltx2_3"), ("2_5", "ltx2_5")].into_iter().find(|(part, _)| slice.contains(part));
        let generation = generation.map(|(_, config)| config);
        let is_main = size.is_none() && generation.is_none();
        for (config, shape) in
            ["ltx2", "ltx2_3", "ltx2_5"].iter().flat_map(|c| [(*c, "768x512x121"), (*c, "1280x768x121")])
        {
            let here = |case: &Value| case["config"] == *config && case["shape"] == shape;
            let (others, alone): (Vec<&Value>, Vec<&Value>) =
                own.iter().filter(|case| here(case)).partition(|case| case["layout"].is_string());
            let is_for =
                size.is_none_or(|size| size == shape) && generation.map_or(config != "ltx2_5", |one| one == config);
            assert_eq!(alone.len(), usize::from(is_for), "{slice}, {config}, {shape}");
            assert!(is_main || slice.ends_with("2_5") || others.is_empty(), "{slice}, {config}, {shape}: {others:?}");
            let target =
                |case: &Value| case["target"] == own[0]["target"] && !case["slice"].as_str().unwrap().ends_with("int8");
            let beside = cases.iter().filter(|case| target(case) && here(case)).count();
            assert!(!is_main || !is_for || beside >= 3, "{slice}, {config}, {shape}: {beside}");
        }
        let targets: BTreeSet<&str> = own.iter().filter_map(|case| case["target"].as_str()).collect();
        assert_eq!(targets.len(), 1, "{slice}: {targets:?}");
        let chip = slice.trim_start_matches("tpu/").split('-').next().expect("a chip");
        assert!(targets.iter().all(|target| target.starts_with(&format!("tpu:{chip}:"))), "{slice}: {targets:?}");
    }
}

/// The best file of each slice is within 2 % of the fastest case compiled for the same devices, configuration and
/// shape. The second pass of `tpu/v6e-16` is a documented exception.
#[needs(nothing)]
fn best_shipped_file_is_within_two_percent_of_fastest() {
    let mut behind: BTreeMap<[String; 3], Option<f64>> = BTreeMap::new();
    for page in ["benchmarks/tpu-slices.md", "benchmarks/tpu-refine.md"] {
        let text = std::fs::read_to_string(page).expect("a page");
        for row in text.lines().filter(|line| line.starts_with("| tpu:")) {
            let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
            let [devices, config, shape, case, share, ..] = cells[..] else { panic!("{page}: {row}") };
            // The only case compiled for these devices.
            if share.is_empty() {
                continue;
            }
            let share: f64 = share.strip_suffix(" %").and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{row}"));
            let best = behind.entry([devices, config, shape].map(String::from)).or_default();
            if case.starts_with("**") {
                *best = Some(best.map_or(share, |best| best.min(share)));
            }
        }
    }
    assert!(behind.len() >= 37, "{} groups", behind.len());
    let far = |(_, share): &(&[String; 3], &Option<f64>)| share.is_none_or(|share| share > 2.0);
    let far: Vec<String> = behind.iter().filter(far).map(|(group, _)| group.join(" ")).collect();
    assert_eq!(far, ["tpu:v6e:4x4 ltx2_two_stage 1536x1024x121"]);
}
