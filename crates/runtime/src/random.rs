//! Random parameters generated on the devices, so that a model of any size can run without checkpoint files.
//!
//! A program returns the parameters of a network as results, each with the type, sharding and memory layout of the
//! argument for which it is used. An element depends only on the seed, the name of its checkpoint tensor and its
//! indices in that tensor. Each device therefore generates its shard without communication or temporaries, and the
//! values are the same on every mesh, regardless of whether the platform stacks or unrolls layers or fuses matmuls.
//!
//! A tensor's key is two words. The first word, and the second plus the element's row-major index, are hashed by
//! `pcg2d` (Jarzynski and Olano, *Hash Functions for GPU Rendering*, JCGT 2020) to two 32-bit words. The sum of their
//! four 16-bit halves, scaled to unit variance, approximates a normal distribution (the Irwin-Hall distribution: mean
//! and variance are exact, kurtosis is 2.7, no value exceeds 3.47 standard deviations). A sum is used instead of the
//! Box-Muller transform because it is integer arithmetic followed by one f32 subtraction and one multiplication: it is
//! identical on every platform and compiles quickly even hundreds of times in one program.

use half::bf16;
use ndarray::Array2;
use sha2::{Digest, Sha256};

use super::engine::Engine;
use super::error::RuntimeError;
use super::sharded_tensor::ShardedTensor;
use super::upload::argument_memory;
use ltx2_base::threads;
use ltx2_nn::{Init, Param, Source};
use ltx2_stablehlo::{Argument, Builder, DType, MemorySpace, Program, ProgramOutput, Sharding, Type, Value};
use ltx2_weights::tensor::{Tensor, TensorError};

/// Name of the program's only argument: two words per checkpoint tensor, in the order of the results.
pub(super) const KEYS: &str = "keys";

/// Maximum total number of elements of parameters of equal shape that are generated as one tensor and then sliced
/// apart. A vocoder has hundreds of small parameters, and one kernel for each would cost seconds of compile time.
const TOGETHER: usize = 1 << 22;

/// Generates `params`, which are arguments of `program`, on the devices of `engine`, and returns them in the same
/// order. Fails if a checkpoint tensor has more than 2^32 elements.
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
            let drawn =
                random.results.iter().zip(batch).filter_map(|(result, &i)| Some((i, outputs.take(&result.name)?)));
            let (here, elsewhere): (Vec<_>, Vec<_>) =
                drawn.partition(|(i, _)| argument_memory(program, params[*i]) == MemorySpace::Device);
            // Mapping host memory takes most of the time, and the kernel can do it on several cores.
            let copied = threads::try_in_order(&elsewhere, threads::cores(), |(i, tensor)| {
                Ok::<_, RuntimeError>((*i, tensor.copied_to_host(engine)?))
            })?;
            here.into_iter().chain(copied).for_each(|(i, tensor)| made[i] = Some(tensor));
        }
    }
    let missing =
        |p: &Param| RuntimeError::Parameter(format!("no random values were generated for parameter '{}'", p.name));
    made.into_iter().zip(params).map(|(tensor, p)| tensor.ok_or_else(|| missing(p))).collect()
}

/// A program that generates parameters in one or several runs.
pub struct RandomProgram {
    /// The program; its results are named after the parameters of the first run.
    pub program: Program,
    /// One entry for each run: the indices into `params` of the parameters that it generates, in the order of the
    /// program's results.
    pub runs: Vec<Vec<usize>>,
}

/// Returns the programs that generate `params`, laid out as `program` expects them.
///
/// # Errors
/// Returns an error if a checkpoint tensor has more than 2^32 elements.
pub fn random_programs(program: &Program, params: &[&Param]) -> Result<Vec<RandomProgram>, RuntimeError> {
    let mut all = Vec::new();
    for batches in batches(program, params) {
        let Some(first) = batches.first().filter(|batch| !batch.is_empty()) else { continue };
        let random = random_program(program, &first.iter().map(|&i| params[i]).collect::<Vec<_>>())?;
        // The program returns its results by group; find the position of each result in `first`.
        let at = |name: &str| first.iter().position(|&i| params[i].name == name).expect("results are parameters");
        let order: Vec<usize> = random.results.iter().map(|r| at(&r.name)).collect();
        let runs = batches.iter().map(|batch| order.iter().map(|&at| batch[at]).collect()).collect();
        all.push(RandomProgram { program: random, runs });
    }
    Ok(all)
}

