//! Loops over identical layers. Depending on the platform, the parameters of all layers are stacked and the program
//! contains a loop, or the loop is unrolled.

use std::ops::Range;

use super::build::Quantization;
use super::layout::Axis;
use super::params::{Layer, Number, Params};
use ltx2_stablehlo::{DType, ProgramOutput, Type, Value};

/// A tensor that every layer has.
#[derive(Clone)]
pub enum PerLayer {
    /// All layers in one tensor with a leading layer dimension.
    Stack(Value),
    /// One tensor per layer, when the loop is unrolled.
    Each(Vec<Value>),
}

impl PerLayer {
    /// Returns the shape of one layer's tensor.
    pub(crate) fn dims(&self) -> &[usize] {
        match self {
            PerLayer::Stack(x) => &x.dims()[1..],
            PerLayer::Each(all) => all.first().map_or(&[], Value::dims),
        }
    }
}

/// Name, type and axes of a tensor that every layer has.
#[derive(Clone)]
pub struct LayerTensor {
    /// Name without the layer number.
    pub name: String,
    /// Type of one layer's tensor.
    pub ty: Type,
    /// Logical axes of one layer's tensor.
    pub axes: Vec<Axis>,
}

impl LayerTensor {
    /// Returns type and axes of the stacked tensor.
    fn stack(&self, layers: usize) -> (Type, Vec<Axis>) {
        (Type::new(self.ty.dtype, [&[layers], &self.ty.dims[..]].concat()), [&[Axis::Layers], &self.axes[..]].concat())
    }

    fn layer_name(&self, layer: usize) -> String {
        format!("{}.{layer}", self.name)
    }
}

/// Splits the layers `0..count` into ranges of consecutive layers for which `kind` returns the same value.
pub(super) fn uniform_ranges<K: PartialEq>(count: usize, kind: impl Fn(usize) -> K) -> Vec<Range<usize>> {
    let starts: Vec<usize> = (0..count).filter(|&l| l == 0 || kind(l) != kind(l - 1)).collect();
    let ends = starts.iter().skip(1).copied().chain([count]);
    starts.iter().zip(ends).map(|(&start, end)| start..end).collect()
}

/// Returns a label that distinguishes the stacks of a range of layers by name; `None` if the range contains all `count`
/// layers.
pub(super) fn stack_label(layers: &Range<usize>, count: usize) -> Option<String> {
    (layers.len() < count).then(|| format!("{}-{}", layers.start, layers.end - 1))
}

impl Params {
    pub(super) fn numbered(&self, name: &str, number: Number, is_streamed: bool) -> Params {
        let mut below = self.pp(name);
        below.layer = Some(Layer { at: below.prefix.len(), number, is_streamed });
        below.pp("*")
    }

    /// Returns the prefix of layer `number` of `count` unrolled layers.
    pub(super) fn unrolled(&self, name: &str, number: usize, count: usize) -> Params {
        self.numbered(name, Number::Fixed(number), self.is_streamed(number, count))
    }

    /// Returns whether the large weights of a layer are in host memory. In an unrolled loop, the layers with weights in
    /// host memory are spread evenly, so that each copy overlaps with the computation of several layers. Otherwise they
    /// are the last layers, so that a single loop runs them.
    pub(super) fn is_streamed(&self, layer: usize, count: usize) -> bool {
        let Some(streaming) = self.streaming else { return false };
        let resident = if self.is_of(streaming.component) { streaming.resident.min(count) } else { 0 };
        let streamed = |layers: usize| layers * (count - resident) / count;
        match self.lowering().unroll_layers {
            true => streamed(layer + 1) > streamed(layer),
            false => layer >= resident,
        }
    }

