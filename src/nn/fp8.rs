//! Weights in 8-bit floats, scaled per output channel when they are loaded, and activations, scaled per token before
//! they are multiplied.

use super::layout::Axis;
use super::param::{Init, Source};
use super::params::Params;
use crate::hlo::{DType, F8, Type, Value};

/// The weight `[out…, in]` of an affine map.
#[derive(Clone)]
pub enum Weight {
    /// In the run's element type.
    Plain(Value),
    /// In 8-bit floats, with the f32 `[out…]` that its channels are multiplied by.
    Scaled(Value, Value),
}

impl Weight {
    /// The same with all output dimensions in one.
    pub(super) fn flat(&self) -> Weight {
        let flat = |x: &Value, inner: &[usize]| {
            let out = x.ty().elements() / inner.iter().product::<usize>();
            x.reshape([&[out], inner].concat())
        };
        match self {
            Weight::Plain(w) => Weight::Plain(flat(w, &[w.dim(-1)])),
            Weight::Scaled(w, channels) => Weight::Scaled(flat(w, &[w.dim(-1)]), flat(channels, &[])),
        }
    }
}

/// `x [rows…, in]` in 8-bit floats, with the f32 `[rows…, 1]` that its rows are multiplied by: a row's largest number
/// becomes the type's.
pub(super) fn scaled(x: &Value) -> (Value, Value) {
    let x = x.to(DType::F32);
    // The bound keeps a row of zeros one.
    let rows = x.abs().max_keep(&[-1]).maximum(&x.builder().scalar(1e-30, DType::F32)) / f64::from(F8::MAX);
    ((x / &rows).to(DType::F8E4M3FN), rows)
}

/// The product `[rows…, out…]` of what was [`scaled`], with its scales and the bias: f32.
pub(super) fn unscaled(product: &Value, rows: &Value, channels: &Value, bias: Option<&Value>) -> Value {
    let leading = &rows.dims()[..rows.rank() - 1];
    let rows = rows.reshape([leading, &vec![1; channels.rank()]].concat());
    let y = product.to(DType::F32) * rows * channels;
    bias.map_or(y.clone(), |bias| y + bias.to(DType::F32))
}

impl Params {
    /// The weight `[out…, in]` of a map, or of several of one shape behind a new leading dimension; each stands in the
    /// checkpoint as `[product(out), in]`. In 8-bit floats where [`Params::quantized`] says so.
    pub(crate) fn weight(&self, names: &[&str], shape: &[usize], axes: &[Axis]) -> Weight {
        let inner = shape.last().copied().unwrap_or(1);
        let stored = [shape.iter().product::<usize>() / inner, inner];
        let deviation = (inner as f32).sqrt().recip();
        if !self.narrow {
            let init = Init::normal(deviation);
            return Weight::Plain(match names {
                [one] => self.get_as(one, &stored, shape, axes, init),
                several => self.fused(several, shape, &stored, axes, init),
            });
        }
        let (key, keys) = (self.key(&names.join("+")), self.keys_of(names));
        let (shape, axes) = match names {
            [_] => (shape.to_vec(), axes.to_vec()),
            several => ([&[several.len()], shape].concat(), [&[Axis::Replicated], axes].concat()),
        };
        let out = shape.len() - 1;
        // Random numbers fill the type's range and have the deviation once they are multiplied.
        let scale = deviation * Init::LARGEST_DEVIATION / F8::MAX;
        let (narrow, wide) = (Type::new(DType::F8E4M3FN, shape.clone()), Type::new(DType::F32, &shape[..out]));
        let source = Source::Stack { keys: keys.clone(), shape: stored.to_vec() };
        let weight = self.declare(key.clone(), source, narrow, &axes, Init::normal(deviation / scale));
        let source = Source::Scales { keys, shape: stored };
        let channels = self.declare(format!("{key}_scale"), source, wide, &axes[..out], Init { mean: scale, std: 0.0 });
        Weight::Scaled(weight, channels)
    }
}
