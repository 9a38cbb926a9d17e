//! Benchmark programs: a loop of `count` iterations, each with several repetitions of one operation. Each repetition
//! depends on the previous one.

use ltx2_nn::kernels::{self, Kernel};
use ltx2_stablehlo::{
    Argument, BuildError, Builder, DType, DeviceMesh, Groups, MemorySpace, Program, ProgramOutput, Sharding, Type,
    Value,
};
use ltx2_xla_analysis::{CollectiveKind, Microbenchmark};

/// Name of the argument with the number of iterations.
pub(super) const COUNT: &str = "count";

/// A program to time.
pub(super) struct Micro {
    pub benchmark: Microbenchmark,
    pub collective: Option<CollectiveKind>,
    /// Description of the operation, with its sizes.
    pub name: String,
    pub devices: usize,
    /// Operations per iteration.
    pub operations: usize,
    pub program: Program,
    /// Expected FLOPs, bytes or collectives per operation in the optimized program.
    pub expected: ExpectedFigure,
}

/// Property of the optimized program that is checked, with its expected value. A different value shows that the
/// compiler changed the operation.
pub(super) enum ExpectedFigure {
    /// No check.
    Any,
    /// Matmul FLOPs.
    Flops(f64),
    /// Bytes read and written.
    Bytes(f64),
    /// Bytes copied from host memory.
    HostBytes(f64),
    One,
    /// One collective that overlaps with the other work.
    Overlapped,
}

/// An argument with random initial values that is either carried through the loop or only read by it.
struct LoopOperand {
    name: &'static str,
    ty: Type,
    carried: bool,
    memory: MemorySpace,
}

fn carried(name: &'static str, ty: Type) -> LoopOperand {
    LoopOperand { carried: true, ..read(name, ty) }
}

fn read(name: &'static str, ty: Type) -> LoopOperand {
    LoopOperand { name, ty, carried: false, memory: MemorySpace::Device }
}

/// Builds a loop on one device. `body` is the body: it gets the carried values, followed by the read-only values, and
/// returns the next carried values.
fn looped(
    name: &str,
    operands: &[LoopOperand],
    body: impl FnOnce(&[Value]) -> Vec<Value>,
) -> Result<Program, BuildError> {
    let b = Builder::new(name);
    let count = b.argument(COUNT, Type::scalar(DType::I32));
    let argument = |o: &LoopOperand| Argument { memory: o.memory, ..Argument::new(o.name, o.ty.clone()) };
    let values: Vec<Value> = operands.iter().map(|o| b.argument_with(argument(o))).collect();
    let start: Vec<Value> = values.iter().zip(operands).filter(|(_, o)| o.carried).map(|(v, _)| v.clone()).collect();
    let fixed: Vec<Value> = values.iter().zip(operands).filter(|(_, o)| !o.carried).map(|(v, _)| v.clone()).collect();
    let zero = b.scalar(0.0, DType::I32);
    let end = b.for_loop(&zero, &count, &start, |_, now| body(&[now, &fixed].concat()));
    let names = operands.iter().filter(|o| o.carried).map(|o| o.name);
    b.finish(&names.zip(&end).collect::<Vec<_>>())
}

/// Builds the benchmark of the overhead per kernel: `operations` kernels that do almost no work.
pub(super) fn kernel(operations: usize) -> Result<Micro, BuildError> {
    let ty = Type::new(DType::F32, [1024]);
    let program = looped("kernel", &[carried("x", ty)], |v| {
        vec![(0..operations).fold(v[0].clone(), |x, _| (x * 0.5 + 0.25).optimization_barrier())]
    })?;
    let name = format!("{operations} kernels per iteration");
    let benchmark = Microbenchmark::Kernel;
    Ok(Micro { benchmark, collective: None, name, devices: 1, operations, program, expected: ExpectedFigure::Any })
}

