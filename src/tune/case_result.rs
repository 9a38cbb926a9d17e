//! Results of cases, ranked among those that can be compared.

use std::path::Path;

use super::compile_report::CompileReport;
use crate::config::Case;

/// One case of an experiment: its compile report, measured step time in seconds, or error.
#[derive(Clone, Debug)]
pub struct CaseResult {
    pub(crate) case: Case,
    pub(crate) label: String,
    pub report: Option<CompileReport>,
    pub(crate) measured: Option<f64>,
    pub error: Option<String>,
    /// Compiler of the target, with its version; none where the target cannot be opened.
    pub(crate) compiler: Option<String>,
}

impl CaseResult {
    /// Predicted milliseconds per step with all blocks, where the chip is known.
    pub(crate) fn predicted(&self) -> Option<f64> {
        self.report.as_ref()?.all_blocks().map(|p| p.step)
    }

    /// Milliseconds per step, measured, else predicted; received bytes where the chip is unknown.
    pub(crate) fn cost(&self) -> Option<f64> {
        let measured = self.measured.map(|s| s * 1e3);
        measured.or(self.predicted()).or_else(|| self.report.as_ref().map(CompileReport::whole_cost))
    }

    pub(crate) fn fits(&self) -> bool {
        self.report.as_ref().is_some_and(CompileReport::fits)
    }

    /// Whether the layout is that of the configuration or the slice.
    pub(super) fn has_own_layout(&self) -> bool {
        self.case.layout.is_none()
    }
}

/// Cases that differ in layout, mesh and flags alone, the fastest first.
pub(crate) struct Group {
    /// Devices, configuration and shape; empty where no case names one, or all cases have the same configuration.
    pub(crate) parts: [String; 3],
    pub(crate) rows: Vec<CaseResult>,
}

impl Group {
    pub(crate) fn name(&self) -> String {
        self.parts.iter().filter(|part| !part.is_empty()).cloned().collect::<Vec<_>>().join(", ")
    }

    /// How much longer than the fastest a step of each case takes; none for what does not fit, was not measured where the
    /// fastest was, or is alone.
    pub(super) fn behind(&self) -> Vec<Option<f64>> {
        let measured = self.rows.first().is_some_and(|first| first.measured.is_some());
        let comparable = |row: &CaseResult| row.fits() && row.measured.is_some() == measured;
        let costs = self.rows.iter().map(|row| row.cost().filter(|_| comparable(row)));
        let costs: Vec<Option<f64>> = costs.collect();
        let several = costs.iter().flatten().nth(1).is_some();
        let best = costs.iter().flatten().next().copied().filter(|best| several && *best > 0.0);
        costs.into_iter().map(|cost| Some(cost? / best? - 1.0)).collect()
    }
}

/// Last part of a path without its extension.
pub(super) fn stem(path: &str) -> String {
    Path::new(path).file_stem().map_or(path.into(), |s| s.to_string_lossy().into_owned())
}

/// Devices of a case: its target, with the slice's name.
fn devices(case: &Case) -> String {
    let target = case.target.clone().unwrap_or_default();
    case.slice.as_ref().map_or(target.clone(), |slice| format!("{} ({target})", stem(slice)))
}

/// Results by group, in their order: the fastest first; then those that do not fit, then failures.
pub(crate) fn ranked(rows: Vec<CaseResult>) -> Vec<Group> {
    let of = |case: &Case| [&case.slice, &case.target, &case.config, &case.shape].map(Clone::clone);
    let several = rows.iter().any(|row| row.case.config != rows[0].case.config);
    let mut groups: Vec<([Option<String>; 4], Group)> = Vec::new();
    for row in rows {
        let (case, key) = (&row.case, of(&row.case));
        match groups.iter_mut().find(|(other, _)| *other == key) {
            Some((_, group)) => group.rows.push(row),
            None => {
                let config = case.config.as_deref().filter(|_| several).map(stem);
                let parts = [devices(case), config.unwrap_or_default(), case.shape.clone().unwrap_or_default()];
                groups.push((key, Group { parts, rows: vec![row] }));
            }
        }
    }
    let mut groups: Vec<Group> = groups.into_iter().map(|(_, group)| group).collect();
    for group in &mut groups {
        group.rows.sort_by(|a, b| {
            let place = |r: &CaseResult| (r.cost().is_none(), !r.fits(), r.measured.is_none());
            let cost = |r: &CaseResult| r.cost().unwrap_or(f64::MAX);
            place(a).cmp(&place(b)).then(cost(a).total_cmp(&cost(b)))
        });
    }
    groups
}
