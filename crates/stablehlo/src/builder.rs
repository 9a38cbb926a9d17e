//! The state of a program under construction: regions, names, scopes and the first error.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::rc::Rc;

use indexmap::IndexMap;

use super::error::{Error, Result};
use super::program::{Argument, Output, Program};
use super::propagation::Known;
use super::sharding::Mesh;
use super::types::{Type, list};
use super::work::Work;
use crate::DType;

/// Precision of matmuls and convolutions of f32 operands on matrix units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Precision {
    /// The platform's fastest: TF32 on CUDA, one bf16 pass on TPU.
    #[default]
    Default,
    /// Full f32.
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

/// A handle on the program under construction; clones share it.
#[derive(Clone)]
pub struct Builder(pub(super) Rc<RefCell<State>>);

/// A value of the program. Cheap to clone; operations on it are methods that add to its program.
#[derive(Clone)]
pub struct Value {
    pub(super) b: Builder,
    pub(super) name: Rc<str>,
    pub(super) ty: Type,
    pub(super) region: usize,
    pub(super) sharding: Known,
}

/// A block of operations being written. A `while` region passes every value it uses from outside through the loop's
/// carry, as XLA wants it, and a manual computation takes such values as operands; a `case` sees them; a function may not use any.
pub(super) struct Region {
    pub id: usize,
    pub kind: RegionKind,
    pub text: String,
}

pub(super) enum RegionKind {
    /// A function's body: sees nothing of the outside.
    Isolated,
    /// Both regions of a `while`: outer values are captured into the carry.
    Loop { captures: Captures },
    /// A manual computation's body: outer values are captured as replicated operands.
    Manual { captures: Captures },
    /// A body of a `case`: sees the values around it under their own names.
    Choice,
}

/// Outer values with their names inside a region, in the order of first use.
pub(super) type Captures = IndexMap<(usize, Rc<str>), (Value, Rc<str>)>;

impl RegionKind {
    fn captures(&self) -> Option<&Captures> {
        match self {
            RegionKind::Isolated | RegionKind::Choice => None,
            RegionKind::Loop { captures } | RegionKind::Manual { captures } => Some(captures),
        }
    }
}

pub(super) struct State {
    pub program: String,
    pub precision: Precision,
    pub mixed_precision_dot: bool,
    pub mesh: Option<Mesh>,
    /// FLOPs of matmuls so far.
    pub dot_flops: f64,
    /// What one device does so far.
    pub work: Work,
    /// Bytes of the smallest collective permute so far.
    pub smallest_permute: Option<usize>,
    regions: Vec<Region>,
    next_name: usize,
    next_region: usize,
    pub next_channel: usize,
    scopes: Vec<String>,
    locations: bool,
    /// By name, in order.
    arguments: IndexMap<String, Argument>,
    pub functions: BTreeMap<String, Function>,
    error: Option<Error>,
}

pub(super) struct Function {
    pub text: String,
    pub results: Vec<Type>,
    /// FLOPs of matmuls in one call.
    pub dot_flops: f64,
    /// What one device does in one call.
    pub work: Work,
}

/// Guard of a name scope, which ends when dropped.
pub struct Scope(Builder);

impl Drop for Scope {
    fn drop(&mut self) {
        self.0.0.borrow_mut().scopes.pop();
    }
}

