//! A writer of Triton's text: what one program of a grid does with tiles in registers, in MLIR's `tt`, `arith`, `math` and `scf`
//! operations. Tiles carry their type; operands of an operation are broadcast to one shape.

use std::cell::RefCell;
use std::rc::Rc;

use crate::hlo::DType;

/// The program being written; clones share it.
#[derive(Clone, Default)]
pub(super) struct Code(Rc<RefCell<State>>);

#[derive(Default)]
struct State {
    lines: Vec<String>,
    names: usize,
    depth: usize,
}

/// Element of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    Flag,
    I32,
    I64,
    F32,
    /// As arrays hold them.
    Stored(DType),
    /// Of one element of an array.
    Pointer(DType),
}

impl Element {
    fn text(self) -> String {
        match self {
            Element::Flag => "i1".into(),
            Element::I32 => "i32".into(),
            Element::I64 => "i64".into(),
            Element::F32 => "f32".into(),
            Element::Stored(dtype) => dtype.name().into(),
            Element::Pointer(dtype) => format!("!tt.ptr<{}>", dtype.name()),
        }
    }

    /// Letter that ends the names of its arithmetic.
    fn letter(self) -> char {
        if matches!(self, Element::F32 | Element::Stored(_)) { 'f' } else { 'i' }
    }
}

/// A number, a row of numbers or a matrix. Sizes are powers of two.
#[derive(Clone)]
pub(super) struct Tile {
    code: Code,
    name: String,
    element: Element,
    dims: Vec<usize>,
}

/// The other operand: a tile, or a number of the first one's element.
pub(super) enum Operand {
    Tile(Tile),
    Int(i64),
    Float(f64),
}

impl From<&Tile> for Operand {
    fn from(tile: &Tile) -> Self {
        Operand::Tile(tile.clone())
    }
}

impl From<usize> for Operand {
    fn from(value: usize) -> Self {
        Operand::Int(value as i64)
    }
}

impl From<f64> for Operand {
    fn from(value: f64) -> Self {
        Operand::Float(value)
    }
}

fn ty(element: Element, dims: &[usize]) -> String {
    if dims.is_empty() {
        return element.text();
    }
    let dims: String = dims.iter().map(|d| format!("{d}x")).collect();
    format!("tensor<{dims}{}>", element.text())
}

impl Code {
    /// The module of the function `name`, whose arguments point to arrays of these elements; `body` writes it.
    pub(crate) fn module(name: &str, arrays: &[DType], body: impl FnOnce(&Code, &[Tile])) -> String {
        let code = Code::default();
        let pointer = |(n, &dtype): (usize, &DType)| Tile {
            code: code.clone(),
            name: format!("%p{n}"),
            element: Element::Pointer(dtype),
            dims: Vec::new(),
        };
        let pointers: Vec<Tile> = arrays.iter().enumerate().map(pointer).collect();
        body(&code, &pointers);
        // The plugin's buffers begin at multiples of more than 16 bytes.
        let argument = |p: &Tile| format!("{}: {} {{tt.divisibility = 16 : i32}}", p.name, p.ty());
        let arguments: Vec<String> = pointers.iter().map(argument).collect();
        let lines = code.0.borrow().lines.concat();
        format!("module {{\n  tt.func public @{name}({}) {{\n{lines}    tt.return\n  }}\n}}\n", arguments.join(", "))
    }

    fn line(&self, text: &str) {
        let mut state = self.0.borrow_mut();
        let indent = "  ".repeat(state.depth + 2);
        state.lines.push(format!("{indent}{text}\n"));
    }

    fn fresh(&self) -> String {
        let mut state = self.0.borrow_mut();
        state.names += 1;
        format!("%{}", state.names - 1)
    }

    fn define(&self, text: &str, element: Element, dims: &[usize]) -> Tile {
        let name = self.fresh();
        self.line(&format!("{name} = {text}"));
        Tile { code: self.clone(), name, element, dims: dims.to_vec() }
    }

    /// The program's place along an axis of the grid.
    pub(crate) fn place(&self, axis: usize) -> Tile {
        self.define(&format!("tt.get_program_id {} : i32", ["x", "y", "z"][axis]), Element::I32, &[])
    }

    pub(crate) fn int(&self, value: usize) -> Tile {
        self.define(&format!("arith.constant {value} : i32"), Element::I32, &[])
    }

    /// `0..n`.
    pub(crate) fn range(&self, n: usize) -> Tile {
        let text = format!("tt.make_range {{end = {n} : i32, start = 0 : i32}} : {}", ty(Element::I32, &[n]));
        self.define(&text, Element::I32, &[n])
    }

