//! Parameters, declared where the network uses them.
//!
//! Building a program declares its parameters: [`Params::get`] takes the name of a checkpoint tensor, its shape and its
//! logical axes, records the parameter and returns its value in the program. Inside a loop over layers
//! ([`Params::each_layer`]) the same call declares the stacked tensors of all layers and returns the slice of the
//! current layer, or declares one tensor per layer if the loop is unrolled. Loading, random initialization, placement,
//! counts and memory estimates use the recorded parameters.

use std::ops::Deref;
use std::rc::Rc;

use super::build::{Build, Quantization, RowProductForm};
use super::context::Context;
use super::layout::{Axis, LayoutError, ResolvedPlacement};
use super::param::{Init, Param, Role, Source};
use ltx2_stablehlo::{Argument, DType, MemorySpace, ProgramOutput, Scope, Sharding, Type, Value};

/// The layer that a prefix belongs to, inside a loop over identical layers. The prefix has `*` instead of the layer
/// number.
#[derive(Clone)]
pub(super) struct Layer {
    /// Length of the prefix before the layer number.
    pub at: usize,
    pub number: Number,
    /// Whether the large weights of the layer are in host memory.
    pub is_streamed: bool,
}

#[derive(Clone)]
pub(super) enum Number {
    /// A layer of an unrolled loop, with separate arguments for its parameters.
    Fixed(usize),
    /// The current layer of a loop; its parameters are slices of tensors that stack some or all layers.
    Counted {
        /// Numbers of the stacked layers, in order.
        layers: Rc<[usize]>,
        /// Label in the argument name that distinguishes several stacks of the same parameter. `None`: the only stack,
        /// with all layers.
        label: Option<Rc<str>>,
        /// Index of the current layer in the stack. `of_all` is the index of the current layer among all layers.
        index: Value,
        of_all: Value,
    },
}

/// Selection of one of several parts of a checkpoint tensor; all parts have the same size. The tensor is read with
/// permuted axes, so that the part index is the leading axis.
pub struct PartView<'a> {
    /// Shape of the tensor in the checkpoint.
    pub stored: &'a [usize],
    /// Strides of the part index and of the axes of a part, in elements of the checkpoint tensor.
    pub strides: &'a [usize],
    /// Number of parts; `index` is less than this.
    pub parts: usize,
    /// Index of the selected part, a value of the program.
    pub index: &'a Value,
}

/// A name prefix in the parameter tree of a program under construction.
#[derive(Clone)]
pub struct Params {
    context: Rc<Context>,
    component: &'static str,
    pub(super) prefix: String,
    pub(super) layer: Option<Layer>,
    /// Whether the weights of linear layers under this prefix are quantized to 8 bits.
    is_quantized: bool,
    /// Matrix that rotates the inputs of quantized linear layers. `None`: inputs are not rotated, or the caller has
    /// already rotated them.
    pub(super) rotation: Option<Value>,
    /// Form of linear layers with a single row.
    row_products: RowProductForm,
}

impl Deref for Params {
    type Target = Context;

    fn deref(&self) -> &Context {
        &self.context
    }
}

impl Params {
    /// Starts a program and returns the root of its parameter tree.
    pub fn new(program: &str, component: &'static str, build: &Build) -> Self {
        let context = Rc::new(Context::new(program, build));
        Params {
            context,
            component,
            prefix: String::new(),
            layer: None,
            is_quantized: false,
            rotation: None,
            row_products: RowProductForm::Dot,
        }
    }

    /// Returns the root of the parameter tree of another component in the same program.
    pub fn for_component(&self, component: &'static str) -> Self {
        Params { component, prefix: String::new(), layer: None, is_quantized: false, ..self.clone() }
    }

    /// Enables quantization for the linear weights under this prefix if the run quantizes weights and either rotates
    /// them or `quantizes(layer)` returns true. Outside a layer, weights stay unquantized. `quantizes` must return the
    /// same value for all layers of a loop.
    pub fn quantized(&self, quantizes: impl Fn(usize) -> bool) -> Self {
        let first = match self.layer.as_ref().map(|l| &l.number) {
            Some(Number::Fixed(l)) => Some(*l),
            Some(Number::Counted { layers, .. }) => layers.first().copied(),
            None => None,
        };
        let quantizes = |layer| self.quantization.is_convrot() || quantizes(layer);
        let is_quantized = self.quantization != Quantization::None && first.is_some_and(quantizes);
        Params { is_quantized, ..self.clone() }
    }

