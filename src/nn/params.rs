//! Parameters: declared once, where the network uses them.
//!
//! Building a program declares its parameters: [`Params::get`] names a checkpoint tensor with shape and logical axes,
//! adds it to the list, and gives its value in the program. Inside a loop over layers ([`Params::each_layer`]) the same
//! call declares the stack of all layers' tensors and gives the current layer's slice, or each layer's own tensor where
//! the platform has layers written out. Loading, random initialisation, placement, counts and memory estimates all read
//! that list.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use serde::Serialize;

use super::build::{Build, Lowering, Quantization};
use super::layers::{Layer, Number};
use super::layout::{Axis, Layout, LayoutError, Placed};
use crate::hlo::{Argument, Builder, DType, Output, Precision, Sharding, Type, Value};

/// Which reference's rounding order the bf16 forward follows where they differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Numerics {
    /// RoPE in f32, rounded once.
    #[default]
    Default,
    /// RoPE with bf16 tables: the product with the cosine is rounded, then one f32 multiply-add.
    Official,
}

/// The normal distribution that a random model draws a parameter from.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)] // Named as statistics name them.
pub struct Init {
    pub mean: f32,
    pub std: f32,
}

impl Init {
    /// No number drawn is further from its mean than this many deviations.
    pub const LARGEST_DEVIATION: f32 = 3.4642;

    /// The distribution of mean 0.
    pub const fn normal(std: f32) -> Self {
        Init { mean: 0.0, std }
    }
}

/// Where a parameter's elements lie in the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Tensors of equal shape, one after the other in row-major order.
    Stack {
        /// Checkpoint names, in order.
        keys: Vec<String>,
        /// Shape of each in the checkpoint.
        shape: Vec<usize>,
    },
    /// One tensor read with its axes permuted: the parameter's dimension `i` walks the tensor with `strides[i]`.
    View {
        /// Checkpoint name.
        key: String,
        /// Shape in the checkpoint.
        shape: Vec<usize>,
        /// Element strides of the parameter's dimensions.
        strides: Vec<usize>,
    },
    /// Of each row of such tensors what its 8-bit floats are multiplied by, one after the other.
    Scales {
        /// Checkpoint names of the tensors, in order.
        keys: Vec<String>,
        /// Shape of each in the checkpoint.
        shape: [usize; 2],
    },
}

impl Source {
    /// What the tensors are called, in order; scales apart from what they scale.
    pub fn names(&self) -> Vec<String> {
        match self {
            Source::Stack { keys, .. } => keys.clone(),
            Source::View { key, .. } => vec![key.clone()],
            Source::Scales { keys, .. } => keys.iter().map(|key| format!("{key}.scale")).collect(),
        }
    }

    /// Shape of each tensor in the checkpoint.
    pub fn shape(&self) -> &[usize] {
        match self {
            Source::Stack { shape, .. } | Source::View { shape, .. } => shape,
            Source::Scales { shape, .. } => shape,
        }
    }

    /// Every checkpoint tensor it reads, with its shape.
    pub fn tensors(&self) -> Vec<(&str, &[usize])> {
        match self {
            Source::Stack { keys, .. } | Source::Scales { keys, .. } => {
                keys.iter().map(|k| (k.as_str(), self.shape())).collect()
            }
            Source::View { key, shape, .. } => vec![(key, shape)],
        }
    }
}

/// A parameter of a program: an argument filled from a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// The model folder it belongs to: `transformer`, `vae`, …
    pub component: &'static str,
    /// Argument name: component, then the checkpoint's name with `*` for the layer.
    pub name: String,
    /// Type on the device, the stacking dimension first.
    pub ty: Type,
    /// Logical axes, one a dimension.
    pub axes: Vec<Axis>,
    /// Where it comes from.
    pub source: Source,
    /// How a random model draws it.
    pub init: Init,
}

/// Where a tensor of a program was placed, under which name scope, by which rules.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// Name scope of the first use.
    pub scope: String,
    /// `component.name` of a parameter or activation, or a program input's name.
    pub tensor: String,
    /// Global type.
    pub ty: Type,
    /// What each dimension is.
    pub axes: Vec<Axis>,
    /// The mesh axes of each dimension.
    pub sharding: Sharding,
    /// The rules that split something, as `file:line: axis: [mesh axes]`.
    pub rules: Vec<String>,
    /// What it is to the program.
    pub role: Role,
}

/// What a placed tensor is to its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// A parameter that is computed with as it lies.
    Parameter,
    /// A parameter that the storage rules split further: it is gathered before its use.
    Stored,
    /// An input, a result, or a value between.
    Activation,
}

struct Shared {
    b: Builder,
    layout: Layout,
    declared: RefCell<Vec<Param>>,
    values: RefCell<HashMap<String, Value>>,
    placements: RefCell<Vec<Placement>>,
    notes: RefCell<Vec<String>>,
}

