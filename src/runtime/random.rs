//! Random parameters, made on the devices: a model of any size without files.
//!
//! One program gives every parameter of a network as a result, each with the type, placement and memory layout of the
//! argument that it will be. An element is a function of seed, checkpoint name and the element's indices in that tensor
//! alone, so that a device makes its shard of a tensor by itself: no communication, no temporaries, and the same numbers
//! on every mesh and however a platform has its layers (stacked or unrolled) and its matmuls (fused or not).
//!
//! The first word of a tensor's key, and the second offset by the element's row-major index, go through `pcg2d` (Jarzynski and Olano, *Hash Functions for GPU Rendering*, JCGT 2020), which gives two words of 32 bits. The
//! sum of their four halves, scaled to unit variance, stands for a normal number (Irwin and Hall's distribution: mean
//! and variance are exact, kurtosis 2.7, no value beyond 3.47 deviations). A sum rather than Box and Muller's
//! logarithm and cosine: it is integer arithmetic with one subtraction and one multiplication in f32 behind it, the same
//! on every platform, and quick to compile some hundred times in one program.

use half::bf16;
use ndarray::Array2;
use sha2::{Digest, Sha256};

use super::engine::Engine;
use super::error::RuntimeError;
use super::sharded_tensor::ShardedTensor;
use crate::hlo::{Argument, Builder, DType, Output, Program, Sharding, Type, Value};
use crate::nn::{Init, Param, Source};
use crate::tensor::{Tensor, TensorError};

/// The one argument of such a program: two words a checkpoint tensor, in the order of its results.
pub(super) const KEYS: &str = "keys";

/// Elements of equal parameters that are drawn as one tensor and then cut apart. A vocoder has hundreds of small ones: a
/// kernel each costs the compiler seconds. Beyond this a tensor is made in its place.
const TOGETHER: usize = 1 << 22;

/// Makes `params`, arguments of `program`, on the devices of `engine`; in the order of `params`.
///
/// # Errors
/// A parameter whose rows have more than 2^32 elements; the plugin's message.
pub(super) fn parameters(
    engine: &Engine,
    program: &Program,
    params: &[&Param],
    seed: u64,
) -> Result<Vec<ShardedTensor>, RuntimeError> {
    let mut made: Vec<Option<ShardedTensor>> = params.iter().map(|_| None).collect();
    for RandomProgram { program: random, runs } in random_programs(program, params)? {
        let executable = engine.compile("random weights", &random)?;
        for batch in &runs {
            let names: Vec<String> = batch.iter().flat_map(|&i| names(params[i])).collect();
            let keys = engine.upload(&executable, KEYS, &keys(&names, seed))?;
            let mut outputs = engine.run(&executable, |name| (name == KEYS).then_some(&keys))?;
            outputs.wait()?;
            for (result, &i) in random.results.iter().zip(batch) {
                made[i] = outputs.take(&result.name);
            }
        }
    }
    let missing = |p: &Param| RuntimeError::Parameter(format!("no random values of '{}' were made", p.name));
    made.into_iter().zip(params).map(|(tensor, p)| tensor.ok_or_else(|| missing(p))).collect()
}

/// A program that makes parameters, in one run or several.
pub struct RandomProgram {
    /// Its results are parameters of the first run.
    pub program: Program,
    /// For each run, which parameters its results are.
    pub runs: Vec<Vec<usize>>,
}

/// The programs that make `params`, as `program` takes them.
///
/// # Errors
/// A parameter whose rows have more than 2^32 elements.
pub fn random_programs(program: &Program, params: &[&Param]) -> Result<Vec<RandomProgram>, RuntimeError> {
    let mut all = Vec::new();
    for batches in batches(program, params) {
        let Some(first) = batches.first().filter(|batch| !batch.is_empty()) else { continue };
        let random = random_program(program, &first.iter().map(|&i| params[i]).collect::<Vec<_>>())?;
        // Results come group by group.
        let at = |name: &str| first.iter().position(|&i| params[i].name == name).expect("results are parameters");
        let order: Vec<usize> = random.results.iter().map(|r| at(&r.name)).collect();
        let runs = batches.iter().map(|batch| order.iter().map(|&at| batch[at]).collect()).collect();
        all.push(RandomProgram { program: random, runs });
    }
    Ok(all)
}