    /// Returns this prefix without quantization.
    pub fn plain(&self) -> Self {
        Params { is_quantized: false, ..self.clone() }
    }

    /// Returns this prefix for text generation: linear layers with a single row have the platform's form.
    pub fn generating(&self) -> Self {
        Params { row_products: self.lowering().row_products, ..self.clone() }
    }

    /// Returns whether operations on a single row, such as `x`, use kernels: this prefix generates text on a platform
    /// that has them, the program has one device, and `x` has 16-bit numbers.
    pub fn has_row_kernels(&self, x: &Value) -> bool {
        let has_kernels = self.row_products == RowProductForm::Kernel && self.layout().is_single();
        has_kernels && [DType::BF16, DType::F16].contains(&x.dtype())
    }

    pub(super) fn row_products(&self) -> RowProductForm {
        self.row_products
    }

    /// Returns this prefix with another matrix that rotates the inputs of quantized linear layers.
    pub(super) fn with_rotation(&self, rotation: Option<Value>) -> Self {
        Params { rotation, ..self.clone() }
    }

    /// Returns whether this prefix is in the parameter tree of a component.
    pub(super) fn is_of(&self, component: &str) -> bool {
        self.component == component
    }

    pub(crate) fn is_quantized(&self) -> bool {
        self.is_quantized
    }

    /// Returns the prefix extended by `name`.
    pub fn pp(&self, name: impl std::fmt::Display) -> Self {
        let prefix = if self.prefix.is_empty() { name.to_string() } else { format!("{}.{name}", self.prefix) };
        Params { prefix, ..self.clone() }
    }

