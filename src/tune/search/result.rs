//! Result of a search: what was compiled, what was not and why, and the fastest.

use crate::pipeline::layouts::Point;
use crate::tune::case_result::CaseResult;
use crate::tune::table::milliseconds;

/// Reason for which a layout was not compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PruneReason {
    /// Contradictory rules, sizes that do not divide, or work done twice.
    Invalid,
    /// Arguments and parameters larger than device memory.
    TooLarge,
    /// Same programs as another layout's.
    Duplicate,
    /// Lower bound above the fastest.
    Slower,
    /// Budget or time used up.
    OverBudget,
}

impl PruneReason {
    /// Words that are true of such layouts, to follow "that".
    pub(super) fn words(self) -> &'static str {
        match self {
            PruneReason::Invalid => "do not divide, contradict themselves or repeat work",
            PruneReason::TooLarge => "do not fit into device memory beside the other components",
            PruneReason::Duplicate => "are the same programs as the layout that is named",
            PruneReason::Slower => "cannot be faster",
            PruneReason::OverBudget => "were left for a larger --budget or --seconds",
        }
    }
}

/// Layout that was not compiled.
#[derive(Clone, Debug)]
pub(super) struct Pruned {
    pub(super) label: String,
    /// Whether it has a name or file: a search decides on each.
    pub(super) named: bool,
    pub(super) reason: PruneReason,
    /// The figure that decided, or the other layout.
    pub(super) why: String,
}

impl Pruned {
    pub(super) fn new(label: impl Into<String>, named: bool, reason: PruneReason, why: String) -> Self {
        Pruned { label: label.into(), named, reason, why }
    }
}

/// Program that layouts are compared by, with the steps of its loop.
#[derive(Clone, Debug)]
pub(super) struct ComparedLoop {
    /// Size and loop, where there are several; may be empty.
    pub(super) name: String,
    pub(super) steps: usize,
}

/// Layout that was compiled.
#[derive(Clone, Debug)]
pub(super) struct Tried {
    pub(super) point: Point,
    /// Number of its batch.
    pub(super) batch: usize,
    /// A result of each part.
    pub(super) rows: Vec<CaseResult>,
    /// Bytes of a run's other parameters on a device, by part; empty where memory does not count.
    pub(super) beside: Vec<i64>,
    /// Milliseconds of all steps of all parts; received bytes where the chip is unknown.
    pub(super) cost: Option<f64>,
}

impl Tried {
    /// Bytes of a run on a device, at most of its parts.
    pub(super) fn bytes(&self) -> i64 {
        let beside = self.beside.iter().copied().chain(std::iter::repeat(0));
        let each = self.rows.iter().zip(beside).filter_map(|(row, b)| Some(row.report.as_ref()?.device_bytes() + b));
        each.max().unwrap_or(0)
    }

    /// Whether all compiled and, where memory counts, fit.
    pub(super) fn may_win(&self) -> bool {
        let fits = |row: &CaseResult| row.room.is_none() || row.fits();
        self.rows.iter().all(|row| row.error.is_none() && row.report.is_some() && fits(row))
    }
}

/// Layouts that are compared, by cost.
#[derive(Clone, Debug)]
pub(super) struct Comparison {
    pub(super) parts: Vec<ComparedLoop>,
    /// Whether costs are milliseconds; else received bytes.
    pub(super) timed: bool,
    /// Whether they are of one video of several.
    pub(super) per_video: bool,
}

impl Comparison {
    /// A cost with its unit: of a step where there is one part, else of all steps.
    pub(super) fn text(&self, cost: f64) -> String {
        let (steps, of) = match self.parts.as_slice() {
            [one] => (one.steps.max(1), "per step"),
            _ => (1, "for all steps"),
        };
        let (cost, video) = (cost / steps as f64, if self.per_video { ", one video" } else { "" });
        match self.timed {
            true if cost >= 1e4 => format!("{:.3} s {of}{video}", cost / 1e3),
            true => format!("{} ms {of}{video}", milliseconds(cost)),
            false => format!("{:.3} MB received {of}{video}", cost / 1e6),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct SearchResult {
    pub(super) comparison: Comparison,
    pub(super) tried: Vec<Tried>,
    /// Number of the fastest.
    pub(super) winner: Option<usize>,
    pub(super) pruned: Vec<Pruned>,
    /// Bytes of a device that a run may use, where they count.
    pub(super) limit: Option<i64>,
}

impl SearchResult {
    pub(crate) fn found(&self) -> bool {
        self.winner.is_some()
    }

    /// Results of all programs.
    pub(crate) fn rows(&self) -> Vec<CaseResult> {
        self.tried.iter().flat_map(|tried| tried.rows.iter().cloned()).collect()
    }
}
