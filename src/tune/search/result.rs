//! Result of a search: the layouts that were compiled, the pruned layouts with the reasons, and the fastest layout.

use crate::pipeline::plan::layouts::Point;
use crate::tune::case_result::CaseResult;
use crate::tune::table::milliseconds;

/// Reason why a layout was not compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PruneReason {
    /// Contradictory rules, a dimension that is not divisible, or work repeated on several devices.
    Invalid,
    /// The program's values and the run's parameters exceed device memory.
    TooLarge,
    /// The programs are the same as those of another layout.
    Duplicate,
    /// The lower bound of the cost exceeds that of the fastest layout.
    Slower,
    /// The budget or the time is used up.
    OverBudget,
}

impl PruneReason {
    /// Returns the reason as the end of a phrase that begins with "layouts that".
    pub(super) fn words(self) -> &'static str {
        match self {
            PruneReason::Invalid => {
                "are invalid (a dimension is not divisible, rules conflict, or devices repeat the same work)"
            }
            PruneReason::TooLarge => "do not fit into device memory together with the other components",
            PruneReason::Duplicate => "have the same programs as another layout",
            PruneReason::Slower => "cannot be faster than the best compiled layout",
            PruneReason::OverBudget => "were not reached within --budget or --seconds",
        }
    }
}

/// A layout that was not compiled.
#[derive(Clone, Debug)]
pub(super) struct PrunedLayout {
    pub(super) label: String,
    /// Whether the layout is shipped or supplied by the user. If false, it is a combination of shipped rules.
    pub(super) named: bool,
    pub(super) reason: PruneReason,
    /// Details of the reason: an error, the memory needed, the lower bound of the cost, or the label of the other
    /// layout.
    pub(super) why: String,
}

impl PrunedLayout {
    pub(super) fn new(label: impl Into<String>, named: bool, reason: PruneReason, why: String) -> Self {
        PrunedLayout { label: label.into(), named, reason, why }
    }
}

/// A program whose cost is used to compare layouts, with the number of steps of its loop.
#[derive(Clone, Debug)]
pub(super) struct ComparedLoop {
    /// Video size and kind of loop. A part that is the same for all loops is omitted, so the name may be empty.
    pub(super) name: String,
    pub(super) steps: usize,
}

/// A layout that was compiled.
#[derive(Clone, Debug)]
pub(super) struct TriedLayout {
    pub(super) point: Point,
    /// Index of the layout's batch size in the list of batch sizes.
    pub(super) batch: usize,
    /// Result of each program that layouts are compared by.
    pub(super) rows: Vec<CaseResult>,
    /// For each program, the bytes per device of the run's other parameters, which the program does not use; empty if
    /// memory is not limited.
    pub(super) other_parameters: Vec<i64>,
    /// Total milliseconds of all steps of all programs; received bytes if the chip is unknown.
    pub(super) cost: Option<f64>,
}

impl TriedLayout {
    /// Returns the bytes that a run needs on a device: the maximum over its programs.
    pub(super) fn bytes(&self) -> i64 {
        let other_parameters = self.other_parameters.iter().copied().chain(std::iter::repeat(0));
        let each =
            self.rows.iter().zip(other_parameters).filter_map(|(row, b)| Some(row.report.as_ref()?.device_bytes() + b));
        each.max().unwrap_or(0)
    }

    /// Returns whether all programs compiled and, if memory is limited, fit into it.
    pub(super) fn may_win(&self) -> bool {
        let fits = |row: &CaseResult| row.room.is_none() || row.fits();
        self.rows.iter().all(|row| row.error.is_none() && row.report.is_some() && fits(row))
    }
}

/// Programs and unit of the costs by which layouts are compared.
#[derive(Clone, Debug)]
pub(super) struct ComparisonBasis {
    pub(super) parts: Vec<ComparedLoop>,
    /// Whether costs are milliseconds. If false, they are received bytes.
    pub(super) timed: bool,
    /// Whether costs are divided by the number of videos of a batch.
    pub(super) per_video: bool,
}

impl ComparisonBasis {
    /// Formats a cost with its unit: per step if layouts are compared by one program, otherwise for all steps.
    pub(super) fn text(&self, cost: f64) -> String {
        let (steps, of) = match self.parts.as_slice() {
            [one] => (one.steps.max(1), "per step"),
            _ => (1, "for all steps"),
        };
        let (cost, video) = (cost / steps as f64, if self.per_video { ", per video" } else { "" });
        match self.timed {
            true if cost >= 1e4 => format!("{:.3} s {of}{video}", cost / 1e3),
            true => format!("{} ms {of}{video}", milliseconds(cost)),
            false => format!("{:.3} MB received {of}{video}", cost / 1e6),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct SearchResult {
    pub(super) comparison: ComparisonBasis,
    pub(super) tried: Vec<TriedLayout>,
    /// Index of the fastest layout in `tried`.
    pub(super) winner: Option<usize>,
    pub(super) pruned: Vec<PrunedLayout>,
    /// Bytes of device memory that a run may use; `None`: not limited.
    pub(super) limit: Option<i64>,
}

impl SearchResult {
    pub(crate) fn found(&self) -> bool {
        self.winner.is_some()
    }

    /// Returns the results of all programs.
    pub(crate) fn rows(&self) -> Vec<CaseResult> {
        self.tried.iter().flat_map(|tried| tried.rows.iter().cloned()).collect()
    }
}
