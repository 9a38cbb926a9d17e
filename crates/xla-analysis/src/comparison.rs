//! Compares predicted and traced times by name scope and category.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use super::category::OpCategory;
use super::chip::Chip;
use super::module::Module;
use super::report::{Predicted, ScopePrediction, report};
use super::trace::Trace;
use super::xplane::XSpace;

/// Predicted and measured milliseconds per step. Times of operations ignore overlap: operations that run at the same
/// time each count in full. Only `step` takes overlap into account.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TraceComparison {
    /// Time of the complete step. It takes overlap into account; the measured time also includes idle time.
    pub step: Pair,
    /// Sum over all operations.
    pub all: Pair,
    /// Time in which the device waits for copies between host memory and the device.
    pub exposed_host_copy: Pair,
    /// Sum over the operations of each category, in the order of [`OpCategory`].
    pub categories: Vec<(OpCategory, Pair)>,
    /// Sum over the operations of each name scope and category, largest difference first.
    pub scopes: Vec<ScopeComparison>,
}

/// Predicted and measured milliseconds per step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Pair {
    /// Predicted milliseconds per step.
    pub predicted_ms: f64,
    /// Measured milliseconds per step.
    pub measured_ms: f64,
}

/// Predicted and measured time of the operations of one category in one name scope.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ScopeComparison {
    /// Name scope; empty for operations that have none.
    pub scope: String,
    /// Category of the operations.
    pub category: OpCategory,
    /// Sum over the operations.
    #[serde(flatten)]
    pub ms: Pair,
}

/// Number of name scopes in the table. The JSON output has all of them.
const SHOWN: usize = 10;

impl Pair {
    /// Returns the predicted time divided by the measured time; `None` if the measured time is 0.
    pub fn ratio(&self) -> Option<f64> {
        (self.measured_ms > 0.0).then(|| self.predicted_ms / self.measured_ms)
    }

    fn add(&mut self, other: Pair) {
        self.predicted_ms += other.predicted_ms;
        self.measured_ms += other.measured_ms;
    }
}

impl TraceComparison {
    /// Compares a trace with the prediction for the largest program in it. The program is partitioned over `mesh`
    /// (names and sizes of the axes, outermost first). `None` if the program cannot be decoded or the prediction is 0.
    pub fn of_space(space: &XSpace, trace: &Trace, mesh: &[(String, usize)], chip: &Chip) -> Option<TraceComparison> {
        let program = space.programs().max_by_key(|bytes| bytes.len())?;
        let module = Module::decode("hlo_with_config", program).ok()?;
        let report = report(&module, mesh, &[], Some(chip));
        // The program may have no shapes, for example in a truncated trace; its predicted time is then 0.
        let predicted = report.predicted.filter(|p| p.step > 0.0)?;
        Some(TraceComparison::from_trace(trace, &predicted, &report.scopes))
    }

    /// Compares a trace with a prediction: that of a step, and those of each name scope and category.
    pub fn from_trace(trace: &Trace, step: &Predicted, predicted: &[ScopePrediction]) -> TraceComparison {
        let steps = trace.steps.unwrap_or(1).max(1) as f64;
        let mut all: BTreeMap<(&str, OpCategory), Pair> = BTreeMap::new();
        for p in predicted {
            all.entry((&p.scope, p.category)).or_default().predicted_ms += p.ms;
        }
        for s in &trace.scopes {
            for (category, ms) in &s.categories {
                all.entry((&s.scope, *category)).or_default().measured_ms += ms / steps;
            }
        }
        let exposed =
            trace.categories.iter().filter(|c| c.category == OpCategory::HostCopy).filter_map(|c| c.exposed_ms);
        let exposed = Pair { predicted_ms: step.exposed_host_copy, measured_ms: exposed.sum::<f64>() / steps };
        let step = Pair { predicted_ms: step.step, measured_ms: trace.window_ms / steps };
        let mut sum = Pair::default();
        let mut categories: BTreeMap<OpCategory, Pair> = BTreeMap::new();
        for ((_, category), pair) in &all {
            sum.add(*pair);
            categories.entry(*category).or_default().add(*pair);
        }
        let rows = all.into_iter().map(|((scope, category), ms)| ScopeComparison { scope: scope.into(), category, ms });
        let mut scopes: Vec<ScopeComparison> = rows.collect();
        let off = |s: &ScopeComparison| (s.ms.predicted_ms - s.ms.measured_ms).abs();
        scopes.sort_by(|a, b| off(b).total_cmp(&off(a)));
        TraceComparison {
            step,
            all: sum,
            exposed_host_copy: exposed,
            categories: categories.into_iter().collect(),
            scopes,
        }
    }
}

