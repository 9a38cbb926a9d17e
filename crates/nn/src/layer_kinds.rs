//! Loops over layers of several kinds in a periodic pattern: an outer loop over the periods and, for each run of
//! consecutive layers of the same kind, an inner loop. Parameters with the same shape in all layers are stacked in one
//! tensor; parameters specific to a kind are stacked in one tensor per kind.

use std::fmt::Display;
use std::ops::Range;
use std::rc::Rc;

use super::layers::{stack_label, uniform_ranges};
use super::params::{Number, Params};
use ltx2_stablehlo::{DType, Value};

/// The current layer of a loop over layers of several kinds.
pub struct KindLayer<K> {
    /// Kind of the layer, one of the kinds passed to [`Params::each_layer_by_kind`].
    pub kind: K,
    /// Index among all layers.
    pub index: Value,
    /// Prefix of the parameters that have the same shape in all layers.
    pub common: Params,
    /// Prefix of the parameters that are specific to the layer's kind.
    pub own: Params,
}

/// Consecutive layers of the same kind within a period.
struct LayerRun<K> {
    kind: K,
    /// Index, within the period, of the first layer of this run.
    start: usize,
    length: usize,
    /// Number of layers of this kind before this run, within the period.
    before: usize,
    /// Number of layers of this kind in the period.
    all: usize,
}

/// Returns the length of the shortest prefix whose repetition gives the complete list.
fn shortest_period<K: PartialEq>(kinds: &[K]) -> usize {
    let repeats = |n: &usize| kinds.len().is_multiple_of(*n) && kinds[*n..].iter().eq(&kinds[..kinds.len() - n]);
    (1..=kinds.len()).find(repeats).unwrap_or_default()
}

fn runs<K: Copy + PartialEq>(round: &[K]) -> Vec<LayerRun<K>> {
    let count = |part: &[K], kind: K| part.iter().filter(|k| **k == kind).count();
    let mut start = 0;
    let run = |run: &[K]| {
        let (kind, first) = (run[0], start);
        start += run.len();
        LayerRun {
            kind,
            start: first,
            length: run.len(),
            before: count(&round[..first], kind),
            all: count(round, kind),
        }
    };
    round.chunk_by(K::eq).map(run).collect()
}

