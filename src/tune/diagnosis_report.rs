//! The diagnosis report, written by `why --json`. The report's keys are declared only here; `ltx2 schema --of why`
//! prints its JSON Schema.

use std::sync::OnceLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::compile_report::CollectiveEntry;
use super::diagnose::{Diagnosis, ShippedLayouts, Suggestion};
use crate::analysis::Predicted;

/// Version of the report format; incremented when a key is renamed, removed or changes its meaning.
const VERSION: u32 = 2;

/// Collectives of a program with their reasons, and the layout changes that were tried.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DiagnosisReport {
    /// Version of the report format.
    version: u32,
    /// Devices that the program is compiled for.
    target: String,
    layout: String,
    /// Number of transformer blocks that were compiled.
    layers: usize,
    /// Total output bytes of one block's collectives.
    per_layer_bytes: f64,
    /// Predicted milliseconds per step with only the compiled blocks; null if the chip is unknown.
    predicted_ms: Option<Predicted>,
    /// Predicted milliseconds per step with all blocks of the model, as in the text output and in `advice`; null if the
    /// chip is unknown.
    predicted_all_ms: Option<Predicted>,
    /// Collectives of the unchanged program.
    collectives: Vec<Numbered>,
    /// Compiled changes that make the step faster, in descending order of the time saved.
    advice: Vec<Suggestion>,
    /// Compiled changes that save less than the minimum, each with the saved fraction of the step (negative: slower).
    no_gain: Vec<(String, f64)>,
    /// Changes that are invalid, fail to compile or do not fit into device memory, each with the reason.
    refused: Vec<(String, String)>,
    /// Changes that were not compiled because the number of compilations reached `--budget`.
    not_compiled: Vec<String>,
    /// Cost estimates of the layout and of shipped layouts on the same devices; null if the layout cannot be estimated.
    shipped: Option<ShippedLayouts>,
}

/// A collective with its number in the table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
struct Numbered {
    /// Number from 1, as passed to `--collective`.
    number: usize,
    #[serde(flatten)]
    collective: CollectiveEntry,
}

/// Returns the JSON Schema of [`DiagnosisReport`].
pub fn diagnosis_schema() -> &'static Value {
    static SCHEMA: OnceLock<Value> = OnceLock::new();
    SCHEMA.get_or_init(|| schemars::schema_for!(DiagnosisReport).to_value())
}

impl From<Diagnosis> for DiagnosisReport {
    fn from(diagnosis: Diagnosis) -> Self {
        let base = diagnosis.base;
        let predicted_all_ms = base.all_blocks();
        let numbered = (1..).zip(base.collectives.list);
        DiagnosisReport {
            version: VERSION,
            target: base.target,
            layout: base.layout,
            layers: base.layers,
            per_layer_bytes: base.collectives.per_layer_bytes,
            predicted_ms: base.predicted_ms,
            predicted_all_ms,
            collectives: numbered.map(|(number, collective)| Numbered { number, collective }).collect(),
            advice: diagnosis.suggestions,
            no_gain: diagnosis.no_gain,
            refused: diagnosis.rejected,
            not_compiled: diagnosis.not_compiled,
            shipped: diagnosis.shipped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tune::compile_report::tests::{gather, report};
    use crate::tune::diagnose::{EstimatedLayout, TradeOff};
    use crate::tune::difference::{CollectiveDelta, Difference};

    #[test]
    fn diagnosis_report_round_trips_and_rejects_unknown_fields() {
        let mut base = report("cpu:2");
        base.collectives.list = vec![gather("blocks/ff", None, 0.5), gather("blocks/attn1", None, 0.25)];
        let decreased =
            vec![CollectiveDelta { kind: "all-gather".into(), what: "blocks/ff".into(), runs: 1.0, bytes: 1.0 }];
        let of = |layout: &str, estimate| EstimatedLayout {
            layout: layout.into(),
            mesh: "context=2".into(),
            rules: vec!["rules: mlp: [tensor]".into()],
            estimate,
        };
        let suggestion = Suggestion {
            change: "drop a rule".into(),
            trade_off: TradeOff::OtherCollectives,
            families: 1,
            cost: [2.0, 1.0],
            block_bytes: [2.0, 1.0],
            difference: Difference { decreased, increased: Vec::new(), memory: -1 },
            collectives: vec![1],
            layout: "rules: {}".into(),
        };
        let one = DiagnosisReport::from(Diagnosis {
            base,
            suggestions: vec![suggestion],
            no_gain: vec![("another".into(), 0.0)],
            rejected: vec![("a third".into(), "does not fit".into())],
            not_compiled: vec!["a fourth".into()],
            shipped: Some(ShippedLayouts {
                estimate: 4.0,
                fastest: of("ulysses", 1.0),
                additions: vec![of("ring", 2.0)],
                lines: vec!["a line".into()],
            }),
        });
        let text = serde_json::to_string(&one).unwrap();
        assert_eq!(serde_json::from_str::<DiagnosisReport>(&text).unwrap(), one);
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (&value["collectives"][1]["number"], &value["advice"][0]["price"]),
            (&2.into(), &"exchanges".into())
        );
        let written: Vec<&String> = value.as_object().unwrap().keys().collect();
        let declared: Vec<&String> = diagnosis_schema()["properties"].as_object().unwrap().keys().collect();
        assert_eq!(written, declared);
        let other = text.replacen("\"refused\"", "\"rejected\"", 1);
        let error = serde_json::from_str::<DiagnosisReport>(&other).unwrap_err().to_string();
        assert!(error.contains("unknown field `rejected`"), "{error}");
    }
}
