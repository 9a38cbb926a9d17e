//! Writes Mosaic kernels as MLIR text: functions on blocks in VMEM, in the dialects `arith`, `vector`, `math`, `scf`
//! and `tpu`. Each operation broadcasts its operands to a common shape.

use std::cell::RefCell;
use std::rc::Rc;

use ltx2_stablehlo::DType;

/// Number of lanes of a vector register.
pub(super) const LANES: usize = 128;

/// The function being written. Clones refer to the same function.
#[derive(Clone, Default)]
pub(super) struct MosaicCode(Rc<RefCell<MosaicCodeState>>);

#[derive(Default)]
struct MosaicCodeState {
    lines: Vec<String>,
    names: usize,
    depth: usize,
}

/// A block in VMEM that is an argument of the kernel.
#[derive(Clone)]
pub(super) struct VmemBlock {
    name: String,
    pub dtype: DType,
    pub dims: Vec<usize>,
}

/// A 32-bit integer.
#[derive(Clone)]
pub(super) struct Int {
    code: MosaicCode,
    name: String,
}

/// A condition, `i1`.
pub(super) struct Predicate {
    name: String,
}

/// A matrix in registers.
#[derive(Clone)]
pub(super) struct Matrix {
    code: MosaicCode,
    name: String,
    pub dtype: DType,
    pub dims: [usize; 2],
}

fn element(dtype: DType) -> &'static str {
    match dtype {
        DType::Bool => "i1",
        other => other.name(),
    }
}

fn shaped(kind: &str, dtype: DType, dims: &[usize], rest: &str) -> String {
    let dims: String = dims.iter().map(|d| format!("{d}x")).collect();
    format!("{kind}<{dims}{}{rest}>", element(dtype))
}

fn vector(dtype: DType, dims: &[usize]) -> String {
    shaped("vector", dtype, dims, "")
}

impl VmemBlock {
    /// Creates the `n`th argument of the kernel.
    pub(crate) fn new(n: usize, dtype: DType, dims: Vec<usize>) -> Self {
        VmemBlock { name: format!("%b{n}"), dtype, dims }
    }

    fn ty(&self) -> String {
        shaped("memref", self.dtype, &self.dims, ", #tpu.memory_space<vmem>")
    }

    /// Returns `%name: type` for the signature of the function.
    pub(crate) fn argument(&self) -> String {
        format!("{}: {}", self.name, self.ty())
    }

    /// Returns the last two dimensions.
    fn matrix(&self) -> [usize; 2] {
        let n = self.dims.len();
        [self.dims[n - 2], self.dims[n - 1]]
    }
}

impl MosaicCode {
    pub(crate) fn text(&self) -> String {
        self.0.borrow().lines.concat()
    }

    fn line(&self, text: &str) {
        let mut state = self.0.borrow_mut();
        let indent = "  ".repeat(state.depth + 2);
        state.lines.push(format!("{indent}{text}\n"));
    }

    fn define(&self, text: &str) -> String {
        let name = {
            let mut state = self.0.borrow_mut();
            state.names += 1;
            format!("%{}", state.names - 1)
        };
        self.line(&format!("{name} = {text}"));
        name
    }

    fn matrix(&self, text: &str, dtype: DType, dims: [usize; 2]) -> Matrix {
        Matrix { code: self.clone(), name: self.define(text), dtype, dims }
    }

    /// Returns the grid position along an axis.
    pub(crate) fn place(&self, axis: usize) -> Int {
        Int { code: self.clone(), name: grid_axis(axis) }
    }

    pub(crate) fn int(&self, value: usize) -> Int {
        Int { code: self.clone(), name: self.define(&format!("arith.constant {value} : i32")) }
    }

    /// Returns a matrix filled with `value`.
    pub(crate) fn full(&self, value: f32, dims: [usize; 2]) -> Matrix {
        let ty = vector(DType::F32, &dims);
        self.matrix(&format!("arith.constant dense<{value:.9e}> : {ty}"), DType::F32, dims)
    }

    /// Returns a matrix of the elements' indices along an axis.
    pub(crate) fn iota(&self, dims: [usize; 2], axis: usize) -> Matrix {
        let text = format!("tpu.iota {{dimensions = array<i32: {axis}>}} : {}", vector(DType::I32, &dims));
        self.matrix(&text, DType::I32, dims)
    }

    fn origin(&self, block: &VmemBlock) -> String {
        let zero = self.define("arith.constant 0 : index");
        vec![zero; block.dims.len()].join(", ")
    }