/// Parameters in equal batches, which one program makes in turn, and the rest, by their places. Unrolled layers have
/// thousands of parameters of few kinds; a kernel each would cost the compiler half a minute.
fn batches(program: &Program, params: &[&Param]) -> [Vec<Vec<usize>>; 2] {
    let mut kinds: Vec<((Drawn, Output), Vec<usize>)> = Vec::new();
    for (i, param) in params.iter().enumerate() {
        let kind = (Drawn::of(param), Output { name: String::new(), ..result(program, param) });
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, places)) => places.push(i),
            None => kinds.push((kind, vec![i])),
        }
    }
    // Tensors to compile for so many batches.
    let compiled = |n: usize| kinds.iter().map(|(_, places)| places.len() / n + places.len() % n).sum::<usize>();
    let most = kinds.iter().map(|(_, places)| places.len()).max().unwrap_or(1);
    let best = (1..=most).min_by_key(|&n| compiled(n)).filter(|&n| 4 * compiled(n) <= params.len()).unwrap_or(1);
    let mut equal: Vec<Vec<usize>> = vec![Vec::new(); best];
    let mut rest = Vec::new();
    for (_, places) in &kinds {
        let each = places.len() / best;
        for (n, batch) in equal.iter_mut().enumerate() {
            batch.extend(&places[n * each..(n + 1) * each]);
        }
        rest.extend(&places[best * each..]);
    }
    [equal, vec![rest]]
}

/// A parameter as a result that `program` takes.
fn result(program: &Program, param: &Param) -> Output {
    let argument = program.argument(&param.name).map(|i| &program.arguments[i]);
    Output {
        sharding: argument.and_then(|a| a.sharding.clone()),
        memory_layout: argument.and_then(|a| a.memory_layout.clone()),
        ..Output::new(&param.name, param.ty.clone())
    }
}

/// The program whose results are `params`, as `program` takes them.
///
/// # Errors
/// A parameter whose rows have more than 2^32 elements.
fn random_program(program: &Program, params: &[&Param]) -> Result<Program, RuntimeError> {
    let mut b = Builder::new("random_weights").without_locations();
    if !program.mesh.axes.is_empty() {
        b = b.with_mesh(program.mesh.clone());
    }
    let tensors = params.iter().map(|p| p.source.names().len()).sum::<usize>();
    let ty = Type::new(DType::I32, [tensors, 2]);
    // Every device holds the keys.
    let whole = (!program.mesh.axes.is_empty()).then(|| Sharding::new(&[&[], &[]]));
    let keys = b.argument_with(Argument { sharding: whole, ..Argument::new(KEYS, ty) }).to(DType::U32);
    let mut results = Vec::with_capacity(params.len());
    let mut used = 0;
    for (how, outputs) in groups(program, params) {
        let first = &outputs[0];
        let own = keys.slice(0, used, used + outputs.len() * how.tensors);
        used += outputs.len() * how.tensors;
        let drawn = how.values(&b, &first.ty, &own.reshape(vec![outputs.len(), how.tensors, 2]))?;
        let stacked = first.sharding.as_ref().map(|s| Sharding([&[Vec::new()], &s.0[..]].concat()));
        let mut drawn = stacked.map_or(drawn.clone(), |s| drawn.constrain(&s));
        if outputs.len() > 1 {
            drawn = drawn.optimization_barrier();
        }
        results.extend(outputs.into_iter().enumerate().map(|(i, output)| (output, drawn.at(0, i))));
    }
    Ok(b.finish_with(results)?)
}

/// The results, those next to each other that are drawn together.
fn groups(program: &Program, params: &[&Param]) -> Vec<(Drawn, Vec<Output>)> {
    let mut groups: Vec<(Drawn, Vec<Output>)> = Vec::new();
    for param in params {
        let (how, output) = (Drawn::of(param), result(program, param));
        let alike = |(known, outputs): &&mut (Drawn, Vec<Output>)| {
            let first = &outputs[0];
            (outputs.len() + 1) * param.ty.elements() <= TOGETHER
                && *known == how
                && (&first.ty, &first.sharding, &first.memory_layout)
                    == (&output.ty, &output.sharding, &output.memory_layout)
        };
        match groups.iter_mut().find(alike) {
            Some((_, outputs)) => outputs.push(output),
            None => groups.push((how, vec![output])),
        }
    }
    groups
}

/// Names that a parameter's tensors are drawn by.
fn names(param: &Param) -> impl Iterator<Item = String> {
    param.source.names().into_iter().map(|name| format!("{}.{name}", param.component))
}

/// A word of 32 bits: of a program, or of the host.
pub(super) trait Word: Sized {
    fn plus(&self, other: &Self) -> Self;
    fn times(&self, factor: u32) -> Self;
    fn plus_constant(self, term: u32) -> Self;
    fn xor_high(&self) -> Self;
}

