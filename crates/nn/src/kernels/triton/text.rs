//! Writes Triton kernels as MLIR text: the code of one program of a launch grid, which operates on tiles in registers,
//! in the dialects `tt`, `arith`, `math` and `scf`. Each operation broadcasts its operands to a common shape.

use std::cell::RefCell;
use std::rc::Rc;

use ltx2_stablehlo::DType;

/// The program being written. Clones refer to the same program.
#[derive(Clone, Default)]
pub(super) struct TritonCode(Rc<RefCell<TritonCodeState>>);

#[derive(Default)]
struct TritonCodeState {
    lines: Vec<String>,
    names: usize,
    depth: usize,
}

/// Element type of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TileElement {
    Flag,
    I32,
    I64,
    F32,
    /// The element type of an array in memory.
    Stored(DType),
    /// Pointer to an element of an array.
    Pointer(DType),
}

impl TileElement {
    fn text(self) -> String {
        match self {
            TileElement::Flag => "i1".into(),
            TileElement::I32 => "i32".into(),
            TileElement::I64 => "i64".into(),
            TileElement::F32 => "f32".into(),
            TileElement::Stored(dtype) => dtype.name().into(),
            TileElement::Pointer(dtype) => format!("!tt.ptr<{}>", dtype.name()),
        }
    }

    /// Returns the suffix of arithmetic operation names for this type.
    fn letter(self) -> char {
        if matches!(self, TileElement::F32 | TileElement::Stored(_)) { 'f' } else { 'i' }
    }
}

/// A scalar, vector or matrix. Sizes are powers of two.
#[derive(Clone)]
pub(super) struct TritonTile {
    code: TritonCode,
    name: String,
    element: TileElement,
    dims: Vec<usize>,
}

/// Right operand of an operation: a tile, or a constant of the left operand's type.
pub(super) enum Operand {
    Tile(TritonTile),
    Int(i64),
    Float(f64),
}