    /// A tile of one f32 number.
    pub(crate) fn full(&self, value: f64, dims: &[usize]) -> Tile {
        let ty = ty(Element::F32, dims);
        self.define(&format!("arith.constant dense<{value:.9e}> : {ty}"), Element::F32, dims)
    }

    /// `body` for each number from 0 to `n - 1`, on what it gave before, at first `carried`.
    pub(crate) fn repeat(
        &self,
        n: usize,
        carried: [Tile; 3],
        body: impl FnOnce(&Tile, &[Tile; 3]) -> [Tile; 3],
    ) -> [Tile; 3] {
        let [from, to, step] = [0, n, 1].map(|value| self.int(value));
        let (index, result) = (self.fresh(), self.fresh());
        let inside = carried.clone().map(|tile| Tile { name: self.fresh(), ..tile });
        let pairs: Vec<String> = inside.iter().zip(&carried).map(|(i, c)| format!("{} = {}", i.name, c.name)).collect();
        let types = carried.each_ref().map(Tile::ty).join(", ");
        self.line(&format!(
            "{result}:3 = scf.for {index} = {} to {} step {} iter_args({}) -> ({types})  : i32 {{",
            from.name,
            to.name,
            step.name,
            pairs.join(", ")
        ));
        self.0.borrow_mut().depth += 1;
        let next = body(&Tile { name: index, ..from }, &inside);
        self.line(&format!("scf.yield {} : {types}", next.each_ref().map(|tile| tile.name.clone()).join(", ")));
        self.0.borrow_mut().depth -= 1;
        self.line("}");
        let mut n = 0..;
        carried.map(|tile| Tile { name: format!("{result}#{}", n.next().unwrap_or(0)), ..tile })
    }
}

impl Tile {
    fn ty(&self) -> String {
        ty(self.element, &self.dims)
    }

    fn same(&self, text: &str) -> Tile {
        self.code.define(text, self.element, &self.dims)
    }

    /// A row `[n]` as `[n, 1]`.
    pub(crate) fn column(&self) -> Tile {
        self.expanded(1)
    }

    /// A row `[n]` as `[1, n]`.
    pub(crate) fn row(&self) -> Tile {
        self.expanded(0)
    }

    fn expanded(&self, axis: usize) -> Tile {
        let mut dims = self.dims.clone();
        dims.insert(axis, 1);
        let to = ty(self.element, &dims);
        let text = format!("tt.expand_dims {} {{axis = {axis} : i32}} : {} -> {to}", self.name, self.ty());
        self.code.define(&text, self.element, &dims)
    }

    fn broadcast(&self, dims: &[usize]) -> Tile {
        if dims == self.dims {
            return self.clone();
        }
        let op = if self.dims.is_empty() { "splat" } else { "broadcast" };
        let text = format!("tt.{op} {} : {} -> {}", self.name, self.ty(), ty(self.element, dims));
        self.code.define(&text, self.element, dims)
    }

    fn operand(&self, other: impl Into<Operand>) -> Tile {
        match other.into() {
            Operand::Tile(tile) => tile,
            Operand::Float(value) => self.code.full(value, &self.dims),
            Operand::Int(value) => {
                let text = format!("arith.constant {value} : {}", self.element.text());
                self.code.define(&text, self.element, &[])
            }
        }
    }

    /// Both in their common shape.
    fn joined(&self, other: &Tile) -> [Tile; 2] {
        let dims: Vec<usize> = match (self.dims.is_empty(), other.dims.is_empty()) {
            (true, _) => other.dims.clone(),
            (_, true) => self.dims.clone(),
            _ => self.dims.iter().zip(&other.dims).map(|(a, b)| *a.max(b)).collect(),
        };
        [self, other].map(|tile| tile.broadcast(&dims))
    }

    fn binary(&self, op: &str, other: impl Into<Operand>) -> Tile {
        let [a, b] = self.joined(&self.operand(other));
        a.same(&format!("arith.{op} {}, {} : {}", a.name, b.name, a.ty()))
    }

    pub(crate) fn plus(&self, other: impl Into<Operand>) -> Tile {
        self.binary(&format!("add{}", self.element.letter()), other)
    }

    pub(crate) fn minus(&self, other: impl Into<Operand>) -> Tile {
        self.binary(&format!("sub{}", self.element.letter()), other)
    }

    pub(crate) fn times(&self, other: impl Into<Operand>) -> Tile {
        self.binary(&format!("mul{}", self.element.letter()), other)
    }

    /// Quotients: of whole numbers, whole.
    pub(crate) fn over(&self, other: impl Into<Operand>) -> Tile {
        self.binary(if self.element == Element::F32 { "divf" } else { "divsi" }, other)
    }

