//! The builder of a program: its regions, SSA names and name scopes, and the first error.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::rc::Rc;
use std::sync::Arc;

use indexmap::IndexMap;

use super::error::{BuildError, Result};
use super::program::{Argument, Program, ProgramOutput};
use super::propagation::KnownSharding;
use super::sharding::DeviceMesh;
use super::types::{Type, list};
use super::work::ProgramWork;
use crate::DType;

/// Precision of f32 matmuls and convolutions on matrix units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Precision {
    /// The platform's fastest precision: TF32 on CUDA, a single bf16 pass on TPU.
    #[default]
    Default,
    /// Full f32 precision.
    Highest,
}

impl Precision {
    pub(super) fn name(self) -> &'static str {
        match self {
            Precision::Default => "DEFAULT",
            Precision::Highest => "HIGHEST",
        }
    }
}

/// A program under construction. Clones share the same program.
#[derive(Clone)]
pub struct Builder(pub(super) Rc<RefCell<BuilderState>>);

/// A value of a program. It is cheap to clone, and its methods add operations to the program.
#[derive(Clone)]
pub struct Value {
    pub(super) b: Builder,
    pub(super) name: Rc<str>,
    pub(super) ty: Type,
    pub(super) region: usize,
    pub(super) sharding: KnownSharding,
}

/// A region under construction. Its kind determines how it uses outer values, which are defined outside of the region.
pub(super) struct Region {
    pub id: usize,
    pub kind: RegionKind,
    pub text: String,
}

pub(super) enum RegionKind {
    /// A function body, which cannot use outer values.
    Isolated,
    /// Both regions of a `while`. Outer values become carried values, as XLA requires.
    Loop { captures: Captures },
    /// The body of a manual computation. Outer values become replicated operands.
    Manual { captures: Captures },
    /// A branch of a `case`, which uses outer values directly.
    Choice,
}

/// Outer values that a region uses, each with its name inside the region, in order of first use.
pub(super) type Captures = IndexMap<(usize, Rc<str>), (Value, Rc<str>)>;

impl RegionKind {
    fn captures(&self) -> Option<&Captures> {
        match self {
            RegionKind::Isolated | RegionKind::Choice => None,
            RegionKind::Loop { captures } | RegionKind::Manual { captures } => Some(captures),
        }
    }
}

pub(super) struct BuilderState {
    pub program: String,
    pub precision: Precision,
    pub mixed_precision_dot: bool,
    pub mesh: Option<DeviceMesh>,
    /// FLOPs of the matmuls added so far.
    pub dot_flops: f64,
    /// Work of one device for the operations added so far.
    pub work: ProgramWork,
    /// Size in bytes of the smallest collective permute added so far.
    pub smallest_permute: Option<usize>,
    regions: Vec<Region>,
    next_name: usize,
    next_region: usize,
    pub next_channel: usize,
    scopes: Vec<String>,
    locations: bool,
    /// Arguments of `main` by name, in order of declaration.
    arguments: IndexMap<String, Argument>,
    pub functions: BTreeMap<String, Function>,
    error: Option<BuildError>,
}

pub(super) struct Function {
    pub text: String,
    pub results: Vec<Type>,
    /// FLOPs of the matmuls in one call of the function.
    pub dot_flops: f64,
    /// Work of one device in one call of the function.
    pub work: ProgramWork,
}

/// A guard that keeps a name scope active until it is dropped.
pub struct Scope(Builder);

impl Drop for Scope {
    fn drop(&mut self) {
        self.0.0.borrow_mut().scopes.pop();
    }
}

impl Builder {
    /// Creates an empty program for one device.
    pub fn new(program: &str) -> Self {
        Builder(Rc::new(RefCell::new(BuilderState {
            program: program.to_string(),
            precision: Precision::Default,
            mixed_precision_dot: true,
            mesh: None,
            dot_flops: 0.0,
            work: ProgramWork::default(),
            smallest_permute: None,
            regions: vec![Region { id: 0, kind: RegionKind::Isolated, text: String::new() }],
            next_name: 0,
            next_region: 1,
            next_channel: 1,
            scopes: Vec::new(),
            locations: true,
            arguments: IndexMap::new(),
            functions: BTreeMap::new(),
            error: None,
        })))
    }

