//! Random parameters, made on the devices: a model of any size without files.
//!
//! One program gives every parameter of a network as a result, each with the type, placement and memory layout of the
//! argument that it will be. An element is a function of seed, parameter name and the element's own indices alone, so
//! that a device makes its part of a tensor from nothing: no exchange, no temporaries, and on every mesh the same
//! numbers.
//!
//! An element's outermost index and the row-major index of the rest, both offset by the parameter's key, go through
//! `pcg2d` (Jarzynski and Olano, *Hash Functions for GPU Rendering*, JCGT 2020), which gives two words of 32 bits. The
//! sum of their four halves, scaled to unit variance, stands for a normal number (Irwin and Hall's distribution: mean
//! and variance are exact, kurtosis 2.7, no value beyond 3.47 deviations). A sum rather than Box and Muller's
//! logarithm and cosine: it is integer arithmetic with one multiplication and one addition in f32 behind it, the same
//! on every platform, and quick to compile some hundred times in one program.

use sha2::{Digest, Sha256};

use super::distributed::Distributed;
use super::engine::{Engine, RuntimeError};
use crate::dtype::DType;
use crate::hlo::{Argument, Builder, Output, Program, Sharding, Type, Value};
use crate::nn::{Init, Param};
use crate::tensor::Tensor;

