//! Measures how well predicted step times agree with measured ones.

use std::collections::BTreeSet;

use super::case_result::CaseResult;

/// Agreement of predicted and measured times over the cases that have both.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Agreement {
    pub(crate) rows: usize,
    /// Spearman's rank correlation; `None` if there are fewer than three cases or all values are equal.
    pub(crate) rank: Option<f64>,
    /// Median of the relative errors `|predicted / measured - 1|`.
    pub(crate) median_error: f64,
    pub(crate) worst_error: f64,
    /// Measured slowdown, as a fraction, of the case with the lowest predicted time relative to the fastest case; 0 if
    /// they are the same case.
    pub(crate) predicted_best_slowdown: f64,
}

impl Agreement {
    pub(crate) fn text(&self) -> String {
        let rank = self.rank.map_or(String::new(), |r| format!("rank correlation {r:.3}, "));
        format!(
            "predicted against measured, {} cases: {rank}median error {:.1} %, worst {:.1} %; the case predicted to be fastest \
             is {:.1} % slower than the fastest",
            self.rows,
            self.median_error * 100.0,
            self.worst_error * 100.0,
            self.predicted_best_slowdown * 100.0
        )
    }
}

/// Returns the agreement over the cases of a group; `None` if fewer than two cases have both a predicted and a measured
/// time.
pub(crate) fn agreement(rows: &[CaseResult]) -> Option<Agreement> {
    statistics(&pairs(rows))
}

/// Returns the predicted and the measured milliseconds of each case that has both. Several cases with the same program
/// count once, because the program was measured only once.
pub(super) fn pairs(rows: &[CaseResult]) -> Vec<(f64, f64)> {
    let mut seen = BTreeSet::new();
    rows.iter()
        .filter(|r| r.report.as_ref().is_none_or(|report| seen.insert(&report.hash)))
        .filter_map(|r| Some((r.predicted()?, r.measured? * 1e3)))
        .filter(|(p, m)| *p > 0.0 && *m > 0.0)
        .collect()
}

fn statistics(pairs: &[(f64, f64)]) -> Option<Agreement> {
    if pairs.len() < 2 {
        return None;
    }
    let mut errors: Vec<f64> = pairs.iter().map(|(p, m)| (p / m - 1.0).abs()).collect();
    errors.sort_by(f64::total_cmp);
    let middle = errors.len() / 2;
    let median_error = if errors.len() % 2 == 1 { errors[middle] } else { (errors[middle - 1] + errors[middle]) / 2.0 };
    let fastest = pairs.iter().map(|(_, m)| *m).fold(f64::INFINITY, f64::min);
    let chosen = pairs.iter().min_by(|a, b| a.0.total_cmp(&b.0))?.1;
    Some(Agreement {
        rows: pairs.len(),
        rank: spearman(pairs),
        median_error,
        worst_error: *errors.last()?,
        predicted_best_slowdown: chosen / fastest - 1.0,
    })
}

fn spearman(pairs: &[(f64, f64)]) -> Option<f64> {
    if pairs.len() < 3 {
        return None;
    }
    let a = ranks(&pairs.iter().map(|p| p.0).collect::<Vec<_>>());
    let b = ranks(&pairs.iter().map(|p| p.1).collect::<Vec<_>>());
    let mean = (pairs.len() + 1) as f64 / 2.0;
    let sum = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| (x - mean) * (y - mean)).sum::<f64>();
    let spread = (sum(&a, &a) * sum(&b, &b)).sqrt();
    (spread > 0.0).then(|| sum(&a, &b) / spread)
}

/// Returns ranks from 1; equal values share the mean of their ranks.
fn ranks(values: &[f64]) -> Vec<f64> {
    let place = |v: &f64| {
        let below = values.iter().filter(|o| *o < v).count();
        let equal = values.iter().filter(|o| *o == v).count();
        below as f64 + (equal as f64 + 1.0) / 2.0
    };
    values.iter().map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agreement_matches_hand_computed_values() {
        // The ranks are 1 2 3 4 5 and 2 1 4 3 5, which differ by 1 1 1 1 0, so the correlation is 1 - 6 * 4 / (5 * 24)
        // = 0.8.
        let pairs = [(10.0, 12.5), (11.0, 11.0), (20.0, 40.0), (24.0, 30.0), (50.0, 100.0)];
        let a = statistics(&pairs).unwrap();
        assert_eq!(a.rows, 5);
        assert!((a.rank.unwrap() - 0.8).abs() < 1e-12, "{a:?}");
        // The relative errors are 0.2, 0, 0.5, 0.2 and 0.5.
        assert!((a.median_error - 0.2).abs() < 1e-12, "{a:?}");
        assert!((a.worst_error - 0.5).abs() < 1e-12, "{a:?}");
        // The case with the lowest prediction took 12.5, the fastest case 11.
        assert!((a.predicted_best_slowdown - 1.5 / 11.0).abs() < 1e-12, "{a:?}");
        assert!(a.text().contains("5 cases: rank correlation 0.800, median error 20.0 %"), "{}", a.text());
        assert!(a.text().ends_with("13.6 % slower than the fastest"), "{}", a.text());
    }

    #[test]
    fn agreement_averages_tied_ranks_and_requires_three_rows() {
        // The ranks are 1.5 1.5 3 and 1 2 3: sum of products 1.5, sums of squares 1.5 and 2.
        let tied = statistics(&[(1.0, 1.0), (1.0, 2.0), (2.0, 3.0)]).unwrap();
        assert!((tied.rank.unwrap() - 1.5 / 3f64.sqrt()).abs() < 1e-12, "{tied:?}");
        let reversed = statistics(&[(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]).unwrap();
        assert_eq!(reversed.rank, Some(-1.0));
        assert_eq!(reversed.predicted_best_slowdown, 2.0);
        let two = statistics(&[(1.0, 2.0), (3.0, 4.0)]).unwrap();
        assert_eq!((two.rank, two.median_error, two.predicted_best_slowdown), (None, 0.375, 0.0));
        assert_eq!(statistics(&[(1.0, 2.0)]), None);
        assert_eq!(spearman(&[(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]), None);
    }
}
