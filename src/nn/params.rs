//! Parameters: declared once, where the network uses them.
//!
//! Building a program declares its parameters: [`Params::get`] names a checkpoint tensor with shape and logical axes,
//! adds it to the list, and gives its value in the program. Inside a loop over layers ([`Params::each_layer`]) the same
//! call declares the stack of all layers' tensors and gives the current layer's slice, or each layer's own tensor where
//! the platform unrolls the loop. Loading, random initialisation, placement, counts and memory estimates all read
//! that list.

use std::ops::Deref;
use std::rc::Rc;

use super::build::{Build, Quantization};
use super::context::Context;
use super::layout::{Axis, LayoutError, Placed};
use super::param::{Init, Param, Role, Source};
use crate::hlo::{Argument, Output, Scope, Sharding, Type, Value};

/// The layer of a loop over equal layers that a place in the tree of names belongs to; `*` stands for its number in the
/// prefix.
#[derive(Clone)]
pub(super) struct Layer {
    /// Length of the part of the prefix before the number.
    pub(crate) at: usize,
    pub(crate) number: Number,
}

#[derive(Clone)]
pub(super) enum Number {
    /// One layer of an unrolled loop: its parameters are arguments of their own.
    Fixed(usize),
    /// The current layer of a loop: its parameters are slices of a stack over some of all layers.
    Counted {
        /// The layers of the stack, in order.
        layers: Rc<[usize]>,
        /// Name of the stack among several; none if it is of all layers.
        label: Option<Rc<str>>,
        /// Its place in the stack, and among all layers.
        index: Value,
        of_all: Value,
    },
}

/// Equal parts of a tensor that is read with permuted axes, the parts first, and which of them.
pub struct PartView<'a> {
    /// Shape of the tensor in the checkpoint.
    pub(crate) stored: &'a [usize],
    /// Strides of the parts' axes and the number of the part, in elements of the stored tensor.
    pub(crate) strides: &'a [usize],
    pub(crate) parts: usize,
    /// Index of the part, a value of the program.
    pub(crate) index: &'a Value,
}

/// A place in a network's tree of names, in a program under construction.
#[derive(Clone)]
pub struct Params {
    context: Rc<Context>,
    component: &'static str,
    pub(super) prefix: String,
    pub(super) layer: Option<Layer>,
    /// Whether the weights of linear maps have 8 bits here.
    is_quantized: bool,
}

impl Deref for Params {
    type Target = Context;

    fn deref(&self) -> &Context {
        &self.context
    }
}

impl Params {
    /// The root of a program's parameters.
    pub fn new(program: &str, component: &'static str, build: &Build) -> Self {
        let context = Rc::new(Context::new(program, build));
        Params { context, component, prefix: String::new(), layer: None, is_quantized: false }
    }

    /// The same program's parameters of another component.
    pub(crate) fn of(&self, component: &'static str) -> Self {
        Params { component, prefix: String::new(), layer: None, is_quantized: false, ..self.clone() }
    }

    /// The same place in a layer, where the weights of linear maps have 8 bits if the run asks for them and
    /// `narrow(layer)` holds. Those of a loop are alike.
    pub(crate) fn quantized(&self, narrow: impl Fn(usize) -> bool) -> Self {
        let first = match self.layer.as_ref().map(|l| &l.number) {
            Some(Number::Fixed(l)) => Some(*l),
            Some(Number::Counted { layers, .. }) => layers.first().copied(),
            None => None,
        };
        let is_quantized = self.context.quantization != Quantization::None && first.is_some_and(narrow);
        Params { is_quantized, ..self.clone() }
    }

    /// The same place, where weights have the run's element type.
    pub(crate) fn plain(&self) -> Self {
        Params { is_quantized: false, ..self.clone() }
    }

    /// Whether the weights of linear maps have 8 bits here.
    pub(crate) fn is_quantized(&self) -> bool {
        self.is_quantized
    }

    /// One level down the tree of names.
    pub fn pp(&self, name: impl std::fmt::Display) -> Self {
        let prefix = if self.prefix.is_empty() { name.to_string() } else { format!("{}.{name}", self.prefix) };
        Params { prefix, ..self.clone() }
    }