/// The one argument of such a program: two words a parameter, in the order of its results.
const KEYS: &str = "keys";

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
) -> Result<Vec<Distributed>, RuntimeError> {
    let mut made: Vec<Option<Distributed>> = params.iter().map(|_| None).collect();
    for RandomProgram { program: random, runs } in random_programs(program, params)? {
        let executable = engine.compile("random weights", &random)?;
        for batch in &runs {
            let names = batch.iter().map(|&i| params[i].name.as_str());
            let keys = engine.upload(&executable, KEYS, &keys(names, seed))?;
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
        let at = |name: &str| first.iter().position(|&i| params[i].name == name).unwrap_or_default();
        let order: Vec<usize> = random.results.iter().map(|r| at(&r.name)).collect();
        let runs = batches.iter().map(|batch| order.iter().map(|&at| batch[at]).collect()).collect();
        all.push(RandomProgram { program: random, runs });
    }
    Ok(all)
}

/// Parameters in equal batches, which one program makes in turn, and the rest, by their places. Layers that are written
/// out have thousands of parameters of few kinds; a kernel each would cost the compiler half a minute.
fn batches(program: &Program, params: &[&Param]) -> [Vec<Vec<usize>>; 2] {
    let mut kinds: Vec<((Init, Output), Vec<usize>)> = Vec::new();
    for (i, param) in params.iter().enumerate() {
        let kind = (param.init, Output { name: String::new(), ..result(program, param) });
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
    let ty = Type::new(DType::I32, [params.len(), 2]);
    // Every device holds the keys.
    let whole = (!program.mesh.axes.is_empty()).then(|| Sharding::new(&[&[], &[]]));
    let keys = b.argument_with(Argument { sharding: whole, ..Argument::new(KEYS, ty) }).to(DType::U32);
    let mut results = Vec::with_capacity(params.len());
    for group in groups(program, params) {
        let own = keys.slice(0, results.len(), results.len() + group.len());
        let (first, init) = &group[0];
        let drawn = normal(&b, &first.ty, &own, *init)?;
        if group.len() == 1 {
            let placed = first.sharding.as_ref().map_or(drawn.clone(), |s| drawn.constrain(s));
            results.push((first.clone(), placed));
            continue;
        }
        let stacked = first.sharding.as_ref().map(|s| Sharding([&[Vec::new()], &s.0[..]].concat()));
        let drawn = stacked.map_or(drawn.clone(), |s| drawn.constrain(&s)).kept();
        results.extend(group.into_iter().enumerate().map(|(i, (output, _))| (output, drawn.at(0, i))));
    }
    Ok(b.finish_with(results)?)
}

/// The results, those next to each other that are drawn together.
fn groups(program: &Program, params: &[&Param]) -> Vec<Vec<(Output, Init)>> {
    let mut groups: Vec<Vec<(Output, Init)>> = Vec::new();
    for param in params {
        let output = result(program, param);
        let alike = |group: &&mut Vec<(Output, Init)>| {
            let (first, init) = &group[0];
            (group.len() + 1) * param.ty.elements() <= TOGETHER
                && (*init, &first.ty, &first.sharding, &first.memory_layout)
                    == (param.init, &output.ty, &output.sharding, &output.memory_layout)
        };
        match groups.iter_mut().find(alike) {
            Some(group) => group.push((output, param.init)),
            None => groups.push(vec![(output, param.init)]),
        }
    }
    groups
}

/// The offsets of each result's indices `[n, 2]`, from its name and the seed.
fn keys<'a>(names: impl ExactSizeIterator<Item = &'a str>, seed: u64) -> Tensor {
    let rows = names.len();
    let each = names.flat_map(|name| {
        let digest = Sha256::new().chain_update(seed.to_le_bytes()).chain_update(name.as_bytes()).finalize();
        let word = |i: usize| i32::from_le_bytes(std::array::from_fn(|k| digest[4 * i + k]));
        [word(0), word(1)]
    });
    let words = ndarray::Array1::from_iter(each);
    Tensor::I32(words.into_shape_with_order((rows, 2)).unwrap_or_default().into_dyn())
}

/// Values of type `ty` with the deviation and around the mean that `init` states, for each of the `keys [n, 2]`: with a
/// leading dimension of `n` where there are several.
fn normal(b: &Builder, ty: &Type, keys: &Value, init: Init) -> Result<Value, RuntimeError> {
    let (mean, deviation) = match init {
        Init::Normal(deviation) => (0.0, deviation),
        Init::Around(mean, deviation) => (mean, deviation),
    };
    let inner = ty.dims.get(1..).unwrap_or_default();
    if inner.iter().product::<usize>() as u64 > 1 << 32 {
        return Err(RuntimeError::Parameter(format!("a row of {ty} has more than 2^32 elements")));
    }
    let several = keys.dim(0) > 1;
    let lead = usize::from(several);
    let dims = if several { [&[keys.dim(0)], &ty.dims[..]].concat() } else { ty.dims.clone() };
    let [first, second] = [0, 1].map(|word| {
        let key = keys.at(1, word);
        if several { key.broadcast_in_dim(&dims, &[0]) } else { key.at(0, 0).broadcast_to(&dims) }
    });
    // Each dimension's part of an index is a vector: whatever else the compiler keeps of it is small.
    let part = |axis: usize, stride: usize| {
        let along = b.iota(Type::new(DType::U32, [ty.dims[axis]]), 0) * stride as f64;
        along.broadcast_in_dim(&dims, &[lead + axis])
    };
    let x = if ty.rank() == 0 { first } else { first + part(0, 1) };
    let y = (1..ty.rank()).fold(second, |y, axis| y + part(axis, ty.dims[axis + 1..].iter().product()));

    // pcg2d.
    let step = |v: &Value, by: &Value| v + by * 1_664_525.0;
    let fold = |v: Value| v.xor(&v.shift_right(&v.like(16.0)));
    let advance = |v: Value| v * 1_664_525.0 + 1_013_904_223.0;
    let (x, y) = (advance(x), advance(y));
    let x = step(&x, &y);
    let y = step(&y, &x);
    let (x, y) = (fold(x), fold(y));
    let x = step(&x, &y);
    let y = step(&y, &x);
    let (x, y) = (fold(x), fold(y));

    let halves = |v: &Value| v.and(&v.like(65_535.0)) + v.shift_right(&v.like(16.0));
    let sum = (halves(&x) + halves(&y)).to(DType::F32);
    // Four halves, each of mean 65535/2 and variance (2^32 - 1)/12; a sum below 2^24 has an exact f32.
    let unit = (4.0 * (65_536f64.powi(2) - 1.0) / 12.0).sqrt();
    let scaled = (sum - 131_070.0) * (f64::from(deviation) / unit);
    let value = if mean == 0.0 { scaled } else { scaled + f64::from(mean) };
    Ok(value.to(ty.dtype))
}