    /// Sets the precision of the matmuls and convolutions that are added afterwards.
    pub fn with_precision(self, precision: Precision) -> Self {
        self.0.borrow_mut().precision = precision;
        self
    }

    /// Sets whether a matmul may have a wider result type than its operands. If not, the operands are converted to the
    /// wider type first, which gives the same values.
    pub fn with_mixed_precision_dot(self, allowed: bool) -> Self {
        self.0.borrow_mut().mixed_precision_dot = allowed;
        self
    }

    /// Partitions the program over a mesh.
    pub fn with_mesh(self, mesh: DeviceMesh) -> Self {
        self.0.borrow_mut().mesh = Some(mesh);
        self
    }

    /// Omits name scopes (MLIR locations) from the program text, for readable snapshots.
    pub fn without_locations(self) -> Self {
        self.0.borrow_mut().locations = false;
        self
    }

    /// Enters a name scope and returns its guard. Operations that are added before the guard is dropped have the scope
    /// in their metadata.
    #[must_use]
    pub fn scope(&self, name: impl Into<String>) -> Scope {
        self.0.borrow_mut().scopes.push(name.into());
        Scope(self.clone())
    }

    /// Returns the current name scope, from outer to inner: `outer/inner`.
    pub fn scope_path(&self) -> String {
        self.0.borrow().scopes.join("/")
    }

    /// Declares an argument of `main`. This may be called at any time, even while a nested region is under
    /// construction.
    pub fn argument(&self, name: &str, ty: Type) -> Value {
        self.argument_with(Argument::new(name, ty))
    }

    /// Declares an argument of `main` with its sharding and memory layout.
    pub fn argument_with(&self, argument: Argument) -> Value {
        let mut s = self.0.borrow_mut();
        let name: Rc<str> = format!("%arg{}", s.arguments.len()).into();
        let ty = argument.ty.clone();
        let sharding = argument.sharding.clone().map(Rc::new);
        let twice = s.arguments.insert(argument.name.clone(), argument);
        drop(s);
        if let Some(argument) = twice {
            self.fail("argument", format!("argument '{}' is declared twice", argument.name));
        }
        Value { b: self.clone(), name, ty, region: 0, sharding }
    }

    /// Records an error, unless the program already has one: later errors are usually consequences of the first.
    pub(super) fn fail(&self, op: &'static str, message: String) {
        let mut s = self.0.borrow_mut();
        if s.error.is_none() {
            s.error = Some(BuildError { op, scope: s.scopes.join("/"), program: s.program.clone(), message });
        }
    }

    /// Records an error that the caller detected, with the current name scope.
    pub fn reject(&self, op: &'static str, message: String) {
        self.fail(op, message);
    }

    /// Records an error and returns a placeholder for the result of the failed operation.
    pub(super) fn poison(&self, op: &'static str, message: String, ty: Type) -> Value {
        self.fail(op, message);
        self.value("%poison".into(), ty)
    }

    pub(super) fn value(&self, name: Rc<str>, ty: Type) -> Value {
        let region = self.0.borrow().regions.last().map_or(0, |r| r.id);
        Value { b: self.clone(), name, ty, region, sharding: None }
    }

    /// Returns a new SSA name.
    pub(super) fn fresh(&self) -> Rc<str> {
        let mut s = self.0.borrow_mut();
        s.next_name += 1;
        format!("%{}", s.next_name - 1).into()
    }

    /// Returns whether the current region is inside a manual computation, in which values are shards of one device.
    pub(super) fn is_manual(&self) -> bool {
        self.0.borrow().regions.iter().any(|r| matches!(r.kind, RegionKind::Manual { .. }))
    }

    /// Returns the name of `v` in the current region. If an outer region defines `v`, the loops and manual computations
    /// between that region and the current one capture `v`.
    pub(super) fn name_of(&self, v: &Value) -> Rc<str> {
        let depth = self.0.borrow().regions.len();
        self.resolve(v, depth - 1)
    }