    /// Loads an entire block, all of whose dimensions except the last two must be 1.
    pub(crate) fn load(&self, block: &VmemBlock) -> Matrix {
        let whole = vector(block.dtype, &block.dims);
        let text = format!("vector.load {}[{}] : {}, {whole}", block.name, self.origin(block), block.ty());
        let dims = block.matrix();
        let loaded = self.define(&text);
        if block.dims.len() == 2 {
            return Matrix { code: self.clone(), name: loaded, dtype: block.dtype, dims };
        }
        let text = format!("vector.shape_cast {loaded} : {whole} to {}", vector(block.dtype, &dims));
        self.matrix(&text, block.dtype, dims)
    }

    pub(crate) fn store(&self, block: &VmemBlock, value: &Matrix) {
        let whole = vector(block.dtype, &block.dims);
        let value = value.to(block.dtype).broadcast(block.matrix());
        let name = match block.dims.len() {
            2 => value.name.clone(),
            _ => self.define(&format!("vector.shape_cast {} : {} to {whole}", value.name, value.ty())),
        };
        let (origin, ty) = (self.origin(block), block.ty());
        self.line(&format!(
            "tpu.vector_store {}[{origin}], {name} {{strides = array<i32>}} : {ty}, {whole},",
            block.name
        ));
    }

    /// Writes a conditional: the code that `body` writes runs only if the condition holds.
    pub(crate) fn when(&self, condition: &Predicate, body: impl FnOnce()) {
        self.line(&format!("scf.if {} {{", condition.name));
        self.0.borrow_mut().depth += 1;
        body();
        self.0.borrow_mut().depth -= 1;
        self.line("}");
    }
}

/// Returns the name of the MLIR value that holds the grid position along an axis.
pub(super) fn grid_axis(axis: usize) -> String {
    format!("%g{axis}")
}

impl Int {
    fn binary(&self, op: &str, other: &Int) -> Int {
        let name = self.code.define(&format!("arith.{op} {}, {} : i32", self.name, other.name));
        Int { code: self.code.clone(), name }
    }

    pub(crate) fn plus(&self, n: usize) -> Int {
        self.binary("addi", &self.code.int(n))
    }

    pub(crate) fn times(&self, n: usize) -> Int {
        self.binary("muli", &self.code.int(n))
    }

    pub(crate) fn is(&self, n: usize) -> Predicate {
        let other = self.code.int(n);
        Predicate { name: self.code.define(&format!("arith.cmpi eq, {}, {} : i32", self.name, other.name)) }
    }

    pub(crate) fn splat(&self, dims: [usize; 2]) -> Matrix {
        let text = format!("vector.broadcast {} : i32 to {}", self.name, vector(DType::I32, &dims));
        self.code.matrix(&text, DType::I32, dims)
    }
}

impl Matrix {
    fn ty(&self) -> String {
        vector(self.dtype, &self.dims)
    }

    fn broadcast(&self, dims: [usize; 2]) -> Matrix {
        if dims == self.dims {
            return self.clone();
        }
        debug_assert!(
            self.dims.iter().zip(dims).all(|(&own, to)| own == 1 || own == to),
            "{:?} to {dims:?}",
            self.dims
        );
        let text = format!("vector.broadcast {} : {} to {}", self.name, self.ty(), vector(self.dtype, &dims));
        self.code.matrix(&text, self.dtype, dims)
    }

    /// Broadcasts both matrices to their common shape.
    fn joined(&self, other: &Matrix) -> [Matrix; 2] {
        let dims = [0, 1].map(|axis| self.dims[axis].max(other.dims[axis]));
        [self, other].map(|m| m.broadcast(dims))
    }

    fn binary(&self, op: &str, other: &Matrix) -> Matrix {
        debug_assert_eq!(self.dtype, other.dtype, "{op}");
        let [a, b] = self.joined(other);
        self.code.matrix(&format!("arith.{op} {}, {} : {}", a.name, b.name, a.ty()), a.dtype, a.dims)
    }

    pub(crate) fn plus(&self, other: &Matrix) -> Matrix {
        self.binary("addf", other)
    }

    pub(crate) fn minus(&self, other: &Matrix) -> Matrix {
        self.binary("subf", other)
    }

    pub(crate) fn times(&self, other: &Matrix) -> Matrix {
        self.binary("mulf", other)
    }

    pub(crate) fn scaled(&self, factor: f64) -> Matrix {
        self.times(&self.code.full(factor as f32, self.dims))
    }

    pub(crate) fn div(&self, other: &Matrix) -> Matrix {
        self.binary("divf", other)
    }

    pub(crate) fn maximum(&self, other: &Matrix) -> Matrix {
        self.binary("maximumf", other)
    }

    pub(crate) fn exp2(&self) -> Matrix {
        self.code.matrix(&format!("math.exp2 {} : {}", self.name, self.ty()), self.dtype, self.dims)
    }