/// A place in a network's tree of names.
#[derive(Clone)]
pub struct Params {
    shared: Rc<Shared>,
    component: &'static str,
    pub(super) prefix: String,
    pub(super) layer: Option<Layer>,
    dtype: DType,
    numerics: Numerics,
    lowering: Lowering,
    quantization: Quantization,
    /// Whether weights of maps are 8-bit floats here.
    pub(super) narrow: bool,
}

impl Params {
    /// The root of a program's parameters.
    pub fn new(program: &str, component: &'static str, build: &Build) -> Self {
        let precision = if build.dtype == DType::F32 { Precision::Highest } else { Precision::Default };
        let layout = &build.layout;
        let mut b =
            Builder::new(program).with_precision(precision).with_mixed_products(build.lowering.mixed_precision_dot);
        if !layout.is_single() {
            b = b.with_mesh(layout.mesh.clone());
        }
        let shared = Shared {
            b,
            layout: layout.clone(),
            declared: RefCell::default(),
            values: RefCell::default(),
            placements: RefCell::default(),
            notes: RefCell::default(),
        };
        Params {
            shared: Rc::new(shared),
            component,
            prefix: String::new(),
            layer: None,
            dtype: build.dtype,
            numerics: build.numerics,
            lowering: build.lowering,
            quantization: build.quantization,
            narrow: false,
        }
    }

    /// The same program's parameters of another component.
    pub fn of(&self, component: &'static str) -> Self {
        Params { component, prefix: String::new(), layer: None, narrow: false, ..self.clone() }
    }

    /// The program under construction.
    pub fn builder(&self) -> &Builder {
        &self.shared.b
    }

    /// The placement rules.
    pub fn layout(&self) -> &Layout {
        &self.shared.layout
    }

    /// Every placement so far, in order.
    pub fn placements(&self) -> Vec<Placement> {
        self.shared.placements.borrow().clone()
    }

    /// What a rule could not split, a line each.
    pub fn notes(&self) -> Vec<String> {
        self.shared.notes.borrow().clone()
    }

    /// Says once what a rule could not split.
    pub fn note(&self, note: String) {
        let mut notes = self.shared.notes.borrow_mut();
        if !notes.contains(&note) {
            notes.push(note);
        }
    }

    /// The weights' and activations' element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// What the platform's compiler takes well; rows apart only where every bit counts.
    pub fn lowering(&self) -> Lowering {
        Lowering { batch_invariant: self.lowering.batch_invariant && self.dtype == DType::F32, ..self.lowering }
    }

    /// The rounding order.
    pub fn numerics(&self) -> Numerics {
        self.numerics
    }

    /// The same place in a layer, where the weights of maps are 8-bit floats if the run asks for them and
    /// `narrow(layer)` holds.
    pub fn quantized(&self, narrow: impl Fn(usize) -> bool) -> Self {
        let narrow = match (self.quantization, self.layer.as_ref().map(|l| &l.number)) {
            (Quantization::None, _) => false,
            (Quantization::Fp8, Some(Number::Fixed(l))) => narrow(*l),
            (Quantization::Fp8, _) => {
                self.builder().reject("fp8", "only layers that are written out differ in their weights' type".into());
                false
            }
        };
        Params { narrow, ..self.clone() }
    }

    /// The same place, where weights have the run's element type.
    pub fn plain(&self) -> Self {
        Params { narrow: false, ..self.clone() }
    }

    /// Whether the weights of maps are 8-bit floats here.
    pub fn is_quantized(&self) -> bool {
        self.narrow
    }

    /// One level down the tree of names.
    pub fn pp(&self, name: impl std::fmt::Display) -> Self {
        let prefix = if self.prefix.is_empty() { name.to_string() } else { format!("{}.{name}", self.prefix) };
        Params { prefix, ..self.clone() }
    }

    /// All parameters declared so far, in the order of first use.
    pub fn declared(&self) -> Vec<Param> {
        self.shared.declared.borrow().clone()
    }