/// Builds the matmul benchmark, which alternates `[rows, from] x [from, to]` and `[rows, to] x [to, from]`.
pub(super) fn matmul(rows: usize, from: usize, to: usize, dtype: DType) -> Result<Micro, BuildError> {
    const PAIRS: usize = 4;
    let ty = |dims: [usize; 2]| Type::new(dtype, dims);
    let operands = [carried("x", ty([rows, from])), read("there", ty([from, to])), read("back", ty([to, from]))];
    let program = looped("product", &operands, |v| {
        let b = v[0].builder();
        let through = |x: Value, _| {
            let wide = b.einsum("ij,jk->ik", &x, &v[1], dtype);
            b.einsum("ij,jk->ik", &wide, &v[2], dtype)
        };
        vec![(0..PAIRS).fold(v[0].clone(), through)]
    })?;
    let flops = 2.0 * (rows * from * to) as f64;
    let (benchmark, name) = (Microbenchmark::Matmul, format!("{rows} x {from} x {to} {}", dtype.name()));
    let expected = ExpectedFigure::Flops(flops);
    Ok(Micro { benchmark, collective: None, name, devices: 1, operations: 2 * PAIRS, program, expected })
}

/// Builds the attention benchmark: `queries` query tokens attend to `keys` key tokens.
pub(super) fn attention(kernel: Kernel, [queries, keys, heads]: [usize; 3], dtype: DType) -> Result<Micro, BuildError> {
    const WIDTH: usize = 128;
    const OPERATIONS: usize = 4;
    let ty = |tokens: usize| Type::new(dtype, [1, tokens, heads, WIDTH]);
    let operands = [carried("q", ty(queries)), read("k", ty(keys)), read("v", ty(keys))];
    let program = looped("attention", &operands, |v| {
        let scale = (WIDTH as f64).powf(-0.5);
        let attend = |q: Value, _| kernels::attention(kernel, &q, &v[1], &v[2], None, scale);
        vec![(0..OPERATIONS).fold(v[0].clone(), attend)]
    })?;
    let flops = 4.0 * (queries * keys * heads * WIDTH) as f64;
    let name = format!("{queries} queries, {keys} keys, {heads} heads {}", dtype.name());
    let benchmark = Microbenchmark::Attention;
    let expected = ExpectedFigure::Flops(flops);
    Ok(Micro { benchmark, collective: None, name, devices: 1, operations: OPERATIONS, program, expected })
}

/// Builds the memory benchmark: elementwise operations that read and write an array of `size` bytes.
pub(super) fn memory(size: usize) -> Result<Micro, BuildError> {
    const OPERATIONS: usize = 8;
    let ty = Type::new(DType::BF16, [size / 2]);
    let program = looped("memory", &[carried("x", ty)], |v| {
        vec![(0..OPERATIONS).fold(v[0].clone(), |x, _| (x * 0.5 + 0.25).optimization_barrier())]
    })?;
    let expected = ExpectedFigure::Bytes(2.0 * size as f64);
    let (benchmark, name) = (Microbenchmark::Memory, megabytes(size));
    Ok(Micro { benchmark, collective: None, name, devices: 1, operations: OPERATIONS, program, expected })
}

/// Builds the benchmark of a copy of `size` bytes from host memory. An addition uses each copied element.
pub(super) fn host_copy(size: usize) -> Result<Micro, BuildError> {
    let ty = Type::new(DType::BF16, [size / 2]);
    let in_host = LoopOperand { memory: MemorySpace::PinnedHost, ..read("w", ty.clone()) };
    let program =
        looped("host_copy", &[carried("x", ty), in_host], |v| vec![&v[0] * 0.5 + v[1].copy_to(MemorySpace::Device)])?;
    let expected = ExpectedFigure::HostBytes(size as f64);
    let (benchmark, name) = (Microbenchmark::HostCopy, megabytes(size));
    Ok(Micro { benchmark, collective: None, name, devices: 1, operations: 1, program, expected })
}

/// Builds the normalization benchmark: RMS norms over rows of `width` elements.
pub(super) fn norm(rows: usize, width: usize) -> Result<Micro, BuildError> {
    const OPERATIONS: usize = 8;
    let ty = Type::new(DType::BF16, [rows, width]);
    let program = looped("norm", &[carried("x", ty)], |v| {
        let norm = |x: Value, _| {
            let wide = x.to(DType::F32);
            let scale = (wide.square().mean_keep(&[1]) + 1e-6).rsqrt();
            (&wide * &scale.broadcast_to(wide.dims())).to(DType::BF16).optimization_barrier()
        };
        vec![(0..OPERATIONS).fold(v[0].clone(), norm)]
    })?;
    let (benchmark, name) = (Microbenchmark::Norm, format!("{rows} x {width}"));
    Ok(Micro {
        benchmark,
        collective: None,
        name,
        devices: 1,
        operations: OPERATIONS,
        program,
        expected: ExpectedFigure::Any,
    })
}

