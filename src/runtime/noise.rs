//! Normal numbers drawn on a device: faster than a host's generator, and no other program's numbers.
//!
//! An element follows from seed, name and its row-major index alone, by the hash of `runtime::random` and Box and
//! Muller's transform.

use super::engine::Engine;
use super::error::RuntimeError;
use super::executable::Executable;
use super::random::{KEYS, keys, pcg2d};
use crate::hlo::{Argument, Builder, DType, Output, Program, Type, Value};
use crate::tensor::Tensor;

/// Tensors to be drawn: name and shape.
pub(crate) type Draws = [(&'static str, Vec<usize>)];

/// Runs a [`program`] of these draws: f32 tensors in their order. `stream` tells draws of one seed apart.
pub(crate) fn draw(
    engine: &Engine,
    executable: &Executable,
    draws: &Draws,
    seed: u64,
    stream: usize,
) -> Result<Vec<Tensor>, RuntimeError> {
    let names: Vec<String> = draws.iter().map(|(name, _)| format!("noise.{stream}.{name}")).collect();
    let keys = engine.upload(executable, KEYS, &keys(&names, seed))?;
    let outputs = engine.run(executable, |name| (name == KEYS).then_some(&keys))?;
    draws.iter().map(|(name, _)| outputs.tensor(name)).collect()
}

/// The program that draws tensors on one device, whatever the seed.
///
/// # Errors
/// A tensor of more than 2^32 elements.
pub(crate) fn program(draws: &Draws) -> Result<Program, RuntimeError> {
    let b = Builder::new("noise").without_locations();
    let keys = b.argument_with(Argument::new(KEYS, Type::new(DType::I32, [draws.len(), 2]))).to(DType::U32);
    let mut results = Vec::with_capacity(draws.len());
    for (i, (name, dims)) in draws.iter().enumerate() {
        let count: usize = dims.iter().product();
        if count as u64 > 1 << 32 {
            return Err(RuntimeError::Parameter(format!("noise of {count} elements: at most 2^32 are drawn at once")));
        }
        let [x, y] = [0, 1].map(|word| keys.at(0, i).at(0, word).broadcast_to(&[count]));
        let [x, y] = pcg2d(x, y + b.iota(Type::new(DType::U32, [count]), 0));
        // 24 bits each have an exact f32; neither is 0, of which there is no logarithm.
        let uniform = |v: &Value| (v.shift_right(&v.like(8.0)).to(DType::F32) + 0.5) * 2f64.powi(-24);
        let normal = (uniform(&x).log() * -2.0).sqrt() * (uniform(&y) * std::f64::consts::TAU).cos();
        results.push((Output::new(name, Type::new(DType::F32, dims.clone())), normal.reshape(dims.clone())));
    }
    Ok(b.finish_with(results)?)
}