    pub(super) fn key(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_string() } else { format!("{}.{name}", self.prefix) }
    }

    /// The checkpoint names of `key`: one, or one for every layer of a stack.
    fn keys(&self, key: &str) -> Vec<String> {
        let layer = |at: usize, number: usize| format!("{}.{number}{}", &key[..at], &key[at + 2..]);
        match &self.layer {
            Some(Layer { at, number: Number::Counted { layers, .. } }) => (0..*layers).map(|l| layer(*at, l)).collect(),
            Some(Layer { at, number: Number::Fixed(l) }) => vec![layer(*at, *l)],
            None => vec![key.to_string()],
        }
    }

    /// One tensor of the checkpoint.
    pub fn get(&self, name: &str, shape: &[usize], axes: &[Axis], init: Init) -> Value {
        self.get_as(name, shape, shape, axes, init)
    }

    /// One tensor of the checkpoint, seen under another shape of as many elements.
    pub fn get_as(&self, name: &str, stored: &[usize], shape: &[usize], axes: &[Axis], init: Init) -> Value {
        let key = self.key(name);
        let source = Source::Stack { keys: self.keys(&key), shape: stored.to_vec() };
        self.declare(key, source, self.of_shape(shape), axes, init)
    }

    fn of_shape(&self, shape: &[usize]) -> Type {
        Type::new(self.dtype, shape)
    }

    /// The checkpoint names of tensors that lie together: layer by layer.
    pub(super) fn keys_of(&self, names: &[&str]) -> Vec<String> {
        let each: Vec<Vec<String>> = names.iter().map(|n| self.keys(&self.key(n))).collect();
        let layers = each.first().map_or(0, Vec::len);
        (0..layers).flat_map(|l| each.iter().map(move |k| k[l].clone())).collect()
    }

    /// Several tensors of one shape under one name, stacked along a new leading dimension.
    pub fn fused(&self, names: &[&str], shape: &[usize], stored: &[usize], axes: &[Axis], init: Init) -> Value {
        let source = Source::Stack { keys: self.keys_of(names), shape: stored.to_vec() };
        let shape: Vec<usize> = std::iter::once(names.len()).chain(shape.iter().copied()).collect();
        let axes: Vec<Axis> = std::iter::once(Axis::Replicated).chain(axes.iter().copied()).collect();
        self.declare(self.key(&names.join("+")), source, self.of_shape(&shape), &axes, init)
    }

    /// Part `index` of one tensor that is read with permuted axes, the parts first: `parts` of them, each of `shape`.
    #[allow(clippy::too_many_arguments)] // As `get_as`, with what a view and a part need.
    pub fn part(
        &self,
        name: &str,
        stored: &[usize],
        strides: &[usize],
        (parts, index): (usize, &Value),
        shape: &[usize],
        axes: &[Axis],
        init: Init,
    ) -> Value {
        let key = self.key(name);
        let source = Source::View { key: key.clone(), shape: stored.to_vec(), strides: strides.to_vec() };
        let layer = Some(Layer { at: 0, number: Number::Counted { layers: parts, index: index.clone() } });
        Params { layer, ..self.clone() }.declare(key, source, self.of_shape(shape), axes, init)
    }

    /// The rows `ids` of a table, `ids`' shape with the rows' behind. A table whose rows are stored in pieces stays so:
    /// what was looked up is gathered, which is less.
    pub fn lookup(&self, name: &str, shape: &[usize], axes: &[Axis], init: Init, ids: &Value) -> Value {
        let key = self.key(name);
        let source = Source::Stack { keys: self.keys(&key), shape: shape.to_vec() };
        self.stored(&key, source, self.of_shape(shape), axes, init).take(ids)
    }

    pub(super) fn declare(&self, key: String, source: Source, ty: Type, axes: &[Axis], init: Init) -> Value {
        let stored = self.stored(&key, source, ty, axes, init);
        self.gathered(&format!("{}.{key}", self.component), stored, axes)
    }

    /// A parameter as it is stored, the current layer's.
    fn stored(&self, key: &str, source: Source, ty: Type, axes: &[Axis], init: Init) -> Value {
        // Rules speak of all layers alike; only the argument has a layer's number.
        let rules = format!("{}.{key}", self.component);
        let name = match &self.layer {
            Some(Layer { number: Number::Fixed(_), .. }) => format!("{}.{}", self.component, self.keys(key)[0]),
            _ => rules.clone(),
        };
        let known = self.shared.values.borrow().get(&name).cloned();
        let value = known.unwrap_or_else(|| {
            let mut param =
                Param { component: self.component, name: name.clone(), ty, axes: axes.to_vec(), source, init };
            if let Some(Layer { number: Number::Counted { layers, .. }, .. }) = &self.layer {
                param.ty.dims.insert(0, *layers);
                param.axes.insert(0, Axis::Layers);
            }
            let layout = &self.shared.layout;
            let placed = layout.place_weight(&rules, &param.ty, &param.axes);
            let used = layout.place(&rules, &param.ty, &param.axes);
            let whole = |p: &Result<Option<Placed>, _>| p.iter().flatten().next().map(|p| p.sharding.clone());
            let role = if whole(&placed) == whole(&used) { Role::Parameter } else { Role::Stored };
            let sharding = self.placed(&rules, (&param.ty, &param.axes), role, placed);
            let memory_layout = self.memory_layout(&param.ty, &param.axes);
            let argument = Argument { sharding, memory_layout, ..Argument::new(&name, param.ty.clone()) };
            let value = self.shared.b.argument_with(argument);
            self.shared.declared.borrow_mut().push(param);
            self.shared.values.borrow_mut().insert(name.clone(), value.clone());
            value
        });
        match &self.layer {
            Some(Layer { number: Number::Counted { index, .. }, .. }) => value.index(index),
            _ => value,
        }
    }

    /// A weight as it is computed with: what the storage rules split is gathered here, once.
    fn gathered(&self, name: &str, weight: Value, axes: &[Axis]) -> Value {
        let layout = &self.shared.layout;
        let (stored, used) = (layout.place_weight(name, weight.ty(), axes), layout.place(name, weight.ty(), axes));
        match (stored, used) {
            (Ok(Some(stored)), Ok(Some(used))) if stored.sharding != used.sharding => weight.constrain(&used.sharding),
            // What is wrong was kept when the argument was placed.
            _ => weight,
        }
    }

    /// Declares an input of the program. Rows and sequences that do not divide are filled up with zeros, so the value's
    /// type may be larger than `ty`.
    pub fn input(&self, name: &str, ty: Type, axes: &[Axis]) -> Value {
        let padded = self.shared.layout.padded(&self.activation(name), &ty, axes);
        self.filled_input(name, padded, &ty.dims, axes)
    }

    /// Declares an input of the program of which callers fill the leading `content`; what lies behind it is zero.
    pub fn filled_input(&self, name: &str, ty: Type, content: &[usize], axes: &[Axis]) -> Value {
        let sharding = self.placement(name, &ty, axes);
        let memory_layout = self.memory_layout(&ty, axes);
        let argument = Argument { sharding, memory_layout, content: content.to_vec(), ..Argument::new(name, ty) };
        self.shared.b.argument_with(argument)
    }

    /// A result of the program, of which callers see the leading `content`.
    pub fn output(&self, name: &str, value: &Value, axes: &[Axis], content: &[usize]) -> (Output, Value) {
        let sharding = self.placement(name, value.ty(), axes);
        let memory_layout = self.memory_layout(value.ty(), axes);
        let output =
            Output { sharding, memory_layout, content: content.to_vec(), ..Output::new(name, value.ty().clone()) };
        (output, value.clone())
    }

    /// The order and tiles in which a loop over layers reads a stack.
    fn memory_layout(&self, ty: &Type, axes: &[Axis]) -> Option<String> {
        // Vectors are small, and read in the default tiles.
        let is_stack = axes.first() == Some(&Axis::Layers) && ty.dims[1..].iter().product::<usize>() >= 1 << 18;
        let tiles = self.lowering.stack_tiles.filter(|_| ty.dtype == DType::BF16 && is_stack)?;
        let order: Vec<String> = (0..ty.rank()).rev().map(|d| d.to_string()).collect();
        Some(format!("{{{}:{tiles}}}", order.join(",")))
    }

    /// Records a placement; a mistake becomes the program's error.
    fn placed(
        &self,
        name: &str,
        (ty, axes): (&Type, &[Axis]),
        role: Role,
        placed: Result<Option<Placed>, LayoutError>,
    ) -> Option<Sharding> {
        let placed = placed.unwrap_or_else(|e| {
            self.shared.b.reject("layout", e.to_string());
            None
        })?;
        for note in placed.notes {
            self.note(note);
        }
        // Layers that are written out lie alike: the first speaks for all.
        if matches!(self.layer, Some(Layer { number: Number::Fixed(1..), .. })) {
            return Some(placed.sharding);
        }
        self.shared.placements.borrow_mut().push(Placement {
            scope: self.shared.b.scope_path(),
            tensor: name.to_string(),
            ty: ty.clone(),
            axes: axes.to_vec(),
            sharding: placed.sharding.clone(),
            rules: placed.rules.iter().map(ToString::to_string).collect(),
            role,
        });
        Some(placed.sharding)
    }

    /// The name of an activation at this place, as layout files match it.
    pub fn activation(&self, name: &str) -> String {
        format!("{}.{}", self.component, self.key(name))
    }

    /// Where an activation of this place lies; `None` on one device.
    pub fn placement(&self, name: &str, ty: &Type, axes: &[Axis]) -> Option<Sharding> {
        let name = self.activation(name);
        self.placed(&name, (ty, axes), Role::Activation, self.shared.layout.place(&name, ty, axes))
    }

    /// Fixes where an activation lies, by its name at this place and its logical axes; nothing on one device.
    pub fn place(&self, name: &str, x: &Value, axes: &[Axis]) -> Value {
        match self.placement(name, x.ty(), axes) {
            Some(sharding) => x.constrain(&sharding),
            None => x.clone(),
        }
    }

    /// Enters the name scope of this place's last name.
    pub fn scope(&self) -> crate::hlo::Scope {
        let last = self.prefix.rsplit('.').find(|s| *s != "*").unwrap_or(self.component);
        self.shared.b.scope(last.to_string())
    }
}