/// Builds the benchmark of a collective in groups of `devices` adjacent devices out of `all`. The larger of the operand
/// and the result has `size` bytes.
pub(super) fn collective(kind: CollectiveKind, all: usize, devices: usize, size: usize) -> Result<Micro, BuildError> {
    const OPERATIONS: usize = 8;
    let mesh = match all / devices {
        1 => DeviceMesh::new(&[("near", devices)]),
        far => DeviceMesh::new(&[("far", far), ("near", devices)]),
    };
    let groups = mesh.groups(&["near"]);
    let elements = (size / 2).next_multiple_of(devices);
    let own = if kind == CollectiveKind::AllGather { elements / devices } else { elements };
    let axes: Vec<&str> = mesh.axes.iter().map(|(name, _)| name.as_str()).collect();
    let split = Sharding::new(&[&axes]);
    let b = Builder::new("collective").with_mesh(mesh.clone());
    let whole = Some(Sharding(Vec::new()));
    let count = b.argument_with(Argument { sharding: whole, ..Argument::new(COUNT, Type::scalar(DType::I32)) });
    let ty = Type::new(DType::BF16, [own * all]);
    let x = b.argument_with(Argument { sharding: Some(split.clone()), ..Argument::new("x", ty.clone()) });
    let zero = b.scalar(0.0, DType::I32);
    let end = b.for_loop(&zero, &count, &[x], |_, now| {
        let manual = |v: &[Value]| vec![(0..OPERATIONS).fold(v[0].clone(), |x, _| once(kind, &x, &groups))];
        b.manual(&[(&now[0], split.clone())], std::slice::from_ref(&split), manual)
    });
    let output = ProgramOutput { sharding: Some(split), ..ProgramOutput::new("x", ty) };
    let program = b.finish_with(vec![(output, end[0].clone())])?;
    let (benchmark, collective, name) = (Microbenchmark::Collective, Some(kind), megabytes(size));
    Ok(Micro { benchmark, collective, name, devices, operations: OPERATIONS, program, expected: ExpectedFigure::One })
}

/// Work that is independent of the collective in the same iteration and can overlap with it.
#[derive(Clone, Copy)]
pub(super) enum Concurrent {
    /// `pairs` pairs of matmuls: `[rows, from] x [from, to]`, then `[rows, to] x [to, from]`.
    Matmuls { pairs: usize, rows: usize, from: usize, to: usize },
    /// `count` copies of an array of `size` bytes.
    Copies { count: usize, size: usize },
}

impl Concurrent {
    /// Row length of a copied array.
    const WIDTH: usize = 4096;

    /// Returns the types of the device-local operand and of the weights.
    fn types(self) -> (Type, Vec<Type>) {
        let ty = |dims: [usize; 2]| Type::new(DType::BF16, dims);
        match self {
            Concurrent::Matmuls { rows, from, to, .. } => (ty([rows, from]), vec![ty([from, to]), ty([to, from])]),
            Concurrent::Copies { size, .. } => {
                (ty([size / DType::BF16.size() / Concurrent::WIDTH, Concurrent::WIDTH]), Vec::new())
            }
        }
    }

    fn done(self, work: &Value, weights: &[Value]) -> Value {
        match self {
            Concurrent::Matmuls { pairs, .. } => (0..pairs * weights.len()).fold(work.clone(), |work, n| {
                work.builder().einsum("ij,jk->ik", &work, &weights[n % weights.len()], DType::BF16)
            }),
            Concurrent::Copies { count, .. } => {
                (0..count).fold(work.clone(), |work, _| (work * 0.5 + 0.25).optimization_barrier())
            }
        }
    }

    fn name(self) -> String {
        match self {
            Concurrent::Matmuls { pairs, rows, from, to } => format!("{} matmuls of {rows} x {from} x {to}", 2 * pairs),
            Concurrent::Copies { count, size } => format!("{count} copies of {}", megabytes(size)),
        }
    }
}