impl From<&TritonTile> for Operand {
    fn from(tile: &TritonTile) -> Self {
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

fn ty(element: TileElement, dims: &[usize]) -> String {
    if dims.is_empty() {
        return element.text();
    }
    let dims: String = dims.iter().map(|d| format!("{d}x")).collect();
    format!("tensor<{dims}{}>", element.text())
}

/// Returns the operation that applies the PTX instruction `name` to f32 values of the type `ty`.
fn instruction(name: &str, operands: &[&str], ty: &str) -> String {
    let places: Vec<String> = (1..=operands.len()).map(|n| format!("${n}")).collect();
    let types = vec![ty; operands.len()].join(", ");
    format!(
        "tt.elementwise_inline_asm \"{name} $0, {};\" {{constraints = \"=f{}\", packed_element = 1 : i32, \
         pure = true}} {} : {types} -> {ty}",
        places.join(", "),
        ",f".repeat(operands.len()),
        operands.join(", ")
    )
}

impl TritonCode {
    /// Returns a module with the function `name`, which has one pointer argument per array, with the element types
    /// `arrays`. `body` writes the code of the function.
    pub(crate) fn module(name: &str, arrays: &[DType], body: impl FnOnce(&TritonCode, &[TritonTile])) -> String {
        let code = TritonCode::default();
        let pointer = |(n, &dtype): (usize, &DType)| TritonTile {
            code: code.clone(),
            name: format!("%p{n}"),
            element: TileElement::Pointer(dtype),
            dims: Vec::new(),
        };
        let pointers: Vec<TritonTile> = arrays.iter().enumerate().map(pointer).collect();
        body(&code, &pointers);
        // The plugin aligns buffers to more than 16 bytes.
        let argument = |p: &TritonTile| format!("{}: {} {{tt.divisibility = 16 : i32}}", p.name, p.ty());
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

    fn define(&self, text: &str, element: TileElement, dims: &[usize]) -> TritonTile {
        let name = self.fresh();
        self.line(&format!("{name} = {text}"));
        TritonTile { code: self.clone(), name, element, dims: dims.to_vec() }
    }

    /// Returns the index of the program along an axis of the launch grid.
    pub(crate) fn place(&self, axis: usize) -> TritonTile {
        self.define(&format!("tt.get_program_id {} : i32", ["x", "y", "z"][axis]), TileElement::I32, &[])
    }

    pub(crate) fn int(&self, value: usize) -> TritonTile {
        self.define(&format!("arith.constant {value} : i32"), TileElement::I32, &[])
    }

    /// Returns a 64-bit number.
    pub(crate) fn wide_int(&self, value: usize) -> TritonTile {
        self.define(&format!("arith.constant {value} : i64"), TileElement::I64, &[])
    }

    /// Returns the vector `0..n`.
    pub(crate) fn range(&self, n: usize) -> TritonTile {
        let text = format!("tt.make_range {{end = {n} : i32, start = 0 : i32}} : {}", ty(TileElement::I32, &[n]));
        self.define(&text, TileElement::I32, &[n])
    }

    /// Returns an f32 tile filled with `value`.
    pub(crate) fn full(&self, value: f64, dims: &[usize]) -> TritonTile {
        let ty = ty(TileElement::F32, dims);
        let value = if dims.is_empty() { format!("{value:.9e}") } else { format!("dense<{value:.9e}>") };
        self.define(&format!("arith.constant {value} : {ty}"), TileElement::F32, dims)
    }

    /// Writes a loop over `0..n` with the loop-carried values `carried`: each iteration passes the results of `body` to
    /// the next. Returns the results of the last iteration. `n` is a constant or an i32 scalar.
    pub(crate) fn repeat<const N: usize>(
        &self,
        n: impl Into<Operand>,
        carried: [TritonTile; N],
        body: impl FnOnce(&TritonTile, &[TritonTile; N]) -> [TritonTile; N],
    ) -> [TritonTile; N] {
        let results = self.repeat_all(n, &carried, |index, inside| {
            let mut inside = inside.iter().cloned();
            let inside = carried.each_ref().map(|tile| inside.next().unwrap_or_else(|| tile.clone()));
            body(index, &inside).to_vec()
        });
        let mut results = results.into_iter();
        carried.map(|tile| results.next().unwrap_or(tile))
    }

    /// Writes a loop like [`Self::repeat`], with any number of loop-carried values.
    pub(crate) fn repeat_all(
        &self,
        n: impl Into<Operand>,
        carried: &[TritonTile],
        body: impl FnOnce(&TritonTile, &[TritonTile]) -> Vec<TritonTile>,
    ) -> Vec<TritonTile> {
        let from = self.int(0);
        let (to, step) = (from.operand(n), self.int(1));
        let (index, result) = (self.fresh(), self.fresh());
        let inside: Vec<TritonTile> =
            carried.iter().map(|tile| TritonTile { name: self.fresh(), ..tile.clone() }).collect();
        let names = |tiles: &[TritonTile]| tiles.iter().map(|tile| tile.name.clone()).collect::<Vec<_>>().join(", ");
        let pairs: Vec<String> = inside.iter().zip(carried).map(|(i, c)| format!("{} = {}", i.name, c.name)).collect();
        let types = carried.iter().map(TritonTile::ty).collect::<Vec<_>>().join(", ");
        self.line(&format!(
            "{result}:{} = scf.for {index} = {} to {} step {} iter_args({}) -> ({types})  : i32 {{",
            carried.len(),
            from.name,
            to.name,
            step.name,
            pairs.join(", ")
        ));
        self.0.borrow_mut().depth += 1;
        let next = body(&TritonTile { name: index, ..from }, &inside);
        self.line(&format!("scf.yield {} : {types}", names(&next)));
        self.0.borrow_mut().depth -= 1;
        self.line("}");
        let results = carried.iter().enumerate();
        results.map(|(n, tile)| TritonTile { name: format!("{result}#{n}"), ..tile.clone() }).collect()
    }
}

impl TritonTile {
    fn ty(&self) -> String {
        ty(self.element, &self.dims)
    }

    fn same(&self, text: &str) -> TritonTile {
        self.code.define(text, self.element, &self.dims)
    }

    /// Reshapes a vector `[n]` to `[n, 1]`.
    pub(crate) fn column(&self) -> TritonTile {
        self.expanded(1)
    }

    /// Reshapes a vector `[n]` to `[1, n]`.
    pub(crate) fn row(&self) -> TritonTile {
        self.expanded(0)
    }

    fn expanded(&self, axis: usize) -> TritonTile {
        let mut dims = self.dims.clone();
        dims.insert(axis, 1);
        let to = ty(self.element, &dims);
        let text = format!("tt.expand_dims {} {{axis = {axis} : i32}} : {} -> {to}", self.name, self.ty());
        self.code.define(&text, self.element, &dims)
    }

    pub(crate) fn broadcast(&self, dims: &[usize]) -> TritonTile {
        if dims == self.dims {
            return self.clone();
        }
        let op = if self.dims.is_empty() { "splat" } else { "broadcast" };
        let text = format!("tt.{op} {} : {} -> {}", self.name, self.ty(), ty(self.element, dims));
        self.code.define(&text, self.element, dims)
    }

    fn operand(&self, other: impl Into<Operand>) -> TritonTile {
        match other.into() {
            Operand::Tile(tile) => tile,
            Operand::Float(value) => self.code.full(value, &self.dims),
            Operand::Int(value) => {
                let text = format!("arith.constant {value} : {}", self.element.text());
                self.code.define(&text, self.element, &[])
            }
        }
    }

    /// Broadcasts both tiles to their common shape.
    fn joined(&self, other: &TritonTile) -> [TritonTile; 2] {
        let dims: Vec<usize> = match (self.dims.is_empty(), other.dims.is_empty()) {
            (true, _) => other.dims.clone(),
            (_, true) => self.dims.clone(),
            _ => self.dims.iter().zip(&other.dims).map(|(a, b)| *a.max(b)).collect(),
        };
        [self, other].map(|tile| tile.broadcast(&dims))
    }

    fn binary(&self, op: &str, other: impl Into<Operand>) -> TritonTile {
        let [a, b] = self.joined(&self.operand(other));
        a.same(&format!("arith.{op} {}, {} : {}", a.name, b.name, a.ty()))
    }

    pub(crate) fn plus(&self, other: impl Into<Operand>) -> TritonTile {
        self.binary(&format!("add{}", self.element.letter()), other)
    }

    pub(crate) fn minus(&self, other: impl Into<Operand>) -> TritonTile {
        self.binary(&format!("sub{}", self.element.letter()), other)
    }

    pub(crate) fn times(&self, other: impl Into<Operand>) -> TritonTile {
        self.binary(&format!("mul{}", self.element.letter()), other)
    }

    /// Divides; integer division truncates.
    pub(crate) fn over(&self, other: impl Into<Operand>) -> TritonTile {
        self.binary(if self.element == TileElement::F32 { "divf" } else { "divsi" }, other)
    }

    pub(crate) fn modulo(&self, n: usize) -> TritonTile {
        self.binary("remsi", n)
    }

    pub(crate) fn at_most(&self, other: impl Into<Operand>) -> TritonTile {
        self.binary("minsi", other)
    }

    pub(crate) fn at_least(&self, other: impl Into<Operand>) -> TritonTile {
        self.binary("maxsi", other)
    }

    pub(crate) fn max_ignoring_nan(&self, other: &TritonTile) -> TritonTile {
        self.binary("maxnumf", other)
    }

    /// Returns the larger value, like [`Self::max_ignoring_nan`], but NaN if an operand is NaN.
    pub(crate) fn max_propagating_nan(&self, other: impl Into<Operand>) -> TritonTile {
        self.binary("maximumf", other)
    }

    pub(crate) fn absolute(&self) -> TritonTile {
        self.same(&format!("math.absf {} : {}", self.name, self.ty()))
    }

    pub(crate) fn and(&self, other: &TritonTile) -> TritonTile {
        self.binary("andi", other)
    }

    /// Returns flags for `0 <= self < n`, with one unsigned comparison.
    pub(crate) fn is_within(&self, n: usize) -> TritonTile {
        let [a, b] = self.joined(&self.operand(n));
        self.code.define(&format!("arith.cmpi ult, {}, {} : {}", a.name, b.name, a.ty()), TileElement::Flag, &a.dims)
    }

    /// Returns flags for f32 values that are at most `limit`; false for NaN.
    pub(crate) fn is_at_most(&self, limit: f64) -> TritonTile {
        let [a, b] = self.joined(&self.operand(limit));
        self.code.define(&format!("arith.cmpf ole, {}, {} : {}", a.name, b.name, a.ty()), TileElement::Flag, &a.dims)
    }

    /// Returns `self · factor + summand`, rounded once.
    pub(crate) fn times_plus(&self, factor: impl Into<Operand>, summand: &TritonTile) -> TritonTile {
        let [a, factor] = self.joined(&self.operand(factor));
        let [a, summand] = a.joined(summand);
        let [a, factor] = a.joined(&factor);
        a.same(&format!("math.fma {}, {}, {} : {}", a.name, factor.name, summand.name, a.ty()))
    }

    /// Returns the f32 result of the PTX instruction `name` for each element of `self` and `others`, all of one shape.
    fn instruction(&self, name: &str, others: &[&TritonTile]) -> TritonTile {
        let names: Vec<&str> = [self].iter().chain(others).map(|tile| tile.name.as_str()).collect();
        self.same(&instruction(name, &names, &self.ty()))
    }

    pub(crate) fn select(&self, yes: &TritonTile, no: &TritonTile) -> TritonTile {
        let text = format!("arith.select {}, {}, {} : {}, {}", self.name, yes.name, no.name, self.ty(), yes.ty());
        yes.same(&text)
    }

    pub(crate) fn sqrt(&self) -> TritonTile {
        self.same(&format!("math.sqrt {} : {}", self.name, self.ty()))
    }

    /// Returns flags for the elements that equal `other`.
    pub(crate) fn equals(&self, other: &TritonTile) -> TritonTile {
        let [a, b] = self.joined(other);
        self.code.define(&format!("arith.cmpi eq, {}, {} : {}", a.name, b.name, a.ty()), TileElement::Flag, &a.dims)
    }

    /// Returns `2^self`; subnormal results are 0. `math.exp2` has three more instructions, for subnormal numbers.
    pub(crate) fn exp2(&self) -> TritonTile {
        self.instruction("ex2.approx.ftz.f32", &[])
    }

    /// Converts integers to 64 bits.
    pub(crate) fn wide(&self) -> TritonTile {
        let to = ty(TileElement::I64, &self.dims);
        self.code.define(&format!("arith.extsi {} : {} to {to}", self.name, self.ty()), TileElement::I64, &self.dims)
    }

    /// Converts f32 to `dtype`, the element type of an array in memory.
    pub(crate) fn narrowed(&self, dtype: DType) -> TritonTile {
        if dtype == DType::F32 {
            return self.clone();
        }
        let element = TileElement::Stored(dtype);
        let to = ty(element, &self.dims);
        self.code.define(&format!("arith.truncf {} : {} to {to}", self.name, self.ty()), element, &self.dims)
    }

    /// Converts the element type of an array in memory to f32.
    pub(crate) fn widened(&self) -> TritonTile {
        if self.element == TileElement::F32 {
            return self.clone();
        }
        let to = ty(TileElement::F32, &self.dims);
        self.code.define(&format!("arith.extf {} : {} to {to}", self.name, self.ty()), TileElement::F32, &self.dims)
    }

    /// Rounds f32 values between -2^22 and 2^22 to the nearest integers, ties to even, and returns their lowest 8 bits.
    /// Adds 1.5 · 2^23 instead of using a conversion instruction, because additions have a higher throughput.
    pub(crate) fn rounded_to_i8(&self) -> TritonTile {
        // Between 2^23 and 2^24, consecutive f32 values differ by 1 and their lowest bits are those of the integer.
        let shifted = self.plus(1.5 * f64::from(1 << 23));
        let [wide, narrow] = [TileElement::I32, TileElement::Stored(DType::I8)].map(|element| ty(element, &self.dims));
        let bits = format!("tt.bitcast {} : {} -> {wide}", shifted.name, shifted.ty());
        let bits = self.code.define(&bits, TileElement::I32, &self.dims);
        let text = format!("arith.trunci {} : {wide} to {narrow}", bits.name);
        self.code.define(&text, TileElement::Stored(DType::I8), &self.dims)
    }

    /// Returns the same elements in row-major order with the shape `dims`.
    pub(crate) fn reshaped(&self, dims: &[usize]) -> TritonTile {
        let text = format!("tt.reshape {} : {} -> {}", self.name, self.ty(), ty(self.element, dims));
        self.code.define(&text, self.element, dims)
    }

    pub(crate) fn transposed(&self) -> TritonTile {
        let dims = [self.dims[1], self.dims[0]];
        let to = ty(self.element, &dims);
        let text = format!("tt.trans {} {{order = array<i32: 1, 0>}} : {} -> {to}", self.name, self.ty());
        self.code.define(&text, self.element, &dims)
    }

    /// Returns `sum + self · other`, f32.
    pub(crate) fn product(&self, other: &TritonTile, sum: &TritonTile) -> TritonTile {
        let operands = format!("{} * {} -> {}", self.ty(), other.ty(), sum.ty());
        let text = format!("tt.dot {}, {}, {}, inputPrecision = tf32 : {operands}", self.name, other.name, sum.name);
        sum.same(&text)
    }

    fn reduced(&self, op: &str, axis: usize) -> TritonTile {
        self.reduced_by(axis, |a, b| format!("arith.{op} {a}, {b} : f32"))
    }

    /// Combines the elements along `axis`, two scalars at a time: `combine` writes the operation on their names.
    fn reduced_by(&self, axis: usize, combine: impl FnOnce(&str, &str) -> String) -> TritonTile {
        let [a, b, c] = [0; 3].map(|_| self.code.fresh());
        let (name, dims) = (self.code.fresh(), vec![self.dims[1 - axis]]);
        self.code.line(&format!("{name} = \"tt.reduce\"({}) <{{axis = {axis} : i32}}> ({{", self.name));
        self.code.line(&format!("^bb0({a}: f32, {b}: f32):"));
        self.code.line(&format!("  {c} = {}", combine(&a, &b)));
        self.code.line(&format!("  tt.reduce.return {c} : f32"));
        self.code.line(&format!("}}) : ({}) -> {}", self.ty(), ty(self.element, &dims)));
        TritonTile { code: self.code.clone(), name, element: self.element, dims }
    }

    /// Returns the sum of `self · other` along `axis`. Unlike the operations of `arith`, which XLA rounds one by one, these
    /// instructions let the assembler fuse each product with its addition.
    fn product_sum(&self, other: &TritonTile, axis: usize) -> TritonTile {
        let [a, b] = self.joined(other);
        a.instruction("mul.f32", &[&b]).reduced_by(axis, |a, b| instruction("add.f32", &[a, b], "f32"))
    }

    /// Returns the sum of `self · other` of each row.
    pub(crate) fn row_product_sum(&self, other: &TritonTile) -> TritonTile {
        self.product_sum(other, 1)
    }

    /// Returns the sum of `self · other` of each column.
    pub(crate) fn column_product_sum(&self, other: &TritonTile) -> TritonTile {
        self.product_sum(other, 0)
    }

    /// Returns the maximum of each row.
    pub(crate) fn row_max_ignoring_nan(&self) -> TritonTile {
        self.reduced("maxnumf", 1)
    }

    /// Returns the maximum of each row, like [`Self::row_max_ignoring_nan`], but NaN for a row that contains NaN.
    pub(crate) fn row_max_propagating_nan(&self) -> TritonTile {
        self.reduced("maximumf", 1)
    }

    /// Returns the sum of each row.
    pub(crate) fn row_sum(&self) -> TritonTile {
        self.reduced("addf", 1)
    }

    /// Returns the maximum of each column, NaN for a column that contains NaN.
    pub(crate) fn column_max_propagating_nan(&self) -> TritonTile {
        self.reduced("maximumf", 0)
    }

    /// Returns the sum of each column.
    pub(crate) fn column_sum(&self) -> TritonTile {
        self.reduced("addf", 0)
    }

    /// Advances the pointers by a number of elements.
    pub(crate) fn ahead(&self, elements: &TritonTile) -> TritonTile {
        let [p, n] = self.joined(elements);
        p.same(&format!("tt.addptr {}, {} : {}, {}", p.name, n.name, p.ty(), n.ty()))
    }

    /// Returns the element type that a load from these pointers has.
    fn loaded_element(&self) -> TileElement {
        match self.element {
            TileElement::Pointer(DType::I32) => TileElement::I32,
            TileElement::Pointer(DType::F32) => TileElement::F32,
            TileElement::Pointer(dtype) => TileElement::Stored(dtype),
            other => other,
        }
    }

    /// Loads the elements that the pointers point to.
    pub(crate) fn load(&self) -> TritonTile {
        self.code.define(&format!("tt.load {} : {}", self.name, self.ty()), self.loaded_element(), &self.dims)
    }

    /// Loads the elements for which `flags` is set; the others are 0.
    pub(crate) fn load_where(&self, flags: &TritonTile) -> TritonTile {
        let element = self.loaded_element();
        let ty = ty(element, &self.dims);
        let zero = self.code.define(&format!("arith.constant dense<0.0> : {ty}"), element, &self.dims);
        let flags = flags.broadcast(&self.dims);
        let text = format!("tt.load {}, {}, {} : {}", self.name, flags.name, zero.name, self.ty());
        self.code.define(&text, element, &self.dims)
    }

    /// Stores `value` at the addresses that the pointers contain.
    pub(crate) fn store(&self, value: &TritonTile) {
        self.code.line(&format!("tt.store {}, {} : {}", self.name, value.name, self.ty()));
    }

    /// Stores the elements of `value` for which `flags` is set.
    pub(crate) fn store_where(&self, value: &TritonTile, flags: &TritonTile) {
        let flags = flags.broadcast(&self.dims);
        self.code.line(&format!("tt.store {}, {}, {} : {}", self.name, value.name, flags.name, self.ty()));
    }
}