    pub(crate) fn to(&self, dtype: DType) -> Matrix {
        if dtype == self.dtype {
            return self.clone();
        }
        let op = if dtype.size() < self.dtype.size() { "truncf" } else { "extf" };
        let text = format!("arith.{op} {} : {} to {}", self.name, self.ty(), vector(dtype, &self.dims));
        self.code.matrix(&text, dtype, self.dims)
    }

    fn reduced(&self, how: &str, start: f32) -> Matrix {
        let n = self.dims[0];
        let flat = vector(DType::F32, &[n]);
        // Infinity has no decimal form, so write its bits.
        let start = self.code.define(&format!("arith.constant dense<0x{:08X}> : {flat}", start.to_bits()));
        let ty = self.ty();
        let sums =
            self.code.define(&format!("vector.multi_reduction <{how}>, {}, {start} [1] : {ty} to {flat}", self.name));
        let column = vector(DType::F32, &[n, 1]);
        self.code.matrix(&format!("vector.shape_cast {sums} : {flat} to {column}"), DType::F32, [n, 1])
    }

    /// Returns the maximum of each row as a column.
    pub(crate) fn row_max(&self) -> Matrix {
        self.reduced("maximumf", f32::NEG_INFINITY)
    }

    /// Returns the sum of each row as a column.
    pub(crate) fn row_sum(&self) -> Matrix {
        self.reduced("add", 0.0)
    }

    /// Concatenates the matrix with itself `times` times along the columns.
    pub(crate) fn repeated(&self, times: usize) -> Matrix {
        if times == 1 {
            return self.clone();
        }
        let dims = [self.dims[0], self.dims[1] * times];
        let (names, types) = (vec![self.name.as_str(); times].join(", "), vec![self.ty(); times].join(", "));
        let text = format!("tpu.concatenate {names} in 1 : {types} -> {}", vector(self.dtype, &dims));
        self.code.matrix(&text, self.dtype, dims)
    }

    /// Returns a mask of the elements smaller than `n`.
    pub(crate) fn lt(&self, n: usize) -> Matrix {
        self.compared("slt", &self.code.int(n).splat(self.dims))
    }

    /// Returns a mask of the elements that are at least `n`.
    pub(crate) fn at_least(&self, n: usize) -> Matrix {
        self.compared("sge", &self.code.int(n).splat(self.dims))
    }

    pub(crate) fn equals(&self, other: &Int) -> Matrix {
        self.compared("eq", &other.splat(self.dims))
    }

    fn compared(&self, how: &str, other: &Matrix) -> Matrix {
        let text = format!("arith.cmpi {how}, {}, {} : {}", self.name, other.name, self.ty());
        self.code.matrix(&text, DType::Bool, self.dims)
    }

    pub(crate) fn shifted(&self, by: &Int) -> Matrix {
        self.binary("addi", &by.splat(self.dims))
    }

    pub(crate) fn and(&self, other: &Matrix) -> Matrix {
        self.binary("andi", other)
    }

    pub(crate) fn select(&self, yes: &Matrix, no: &Matrix) -> Matrix {
        let [yes, no] = yes.joined(no).map(|m| m.broadcast(self.dims));
        let text = format!("arith.select {}, {}, {} : {}, {}", self.name, yes.name, no.name, self.ty(), yes.ty());
        self.code.matrix(&text, yes.dtype, yes.dims)
    }

    /// Multiplies `[n, k]` by `[k, m]`, or by `[m, k]` if `transpose_rhs`. Accumulates in f32; f32 operands keep full
    /// precision.
    pub(crate) fn product(&self, other: &Matrix, transpose_rhs: bool) -> Matrix {
        let dims = [self.dims[0], if transpose_rhs { other.dims[0] } else { other.dims[1] }];
        let start = self.code.full(0.0, dims);
        let numbers = match transpose_rhs {
            true => "[1], [1], [0], [0], [0, 0, 1, 0], [], []",
            false => "[1], [0], [0], [1], [0, 0, 1, 1], [], []",
        };
        let precision = match self.dtype {
            DType::F32 => "precision = #tpu.contract_precision<fp32>, ",
            _ => "",
        };
        let text = format!(
            "tpu.matmul {}, {}, {} {{dimension_numbers = #tpu.dot_dimension_numbers<{numbers}>, \
             {precision}transpose_lhs_hint = false}} : {}, {}, {} -> {}",
            self.name,
            other.name,
            start.name,
            self.ty(),
            other.ty(),
            start.ty(),
            start.ty()
        );
        self.code.matrix(&text, DType::F32, dims)
    }
}