impl Params {
    /// Runs `body(layer, carried)` for the layers `name.0`, `name.1` …, whose kinds are `kinds`. In the names of
    /// stacked parameters that are specific to a kind, the kind's name replaces the layer number. If weights are
    /// rotated before quantization (int8-convrot), the layers' weights are quantized to 8 bits, and each range of
    /// layers whose weights have the same types has its own loop and stacks.
    pub fn each_layer_by_kind<K: Copy + PartialEq + Display>(
        &self,
        name: &str,
        kinds: &[K],
        init: &[Value],
        body: impl Fn(&KindLayer<K>, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let (b, all) = (self.builder(), self.rotating());
        if self.lowering().unroll_layers {
            return kinds.iter().enumerate().fold(init.to_vec(), |carried, (l, &kind)| {
                let place = all.unrolled(name, l, kinds.len()).quantized(|_| false);
                let index = b.scalar(l as f64, DType::I32);
                body(&KindLayer { kind, index, common: place.clone(), own: place }, &carried)
            });
        }
        uniform_ranges(kinds.len(), |l| self.unquantized_in(name, l))
            .into_iter()
            .fold(init.to_vec(), |carried, layers| all.loop_by_kind(name, kinds, layers, &carried, &body))
    }

    /// Loops over the range `layers` of the layers whose kinds are `kinds`.
    fn loop_by_kind<K: Copy + PartialEq + Display>(
        &self,
        name: &str,
        kinds: &[K],
        layers: Range<usize>,
        init: &[Value],
        body: impl Fn(&KindLayer<K>, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let (b, own) = (self.builder(), &kinds[layers.clone()]);
        let length = shortest_period(own);
        let runs = runs(&own[..length]);
        let round = |number: &Value, carried: &[Value]| {
            runs.iter().fold(carried.to_vec(), |carried, run| {
                let layer = |at: &Value, carried: &[Value]| {
                    let index = number * length as f64 + run.start as f64 + at;
                    let index_in_kind = number * run.all as f64 + run.before as f64 + at;
                    body(&self.kind_layer(name, kinds, layers.clone(), run.kind, &index, &index_in_kind), carried)
                };
                match run.length {
                    1 => layer(&b.scalar(0.0, DType::I32), &carried),
                    several => b.repeat(several, &carried, layer),
                }
            })
        };
        b.repeat(own.len().checked_div(length).unwrap_or_default(), init, round)
    }

    /// Returns a layer of kind `kind` in the range `layers`. `index` is its index in the range, `index_in_kind` its
    /// index among the layers of that kind in the range.
    fn kind_layer<K: Copy + PartialEq + Display>(
        &self,
        name: &str,
        kinds: &[K],
        layers: Range<usize>,
        kind: K,
        index: &Value,
        index_in_kind: &Value,
    ) -> KindLayer<K> {
        let of_all = if layers.start == 0 { index.clone() } else { index + layers.start as f64 };
        let place = |layers: Rc<[usize]>, label: Option<String>, at: &Value| {
            let label = label.map(Into::into);
            let number = Number::Counted { layers, label, index: at.clone(), of_all: of_all.clone() };
            // All layers are in the same loop, so their weights are in the same memory.
            self.numbered(name, number, self.streaming.is_some()).quantized(|_| false)
        };
        let alike = layers.clone().filter(|&l| kinds[l] == kind).collect();
        let label = stack_label(&layers, kinds.len());
        let kind_label = label.iter().fold(kind.to_string(), |kind, label| format!("{kind}.{label}"));
        KindLayer {
            kind,
            index: of_all.clone(),
            common: place(layers.collect(), label, index),
            own: place(alike, Some(kind_label), index_in_kind),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Axis, Build, Init, Lowering, Quantization, affine};
    use ltx2_stablehlo::Type;
    use std::collections::BTreeSet;
    use std::sync::Arc;

    #[test]
    fn shortest_period_and_runs_of_layer_kinds_are_found() {
        for (kinds, length) in [("sssfsssf", 4), ("ssfs", 4), ("ssss", 1), ("sfsf", 2), ("s", 1), ("", 0), ("sssff", 5)]
        {
            assert_eq!(shortest_period(kinds.as_bytes()), length, "{kinds}");
        }
        let of = |kinds: &str| -> Vec<[usize; 4]> {
            runs(kinds.as_bytes()).iter().map(|r| [r.start, r.length, r.before, r.all]).collect()
        };
        assert_eq!(of("ssfsf"), [[0, 2, 0, 3], [2, 1, 0, 2], [3, 1, 2, 3], [4, 1, 1, 2]]);
    }

    /// Returns the name, the shape and the checkpoint tensors of each parameter that a loop over eight layers declares.
    fn declared(lowering: Lowering) -> Vec<(String, Vec<usize>, Vec<String>)> {
        let p = Params::new("kinds", "text_encoder", &Build { lowering, ..Build::new(DType::F32) });
        let x = p.builder().argument("x", Type::new(DType::F32, [4]));
        let kinds: Vec<char> = "ssfsssfs".chars().collect();
        let y = p.each_layer_by_kind("layers", &kinds, &[x], |layer, x| {
            let get = |p: &Params, width| p.get("w", &[width], &[Axis::Replicated], Init::normal(1.0));
            let own = get(&layer.own.pp("own"), if layer.kind == 's' { 4 } else { 8 }).slice(0, 0, 4);
            vec![&x[0] + get(&layer.common, 4) + own]
        });
        p.builder().finish(&[("y", &y[0])]).expect("builds");
        p.declared().iter().map(|p| (p.name.clone(), p.ty.dims.clone(), p.source.names())).collect()
    }

    #[test]
    fn ranges_with_equal_weight_types_have_their_own_stacks() {
        let quantization = Quantization::Int8 { activations: false, rotated: true };
        let unquantized = Arc::new(BTreeSet::from(["layers.2.w".to_string()]));
        let p = Params::new("kinds", "text_encoder", &Build { quantization, unquantized, ..Build::new(DType::F32) });
        let x = p.builder().argument("x", Type::new(DType::F32, [1, 256]));
        let y = p.each_layer_by_kind("layers", &['s', 'f', 's', 'f'], &[x], |layer, x| {
            let get = |p: &Params, x: &Value| {
                let weight = p.weight(&["w"], &[256, 256], &[Axis::Replicated; 2]);
                affine(p, x, &weight, None, &[Axis::Replicated])
            };
            vec![get(&layer.own.pp("own"), &get(&layer.common, &x[0]))]
        });
        p.builder().finish(&[("y", &y[0])]).expect("builds");
        let all = p.declared();
        let weights = all.iter().filter(|p| p.name.ends_with(".w"));
        let found: Vec<_> = weights.map(|p| (p.name.as_str(), p.ty.dtype, p.source.names().join(" "))).collect();
        let want = |label: &'static str, dtype, names: &str| (label, dtype, names.to_string());
        assert_eq!(
            found,
            [
                want("text_encoder.layers.0-1.w", DType::I8, "layers.0.w layers.1.w"),
                want("text_encoder.layers.s.0-1.own.w", DType::I8, "layers.0.own.w"),
                want("text_encoder.layers.f.0-1.own.w", DType::I8, "layers.1.own.w"),
                want("text_encoder.layers.2-2.w", DType::F32, "layers.2.w"),
                want("text_encoder.layers.s.2-2.own.w", DType::I8, "layers.2.own.w"),
                want("text_encoder.layers.3-3.w", DType::I8, "layers.3.w"),
                want("text_encoder.layers.f.3-3.own.w", DType::I8, "layers.3.own.w"),
            ]
        );
    }

    #[test]
    fn kind_specific_tensors_are_stacked_per_kind() {
        let key = |l: &usize| format!("layers.{l}.own.w");
        let all: Vec<String> = (0..8).map(|l| format!("layers.{l}.w")).collect();
        let own = |kind: &str| format!("text_encoder.layers.{kind}.own.w");
        let want = [
            (own("s"), vec![6, 4], [0, 1, 3, 4, 5, 7].iter().map(key).collect()),
            ("text_encoder.layers.*.w".to_string(), vec![8, 4], all),
            (own("f"), vec![2, 8], [2, 6].iter().map(key).collect()),
        ];
        assert_eq!(declared(Lowering::default()), want);
        let unrolled = declared(Lowering { unroll_layers: true, ..Lowering::default() });
        assert_eq!(unrolled.len(), 16);
        assert!(unrolled.iter().any(|(name, dims, _)| *name == own("6") && *dims == [8]));
    }
}
