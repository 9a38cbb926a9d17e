//! Measured constants of chips follow from the measurements that are kept beside the docs.

use ltx2::analysis::{Calibration, Measurements, fit};

use crate::support::needs;

#[needs(nothing)]
fn those_of_the_h200_follow_from_what_was_measured() {
    let kept = Calibration::of("h200").unwrap();
    let from = kept.fit.split_whitespace().filter(|word| word.starts_with("benchmarks/calibration/"));
    let all: Vec<Measurements> =
        from.map(|path| serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()).collect();
    let again = fit(&all, "h200", &kept.fit).unwrap();
    let numbers = |c: &Calibration| {
        let lines = [Some(c.matmul), c.attention].into_iter().flatten().chain(c.collectives.iter().map(|e| e.cost));
        let lines: Vec<f64> = lines.flat_map(|l| [l.latency, l.rate]).collect();
        [&[c.kernel_seconds, c.bandwidth], &lines[..]].concat()
    };
    assert!(!all.is_empty() && again.source == kept.source);
    assert_eq!(numbers(&again).len(), numbers(kept).len());
    for (got, want) in numbers(&again).into_iter().zip(numbers(kept)) {
        assert!((got - want).abs() <= 1e-9 * want.abs(), "{got}, not {want}");
    }
}
