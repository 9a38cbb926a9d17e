//! Measures the FLOP/s that a device reaches on a large matmul.

use std::time::Instant;

use super::engine::Engine;
use super::error::RuntimeError;
use super::random;
use ltx2_nn::{Axis, Init, Param, Source};
use ltx2_stablehlo::{Builder, DType, Type};

/// Number of matmuls in flight at a time. It is greater than 1 to hide the launch overhead.
const IN_FLIGHT: usize = 8;

/// Timing of a matmul of two square matrices on one device.
#[derive(Clone, Debug, serde::Serialize)]
pub struct PeakMatmul {
    /// Number of rows and of columns.
    pub size: usize,
    /// Element type of the matrices, for example `bf16`.
    pub dtype: &'static str,
    /// Seconds per matmul, in the fastest round.
    pub seconds: f64,
    /// FLOP/s; a multiply-add counts as two operations.
    pub flops_per_second: f64,
}

/// Times a matmul of random matrices: 8192³ in bf16, or 1024³ in f32 on CPU.
pub fn peak_matmul(engine: &Engine, runs: usize) -> Result<PeakMatmul, RuntimeError> {
    let (size, dtype) = if engine.spec().is_host { (1024, DType::F32) } else { (8192, DType::BF16) };
    let ty = Type::new(dtype, [size, size]);
    let b = Builder::new("matmul");
    let [x, y] = ["x", "y"].map(|name| b.argument(name, ty.clone()));
    let product = b.einsum("ij,jk->ik", &x, &y, dtype);
    let program = b.finish(&[("product", &product)])?;
    let operand = |name: &str| Param {
        component: "bench",
        name: name.into(),
        ty: ty.clone(),
        axes: vec![Axis::Replicated; 2],
        source: Source::Stack { keys: vec![name.into()], shape: vec![size; 2] },
        init: Init::normal(1.0),
    };
    let operands = [operand("x"), operand("y")];
    let made = random::parameters(engine, &program, &[&operands[0], &operands[1]], 0)?;
    let executable = engine.compile("matmul", &program)?;
    let find = |name: &str| operands.iter().position(|p| p.name == name).map(|i| &made[i]);
    let round = || -> Result<f64, RuntimeError> {
        let started = Instant::now();
        let products = (0..IN_FLIGHT).map(|_| engine.run(&executable, find)).collect::<Result<Vec<_>, _>>()?;
        products.iter().try_for_each(|p| p.wait())?;
        Ok(started.elapsed().as_secs_f64() / IN_FLIGHT as f64)
    };
    // Warm-up round.
    round()?;
    let times = (0..runs.max(1)).map(|_| round()).collect::<Result<Vec<_>, _>>()?;
    let seconds = times.into_iter().fold(f64::INFINITY, f64::min);
    let flops_per_second = 2.0 * (size as f64).powi(3) / seconds;
    Ok(PeakMatmul { size, dtype: dtype.name(), seconds, flops_per_second })
}
