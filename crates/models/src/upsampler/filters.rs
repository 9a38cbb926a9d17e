//! Optional filters for the un-normalized latents that an upsampler returns; all are off by default.

use ndarray::{Array5, ArrayView1, ArrayView5, Axis, Zip};

/// Applies adaptive instance normalization (AdaIN): gives each channel of each video in `latents [b, c, f, h, w]` the
/// mean and unbiased standard deviation of the same channel in `reference`, which has the same `b` and `c` and any
/// size. `factor` interpolates linearly from the input (0) to the full result (1).
pub fn adain(latents: ArrayView5<f32>, reference: ArrayView5<f32>, factor: f32) -> Array5<f32> {
    let mut result = latents.to_owned();
    Zip::from(result.outer_iter_mut()).and(reference.outer_iter()).for_each(|mut video, reference| {
        Zip::from(video.outer_iter_mut()).and(reference.outer_iter()).for_each(|mut x, reference| {
            let flat = |a: ndarray::ArrayView3<f32>| moments(a.flatten().view());
            let ([mean, std], [wanted_mean, wanted_std]) = (flat(x.view()), flat(reference));
            x.mapv_inplace(|v| {
                let moved = (f64::from(v) - mean) / std * wanted_std + wanted_mean;
                v + factor * (moved as f32 - v)
            });
        });
    });
    result
}

fn moments(values: ArrayView1<f32>) -> [f64; 2] {
    let wide = values.mapv(f64::from);
    [wide.mean().unwrap_or(0.0), wide.std_axis(Axis(0), 1.0).into_scalar()]
}

/// Compresses large latent values towards 0. `compression` is the strength: 0 returns the latents unchanged, 1 is the
/// maximum.
pub fn tone_map(latents: ArrayView5<f32>, compression: f32) -> Array5<f32> {
    let s = 0.75 * compression;
    latents.mapv(|v| v * (1.0 - 0.8 * s / (1.0 + (-4.0 * s * (v.abs() - 1.0)).exp())))
}