impl Word for Value {
    fn plus(&self, other: &Self) -> Self {
        self + other
    }

    fn times(&self, factor: u32) -> Self {
        self * f64::from(factor)
    }

    fn plus_constant(self, term: u32) -> Self {
        self + f64::from(term)
    }

    fn xor_high(&self) -> Self {
        self.xor(&self.shift_right(&self.like(16.0)))
    }
}

impl Word for u32 {
    fn plus(&self, other: &Self) -> Self {
        self.wrapping_add(*other)
    }

    fn times(&self, factor: u32) -> Self {
        self.wrapping_mul(factor)
    }

    fn plus_constant(self, term: u32) -> Self {
        self.wrapping_add(term)
    }

    fn xor_high(&self) -> Self {
        self ^ (self >> 16)
    }
}

/// Two words of random bits from two words that differ for every element.
pub(super) fn pcg2d<W: Word>(x: W, y: W) -> [W; 2] {
    const FACTOR: u32 = 1_664_525;
    let step = |v: &W, by: &W| v.plus(&by.times(FACTOR));
    let advance = |v: W| v.times(FACTOR).plus_constant(1_013_904_223);
    let (x, y) = (advance(x), advance(y));
    let x = step(&x, &y);
    let y = step(&y, &x);
    let (x, y) = (x.xor_high(), y.xor_high());
    let x = step(&x, &y);
    let y = step(&y, &x);
    [x.xor_high(), y.xor_high()]
}

/// Offset that is subtracted from the sum of four halves, and the factor that then makes it a value: each half has mean
/// 65535/2 and variance (2^32 - 1)/12. The mean is subtracted with theirs, because a product and a sum after it would be
/// rounded once on one platform and twice on another.
fn scale(init: Init) -> (f64, f64) {
    let factor = f64::from(init.std) / (4.0 * (65_536f64.powi(2) - 1.0) / 12.0).sqrt();
    (131_070.0 - if init.mean == 0.0 { 0.0 } else { f64::from(init.mean) / factor }, factor)
}

/// Writes a checkpoint tensor's little-endian bytes, from element `first` on, as the devices make it for `model.weights: random`,
/// rounded to `dtype`; `name` begins with the component's folder.
///
/// # Errors
/// An element type other than f32 and bf16.
pub(crate) fn fill(
    seed: u64,
    name: &str,
    init: Init,
    dtype: DType,
    first: usize,
    into: &mut [u8],
) -> Result<(), TensorError> {
    let [x, y] = key(name, seed);
    // Indices count in 32 bits, as the devices' do.
    let y = y.wrapping_add(first as u32);
    let (center, factor) = scale(init);
    let (center, factor, mean) = (center as f32, factor as f32, init.mean);
    let halves = |v: u32| (v & 65_535) + (v >> 16);
    let drawn = |i: usize| {
        let [a, b] = pcg2d(x, y.wrapping_add(i as u32));
        ((halves(a) + halves(b)) as f32 - center) * factor
    };
    match (dtype, init.std == 0.0) {
        (DType::BF16, false) => each(into, |i| bf16::from_f32(drawn(i)).to_le_bytes()),
        (DType::BF16, true) => each(into, |_| bf16::from_f32(mean).to_le_bytes()),
        (DType::F32, false) => each(into, |i| drawn(i).to_le_bytes()),
        (DType::F32, true) => each(into, |_| mean.to_le_bytes()),
        (other, _) => return Err(TensorError::Unsupported(other)),
    }
    Ok(())
}

fn each<const N: usize>(into: &mut [u8], value: impl Fn(usize) -> [u8; N]) {
    into.as_chunks_mut().0.iter_mut().enumerate().for_each(|(i, element)| *element = value(i));
}

/// Two words that a tensor's indices are offset by.
fn key(name: &str, seed: u64) -> [u32; 2] {
    let digest = Sha256::new().chain_update(seed.to_le_bytes()).chain_update(name.as_bytes()).finalize();
    [0, 4].map(|at| u32::from_le_bytes(std::array::from_fn(|k| digest[at + k])))
}

/// The words of each tensor `[n, 2]`, as a program takes them.
pub(super) fn keys(names: &[String], seed: u64) -> Tensor {
    let words: Vec<[u32; 2]> = names.iter().map(|name| key(name, seed)).collect();
    Tensor::from(Array2::from_shape_fn((names.len(), 2), |(n, word)| words[n][word] as i32))
}

