//! The calibration constants of the chip files can be reproduced from the measurements in `benchmarks/calibration`.

use ltx2::analysis::{Calibration, Chip, Measurements, fit};

use crate::support::needs;

#[needs(nothing)]
fn calibrations_are_reproducible_from_measurements() {
    let mut count = 0;
    for chip in Chip::all() {
        let Some(kept) = &chip.calibration else { continue };
        let from = kept.fit.split_whitespace().filter(|word| word.starts_with("benchmarks/calibration/"));
        let all: Vec<Measurements> =
            from.map(|path| serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()).collect();
        let again = fit(&all, &kept.fit).unwrap();
        let numbers = |c: &Calibration| {
            let lines = [Some(c.matmul), c.attention].into_iter().flatten().chain(c.collectives.iter().map(|e| e.cost));
            let lines: Vec<f64> = lines.flat_map(|l| [l.latency, l.rate]).collect();
            [&[c.kernel_seconds, c.bandwidth], &lines[..]].concat()
        };
        assert!(!all.is_empty() && again.source == kept.source, "{}", chip.name);
        assert_eq!(numbers(&again).len(), numbers(kept).len(), "{}", chip.name);
        for (got, want) in numbers(&again).into_iter().zip(numbers(kept)) {
            assert!((got - want).abs() <= 1e-9 * want.abs(), "{}: {got}, not {want}", chip.name);
        }
        count += 1;
    }
    assert!(count > 0);
}
