//! A program under construction: the builder, the layout, build options, and the parameters declared so far.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::build::{Build, Lowering, Quantization, RoundingPoints, Streaming};
use super::layout::{Axis, Layout, LayoutError, ResolvedPlacement};
use super::lora::AddedLoras;
use super::param::{Param, Role, ValuePlacement};
use ltx2_stablehlo::{Argument, Builder, DType, MemorySpace, Precision, Sharding, Type, Value};

/// A program under construction, shared by all its [`Params`](super::Params).
pub struct Context {
    builder: Builder,
    layout: Layout,
    dtype: DType,
    numerics: RoundingPoints,
    lowering: Lowering,
    pub(super) quantization: Quantization,
    pub(super) unquantized: Arc<BTreeSet<String>>,
    pub(super) streaming: Option<Streaming>,
    pub(super) added_loras: Option<AddedLoras>,
    declared: RefCell<Vec<Param>>,
    values: RefCell<HashMap<String, Value>>,
    placements: RefCell<Vec<ValuePlacement>>,
    notes: RefCell<Vec<String>>,
}

impl Context {
    pub(super) fn new(program: &str, build: &Build) -> Self {
        let precision = if build.dtype == DType::F32 { Precision::Highest } else { Precision::Default };
        let Build { layout, lowering, .. } = build;
        let builder = Builder::new(program).with_precision(precision);
        let builder = builder.with_mixed_precision_dot(lowering.mixed_precision_dot);
        Context {
            builder: if layout.is_single() { builder } else { builder.with_mesh(layout.mesh.clone()) },
            layout: layout.clone(),
            dtype: build.dtype,
            numerics: build.numerics,
            // Batch invariance matters only for f32, whose results must be bitwise reproducible.
            lowering: Lowering { batch_invariant: lowering.batch_invariant && build.dtype == DType::F32, ..*lowering },
            quantization: build.quantization,
            unquantized: build.unquantized.clone(),
            streaming: build.streaming,
            added_loras: build.added_loras,
            declared: RefCell::default(),
            values: RefCell::default(),
            placements: RefCell::default(),
            notes: RefCell::default(),
        }
    }

    /// Returns the builder that records the operations of the program.
    pub fn builder(&self) -> &Builder {
        &self.builder
    }

    /// Returns the layout of the build options.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the element type of weights and activations.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the rounding points of a bf16 forward pass.
    pub fn numerics(&self) -> RoundingPoints {
        self.numerics
    }

    /// Returns the lowering of the build options, with `batch_invariant` disabled unless the element type is f32.
    pub fn lowering(&self) -> Lowering {
        self.lowering
    }

    /// Returns all parameters declared so far, in order of first use.
    pub fn declared(&self) -> Vec<Param> {
        self.declared.borrow().clone()
    }

    /// Returns the placements recorded so far, in build order; empty on one device.
    pub fn placements(&self) -> Vec<ValuePlacement> {
        self.placements.borrow().clone()
    }

    /// Returns one-line notes on dimensions that a layout rule could not shard.
    pub fn notes(&self) -> Vec<String> {
        self.notes.borrow().clone()
    }

    /// Adds a note on a dimension that a rule could not shard, unless the same note exists.
    pub fn note(&self, note: String) {
        let mut notes = self.notes.borrow_mut();
        if !notes.contains(&note) {
            notes.push(note);
        }
    }

    /// Returns the value of a parameter that is already declared.
    pub(super) fn known(&self, name: &str) -> Option<Value> {
        self.values.borrow().get(name).cloned()
    }

    /// Declares a parameter as an argument of the program, in the memory `memory`.
    pub(super) fn declare(&self, param: Param, sharding: Option<Sharding>, memory: MemorySpace) -> Value {
        // Layouts with tiles are for device memory: in host memory, they make XLA copy the stack in each iteration.
        let memory_layout = self.memory_layout(&param.ty, &param.axes).filter(|_| memory == MemorySpace::Device);
        let argument = Argument { sharding, memory_layout, memory, ..Argument::new(&param.name, param.ty.clone()) };
        let value = self.builder.argument_with(argument);
        self.values.borrow_mut().insert(param.name.clone(), value.clone());
        self.declared.borrow_mut().push(param);
        value
    }

    /// Returns the device memory layout (dimension order and tiles) of a stacked weight, or `None` for the default.
    pub(super) fn memory_layout(&self, ty: &Type, axes: &[Axis]) -> Option<String> {
        // Vectors are small and use the default tiles. Convolution kernels do not fill a tile.
        let is_stack = axes.first() == Some(&Axis::Layers) && ty.dims[1..].iter().product::<usize>() >= 1 << 18;
        let fills_tiles = ty.dims.last().is_some_and(|&columns| columns >= 128);
        let tiles = self.lowering.stack_tiles.filter(|_| ty.dtype == DType::BF16 && is_stack && fills_tiles)?;
        let order: Vec<String> = (0..ty.rank()).rev().map(|d| d.to_string()).collect();
        Some(format!("{{{}:{tiles}}}", order.join(",")))
    }

    /// Returns the sharding of `placed`, and a description of the placement of tensor `name`. Records the notes of
    /// `placed`. Returns `None` on one device, and after a layout error, which becomes the program's error.
    pub(super) fn placed(
        &self,
        name: &str,
        ty: &Type,
        axes: &[Axis],
        role: Role,
        placed: Result<Option<ResolvedPlacement>, LayoutError>,
    ) -> Option<(Sharding, ValuePlacement)> {
        let placed = placed.unwrap_or_else(|e| {
            self.builder.reject("layout", e.to_string());
            None
        })?;
        placed.notes.into_iter().for_each(|note| self.note(note));
        let placement = ValuePlacement {
            scope: self.builder.scope_path(),
            tensor: name.to_string(),
            ty: ty.clone(),
            axes: axes.to_vec(),
            sharding: placed.sharding.clone(),
            rules: placed.rules.iter().map(ToString::to_string).collect(),
            role,
        };
        Some((placed.sharding, placement))
    }

    /// Returns whether a tensor with this name and per-layer shape already has a recorded placement.
    pub(super) fn is_recorded(&self, placement: &ValuePlacement) -> bool {
        let of_layer = |p: &ValuePlacement| p.ty.dims[usize::from(p.axes.first() == Some(&Axis::Layers))..].to_vec();
        let same = |p: &ValuePlacement| p.tensor == placement.tensor && of_layer(p) == of_layer(placement);
        self.placements.borrow().iter().any(same)
    }

    pub(super) fn record(&self, placement: ValuePlacement) {
        self.placements.borrow_mut().push(placement);
    }
}