/// Splits the indices of the parameters into batches and a remainder. All batches have the same kinds of parameters, so
/// the same program generates each batch in one run. Unrolled layers have thousands of parameters of a few kinds; one
/// kernel for each would cost half a minute of compile time.
fn batches(program: &Program, params: &[&Param]) -> [Vec<Vec<usize>>; 2] {
    let mut kinds: Vec<((DrawSpec, ProgramOutput), Vec<usize>)> = Vec::new();
    for (i, param) in params.iter().enumerate() {
        let kind = (DrawSpec::from_param(param), ProgramOutput { name: String::new(), ..result(program, param) });
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, places)) => places.push(i),
            None => kinds.push((kind, vec![i])),
        }
    }
    // Number of parameters that the two programs (batch and remainder) generate if there are `n` batches.
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

/// Describes a parameter as a result with the sharding and layout that `program` expects.
fn result(program: &Program, param: &Param) -> ProgramOutput {
    let argument = program.argument(&param.name);
    ProgramOutput {
        sharding: argument.and_then(|a| a.sharding.clone()),
        memory_layout: argument.and_then(|a| a.memory_layout.clone()),
        ..ProgramOutput::new(&param.name, param.ty.clone())
    }
}

/// Builds the program whose results are `params`, laid out as `program` expects them.
fn random_program(program: &Program, params: &[&Param]) -> Result<Program, RuntimeError> {
    let mut b = Builder::new("random_weights").without_locations();
    if !program.mesh.axes.is_empty() {
        b = b.with_mesh(program.mesh.clone());
    }
    let tensors = params.iter().map(|p| p.source.names().len()).sum::<usize>();
    let ty = Type::new(DType::I32, [tensors, 2]);
    // The keys are replicated on every device.
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

/// Groups the results: each group is generated as one tensor.
fn groups(program: &Program, params: &[&Param]) -> Vec<(DrawSpec, Vec<ProgramOutput>)> {
    let mut groups: Vec<(DrawSpec, Vec<ProgramOutput>)> = Vec::new();
    for param in params {
        let (how, output) = (DrawSpec::from_param(param), result(program, param));
        let alike = |(known, outputs): &&mut (DrawSpec, Vec<ProgramOutput>)| {
            let first = &outputs[0];
            (outputs.len() + 1) * param.ty.elements() <= TOGETHER
                && *known == how
                && ProgramOutput { name: output.name.clone(), ..first.clone() } == output
        };
        match groups.iter_mut().find(alike) {
            Some((_, outputs)) => outputs.push(output),
            None => groups.push((how, vec![output])),
        }
    }
    groups
}

/// Returns the names on which the random values of a parameter's checkpoint tensors depend.
fn names(param: &Param) -> impl Iterator<Item = String> {
    param.source.names().into_iter().map(|name| format!("{}.{name}", param.component))
}

/// A 32-bit word: a value of a program, or a host integer.
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

/// Hashes a pair of words, which must be different for each element, to two pseudorandom words.
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

/// Returns the offset that is subtracted from the sum of four 16-bit halves, and the factor that converts the
/// difference to a value. Each half has mean 65535/2 and variance (2^32 - 1)/12. The offset includes the distribution's
/// mean, because a multiplication followed by an addition would be rounded once on some platforms (fused) and twice on
/// others.
fn scale(init: Init) -> (f64, f64) {
    let factor = f64::from(init.std) / (4.0 * (65_536f64.powi(2) - 1.0) / 12.0).sqrt();
    (131_070.0 - if init.mean == 0.0 { 0.0 } else { f64::from(init.mean) / factor }, factor)
}

/// Fills `into` with the little-endian values of a checkpoint tensor from element `first` on, rounded to `dtype`. They
/// are the values that the devices generate for `model.weights: random`. `name` starts with the component's directory.
/// Fails for element types other than f32 and bf16.
pub fn fill(seed: u64, name: &str, init: Init, dtype: DType, first: usize, into: &mut [u8]) -> Result<(), TensorError> {
    let [x, y] = key(name, seed);
    // Indices wrap at 32 bits, as on the devices.
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

/// Returns a tensor's key: the two words that are hashed for its first element.
fn key(name: &str, seed: u64) -> [u32; 2] {
    let digest = Sha256::new().chain_update(seed.to_le_bytes()).chain_update(name.as_bytes()).finalize();
    [0, 4].map(|at| u32::from_le_bytes(std::array::from_fn(|k| digest[at + k])))
}

/// Returns the keys of all tensors as an `[n, 2]` tensor, the program's argument.
pub(super) fn keys(names: &[String], seed: u64) -> Tensor {
    let words: Vec<[u32; 2]> = names.iter().map(|name| key(name, seed)).collect();
    Tensor::from(Array2::from_shape_fn((names.len(), 2), |(n, word)| words[n][word] as i32))
}

/// Distribution and indexing of a parameter's elements.
#[derive(PartialEq)]
struct DrawSpec {
    init: Init,
    /// Number of checkpoint tensors in the parameter: the product of its leading dimensions.
    tensors: usize,
    /// Number of leading dimensions that count checkpoint tensors, including dimensions of size 1 that follow them.
    lead: usize,
    /// Strides of the remaining dimensions in a checkpoint tensor, in elements.
    strides: Vec<usize>,
}

impl DrawSpec {
    fn from_param(param: &Param) -> Self {
        let (dims, tensors) = (&param.ty.dims, param.source.names().len());
        let counts = |n: &usize| dims[..*n].iter().product::<usize>() == tensors;
        let lead = (0..=dims.len()).rev().find(counts).expect("leading dimensions count the tensors");
        let strides = match &param.source {
            Source::View { strides, .. } => strides[lead..].to_vec(),
            _ => (lead..dims.len()).map(|axis| dims[axis + 1..].iter().product()).collect(),
        };
        DrawSpec { init: param.init, tensors, lead, strides }
    }

    /// Generates, from the keys `[n, tensors, 2]`, the values of `n` parameters of type `ty` as one tensor of shape
    /// `[n, …]`.
    fn values(&self, b: &Builder, ty: &Type, keys: &Value) -> Result<Value, RuntimeError> {
        let own = &ty.dims[self.lead..];
        if own.iter().product::<usize>() as u64 > 1 << 32 {
            return Err(RuntimeError::Parameter(format!(
                "cannot generate random values for a tensor of type {ty}, which has more than 2^32 elements"
            )));
        }
        let dims = [&[keys.dim(0)], &ty.dims[..]].concat();
        if self.init.std == 0.0 {
            return Ok(b.full(self.init.mean.into(), Type::new(DType::F32, dims)).to(ty.dtype));
        }
        let leading: Vec<usize> = (0..=self.lead).collect();
        let [x, second] =
            [0, 1].map(|word| keys.at(2, word).reshape(dims[..=self.lead].to_vec()).broadcast_in_dim(&dims, &leading));
        // Each dimension contributes a vector to the index, so that the compiler never materializes large index
        // tensors.
        let y = self.strides.iter().enumerate().fold(second, |y, (axis, &stride)| {
            let along = b.iota(Type::new(DType::U32, [own[axis]]), 0) * stride as f64;
            y + along.broadcast_in_dim(&dims, &[leading.len() + axis])
        });

        let [x, y] = pcg2d(x, y);
        let halves = |v: &Value| v.and(&v.like(65_535.0)) + v.shift_right(&v.like(16.0));
        let sum = (halves(&x) + halves(&y)).to(DType::F32);
        // The sum is below 2^24, so its f32 value is exact.
        let (center, factor) = scale(self.init);
        let values = (sum - center) * factor;
        // Round first, because conversion to integers truncates.
        Ok(if ty.dtype.is_float() { values } else { values.round() }.to(ty.dtype))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_values_depend_only_on_seed_and_name() {
        let draw = |seed, name: &str, init, first: usize, count: usize| {
            let mut bytes = vec![0; 4 * count];
            fill(seed, name, init, DType::F32, first, &mut bytes).expect("f32");
            bytemuck::pod_collect_to_vec::<u8, f32>(&bytes)
        };
        let a = draw(1, "a.weight", Init::normal(0.02), 0, 20_000);
        assert_eq!(a, draw(1, "a.weight", Init::normal(0.02), 0, 20_000));
        assert_ne!(a, draw(2, "a.weight", Init::normal(0.02), 0, 20_000));
        assert_ne!(a, draw(1, "b.weight", Init::normal(0.02), 0, 20_000));
        // A range that starts later has the same values.
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
