//! Results of an experiment's cases, ranked within groups of comparable cases.

use std::path::Path;

use super::compile_report::CompileReport;
use super::diagnose::Diagnosis;
use crate::config::Case;

/// Result of one case of an experiment: its compile report, its measured step time in seconds, or its error.
#[derive(Clone, Debug)]
pub struct CaseResult {
    pub(crate) case: Case,
    pub(crate) label: String,
    /// Element types; `None` if they are all bf16. Layouts of cases with different types are not compared.
    pub(crate) precision: Option<String>,
    pub report: Option<CompileReport>,
    pub(crate) measured: Option<f64>,
    pub error: Option<String>,
    /// Compiler of the target, with its version; `None` if the target cannot be opened.
    pub(crate) compiler: Option<String>,
    /// Bytes of device memory that the program may use; `None`: all of it.
    pub(crate) room: Option<i64>,
}

impl CaseResult {
    /// Returns the predicted milliseconds per step with all blocks; `None` if the chip is unknown.
    pub(crate) fn predicted(&self) -> Option<f64> {
        self.report.as_ref()?.all_blocks().map(|p| p.step)
    }

    /// Returns the milliseconds per step: measured, or else predicted. If the chip is unknown, returns received bytes
    /// instead.
    pub(crate) fn cost(&self) -> Option<f64> {
        let measured = self.measured.map(|s| s * 1e3);
        measured.or(self.predicted()).or_else(|| self.report.as_ref().map(CompileReport::whole_cost))
    }

    pub(crate) fn fits(&self) -> bool {
        let in_room = |f: &CompileReport| self.room.is_none_or(|room| f.device_bytes() <= room);
        self.report.as_ref().is_some_and(|f| f.fits() && in_room(f))
    }

    /// Returns whether the case sets no layout and therefore uses that of its configuration or of its TPU slice.
    pub(super) fn uses_default_layout(&self) -> bool {
        self.case.layout.is_none()
    }
}

/// Cases that differ only in layout, mesh and flags, fastest first. They may be on different TPU slices.
pub(crate) struct CaseGroup {
    /// Devices, configuration and shape, which form the group's name. A part is empty if the cases do not set it; the
    /// configuration is also empty if all groups have the same one.
    pub(crate) parts: [String; 3],
    pub(crate) rows: Vec<CaseResult>,
    /// Diagnosis of the fastest case that fits into device memory; `None` if not requested.
    pub(crate) diagnosis: Option<GroupDiagnosis>,
}

/// Diagnosis of one case of a group, or the reason why the diagnosis failed.
#[derive(Clone, Debug)]
pub(crate) struct GroupDiagnosis {
    pub(crate) label: String,
    pub(crate) result: Result<Diagnosis, String>,
}