    /// Runs `body(layer prefix, layer index, carried)` for `count` identical layers `name.0`, `name.1` … in order.
    pub fn each_layer(
        &self,
        name: &str,
        count: usize,
        init: &[Value],
        body: impl Fn(&Params, &Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        self.loops_over_layers(name, count, |_| false, init, body)
    }

    /// Runs `body` like [`Self::each_layer`], but in quantized runs, the weights of the layers for which `quantizes`
    /// returns true are quantized to 8 bits. If weights are rotated before quantization (int8-convrot), the weights of
    /// all layers are quantized. Consecutive layers with the same weight types share a loop.
    pub fn each_layer_quantized(
        &self,
        name: &str,
        count: usize,
        quantizes: impl Fn(usize) -> bool,
        init: &[Value],
        body: impl Fn(&Params, &Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let place = self.rotating();
        let body = |p: &Params, i: &Value, carried: &[Value]| body(&p.quantized(&quantizes), i, carried);
        let is_same = self.quantization == Quantization::None || self.quantization.is_convrot();
        place.loops_over_layers(name, count, |l| !is_same && quantizes(l), init, body)
    }

    /// Runs `body` for each layer: unrolled, or in one loop for each range of layers whose weights have the same types
    /// and memory.
    fn loops_over_layers(
        &self,
        name: &str,
        count: usize,
        quantizes: impl Fn(usize) -> bool,
        init: &[Value],
        body: impl Fn(&Params, &Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        if self.lowering().unroll_layers {
            return (0..count).fold(init.to_vec(), |carried, l| {
                body(&self.unrolled(name, l, count), &self.builder().scalar(l as f64, DType::I32), &carried)
            });
        }
        let kind = |l: usize| (quantizes(l), self.is_streamed(l, count), self.unquantized_in(name, l));
        uniform_ranges(count, kind)
            .into_iter()
            .fold(init.to_vec(), |carried, layers| self.loop_over_layers(name, layers, count, &carried, &body))
    }

    /// Returns the names, relative to the layer, of the layer's weights that are exempt from quantization. Only layers
    /// for which these names are equal can share a stack.
    pub(super) fn unquantized_in(&self, name: &str, layer: usize) -> Vec<&str> {
        let prefix = self.key(&format!("{name}.{layer}."));
        self.unquantized.iter().filter_map(|key| key.strip_prefix(&prefix)).collect()
    }

    /// Loops over the range `layers` of the `count` layers.
    fn loop_over_layers(
        &self,
        name: &str,
        layers: Range<usize>,
        count: usize,
        init: &[Value],
        body: impl Fn(&Params, &Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let is_streamed = self.is_streamed(layers.start, count);
        let label = stack_label(&layers, count).map(Into::into);
        self.builder().repeat(layers.len(), init, |index, carried| {
            let of_all = if layers.start == 0 { index.clone() } else { index + layers.start as f64 };
            let layers = layers.clone().collect();
            let number = Number::Counted { layers, label: label.clone(), index: index.clone(), of_all: of_all.clone() };
            body(&self.numbered(name, number, is_streamed), &of_all, carried)
        })
    }

    /// Runs `body(layer prefix)` for each of `count` layers and returns the resulting tensors, either stacked over all
    /// layers or as one tensor per layer. `tensors` describes the results of `body`. Weights have 8 bits as in
    /// [`Self::each_layer_quantized`].
    pub fn per_layer(
        &self,
        name: &str,
        count: usize,
        quantizes: impl Fn(usize) -> bool,
        tensors: &[LayerTensor],
        body: impl Fn(&Params) -> Vec<Value>,
    ) -> Vec<PerLayer> {
        if self.lowering().unroll_layers {
            let all = self.rotating();
            let place = |l: usize| all.unrolled(name, l, count).quantized(&quantizes);
            let each: Vec<_> = (0..count).map(|l| body(&place(l))).collect();
            let of = |t: usize| each.iter().filter_map(|layer| layer.get(t).cloned()).collect();
            return (0..tensors.len()).map(|t| PerLayer::Each(of(t))).collect();
        }
        let empty = tensors.iter().map(|t| {
            let (ty, axes) = t.stack(count);
            self.place(&t.name, &self.builder().full(0.0, ty), &axes)
        });
        let filled = self.each_layer_quantized(name, count, quantizes, &empty.collect::<Vec<_>>(), |p, i, stacks| {
            body(p).iter().zip(stacks).map(|(x, stack)| stack.dynamic_update(0, i, &x.unsqueeze(0))).collect()
        });
        filled.into_iter().map(PerLayer::Stack).collect()
    }

    /// Returns the element of `tensors` for the layer that this prefix belongs to.
    pub fn of_layer(&self, tensors: &PerLayer) -> Value {
        match (tensors, self.layer.as_ref().map(|l| &l.number)) {
            (PerLayer::Stack(stack), Some(Number::Counted { of_all, .. })) => stack.index(of_all),
            (PerLayer::Each(each), Some(Number::Fixed(l))) if *l < each.len() => each[*l].clone(),
            _ => {
                self.builder().reject("layers", "a per-layer tensor is read outside of its layer loop".into());
                self.builder().scalar(0.0, self.dtype())
            }
        }
    }

    /// Returns the number of the layer that this prefix belongs to if the loop over layers is unrolled. `None`: the
    /// number is known only when the program runs.
    pub fn fixed_layer(&self) -> Option<usize> {
        match self.layer.as_ref().map(|l| &l.number) {
            Some(Number::Fixed(number)) => Some(*number),
            _ => None,
        }
    }

    /// Declares a program input for a tensor of `count` layers: `name` if stacked, otherwise `name.0`, `name.1` ….
    pub(crate) fn layer_inputs(&self, t: &LayerTensor, count: usize) -> PerLayer {
        if self.lowering().unroll_layers {
            return PerLayer::Each((0..count).map(|l| self.input(&t.layer_name(l), t.ty.clone(), &t.axes)).collect());
        }
        let (ty, axes) = t.stack(count);
        PerLayer::Stack(self.input(&t.name, ty, &axes))
    }

    /// Returns program outputs for `tensors`. Another program can take them as its `layer_inputs` for the same
    /// `LayerTensor`.
    pub fn layer_outputs(&self, t: &LayerTensor, tensors: &PerLayer) -> Vec<(ProgramOutput, Value)> {
        match tensors {
            PerLayer::Stack(x) => vec![self.output(&t.name, x, &t.stack(x.dim(0)).1, x.dims())],
            PerLayer::Each(all) => {
                all.iter().enumerate().map(|(l, x)| self.output(&t.layer_name(l), x, &t.axes, x.dims())).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Build, Init, Lowering, Streaming};
    use ltx2_stablehlo::MemorySpace;

    /// Returns, for each weight that a loop over four layers declares, its name and whether it is in host memory.
    fn streamed(component: &'static str, resident: usize, unroll_layers: bool) -> Vec<(String, bool)> {
        let streaming = Some(Streaming { component: "transformer", resident, min_bytes: 64 });
        let lowering = Lowering { unroll_layers, ..Lowering::default() };
        let p = Params::new("layers", component, &Build { lowering, streaming, ..Build::new(DType::F32) });
        let x = p.builder().argument("x", Type::new(DType::F32, [16]));
        let y = p.each_layer("blocks", 4, &[x], |p, _, x| {
            let get = |name, width| p.get(name, &[width], &[Axis::Replicated], Init::normal(1.0));
            let small = get("small", 8);
            vec![&x[0] + get("large", 16) + p.builder().concat(&[&small, &small], 0)]
        });
        let program = p.builder().finish(&[("y", &y[0])]).expect("builds");
        let arguments = program.arguments.iter().skip(1);
        let all = arguments.map(|a| (a.name.clone(), a.memory == MemorySpace::PinnedHost));
        all.filter(|(name, in_host)| {
            assert!(!in_host || name.ends_with("large"), "{name}");
            name.ends_with("large")
        })
        .collect()
    }

    #[test]
    fn streamed_layers_are_spread_evenly_over_an_unrolled_loop() {
        let numbers = |component, resident| {
            let all = streamed(component, resident, true);
            (0..4).filter(|l| all.contains(&(format!("{component}.blocks.{l}.large"), true))).collect::<Vec<_>>()
        };
        assert_eq!(numbers("transformer", 0), [0, 1, 2, 3]);
        assert_eq!(numbers("transformer", 2), [1, 3]);
        assert_eq!(numbers("transformer", 3), [3]);
        assert_eq!(numbers("transformer", 9), Vec::<usize>::new());
        assert_eq!(numbers("text_encoder", 3), [0, 1, 2, 3]);
    }

    #[test]
    fn stacked_layers_in_host_memory_use_a_separate_loop() {
        let stack = |name: &str, in_host| (format!("transformer.blocks.{name}.large"), in_host);
        assert_eq!(streamed("transformer", 1, false), [stack("0-0", false), stack("1-3", true)]);
        assert_eq!(streamed("transformer", 0, false), [stack("*", true)]);
    }
}
