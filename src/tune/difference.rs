//! Compares the collectives and the memory of two compiled programs.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::compile_report::CompileReport;

/// Difference between the collectives of two programs, of one kind and on one tensor (or in one name scope).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct CollectiveDelta {
    pub(crate) kind: String,
    /// Tensor, or the name scope if the tensor is unknown.
    pub(crate) what: String,
    pub(crate) runs: f64,
    pub(crate) bytes: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Difference {
    /// Collectives that produce fewer bytes per step after the change, largest difference first.
    #[serde(rename = "lost")]
    pub(crate) decreased: Vec<CollectiveDelta>,
    /// Collectives that produce more bytes per step after the change, largest difference first.
    #[serde(rename = "gained")]
    pub(crate) increased: Vec<CollectiveDelta>,
    /// Additional bytes per device with all blocks; negative if the change saves memory.
    pub(crate) memory: i64,
}

/// Returns the runs and bytes of collectives per step, by kind and by tensor or name scope.
fn totals_by_tensor(f: &CompileReport) -> BTreeMap<(&str, &str), (f64, f64)> {
    let mut all = BTreeMap::new();
    for e in &f.collectives.list {
        let what = e.tensor.as_deref().unwrap_or(&e.scope);
        let sum = all.entry((e.kind.name(), what)).or_insert((0.0, 0.0));
        sum.0 += e.runs();
        sum.1 += e.step_bytes();
    }
    all
}

pub(crate) fn difference(a: &CompileReport, b: &CompileReport) -> Difference {
    let (first, second) = (totals_by_tensor(a), totals_by_tensor(b));
    let more = |of: &BTreeMap<_, (f64, f64)>, than: &BTreeMap<_, (f64, f64)>| -> Vec<CollectiveDelta> {
        let mut list: Vec<CollectiveDelta> = of
            .iter()
            .filter_map(|(key, (runs, bytes))| {
                let (other_runs, other) = than.get(key).copied().unwrap_or_default();
                let (kind, what): &(&str, &str) = key;
                let delta = CollectiveDelta {
                    kind: (*kind).into(),
                    what: (*what).into(),
                    runs: runs - other_runs,
                    bytes: bytes - other,
                };
                (delta.bytes > 0.0).then_some(delta)
            })
            .collect();
        list.sort_by(|x, y| y.bytes.total_cmp(&x.bytes));
        list
    };
    Difference {
        decreased: more(&first, &second),
        increased: more(&second, &first),
        memory: b.device_bytes() - a.device_bytes(),
    }
}

impl Difference {
    /// Returns the additional bytes per step of each kind of collective (negative: fewer bytes), largest change first.
    pub(crate) fn by_kind(&self) -> Vec<(String, f64)> {
        let mut kinds: BTreeMap<&str, f64> = BTreeMap::new();
        self.increased.iter().for_each(|m| *kinds.entry(&m.kind).or_default() += m.bytes);
        self.decreased.iter().for_each(|m| *kinds.entry(&m.kind).or_default() -= m.bytes);
        let mut kinds: Vec<(String, f64)> = kinds.into_iter().map(|(k, b)| (k.to_string(), b)).collect();
        kinds.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
        kinds
    }
}