impl CaseGroup {
    /// Prefixes a case's label with the parts of its group's name.
    pub(super) fn name_of(&self, label: &str) -> String {
        self.parts
            .iter()
            .map(String::as_str)
            .chain([label])
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// Returns the fastest case that fits into device memory.
    pub(super) fn fastest(&self) -> Option<&CaseResult> {
        self.rows.iter().find(|row| row.fits())
    }

    pub(crate) fn name(&self) -> String {
        self.parts.iter().filter(|part| !part.is_empty()).cloned().collect::<Vec<_>>().join(", ")
    }

    /// Returns the slowdown of each case relative to the fastest, as a fraction. `None` if the case does not fit into
    /// memory, if it was not measured although the fastest was, or if there is no other case to compare it with.
    pub(super) fn slowdowns(&self) -> Vec<Option<f64>> {
        let measured = self.rows.first().is_some_and(|first| first.measured.is_some());
        let comparable = |row: &CaseResult| row.fits() && row.measured.is_some() == measured;
        let costs = self.rows.iter().map(|row| row.cost().filter(|_| comparable(row)));
        let costs: Vec<Option<f64>> = costs.collect();
        let several = costs.iter().flatten().nth(1).is_some();
        let best = costs.iter().flatten().next().copied().filter(|best| several && *best > 0.0);
        costs.into_iter().map(|cost| Some(cost? / best? - 1.0)).collect()
    }
}

pub(super) fn stem(path: &str) -> String {
    Path::new(path).file_stem().map_or(path.into(), |s| s.to_string_lossy().into_owned())
}

/// Returns the devices of a case. If `types_differ`, appends the element types.
fn devices(row: &CaseResult, types_differ: bool) -> String {
    let types = row.precision.as_ref().filter(|_| types_differ);
    row.case.target.iter().chain(types).cloned().collect::<Vec<_>>().join(", ")
}

/// Groups comparable cases, in the order of each group's first case. Within a group, the fastest case comes first, then
/// cases that do not fit into memory, then failed cases.
pub(crate) fn ranked(rows: Vec<CaseResult>) -> Vec<CaseGroup> {
    let of = |row: &CaseResult| [&row.case.target, &row.precision, &row.case.config, &row.case.shape].map(Clone::clone);
    let several = rows.iter().any(|row| row.case.config != rows[0].case.config);
    let types_differ = rows.iter().any(|row| row.precision != rows[0].precision);
    let mut groups: Vec<([Option<String>; 4], CaseGroup)> = Vec::new();
    for row in rows {
        let (case, key) = (&row.case, of(&row));
        match groups.iter_mut().find(|(other, _)| *other == key) {
            Some((_, group)) => group.rows.push(row),
            None => {
                let config = case.config.as_deref().filter(|_| several).map(stem);
                let parts =
                    [devices(&row, types_differ), config.unwrap_or_default(), case.shape.clone().unwrap_or_default()];
                groups.push((key, CaseGroup { parts, rows: vec![row], diagnosis: None }));
            }
        }
    }
    let mut groups: Vec<CaseGroup> = groups.into_iter().map(|(_, group)| group).collect();
    for group in &mut groups {
        group.rows.sort_by(|a, b| {
            let place = |r: &CaseResult| (r.cost().is_none(), !r.fits(), r.measured.is_none());
            let cost = |r: &CaseResult| r.cost().unwrap_or(f64::MAX);
            place(a).cmp(&place(b)).then(cost(a).total_cmp(&cost(b)))
        });
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(slice: &str, target: &str, precision: Option<&str>, step: f64) -> CaseResult {
        let some = |text: &str| Some(text.to_string());
        let case = Case { slice: some(slice), target: some(target), shape: some("768x512x121"), ..Case::default() };
        let (label, precision) = (slice.to_string(), precision.map(String::from));
        CaseResult {
            case,
            label,
            precision,
            report: None,
            measured: Some(step),
            error: None,
            compiler: None,
            room: None,
        }
    }

    #[test]
    fn cases_group_by_devices_and_element_types() {
        let (v6e, v5e) = ("tpu:v6e:2x4", "tpu:v5e:4x4");
        let groups = ranked(vec![
            result("v6e-8", v6e, None, 0.3),
            result("v5e-16", v5e, None, 0.5),
            result("v6e-8-int8", v6e, Some("int8"), 0.1),
            result("v6e-8-large", v6e, None, 0.2),
        ]);
        let named =
            |group: &CaseGroup| (group.name(), group.rows.iter().map(|row| row.label.clone()).collect::<Vec<_>>());
        let named: Vec<(String, Vec<String>)> = groups.iter().map(named).collect();
        let expected = [
            ("tpu:v6e:2x4, 768x512x121", vec!["v6e-8-large", "v6e-8"]),
            ("tpu:v5e:4x4, 768x512x121", vec!["v5e-16"]),
            ("tpu:v6e:2x4, int8, 768x512x121", vec!["v6e-8-int8"]),
        ];
        assert_eq!(
            named,
            expected.map(|(name, rows)| (name.to_string(), rows.into_iter().map(String::from).collect()))
        );
    }
}