    pub(super) fn key(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_string() } else { format!("{}.{name}", self.prefix) }
    }

    /// Returns the names of `key` in the checkpoint: one name, or one per layer of a stack.
    fn keys(&self, key: &str) -> Vec<String> {
        let layer = |at: usize, number: usize| format!("{}.{number}{}", &key[..at], &key[at + 2..]);
        match &self.layer {
            Some(Layer { at, number: Number::Counted { layers, .. }, .. }) => {
                layers.iter().map(|l| layer(*at, *l)).collect()
            }
            Some(Layer { at, number: Number::Fixed(l), .. }) => vec![layer(*at, *l)],
            None => vec![key.to_string()],
        }
    }

    /// Returns the parameter `name` under this prefix, and declares it on first use. In a layer loop, it is the current
    /// layer's parameter. `shape` is the shape in the checkpoint, without the layers; `axes` are its logical axes.
    pub fn get(&self, name: &str, shape: &[usize], axes: &[Axis], init: Init) -> Value {
        self.get_as(name, shape, shape, axes, init)
    }

    /// Returns a checkpoint tensor of shape `stored`, reshaped to `shape`.
    pub fn get_as(&self, name: &str, stored: &[usize], shape: &[usize], axes: &[Axis], init: Init) -> Value {
        let key = self.key(name);
        let source = Source::Stack { keys: self.keys(&key), shape: stored.to_vec() };
        self.declare(key, source, self.of_shape(shape), axes, init)
    }

    fn of_shape(&self, shape: &[usize]) -> Type {
        Type::new(self.dtype(), shape)
    }

    /// Returns the checkpoint names of tensors that are fused into one parameter, layer by layer.
    pub(super) fn keys_of(&self, names: &[&str]) -> Vec<String> {
        let each: Vec<Vec<String>> = names.iter().map(|n| self.keys(&self.key(n))).collect();
        let layers = each.first().map_or(0, Vec::len);
        (0..layers).flat_map(|l| each.iter().map(move |k| k[l].clone())).collect()
    }

    /// Declares several tensors of the same shape as one parameter, stacked along a new leading dimension.
    pub fn fused(&self, names: &[&str], shape: &[usize], stored: &[usize], axes: &[Axis], init: Init) -> Value {
        let source = Source::Stack { keys: self.keys_of(names), shape: stored.to_vec() };
        let shape: Vec<usize> = std::iter::once(names.len()).chain(shape.iter().copied()).collect();
        let axes: Vec<Axis> = std::iter::once(Axis::Replicated).chain(axes.iter().copied()).collect();
        self.declare(self.key(&names.join("+")), source, self.of_shape(&shape), &axes, init)
    }

    /// Returns the part of a checkpoint tensor that `view` selects, with shape `shape`.
    pub fn part(&self, name: &str, view: PartView, shape: &[usize], axes: &[Axis], init: Init) -> Value {
        let key = self.key(name);
        let source = Source::View { key: key.clone(), shape: view.stored.to_vec(), strides: view.strides.to_vec() };
        let number = Number::Counted {
            layers: (0..view.parts).collect(),
            label: None,
            index: view.index.clone(),
            of_all: view.index.clone(),
        };
        let layer = Some(Layer { at: 0, number, is_streamed: false });
        Params { layer, ..self.clone() }.declare(key, source, self.of_shape(shape), axes, init)
    }

    /// Looks up the rows `ids` of a table. The result has the shape of `ids` followed by the shape of a row. If the
    /// table is sharded, only the selected rows are gathered.
    pub fn lookup(&self, name: &str, shape: &[usize], axes: &[Axis], init: Init, ids: &Value) -> Value {
        let key = self.key(name);
        let source = Source::Stack { keys: self.keys(&key), shape: shape.to_vec() };
        self.declare_stored(&key, source, self.of_shape(shape), axes, init).gather_rows(ids)
    }

    pub(super) fn declare(&self, key: String, source: Source, ty: Type, axes: &[Axis], init: Init) -> Value {
        let stored = self.declare_stored(&key, source, ty, axes, init);
        self.gathered(&format!("{}.{key}", self.component), stored, axes)
    }

    /// Declares a parameter unless it is already declared. Returns it, or the current layer's slice of it, with its
    /// stored sharding. If the parameter is in host memory, each call copies it to the device.
    fn declare_stored(&self, key: &str, source: Source, ty: Type, axes: &[Axis], init: Init) -> Value {
        // Layout rules match all layers; only the argument name includes the layer number or the label of the stack.
        let rules = format!("{}.{key}", self.component);
        let name = match &self.layer {
            Some(Layer { number: Number::Fixed(_), .. }) => format!("{}.{}", self.component, self.keys(key)[0]),
            Some(Layer { at, number: Number::Counted { label: Some(label), .. }, .. }) => {
                format!("{}.{}.{label}{}", self.component, &key[..*at], &key[at + 2..])
            }
            _ => rules.clone(),
        };
        let is_large = self.streaming.is_some_and(|s| ty.elements() * ty.dtype.size() >= s.min_bytes);
        let is_streamed = is_large && self.layer.as_ref().is_some_and(|layer| layer.is_streamed);
        let memory = if is_streamed { MemorySpace::PinnedHost } else { MemorySpace::Device };
        let value = self.known(&name).unwrap_or_else(|| {
            let mut param = Param { component: self.component, name, ty, axes: axes.to_vec(), source, init };
            if let Some(Layer { number: Number::Counted { layers, .. }, .. }) = &self.layer {
                param.ty.dims.insert(0, layers.len());
                param.axes.insert(0, Axis::Layers);
            }
            let placed = self.layout().place_weight(&rules, &param.ty, &param.axes);
            let used = self.layout().place(&rules, &param.ty, &param.axes);
            let sharding =
                |p: &Result<Option<ResolvedPlacement>, _>| p.iter().flatten().next().map(|p| p.sharding.clone());
            let role = if sharding(&placed) == sharding(&used) { Role::Parameter } else { Role::FsdpSharded };
            let sharding = self.placed(&rules, &param.ty, &param.axes, role, placed);
            self.context.declare(param, sharding, memory)
        });
        let copied = |value: Value| if is_streamed { value.copy_to(MemorySpace::Device) } else { value };
        match &self.layer {
            // Copy before the reshape: XLA slices in host memory only if the copy consumes the slice directly.
            Some(Layer { number: Number::Counted { index, .. }, .. }) => {
                let dims = value.dims()[1..].to_vec();
                copied(value.dynamic_slice(0, index, 1)).reshape(dims)
            }
            _ => copied(value),
        }
    }

    /// Returns a weight as it is used in computation: gathers the dimensions that storage rules shard.
    fn gathered(&self, name: &str, weight: Value, axes: &[Axis]) -> Value {
        let layout = self.layout();
        let (stored, used) = (layout.place_weight(name, weight.ty(), axes), layout.place(name, weight.ty(), axes));
        match (stored, used) {
            (Ok(Some(stored)), Ok(Some(used))) if stored.sharding != used.sharding => weight.constrain(&used.sharding),
            // A layout error was recorded when the argument was placed.
            _ => weight,
        }
    }

    /// Declares a program input. Batches and sequences whose sizes are not divisible by their number of shards are
    /// padded with zeros, so the type of the value may be larger than `ty`.
    pub fn input(&self, name: &str, ty: Type, axes: &[Axis]) -> Value {
        let padded = self.layout().padded(&self.activation(name), &ty, axes, self.lowering().sequence_unit);
        self.filled_input(name, padded, &ty.dims, axes)
    }

    /// Declares a program input of type `ty`. Callers set the first `content` elements along each dimension; the rest
    /// is zero.
    pub fn filled_input(&self, name: &str, ty: Type, content: &[usize], axes: &[Axis]) -> Value {
        let sharding = self.placement(name, &ty, axes);
        let memory_layout = self.memory_layout(&ty, axes);
        let argument = Argument { sharding, memory_layout, logical_dims: content.to_vec(), ..Argument::new(name, ty) };
        self.builder().argument_with(argument)
    }

    /// Creates a program output. Callers see only the first `content` elements along each dimension.
    pub fn output(&self, name: &str, value: &Value, axes: &[Axis], content: &[usize]) -> (ProgramOutput, Value) {
        let sharding = self.placement(name, value.ty(), axes);
        let memory_layout = self.memory_layout(value.ty(), axes);
        let output = ProgramOutput {
            sharding,
            memory_layout,
            logical_dims: content.to_vec(),
            ..ProgramOutput::new(name, value.ty().clone())
        };
        (output, value.clone())
    }

    /// Records the placement of a tensor and returns its sharding. Returns `None` on one device, and after a layout
    /// error, which becomes the program's error.
    fn placed(
        &self,
        name: &str,
        ty: &Type,
        axes: &[Axis],
        role: Role,
        placed: Result<Option<ResolvedPlacement>, LayoutError>,
    ) -> Option<Sharding> {
        let (sharding, placement) = self.context.placed(name, ty, axes, role, placed)?;
        // Layers of the same shape have the same placement, so it is recorded only once.
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

    /// Returns the full name of an activation under this prefix, `component.name`, which layout rules match.
    pub fn activation(&self, name: &str) -> String {
        format!("{}.{}", self.component, self.key(name))
    }

    /// Returns the sharding of an activation under this prefix; `None` on one device.
    pub fn placement(&self, name: &str, ty: &Type, axes: &[Axis]) -> Option<Sharding> {
        let name = self.activation(name);
        self.placed(&name, ty, axes, Role::Activation, self.layout().place(&name, ty, axes))
    }

    /// Constrains an activation to the sharding that the layout defines for its name and logical axes. Has no effect on
    /// one device.
    pub fn place(&self, name: &str, x: &Value, axes: &[Axis]) -> Value {
        match self.placement(name, x.ty(), axes) {
            Some(sharding) => x.constrain(&sharding),
            None => x.clone(),
        }
    }

    /// Enters a name scope with the last component of this prefix.
    pub fn scope(&self) -> Scope {
        let last = self.prefix.rsplit('.').find(|s| *s != "*").unwrap_or(self.component);
        self.builder().scope(last.to_string())
    }
}
