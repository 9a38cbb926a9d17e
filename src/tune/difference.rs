//! What changed between two compiled programs.

use std::collections::BTreeMap;

use serde::Serialize;

use super::compile_report::CompileReport;

/// Exchanges of one kind for one tensor or place.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CollectiveDelta {
    /// XLA's name.
    pub kind: String,
    /// The tensor, or where none is known the place.
    pub what: String,
    /// More runs in a step than in the other program.
    pub runs: f64,
    /// More bytes in a step.
    pub bytes: f64,
}

/// From one program to another.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Difference {
    /// Exchanges that only the first has, or of which it moves more; the largest first.
    pub lost: Vec<CollectiveDelta>,
    /// Exchanges that only the second has, or of which it moves more.
    pub gained: Vec<CollectiveDelta>,
    /// Arguments and results with all blocks, and temporaries: bytes a device.
    pub memory: i64,
}

/// Exchanges in a step, by kind and tensor or place.
fn moved(f: &CompileReport) -> BTreeMap<(&str, &str), (f64, f64)> {
    let mut all = BTreeMap::new();
    for e in &f.collectives.list {
        let what = e.tensor.as_deref().unwrap_or(&e.scope);
        let sum = all.entry((e.kind.as_str(), what)).or_insert((0.0, 0.0));
        sum.0 += e.runs();
        sum.1 += e.step_bytes();
    }
    all
}

/// What the second program does otherwise than the first.
pub fn difference(a: &CompileReport, b: &CompileReport) -> Difference {
    let (first, second) = (moved(a), moved(b));
    let more = |of: &BTreeMap<_, (f64, f64)>, than: &BTreeMap<_, (f64, f64)>| -> Vec<CollectiveDelta> {
        let mut list: Vec<CollectiveDelta> = of
            .iter()
            .filter_map(|(key, (runs, bytes))| {
                let (other_runs, other) = than.get(key).copied().unwrap_or_default();
                let (kind, what): &(&str, &str) = key;
                let moved = CollectiveDelta {
                    kind: (*kind).into(),
                    what: (*what).into(),
                    runs: runs - other_runs,
                    bytes: bytes - other,
                };
                (moved.bytes > 0.0).then_some(moved)
            })
            .collect();
        list.sort_by(|x, y| y.bytes.total_cmp(&x.bytes));
        list
    };
    let held = |f: &CompileReport| f.needed.bytes + f.memory.temporaries;
    Difference { lost: more(&first, &second), gained: more(&second, &first), memory: held(b) - held(a) }
}

impl Difference {
    /// Bytes that a step moves more (or, below 0, less) by kind of exchange; the largest first.
    pub fn by_kind(&self) -> Vec<(String, f64)> {
        let mut kinds: BTreeMap<&str, f64> = BTreeMap::new();
        self.gained.iter().for_each(|m| *kinds.entry(&m.kind).or_default() += m.bytes);
        self.lost.iter().for_each(|m| *kinds.entry(&m.kind).or_default() -= m.bytes);
        let mut kinds: Vec<(String, f64)> = kinds.into_iter().map(|(k, b)| (k.to_string(), b)).collect();
        kinds.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
        kinds
    }
}
