//! Data of a report page, which the page's script reads as JSON.

use std::collections::HashMap;

use serde::Serialize;

use crate::analysis::{CollectiveKind, Predicted};
use crate::nn::Role;
use crate::tune::agreement::agreement;
use crate::tune::case_result::{CaseGroup, CaseResult, GroupDiagnosis};
use crate::tune::compile_report::{ChipRates, CollectiveEntry, CompileReport, CostUnit, TensorPlacement};
use crate::tune::diagnose::{Diagnosis, MIN_GAIN, Suggestion};

#[derive(Serialize)]
pub(super) struct ReportData<'a> {
    groups: Vec<GroupData<'a>>,
    /// Distinct placements and collectives. Cases refer to them by index, because many cases share them.
    tensors: Vec<PlacementRow<'a>>,
    collectives: Vec<CollectiveRow<'a>>,
}

#[derive(Serialize)]
struct GroupData<'a> {
    name: String,
    chip: Option<&'a ChipRates>,
    agreement: Option<String>,
    diagnosis: Option<DiagnosisData<'a>>,
    cases: Vec<CaseData<'a>>,
}

#[derive(Serialize)]
struct CaseData<'a> {
    label: &'a str,
    own_layout: bool,
    error: Option<&'a str>,
    /// Slowdown of a step relative to the fastest case, as a fraction.
    #[serde(rename = "behind")]
    slowdown: Option<f64>,
    measured_ms: Option<f64>,
    compiled: Option<CompiledMetrics>,
}

/// Metrics of a compiled case. Bytes are per device.
#[derive(Serialize)]
struct CompiledMetrics {
    layers: usize,
    fits: bool,
    /// Milliseconds per step with all blocks.
    predicted_ms: Option<Predicted>,
    /// Bytes of arguments and results with all blocks.
    arguments: i64,
    temporaries: i64,
    capacity: Option<i64>,
    block_bytes: f64,
    block_wire_bytes: f64,
    /// Floating-point operations per step with all blocks.
    flops: f64,
    bytes_accessed: f64,
    compile_seconds: f64,
    tensors: Vec<usize>,
    collectives: Vec<usize>,
}

#[derive(Serialize)]
struct PlacementRow<'a> {
    tensor: &'a str,
    role: Role,
    /// Element type, and dimensions with the mesh axes that shard them.
    sharding: String,
    axes: String,
    bytes: usize,
    rules: String,
}

impl<'a> PlacementRow<'a> {
    fn from_placement(t: &'a TensorPlacement) -> Self {
        let (axes, rules) = (t.axes.join(", "), t.rules.join("; "));
        PlacementRow { tensor: &t.tensor, role: t.role, sharding: t.text(), axes, bytes: t.bytes, rules }
    }
}

/// Equal collectives, summed over all runs of a step with only the compiled blocks.
#[derive(Serialize)]
struct CollectiveRow<'a> {
    kind: CollectiveKind,
    /// Tensor, or the name scope if the tensor is unknown.
    what: &'a str,
    axes: String,
    runs: f64,
    bytes: f64,
    wire_bytes: f64,
    ms: Option<f64>,
    reason: &'a str,
}

impl<'a> CollectiveRow<'a> {
    fn from_entry(e: &'a CollectiveEntry) -> Self {
        CollectiveRow {
            kind: e.kind,
            what: e.tensor.as_deref().unwrap_or(&e.scope),
            axes: e.axes.join(", "),
            runs: e.runs(),
            bytes: e.step_bytes(),
            wire_bytes: e.runs() * e.wire_bytes,
            ms: e.ms.map(|ms| e.runs() * ms),
            reason: &e.reason,
        }
    }
}

/// Diagnosis of one case of a group, or the reason why the diagnosis failed.
#[derive(Serialize)]
struct DiagnosisData<'a> {
    case: &'a str,
    failure: Option<&'a str>,
    #[serde(flatten)]
    found: Option<Changes<'a>>,
}

#[derive(Serialize)]
struct Changes<'a> {
    unit: CostUnit,
    /// Number of transformer blocks that the costs refer to.
    layers: usize,
    min_gain: f64,
    suggestions: Vec<RankedSuggestion<'a>>,
    no_gain: Vec<NoGain<'a>>,
    rejected: Vec<RejectedSuggestion<'a>>,
    not_compiled: &'a [String],
    /// Findings from the cost estimates of shipped layouts.
    shipped: &'a [String],
}