    pub(crate) fn modulo(&self, n: usize) -> Tile {
        self.binary("remsi", n)
    }

    pub(crate) fn at_most(&self, other: impl Into<Operand>) -> Tile {
        self.binary("minsi", other)
    }

    pub(crate) fn at_least(&self, other: impl Into<Operand>) -> Tile {
        self.binary("maxsi", other)
    }

    pub(crate) fn larger(&self, other: &Tile) -> Tile {
        self.binary("maxnumf", other)
    }

    pub(crate) fn and(&self, other: &Tile) -> Tile {
        self.binary("andi", other)
    }

    /// Flags of `0 <= self < n`: a negative number is a large one without its sign.
    pub(crate) fn is_within(&self, n: usize) -> Tile {
        let [a, b] = self.joined(&self.operand(n));
        self.code.define(&format!("arith.cmpi ult, {}, {} : {}", a.name, b.name, a.ty()), Element::Flag, &a.dims)
    }

    pub(crate) fn select(&self, yes: &Tile, no: &Tile) -> Tile {
        let text = format!("arith.select {}, {}, {} : {}, {}", self.name, yes.name, no.name, self.ty(), yes.ty());
        yes.same(&text)
    }

    pub(crate) fn exp2(&self) -> Tile {
        self.same(&format!("math.exp2 {} : {}", self.name, self.ty()))
    }

    /// Whole numbers in 64 bits.
    pub(crate) fn wide(&self) -> Tile {
        let to = ty(Element::I64, &self.dims);
        self.code.define(&format!("arith.extsi {} : {} to {to}", self.name, self.ty()), Element::I64, &self.dims)
    }

    /// F32 numbers as arrays hold them.
    pub(crate) fn narrowed(&self, dtype: DType) -> Tile {
        let element = Element::Stored(dtype);
        let to = ty(element, &self.dims);
        self.code.define(&format!("arith.truncf {} : {} to {to}", self.name, self.ty()), element, &self.dims)
    }

    pub(crate) fn transposed(&self) -> Tile {
        let dims = [self.dims[1], self.dims[0]];
        let to = ty(self.element, &dims);
        let text = format!("tt.trans {} {{order = array<i32: 1, 0>}} : {} -> {to}", self.name, self.ty());
        self.code.define(&text, self.element, &dims)
    }

    /// `sum + self · other`, f32.
    pub(crate) fn product(&self, other: &Tile, sum: &Tile) -> Tile {
        let operands = format!("{} * {} -> {}", self.ty(), other.ty(), sum.ty());
        let text = format!("tt.dot {}, {}, {}, inputPrecision = tf32 : {operands}", self.name, other.name, sum.name);
        sum.same(&text)
    }

    fn reduced(&self, op: &str) -> Tile {
        let [a, b, c] = [0; 3].map(|_| self.code.fresh());
        let (name, dims) = (self.code.fresh(), vec![self.dims[0]]);
        self.code.line(&format!("{name} = \"tt.reduce\"({}) <{{axis = 1 : i32}}> ({{", self.name));
        self.code.line(&format!("^bb0({a}: f32, {b}: f32):"));
        self.code.line(&format!("  {c} = arith.{op} {a}, {b} : f32"));
        self.code.line(&format!("  tt.reduce.return {c} : f32"));
        self.code.line(&format!("}}) : ({}) -> {}", self.ty(), ty(self.element, &dims)));
        Tile { code: self.code.clone(), name, element: self.element, dims }
    }

    /// The largest of each row.
    pub(crate) fn row_max(&self) -> Tile {
        self.reduced("maxnumf")
    }

    /// The sum of each row.
    pub(crate) fn row_sum(&self) -> Tile {
        self.reduced("addf")
    }

    /// Pointers so many elements on.
    pub(crate) fn ahead(&self, elements: &Tile) -> Tile {
        let [p, n] = self.joined(elements);
        p.same(&format!("tt.addptr {}, {} : {}, {}", p.name, n.name, p.ty(), n.ty()))
    }

    /// The elements that these pointers point to.
    pub(crate) fn load(&self) -> Tile {
        let Element::Pointer(dtype) = self.element else { return self.clone() };
        let element = if dtype == DType::I32 { Element::I32 } else { Element::Stored(dtype) };
        self.code.define(&format!("tt.load {} : {}", self.name, self.ty()), element, &self.dims)
    }

    /// Writes to where these pointers point.
    pub(crate) fn store(&self, value: &Tile) {
        self.code.line(&format!("tt.store {}, {} : {}", self.name, value.name, self.ty()));
    }
}