impl Builder {
    /// A new program on one device.
    pub fn new(program: &str) -> Self {
        Builder(Rc::new(RefCell::new(State {
            program: program.to_string(),
            precision: Precision::Default,
            mixed_precision_dot: true,
            mesh: None,
            dot_flops: 0.0,
            work: Work::default(),
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

    /// Sets the precision of the matmuls and convolutions that follow.
    pub fn with_precision(self, precision: Precision) -> Self {
        self.0.borrow_mut().precision = precision;
        self
    }

    /// Whether a matmul may give a wider type than its operands have; else they are widened first, to the same value.
    pub fn with_mixed_precision_dot(self, allowed: bool) -> Self {
        self.0.borrow_mut().mixed_precision_dot = allowed;
        self
    }

    /// Partitions the program over a mesh.
    pub fn with_mesh(self, mesh: Mesh) -> Self {
        self.0.borrow_mut().mesh = Some(mesh);
        self
    }

    /// Leaves the name scopes out of the text, for readable snapshots.
    pub fn without_locations(self) -> Self {
        self.0.borrow_mut().locations = false;
        self
    }

    /// Enters a name scope: operations made while the returned guard lives carry it in their metadata.
    #[must_use]
    pub fn scope(&self, name: impl Into<String>) -> Scope {
        self.0.borrow_mut().scopes.push(name.into());
        Scope(self.clone())
    }

    /// The current name scope, `outer/inner`.
    pub fn scope_path(&self) -> String {
        self.0.borrow().scopes.join("/")
    }

    /// Declares an argument of `main`, from wherever in the program it is first needed.
    pub fn argument(&self, name: &str, ty: Type) -> Value {
        self.argument_with(Argument::new(name, ty))
    }

    /// Declares an argument of `main` with its placement.
    pub fn argument_with(&self, argument: Argument) -> Value {
        let mut s = self.0.borrow_mut();
        let name: Rc<str> = format!("%arg{}", s.arguments.len()).into();
        let ty = argument.ty.clone();
        let sharding = argument.sharding.clone().map(Rc::new);
        let twice = s.arguments.insert(argument.name.clone(), argument);
        drop(s);
        if let Some(argument) = twice {
            self.fail("argument", format!("'{}' is declared twice", argument.name));
        }
        Value { b: self.clone(), name, ty, region: 0, sharding }
    }

    /// Records the first error; later ones follow from it.
    pub(super) fn fail(&self, op: &'static str, message: String) {
        let mut s = self.0.borrow_mut();
        if s.error.is_none() {
            s.error = Some(Error { op, scope: s.scopes.join("/"), program: s.program.clone(), message });
        }
    }

    /// Records an error that a layer above found, under the current name scope.
    pub fn reject(&self, op: &'static str, message: String) {
        self.fail(op, message);
    }

    /// A value that stands for the result of a failed operation.
    pub(super) fn poison(&self, op: &'static str, message: String, ty: Type) -> Value {
        self.fail(op, message);
        self.value("%poison".into(), ty)
    }

    pub(super) fn value(&self, name: Rc<str>, ty: Type) -> Value {
        let region = self.0.borrow().regions.last().map_or(0, |r| r.id);
        Value { b: self.clone(), name, ty, region, sharding: None }
    }

    /// A fresh SSA name.
    pub(super) fn fresh(&self) -> Rc<str> {
        let mut s = self.0.borrow_mut();
        s.next_name += 1;
        format!("%{}", s.next_name - 1).into()
    }

    /// Whether operations now see one device's own part of every value.
    pub(super) fn is_manual(&self) -> bool {
        self.0.borrow().regions.iter().any(|r| matches!(r.kind, RegionKind::Manual { .. }))
    }

    /// The name of `v` inside the current region, captured through the regions in between.
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
        // `main`'s arguments may be declared while a function is being written, but not be seen from inside it.
        let known = region.kind.captures().map(|c| c.get(&(v.region, v.name.clone())));
        match known {
            Some(Some((_, local))) => return local.clone(),
            Some(None) if level > 0 => drop(s),
            _ => {
                drop(s);
                self.fail("capture", format!("value of type {} is used in a region that cannot see it", v.ty));
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

    /// Writes one operation with one result.
    pub(super) fn op(&self, op: &'static str, text: impl Display, ty: Type) -> Value {
        let name = self.fresh();
        self.line(op, format_args!("{name} = {text}"));
        self.value(name, ty)
    }

    /// Writes one operation with several results.
    pub(super) fn op_many(&self, op: &'static str, text: impl Display, types: &[Type]) -> Vec<Value> {
        let name = self.fresh();
        if types.len() == 1 {
            self.line(op, format_args!("{name} = {text}"));
            return vec![self.value(name, types[0].clone())];
        }
        self.line(op, format_args!("{name}:{} = {text}", types.len()));
        types.iter().enumerate().map(|(i, t)| self.value(format!("{name}#{i}").into(), t.clone())).collect()
    }

    /// Writes a line of the current region, with its name scope as location.
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

    /// Writes a line without a location (terminators).
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
            // The outermost region is only taken by `finish`; give an empty one so that the error kept is the real one.
            _ => Region { id: usize::MAX, kind: RegionKind::Isolated, text: String::new() },
        }
    }

    /// Takes the text written in the current region so far, leaving it empty: a loop writes its two regions one after
    /// the other into one frame, because they share the loop's captures.
    pub(super) fn take_text(&self) -> String {
        self.0.borrow_mut().regions.last_mut().map(|r| std::mem::take(&mut r.text)).unwrap_or_default()
    }

    /// Finishes the program with its named results.
    ///
    /// # Errors
    /// The first error of a builder call, with operation, name scope and shapes.
    pub fn finish(&self, results: &[(&str, &Value)]) -> Result<Program> {
        self.finish_with(results.iter().map(|(n, v)| (Output::new(n, v.ty.clone()), (*v).clone())).collect())
    }

    /// Finishes the program with its named results and their placements.
    ///
    /// # Errors
    /// The first error of a builder call, with operation, name scope and shapes.
    pub fn finish_with(&self, results: Vec<(Output, Value)>) -> Result<Program> {
        let names = list(results.iter().map(|(_, v)| self.name_of(v)));
        let types = list(results.iter().map(|(_, v)| &v.ty));
        let s = self.0.borrow();
        if let Some(e) = &s.error {
            return Err(e.clone());
        }
        let outputs: Vec<Output> = results.into_iter().map(|(output, _)| output).collect();
        let mesh = s.mesh.clone().unwrap_or(Mesh { axes: Vec::new() });
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
            results: outputs,
            mesh,
            dot_flops: s.dot_flops,
            work: s.work.clone(),
            smallest_permute: s.smallest_permute,
        })
    }

    /// Donates an argument's memory to result number `result`.
    pub fn donate(&self, argument: &str, result: usize) {
        let found = {
            let mut s = self.0.borrow_mut();
            s.arguments.get_mut(argument).map(|a| a.donated_to = Some(result)).is_some()
        };
        if !found {
            self.fail("donate", format!("there is no argument '{argument}'"));
        }
    }

    /// Precision of matmuls and convolutions.
    pub fn precision(&self) -> Precision {
        self.0.borrow().precision
    }

    /// A scalar constant.
    pub fn scalar(&self, value: f64, dtype: DType) -> Value {
        self.full(value, Type::scalar(dtype))
    }
}

impl Value {
    pub fn ty(&self) -> &Type {
        &self.ty
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.ty.dtype
    }

    pub fn dims(&self) -> &[usize] {
        &self.ty.dims
    }

    /// One dimension; negative counts from the end. A wrong index is the program's error and reads as 1.
    pub fn dim(&self, axis: isize) -> usize {
        self.axis("dim", axis).map_or(1, |a| self.ty.dims[a])
    }

    /// A possibly negative axis as an index; one that is not there is the error of `op`.
    pub(super) fn axis(&self, op: &'static str, axis: isize) -> Option<usize> {
        let found = axis_of(axis, self.rank());
        if found.is_none() {
            self.b.fail(op, format!("there is no axis {axis} in {}", self.ty));
        }
        found
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.ty.rank()
    }

    /// Builder of the program that this value belongs to.
    pub fn builder(&self) -> &Builder {
        &self.b
    }

    pub(super) fn local(&self) -> Rc<str> {
        self.b.name_of(self)
    }
}

/// A possibly negative axis as an index.
pub(super) fn axis_of(axis: isize, rank: usize) -> Option<usize> {
    let a = if axis < 0 { axis + rank as isize } else { axis };
    (a >= 0 && (a as usize) < rank).then_some(a as usize)
}