#[derive(Serialize)]
struct RankedSuggestion<'a> {
    /// Cost saved, as a fraction of the step.
    gain: f64,
    #[serde(flatten)]
    suggestion: &'a Suggestion,
}

#[derive(Serialize)]
struct NoGain<'a> {
    change: &'a str,
    gain: f64,
}

#[derive(Serialize)]
struct RejectedSuggestion<'a> {
    change: &'a str,
    reason: &'a str,
}

impl<'a> Changes<'a> {
    fn from_diagnosis(d: &'a Diagnosis) -> Self {
        Changes {
            unit: d.base.cost_unit(),
            layers: d.base.needed.layers,
            min_gain: MIN_GAIN,
            suggestions: d.suggestions.iter().map(|s| RankedSuggestion { gain: s.gain(), suggestion: s }).collect(),
            no_gain: d.no_gain.iter().map(|(change, gain)| NoGain { change, gain: *gain }).collect(),
            rejected: d.rejected.iter().map(|(change, reason)| RejectedSuggestion { change, reason }).collect(),
            not_compiled: &d.not_compiled,
            shipped: d.shipped.as_ref().map_or(&[], |shipped| &shipped.lines),
        }
    }
}

/// Values without duplicates; a value's index never changes.
struct Distinct<T> {
    values: Vec<T>,
    places: HashMap<String, usize>,
}

impl<T: Serialize> Distinct<T> {
    fn new() -> Self {
        Distinct { values: Vec::new(), places: HashMap::new() }
    }

    fn place(&mut self, value: T) -> usize {
        let key = serde_json::to_string(&value).expect("structs of strings and numbers serialize to JSON");
        *self.places.entry(key).or_insert_with(|| {
            self.values.push(value);
            self.values.len() - 1
        })
    }
}

impl<'a> ReportData<'a> {
    pub(super) fn from_groups(groups: &'a [CaseGroup]) -> Self {
        let (mut tensors, mut collectives) = (Distinct::new(), Distinct::new());
        let mut compiled = |f: &'a CompileReport| {
            let (flops, bytes_accessed) = f.work();
            CompiledMetrics {
                layers: f.layers,
                fits: f.fits(),
                predicted_ms: f.all_blocks(),
                arguments: f.needed.bytes,
                temporaries: f.memory.temporaries,
                capacity: f.memory.capacity,
                block_bytes: f.collectives.per_layer_bytes,
                block_wire_bytes: f.collectives.per_layer_wire_bytes,
                flops,
                bytes_accessed,
                compile_seconds: f.compile_seconds,
                tensors: f.tensors.iter().map(|t| tensors.place(PlacementRow::from_placement(t))).collect(),
                collectives: f
                    .collectives
                    .list
                    .iter()
                    .map(|e| collectives.place(CollectiveRow::from_entry(e)))
                    .collect(),
            }
        };
        let mut case = |row: &'a CaseResult, slowdown: Option<f64>| CaseData {
            label: &row.label,
            own_layout: row.uses_default_layout(),
            error: row.error.as_deref(),
            slowdown,
            measured_ms: row.measured.map(|s| s * 1e3),
            compiled: row.report.as_ref().map(&mut compiled),
        };
        let groups = groups.iter().map(|group| GroupData {
            name: group.name(),
            chip: group.rows.iter().find_map(|row| row.report.as_ref()?.chip.as_ref()),
            agreement: agreement(&group.rows).map(|agreement| agreement.text()),
            diagnosis: group.diagnosis.as_ref().map(diagnosis),
            cases: group.rows.iter().zip(group.slowdowns()).map(|(row, slowdown)| case(row, slowdown)).collect(),
        });
        let groups = groups.collect();
        ReportData { groups, tensors: tensors.values, collectives: collectives.values }
    }
}

fn diagnosis(of: &GroupDiagnosis) -> DiagnosisData<'_> {
    let found = of.result.as_ref().ok().map(Changes::from_diagnosis);
    DiagnosisData { case: &of.label, failure: of.result.as_ref().err().map(String::as_str), found }
}