    pub(super) fn key(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_string() } else { format!("{}.{name}", self.prefix) }
    }

    /// The checkpoint names of `key`: one, or one for every layer of a stack.
    fn keys(&self, key: &str) -> Vec<String> {
        let layer = |at: usize, number: usize| format!("{}.{number}{}", &key[..at], &key[at + 2..]);
        match &self.layer {
            Some(Layer { at, number: Number::Counted { layers, .. } }) => {
                layers.iter().map(|l| layer(*at, *l)).collect()
            }
            Some(Layer { at, number: Number::Fixed(l) }) => vec![layer(*at, *l)],
            None => vec![key.to_string()],
        }
    }

    pub(crate) fn get(&self, name: &str, shape: &[usize], axes: &[Axis], init: Init) -> Value {
        self.get_as(name, shape, shape, axes, init)
    }

    /// One tensor of the checkpoint, seen under another shape of as many elements.
    pub(crate) fn get_as(&self, name: &str, stored: &[usize], shape: &[usize], axes: &[Axis], init: Init) -> Value {
        let key = self.key(name);
        let source = Source::Stack { keys: self.keys(&key), shape: stored.to_vec() };
        self.declare(key, source, self.of_shape(shape), axes, init)
    }

    fn of_shape(&self, shape: &[usize]) -> Type {
        Type::new(self.dtype(), shape)
    }

    /// The checkpoint names of tensors that lie together: layer by layer.
    pub(super) fn keys_of(&self, names: &[&str]) -> Vec<String> {
        let each: Vec<Vec<String>> = names.iter().map(|n| self.keys(&self.key(n))).collect();
        let layers = each.first().map_or(0, Vec::len);
        (0..layers).flat_map(|l| each.iter().map(move |k| k[l].clone())).collect()
    }

    /// Several tensors of one shape under one name, stacked along a new leading dimension.
    pub(crate) fn fused(&self, names: &[&str], shape: &[usize], stored: &[usize], axes: &[Axis], init: Init) -> Value {
        let source = Source::Stack { keys: self.keys_of(names), shape: stored.to_vec() };
        let shape: Vec<usize> = std::iter::once(names.len()).chain(shape.iter().copied()).collect();
        let axes: Vec<Axis> = std::iter::once(Axis::Replicated).chain(axes.iter().copied()).collect();
        self.declare(self.key(&names.join("+")), source, self.of_shape(&shape), &axes, init)
    }

    /// One part of a tensor, of `shape`.
    pub(crate) fn part(&self, name: &str, view: PartView, shape: &[usize], axes: &[Axis], init: Init) -> Value {
        let key = self.key(name);
        let source = Source::View { key: key.clone(), shape: view.stored.to_vec(), strides: view.strides.to_vec() };
        let number = Number::Counted {
            layers: (0..view.parts).collect(),
            label: None,
            index: view.index.clone(),
            of_all: view.index.clone(),
        };
        let layer = Some(Layer { at: 0, number });
        Params { layer, ..self.clone() }.declare(key, source, self.of_shape(shape), axes, init)
    }

    /// The rows `ids` of a table, `ids`' shape with the rows' behind. The rows of a sharded table stay sharded:
    /// what was looked up is gathered, which is less.
    pub(crate) fn lookup(&self, name: &str, shape: &[usize], axes: &[Axis], init: Init, ids: &Value) -> Value {
        let key = self.key(name);
        let source = Source::Stack { keys: self.keys(&key), shape: shape.to_vec() };
        self.stored(&key, source, self.of_shape(shape), axes, init).gather_rows(ids)
    }

    pub(super) fn declare(&self, key: String, source: Source, ty: Type, axes: &[Axis], init: Init) -> Value {
        let stored = self.stored(&key, source, ty, axes, init);
        self.gathered(&format!("{}.{key}", self.component), stored, axes)
    }

    /// A parameter as it is stored, the current layer's.
    fn stored(&self, key: &str, source: Source, ty: Type, axes: &[Axis], init: Init) -> Value {
        // Rules speak of all layers alike; only the argument has a layer's number, or the label of a part of them.
        let rules = format!("{}.{key}", self.component);
        let name = match &self.layer {
            Some(Layer { number: Number::Fixed(_), .. }) => format!("{}.{}", self.component, self.keys(key)[0]),
            Some(Layer { at, number: Number::Counted { label: Some(label), .. } }) => {
                format!("{}.{}.{label}{}", self.component, &key[..*at], &key[at + 2..])
            }
            _ => rules.clone(),
        };
        let value = self.known(&name).unwrap_or_else(|| {
            let mut param = Param { component: self.component, name, ty, axes: axes.to_vec(), source, init };
            if let Some(Layer { number: Number::Counted { layers, .. }, .. }) = &self.layer {
                param.ty.dims.insert(0, layers.len());
                param.axes.insert(0, Axis::Layers);
            }
            let placed = self.layout().place_weight(&rules, &param.ty, &param.axes);
            let used = self.layout().place(&rules, &param.ty, &param.axes);
            let sharding = |p: &Result<Option<Placed>, _>| p.iter().flatten().next().map(|p| p.sharding.clone());
            let role = if sharding(&placed) == sharding(&used) { Role::Parameter } else { Role::Stored };
            let sharding = self.placed(&rules, &param.ty, &param.axes, role, placed);
            self.context.declare(param, sharding)
        });
        match &self.layer {
            Some(Layer { number: Number::Counted { index, .. }, .. }) => value.index(index),
            _ => value,
        }
    }

    /// A weight as it is computed with: what the storage rules split is gathered here, once.
    fn gathered(&self, name: &str, weight: Value, axes: &[Axis]) -> Value {
        let layout = self.layout();
        let (stored, used) = (layout.place_weight(name, weight.ty(), axes), layout.place(name, weight.ty(), axes));
        match (stored, used) {
            (Ok(Some(stored)), Ok(Some(used))) if stored.sharding != used.sharding => weight.constrain(&used.sharding),
            // What is wrong was kept when the argument was placed.
            _ => weight,
        }
    }

    /// Declares an input of the program. Rows and sequences that do not divide are padded with zeros, so the value's
    /// type may be larger than `ty`.
    pub fn input(&self, name: &str, ty: Type, axes: &[Axis]) -> Value {
        let padded = self.layout().padded(&self.activation(name), &ty, axes, self.lowering().sequence_unit);
        self.filled_input(name, padded, &ty.dims, axes)
    }

    /// Declares an input of the program of which callers fill the leading `content`; what lies behind it is zero.
    pub(crate) fn filled_input(&self, name: &str, ty: Type, content: &[usize], axes: &[Axis]) -> Value {
        let sharding = self.placement(name, &ty, axes);
        let memory_layout = self.memory_layout(&ty, axes);
        let argument = Argument { sharding, memory_layout, logical_dims: content.to_vec(), ..Argument::new(name, ty) };
        self.builder().argument_with(argument)
    }

    /// A result of the program, of which callers see the leading `content`.
    pub fn output(&self, name: &str, value: &Value, axes: &[Axis], content: &[usize]) -> (Output, Value) {
        let sharding = self.placement(name, value.ty(), axes);
        let memory_layout = self.memory_layout(value.ty(), axes);
        let output =
            Output { sharding, memory_layout, logical_dims: content.to_vec(), ..Output::new(name, value.ty().clone()) };
        (output, value.clone())
    }

    /// Records a placement; a mistake becomes the program's error.
    fn placed(
        &self,
        name: &str,
        ty: &Type,
        axes: &[Axis],
        role: Role,
        placed: Result<Option<Placed>, LayoutError>,
    ) -> Option<Sharding> {
        let (sharding, placement) = self.context.placed(name, ty, axes, role, placed)?;
        // Layers are placed alike: the first of each shape speaks for all.
        let is_later = match self.layer.as_ref().map(|l| &l.number) {
            Some(Number::Fixed(l)) => *l > 0,
            Some(Number::Counted { layers, .. }) => layers.first().is_some_and(|l| *l > 0),
            None => false,
        };
        if !is_later || !self.is_recorded(&placement) {
            self.record(placement);
        }
        Some(sharding)
    }

    /// The name of an activation at this place, as layout files match it.
    pub(crate) fn activation(&self, name: &str) -> String {
        format!("{}.{}", self.component, self.key(name))
    }

    /// The sharding of an activation of this place; `None` on one device.
    pub(crate) fn placement(&self, name: &str, ty: &Type, axes: &[Axis]) -> Option<Sharding> {
        let name = self.activation(name);
        self.placed(&name, ty, axes, Role::Activation, self.layout().place(&name, ty, axes))
    }

    /// Fixes an activation's sharding, by its name at this place and its logical axes; nothing on one device.
    pub(crate) fn place(&self, name: &str, x: &Value, axes: &[Axis]) -> Value {
        match self.placement(name, x.ty(), axes) {
            Some(sharding) => x.constrain(&sharding),
            None => x.clone(),
        }
    }

    /// Enters the name scope of this place's last name.
    pub(crate) fn scope(&self) -> Scope {
        let last = self.prefix.rsplit('.').find(|s| *s != "*").unwrap_or(self.component);
        self.builder().scope(last.to_string())
    }
}