impl fmt::Display for TraceComparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |f: &mut fmt::Formatter<'_>, ms: &Pair, name: &str, scope: &str| {
            let ratio = ms.ratio().map_or(String::new(), |r| format!("{r:.2}"));
            let line = format!("{:>12.3}{:>12.3}{ratio:>8}   {name:<20}{scope}", ms.predicted_ms, ms.measured_ms);
            writeln!(f, "{}", line.trim_end())
        };
        writeln!(f, "{:>12}{:>12}{:>8}   ms a step; operation times ignore overlap", "predicted", "measured", "ratio")?;
        row(f, &self.step, "step", "")?;
        row(f, &self.all, "operations", "")?;
        self.categories.iter().try_for_each(|(category, ms)| row(f, ms, category.name(), ""))?;
        if self.categories.iter().any(|(category, _)| *category == OpCategory::HostCopy) {
            row(f, &self.exposed_host_copy, "exposed host-copy", "")?;
        }
        let shown = self.scopes.len().min(SHOWN);
        writeln!(f, "\nthe {shown} largest differences by name scope, of {}", self.scopes.len())?;
        self.scopes.iter().take(SHOWN).try_for_each(|s| {
            let scope = if s.scope.is_empty() { "(none)" } else { &s.scope };
            row(f, &s.ms, s.category.name(), scope)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CollectiveKind;
    use crate::trace::{CategoryTime, ScopeTime};

    #[test]
    fn largest_difference_is_first_and_times_are_per_step() {
        let scope = |scope: &str, category: OpCategory, ms: f64| ScopeTime {
            scope: scope.into(),
            ms,
            share: 0.0,
            categories: BTreeMap::from([(category, ms)]),
        };
        let gather = OpCategory::Collective(CollectiveKind::AllGather);
        let trace = Trace {
            steps: Some(2),
            window_ms: 40.0,
            busy_ms: 40.0,
            idle_ms: 0.0,
            idle_share: 0.0,
            categories: vec![CategoryTime {
                category: OpCategory::HostCopy,
                ms: 12.0,
                share: 0.1,
                exposed_ms: Some(4.0),
                overlapped_ms: Some(8.0),
            }],
            scopes: vec![
                scope("blocks/ff", OpCategory::Matmul, 20.0),
                scope("blocks/ff", OpCategory::HostCopy, 12.0),
                scope("blocks/ff", gather, 8.0),
                scope("", OpCategory::Other, 2.0),
            ],
            without_scope: 0.0,
            devices: Vec::new(),
            operations: Vec::new(),
            warnings: Vec::new(),
        };
        let predicted = |scope: &str, category, ms| ScopePrediction { scope: scope.into(), category, ms };
        let all = [
            predicted("blocks/ff", OpCategory::Matmul, 9.0),
            predicted("blocks/ff", gather, 1.0),
            predicted("blocks/ff", OpCategory::HostCopy, 6.0),
            predicted("blocks/norm", OpCategory::Elementwise, 0.5),
        ];
        let step = Predicted { step: 8.0, host_copy: 6.0, exposed_host_copy: 1.0, ..Predicted::default() };
        let c = TraceComparison::from_trace(&trace, &step, &all);
        let pair = |predicted_ms, measured_ms| Pair { predicted_ms, measured_ms };
        assert_eq!((c.step, c.all), (pair(8.0, 20.0), pair(16.5, 21.0)));
        assert_eq!(c.exposed_host_copy, pair(1.0, 2.0));
        let rows: Vec<_> = c.scopes.iter().map(|s| (s.scope.as_str(), s.category, s.ms)).collect();
        // The rows differ by 3, 1, 1, 0.5 and 0 ms.
        assert_eq!(rows[0], ("blocks/ff", gather, pair(1.0, 4.0)));
        assert_eq!(rows[3], ("blocks/norm", OpCategory::Elementwise, pair(0.5, 0.0)));
        let text = c.to_string();
        let line = |end: &str| text.lines().find(|l| l.ends_with(end)).unwrap().split_whitespace().collect::<Vec<_>>();
        assert_eq!(line("   step"), ["8.000", "20.000", "0.40", "step"]);
        assert_eq!(line("   all-gather"), ["1.000", "4.000", "0.25", "all-gather"]);
        assert_eq!(line("blocks/norm"), ["0.500", "0.000", "elementwise", "blocks/norm"]);
        assert_eq!(line("   exposed host-copy"), ["1.000", "2.000", "0.50", "exposed", "host-copy"]);
        assert!(text.contains("the 5 largest differences by name scope, of 5"), "{text}");
    }
}