/// Builds the benchmark of a collective of `size` bytes among all devices, with independent work that can overlap with
/// it.
pub(super) fn overlapped(
    kind: CollectiveKind,
    devices: usize,
    size: usize,
    concurrent: Concurrent,
) -> Result<Micro, BuildError> {
    let mesh = DeviceMesh::new(&[("near", devices)]);
    let groups = mesh.groups(&["near"]);
    let elements = (size / DType::BF16.size()).next_multiple_of(devices);
    let own = if kind == CollectiveKind::AllGather { elements / devices } else { elements };
    let (row, rows, all) = (Sharding::new(&[&["near"]]), Sharding::new(&[&["near"], &[]]), Sharding::new(&[&[], &[]]));
    let b = Builder::new("overlapped").with_mesh(mesh);
    let argument = |name: &str, ty: Type, sharding: &Sharding| {
        b.argument_with(Argument { sharding: Some(sharding.clone()), ..Argument::new(name, ty) })
    };
    let count = argument(COUNT, Type::scalar(DType::I32), &Sharding(Vec::new()));
    let (ty, weights) = concurrent.types();
    let carried = [
        argument("x", Type::new(DType::BF16, [own * devices]), &row),
        argument("work", Type::new(ty.dtype, [ty.dims[0] * devices, ty.dims[1]]), &rows),
    ];
    let weights: Vec<Value> =
        ["there", "back"].into_iter().zip(weights).map(|(name, ty)| argument(name, ty, &all)).collect();
    let zero = b.scalar(0.0, DType::I32);
    let end = b.for_loop(&zero, &count, &carried, |_, now| {
        let placed = [(&now[0], row.clone()), (&now[1], rows.clone())];
        let inputs: Vec<_> = placed.into_iter().chain(weights.iter().map(|v| (v, all.clone()))).collect();
        b.manual(&inputs, &[row.clone(), rows.clone()], |v| {
            vec![once(kind, &v[0], &groups), concurrent.done(&v[1], &v[2..])]
        })
    });
    let outputs =
        carried.iter().zip(["x", "work"]).zip([&row, &rows]).zip(end).map(|(((of, name), sharding), value)| {
            (ProgramOutput { sharding: Some(sharding.clone()), ..ProgramOutput::new(name, of.ty().clone()) }, value)
        });
    let program = b.finish_with(outputs.collect())?;
    let benchmark = match concurrent {
        Concurrent::Matmuls { .. } => Microbenchmark::OverlappedMatmul,
        Concurrent::Copies { .. } => Microbenchmark::OverlappedMemory,
    };
    let name = format!("{} during {}", megabytes(size), concurrent.name());
    let (collective, expected) = (Some(kind), ExpectedFigure::Overlapped);
    Ok(Micro { benchmark, collective, name, devices, operations: 1, program, expected })
}

/// Applies one collective. The result has the operand's size and depends on the complete collective.
fn once(kind: CollectiveKind, x: &Value, groups: &Groups) -> Value {
    let n = groups.size();
    // Copying one element serializes the collectives and keeps the devices' values different; otherwise, the compiler
    // would replace a collective of equal operands by arithmetic.
    let stitched = |result: Value| {
        let zero = x.builder().scalar(0.0, DType::I32);
        x.dynamic_update(0, &zero, &result.slice(0, 0, 1))
    };
    match kind {
        CollectiveKind::AllGather => stitched(x.all_gather(0, groups)),
        CollectiveKind::AllReduce => {
            let sum = x.all_reduce_sum(groups);
            let zero = x.builder().scalar(0.0, DType::I32);
            sum.dynamic_update(0, &zero, &x.slice(0, 0, 1))
        }
        CollectiveKind::ReduceScatter => stitched(x.reduce_scatter_sum(0, groups)),
        CollectiveKind::AllToAll => x.all_to_all(0, 0, groups),
        CollectiveKind::CollectivePermute | CollectiveKind::CollectiveBroadcast => {
            let pairs: Vec<(usize, usize)> =
                groups.0.iter().flat_map(|g| (0..n).map(|j| (g[j], g[(j + 1) % n]))).collect();
            x.collective_permute(&pairs)
        }
    }
}

fn megabytes(bytes: usize) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 1.0 { format!("{} KiB", bytes >> 10) } else { format!("{mib:.0} MiB") }
}