/// Distribution and indexing of a parameter's elements.
#[derive(PartialEq)]
struct Drawn {
    init: Init,
    /// Checkpoint tensors in it, which its leading dimensions count.
    tensors: usize,
    /// Number of those dimensions, trailing sizes of 1 included.
    lead: usize,
    /// Strides of the other dimensions in a checkpoint tensor.
    strides: Vec<usize>,
}

impl Drawn {
    fn of(param: &Param) -> Self {
        let (dims, tensors) = (&param.ty.dims, param.source.names().len());
        let counts = |n: &usize| dims[..*n].iter().product::<usize>() == tensors;
        let lead = (0..=dims.len()).rev().find(counts).expect("leading dimensions count the tensors");
        let strides = match &param.source {
            Source::View { strides, .. } => strides[lead..].to_vec(),
            _ => (lead..dims.len()).map(|axis| dims[axis + 1..].iter().product()).collect(),
        };
        Drawn { init: param.init, tensors, lead, strides }
    }

    /// Values of type `ty` for each of the `keys [n, tensors, 2]`: `[n, …]`.
    fn values(&self, b: &Builder, ty: &Type, keys: &Value) -> Result<Value, RuntimeError> {
        let own = &ty.dims[self.lead..];
        if own.iter().product::<usize>() as u64 > 1 << 32 {
            return Err(RuntimeError::Parameter(format!("a tensor of {ty} has more than 2^32 elements")));
        }
        let dims = [&[keys.dim(0)], &ty.dims[..]].concat();
        if self.init.std == 0.0 {
            return Ok(b.full(self.init.mean.into(), Type::new(DType::F32, dims)).to(ty.dtype));
        }
        let leading: Vec<usize> = (0..=self.lead).collect();
        let [x, second] =
            [0, 1].map(|word| keys.at(2, word).reshape(dims[..=self.lead].to_vec()).broadcast_in_dim(&dims, &leading));
        // Each dimension's part of an index is a vector: whatever else the compiler keeps of it is small.
        let y = self.strides.iter().enumerate().fold(second, |y, (axis, &stride)| {
            let along = b.iota(Type::new(DType::U32, [own[axis]]), 0) * stride as f64;
            y + along.broadcast_in_dim(&dims, &[leading.len() + axis])
        });

        let [x, y] = pcg2d(x, y);
        let halves = |v: &Value| v.and(&v.like(65_535.0)) + v.shift_right(&v.like(16.0));
        let sum = (halves(&x) + halves(&y)).to(DType::F32);
        // A sum below 2^24 has an exact f32.
        let (center, factor) = scale(self.init);
        let values = (sum - center) * factor;
        // A conversion to integers cuts off.
        Ok(if ty.dtype.is_float() { values } else { values.round() }.to(ty.dtype))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_depend_on_seed_and_name_alone() {
        let draw = |seed, name: &str, init, first: usize, count: usize| {
            let mut bytes = vec![0; 4 * count];
            fill(seed, name, init, DType::F32, first, &mut bytes).expect("f32");
            bytemuck::pod_collect_to_vec::<u8, f32>(&bytes)
        };
        let a = draw(1, "a.weight", Init::normal(0.02), 0, 20_000);
        assert_eq!(a, draw(1, "a.weight", Init::normal(0.02), 0, 20_000));
        assert_ne!(a, draw(2, "a.weight", Init::normal(0.02), 0, 20_000));
        assert_ne!(a, draw(1, "b.weight", Init::normal(0.02), 0, 20_000));
        // However it is cut.
        assert_eq!(a[777..], draw(1, "a.weight", Init::normal(0.02), 777, 20_000 - 777));
        let n = a.len() as f32;
        let mean = a.iter().sum::<f32>() / n;
        let std = (a.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / n).sqrt();
        assert!(mean.abs() < 5e-4 && (std - 0.02).abs() < 4e-4, "mean {mean}, std {std}");
        assert!(draw(1, "a.weight", Init { mean: 1.0, std: 0.0 }, 0, 500).iter().all(|v| *v == 1.0));
        let mut rounded = [0; 40];
        fill(1, "a.weight", Init::normal(0.02), DType::BF16, 0, &mut rounded).expect("bf16");
        let expected: Vec<u8> = a[..20].iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect();
        assert_eq!(rounded.to_vec(), expected);
        assert!(fill(3, "w", Init::normal(1.0), DType::I32, 0, &mut [0; 4]).is_err());
    }
}
