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

impl Params {
    pub(super) fn numbered(&self, name: &str, number: Number) -> Params {
        let mut below = self.pp(name);
        below.layer = Some(Layer { at: below.prefix.len(), number });
        below.pp("*")
    }

    /// Runs `body(layer prefix, layer index, carried)` for `count` identical layers `name.0`, `name.1` … in order.
    pub fn each_layer(
        &self,
        name: &str,
        count: usize,
        init: &[Value],
        body: impl Fn(&Params, &Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let b = self.builder();
        if self.lowering().unroll_layers {
            return (0..count).fold(init.to_vec(), |carried, l| {
                body(&self.numbered(name, Number::Fixed(l)), &b.scalar(l as f64, DType::I32), &carried)
            });
        }
        self.loop_over_layers(name, 0..count, count, init, body)
    }

    /// Like [`Self::each_layer`], but in quantized runs, the weights of the layers for which `narrow` returns true have
    /// 8 bits. If the run rotates weights, the weights of all layers have 8 bits. Consecutive layers with the same
    /// weight types share a loop.
    pub fn each_layer_quantized(
        &self,
        name: &str,
        count: usize,
        narrow: impl Fn(usize) -> bool,
        init: &[Value],
        body: impl Fn(&Params, &Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let place = self.rotating();
        let body = |p: &Params, i: &Value, carried: &[Value]| body(&p.quantized(&narrow), i, carried);
        let is_same = self.quantization == Quantization::None || self.quantization.is_rotated();
        if self.lowering().unroll_layers || is_same {
            return place.each_layer(name, count, init, body);
        }
        let starts: Vec<usize> = (0..count).filter(|&l| l == 0 || narrow(l) != narrow(l - 1)).collect();
        let ends = starts.iter().skip(1).copied().chain([count]);
        starts.iter().zip(ends).fold(init.to_vec(), |carried, (&start, end)| {
            self.loop_over_layers(name, start..end, count, &carried, body)
        })
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
        let label = (layers.len() < count).then(|| format!("{}-{}", layers.start, layers.end - 1).into());
        self.builder().repeat(layers.len(), init, |index, carried| {
            let of_all = if layers.start == 0 { index.clone() } else { index + layers.start as f64 };
            let layers = layers.clone().collect();
            let number = Number::Counted { layers, label: label.clone(), index: index.clone(), of_all: of_all.clone() };
            body(&self.numbered(name, number), &of_all, carried)
        })
    }

    /// Runs `body(layer prefix)` for each of `count` layers and returns the resulting tensors, either stacked over all
    /// layers or as one tensor per layer. `tensors` describes the results of `body`. Weights have 8 bits as in
    /// [`Self::each_layer_quantized`].
    pub fn per_layer(
        &self,
        name: &str,
        count: usize,
        narrow: impl Fn(usize) -> bool,
        tensors: &[LayerTensor],
        body: impl Fn(&Params) -> Vec<Value>,
    ) -> Vec<PerLayer> {
        if self.lowering().unroll_layers {
            let all = self.rotating();
            let place = |l: usize| all.numbered(name, Number::Fixed(l)).quantized(&narrow);
            let each: Vec<_> = (0..count).map(|l| body(&place(l))).collect();
            let of = |t: usize| each.iter().filter_map(|layer| layer.get(t).cloned()).collect();
            return (0..tensors.len()).map(|t| PerLayer::Each(of(t))).collect();
        }
        let empty = tensors.iter().map(|t| {
            let (ty, axes) = t.stack(count);
            self.place(&t.name, &self.builder().full(0.0, ty), &axes)
        });
        let filled = self.each_layer_quantized(name, count, narrow, &empty.collect::<Vec<_>>(), |p, i, stacks| {
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
