//! Sinusoidal embedding of a scalar timestep.

use ltx2_nn::{Axis, Params, linear, silu};
use ltx2_stablehlo::Value;

/// Number of sinusoidal features, fixed by the architecture.
const FEATURES: usize = 256;

/// Returns `[cos(t·f), sin(t·f)]` with `f_i = 10000^(-i/128)`, computed in f32: `[…] -> […, 256]`.
pub(crate) fn sinusoid(t: &Value) -> Value {
    let half = FEATURES / 2;
    let step = -(10000f64.ln()) as f32;
    let f: Vec<f32> = (0..half).map(|i| f64::from(step * i as f32 / half as f32).exp() as f32).collect();
    let angle = t.unsqueeze(t.rank()) * t.builder().constant(&[half], &f);
    t.builder().concat(&[&angle.cos(), &angle.sin()], -1)
}

/// Returns `linear_2(silu(linear_1(sinusoid(t))))` with the weights at `p`: `[…] -> […, width]`, in the weights'
/// element type.
pub(crate) fn timestep_embedding(p: &Params, t: &Value, width: usize) -> Value {
    let _scope = p.scope();
    let embed = |name: &str, x: &Value| linear(&p.pp(name), x, width, true, [Axis::Replicated, Axis::Embed]);
    embed("linear_2", &silu(&embed("linear_1", &sinusoid(t).to(p.dtype()))))
}
