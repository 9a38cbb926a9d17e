//! Generates normally distributed noise on a device, which is faster than on the host. The values differ from those of
//! any other implementation.
//!
//! An element depends only on the seed, the tensor's name and its row-major index, through the hash of
//! `runtime::random` and the Box-Muller transform.

use super::engine::Engine;
use super::error::RuntimeError;
use super::executable::CompiledProgram;
use super::random::{KEYS, keys, pcg2d};
use ltx2_stablehlo::{Argument, Builder, DType, Program, ProgramOutput, Type, Value};
use ltx2_weights::tensor::Tensor;

/// Names and shapes of the noise tensors to generate.
pub type Draws = [(&'static str, Vec<usize>)];

/// Runs the executable of [`program`] and returns the noise tensors (f32) in the order of `draws`. Different values of
/// `stream` give different noise for the same seed.
pub fn draw(
    engine: &Engine,
    executable: &CompiledProgram,
    draws: &Draws,
    seed: u64,
    stream: usize,
) -> Result<Vec<Tensor>, RuntimeError> {
    let names: Vec<String> = draws.iter().map(|(name, _)| format!("noise.{stream}.{name}")).collect();
    let keys = engine.upload(executable, KEYS, &keys(&names, seed))?;
    let outputs = engine.run(executable, |name| (name == KEYS).then_some(&keys))?;
    draws.iter().map(|(name, _)| outputs.tensor(name)).collect()
}

/// Builds the program that generates the tensors on one device; the seed is an input. Fails if a tensor has more than
/// 2^32 elements.
pub fn program(draws: &Draws) -> Result<Program, RuntimeError> {
    let b = Builder::new("noise").without_locations();
    let keys = b.argument_with(Argument::new(KEYS, Type::new(DType::I32, [draws.len(), 2]))).to(DType::U32);
    let mut results = Vec::with_capacity(draws.len());
    for (i, (name, dims)) in draws.iter().enumerate() {
        let count: usize = dims.iter().product();
        if count as u64 > 1 << 32 {
            return Err(RuntimeError::Parameter(format!(
                "a noise tensor of {count} elements exceeds the limit of 2^32"
            )));
        }
        let [x, y] = [0, 1].map(|word| keys.at(0, i).at(0, word).broadcast_to(&[count]));
        let [x, y] = pcg2d(x, y + b.iota(Type::new(DType::U32, [count]), 0));
        // 24 bits convert exactly to f32. Adding 0.5 avoids 0, whose logarithm is undefined.
        let uniform = |v: &Value| (v.shift_right(&v.like(8.0)).to(DType::F32) + 0.5) * 2f64.powi(-24);
        let normal = (uniform(&x).log() * -2.0).sqrt() * (uniform(&y) * std::f64::consts::TAU).cos();
        results.push((ProgramOutput::new(name, Type::new(DType::F32, dims.clone())), normal.reshape(dims.clone())));
    }
    Ok(b.finish_with(results)?)
}