    fn resolve(&self, v: &Value, level: usize) -> Rc<str> {
        let s = self.0.borrow();
        let region = &s.regions[level];
        if region.id == v.region {
            return v.name.clone();
        }
        if matches!(region.kind, RegionKind::Choice) && level > 0 {
            drop(s);
            return self.resolve(v, level - 1);
        }
        // Arguments of `main` may be declared while a function is under construction, but the function cannot use them.
        let known = region.kind.captures().map(|c| c.get(&(v.region, v.name.clone())));
        match known {
            Some(Some((_, local))) => return local.clone(),
            Some(None) if level > 0 => drop(s),
            _ => {
                drop(s);
                self.fail(
                    "capture",
                    format!("a value of type {} is used outside the function or region that defines it", v.ty),
                );
                return "%poison".into();
            }
        }
        let local = self.fresh();
        if let RegionKind::Loop { captures } | RegionKind::Manual { captures } =
            &mut self.0.borrow_mut().regions[level].kind
        {
            captures.insert((v.region, v.name.clone()), (v.clone(), local.clone()));
        }
        local
    }

    /// Adds an operation with one result.
    pub(super) fn op(&self, op: &'static str, text: impl Display, ty: Type) -> Value {
        let name = self.fresh();
        self.line(op, format_args!("{name} = {text}"));
        self.value(name, ty)
    }

    /// Adds an operation with several results.
    pub(super) fn op_many(&self, op: &'static str, text: impl Display, types: &[Type]) -> Vec<Value> {
        let name = self.fresh();
        if types.len() == 1 {
            self.line(op, format_args!("{name} = {text}"));
            return vec![self.value(name, types[0].clone())];
        }
        self.line(op, format_args!("{name}:{} = {text}", types.len()));
        types.iter().enumerate().map(|(i, t)| self.value(format!("{name}#{i}").into(), t.clone())).collect()
    }

    /// Adds a line to the current region. The location of the line is the current name scope, followed by `op`.
    pub(super) fn line(&self, op: &'static str, text: impl Display) {
        let mut s = self.0.borrow_mut();
        let location = if s.locations {
            let mut scope = s.scopes.join("/");
            if !scope.is_empty() {
                scope.push('/');
            }
            format!(" loc(\"{scope}{op}\")")
        } else {
            String::new()
        };
        let indent = "  ".repeat(s.regions.len() + 1);
        if let Some(region) = s.regions.last_mut() {
            use std::fmt::Write;
            // Writing to a String cannot fail.
            let _ = writeln!(region.text, "{indent}{text}{location}");
        }
    }

    /// Adds a line without a location, for terminators.
    pub(super) fn raw_line(&self, text: impl Display) {
        let mut s = self.0.borrow_mut();
        let indent = "  ".repeat(s.regions.len() + 1);
        if let Some(region) = s.regions.last_mut() {
            use std::fmt::Write;
            let _ = writeln!(region.text, "{indent}{text}");
        }
    }

    pub(super) fn push_region(&self, kind: RegionKind) {
        let mut s = self.0.borrow_mut();
        let id = s.next_region;
        s.next_region += 1;
        s.regions.push(Region { id, kind, text: String::new() });
    }

    pub(super) fn pop_region(&self) -> Region {
        let mut s = self.0.borrow_mut();
        match s.regions.pop() {
            Some(r) if !s.regions.is_empty() => r,
            // Only `finish` may take the outermost region. Return an empty region, so that the first error is reported
            // instead of a panic.
            _ => Region { id: usize::MAX, kind: RegionKind::Isolated, text: String::new() },
        }
    }

    /// Takes the text of the current region and leaves the region empty. `while` uses this to build its two regions one
    /// after the other with the same captures.
    pub(super) fn take_text(&self) -> String {
        self.0.borrow_mut().regions.last_mut().map(|r| std::mem::take(&mut r.text)).unwrap_or_default()
    }

    /// Finishes the program with its named results.
    ///
    /// # Errors
    /// Returns the first error of a builder call, with its operation, name scope and shapes.
    pub fn finish(&self, results: &[(&str, &Value)]) -> Result<Program> {
        self.finish_with(results.iter().map(|(n, v)| (ProgramOutput::new(n, v.ty.clone()), (*v).clone())).collect())
    }

