//! Weights in 8 bits, scaled per output channel when they are loaded, and activations, scaled per token before they are
//! multiplied.

use super::build::Quantization;
use super::layout::Axis;
use super::param::{Init, Source};
use super::params::Params;
use crate::hlo::{DType, F8, Type, Value};

/// The weight `[out…, in]` of an affine map.
#[derive(Clone)]
pub enum Weight {
    /// In the run's element type.
    Plain(Value),
    /// In 8 bits, with the f32 `[out…]` that its channels are multiplied by.
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

/// The largest number of an 8-bit type that a row's largest becomes; of integers the same on both sides of 0.
pub(crate) fn largest(dtype: DType) -> f32 {
    if dtype == DType::I8 { f32::from(i8::MAX) } else { F8::MAX }
}

/// `x [rows…, in]` in an 8-bit type, with the f32 `[rows…, 1]` that its rows are multiplied by: a row's largest number
/// becomes the type's.
pub(super) fn scaled(x: &Value, dtype: DType) -> (Value, Value) {
    let x = x.to(DType::F32);
    // The bound keeps a row of zeros one.
    let rows = x.abs().max_keep(&[-1]).maximum(&x.builder().scalar(1e-30, DType::F32)) / f64::from(largest(dtype));
    let narrow = x / &rows;
    // A conversion to integers cuts off.
    let narrow = if dtype == DType::I8 { narrow.round() } else { narrow };
    (narrow.to(dtype), rows)
}

/// The product `[rows…, out…]` of a weight in 8 bits, with its scales, those of what was [`scaled`], and the bias: f32.
pub(super) fn unscaled(product: &Value, rows: Option<&Value>, channels: &Value, bias: Option<&Value>) -> Value {
    let mut y = product.to(DType::F32);
    if let Some(rows) = rows {
        let leading = &rows.dims()[..rows.rank() - 1];
        y = y * rows.reshape([leading, &vec![1; channels.rank()]].concat());
    }
    let y = y * channels;
    bias.map_or(y.clone(), |bias| y + bias.to(DType::F32))
}

impl Params {
    /// The 8-bit type of weights at this place, where they have one.
    fn narrow(&self) -> Option<DType> {
        match self.quantization {
            _ if !self.is_quantized() => None,
            Quantization::None => None,
            Quantization::Fp8 => Some(DType::F8E4M3FN),
            Quantization::Int8 { .. } => Some(DType::I8),
        }
    }

    /// The weight `[out…, in]` of a map, or of several of one shape behind a new leading dimension; each stands in the
    /// checkpoint as `[product(out), in]`. In 8 bits where [`Params::quantized`] says so.
    pub(crate) fn weight(&self, names: &[&str], shape: &[usize], axes: &[Axis]) -> Weight {
        let inner = shape.last().copied().unwrap_or(1);
        let stored = [shape.iter().product::<usize>() / inner, inner];
        let deviation = (inner as f32).sqrt().recip();
        let Some(dtype) = self.narrow() else {
            let init = Init::normal(deviation);
            return Weight::Plain(match names {
                [one] => self.get_as(one, &stored, shape, axes, init),
                several => self.fused(several, shape, &stored, axes, init),
            });
        };
        let (key, keys) = (self.key(&names.join("+")), self.keys_of(names));
        let (shape, axes) = match names {
            [_] => (shape.to_vec(), axes.to_vec()),
            several => ([&[several.len()], shape].concat(), [&[Axis::Replicated], axes].concat()),
        };
        let out = shape.len() - 1;
        // Random numbers fill the type's range and have the deviation once they are multiplied.
        let scale = deviation * Init::LARGEST_DEVIATION / largest(dtype);
        let (narrow, wide) = (Type::new(dtype, shape.clone()), Type::new(DType::F32, &shape[..out]));
        let source = Source::Stack { keys: keys.clone(), shape: stored.to_vec() };
        let weight = self.declare(key.clone(), source, narrow, &axes, Init::normal(deviation / scale));
        let source = Source::Scales { keys, shape: stored, of: dtype };
        let channels = self.declare(format!("{key}_scale"), source, wide, &axes[..out], Init { mean: scale, std: 0.0 });
        Weight::Scaled(weight, channels)
    }
}