    /// Finishes the program with its named results, which may have shardings and memory layouts.
    ///
    /// # Errors
    /// Returns the first error of a builder call, with its operation, name scope and shapes.
    pub fn finish_with(&self, results: Vec<(ProgramOutput, Value)>) -> Result<Program> {
        let names = list(results.iter().map(|(_, v)| self.name_of(v)));
        let types = list(results.iter().map(|(_, v)| &v.ty));
        let s = self.0.borrow();
        if let Some(e) = &s.error {
            return Err(e.clone());
        }
        let outputs: Vec<ProgramOutput> = results.into_iter().map(|(output, _)| output).collect();
        let mesh = s.mesh.clone().unwrap_or(DeviceMesh { axes: Vec::new() });
        let devices = mesh.devices();
        let mut text = format!(
            "module @{} attributes {{mhlo.num_partitions = {devices} : i32, mhlo.num_replicas = 1 : i32}} {{\n",
            s.program
        );
        if let Some(mesh) = &s.mesh {
            text.push_str(&format!("  {mesh}\n"));
        }
        for f in s.functions.values() {
            text.push_str(&f.text);
        }
        let arguments =
            list(s.arguments.values().enumerate().map(|(i, a)| format!("%arg{i}: {}{}", a.ty, a.attributes())));
        let returned = list(outputs.iter().map(|o| format!("{}{}", o.ty, o.attributes())));
        text.push_str(&format!("  func.func public @main({arguments}) -> ({returned}) {{\n"));
        text.push_str(&s.regions[0].text);
        text.push_str(&format!("    return {names} : {types}\n  }}\n}}\n"));
        Ok(Program {
            text,
            arguments: s.arguments.values().cloned().collect(),
            argument_indices: Arc::new(s.arguments.keys().cloned().zip(0..).collect()),
            results: outputs,
            mesh,
            dot_flops: s.dot_flops,
            work: s.work.clone(),
            smallest_permute: s.smallest_permute,
        })
    }

    /// Donates the memory of an argument to the result with index `result`.
    pub fn donate(&self, argument: &str, result: usize) {
        let found = {
            let mut s = self.0.borrow_mut();
            s.arguments.get_mut(argument).map(|a| a.donated_to = Some(result)).is_some()
        };
        if !found {
            self.fail("donate", format!("there is no argument '{argument}' to donate"));
        }
    }

    /// Returns the precision of matmuls and convolutions.
    pub fn precision(&self) -> Precision {
        self.0.borrow().precision
    }

    /// Returns a scalar constant.
    pub fn scalar(&self, value: f64, dtype: DType) -> Value {
        self.full(value, Type::scalar(dtype))
    }
}

impl Value {
    /// Returns the type of the value. In a manual computation, this is the type of one device's shard.
    pub fn ty(&self) -> &Type {
        &self.ty
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.ty.dtype
    }

    /// Returns the dimensions of the type, outermost dimension first.
    pub fn dims(&self) -> &[usize] {
        &self.ty.dims
    }

    /// Returns the size of a dimension. A negative axis counts from the end. If the axis is invalid, records an error
    /// and returns 1.
    pub fn dim(&self, axis: isize) -> usize {
        self.axis("dim", axis).map_or(1, |a| self.ty.dims[a])
    }

    /// Converts a possibly negative axis to an index. If the axis is invalid, records an error of the operation `op`.
    pub(super) fn axis(&self, op: &'static str, axis: isize) -> Option<usize> {
        let found = axis_of(axis, self.rank());
        if found.is_none() {
            self.b.fail(op, format!("axis {axis} is out of range for {}", self.ty));
        }
        found
    }

    /// Returns the number of dimensions.
    pub fn rank(&self) -> usize {
        self.ty.rank()
    }

    /// Returns the builder of the program that contains this value.
    pub fn builder(&self) -> &Builder {
        &self.b
    }

    pub(super) fn local(&self) -> Rc<str> {
        self.b.name_of(self)
    }
}

/// Converts a possibly negative axis to an index; `None` if it is out of range.
pub(super) fn axis_of(axis: isize, rank: usize) -> Option<usize> {
    let a = if axis < 0 { axis + rank as isize } else { axis };
    (a >= 0 && (a as usize) < rank).then_some(a as usize)
}
