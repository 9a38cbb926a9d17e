//! Quantization to 8 bits: weights are scaled per output channel when they are loaded, activations per token before
//! they are multiplied. With int8-convrot, both are first multiplied by the same orthogonal matrix, which leaves the
//! product unchanged but spreads outliers over 256 inputs.

use super::build::{Quantization, ROTATED_INPUTS};
use super::kernels::RowRotation;
use super::layout::Axis;
use super::linear::linear_by_batch;
use super::param::{Init, Source};
use super::params::Params;
use ltx2_stablehlo::{DType, F8, Type, Value};

/// Weight `[out…, in]` of a linear layer.
#[derive(Clone)]
pub enum Weight {
    /// In the run's element type.
    Plain(Value),
    /// Quantized to 8 bits, with f32 dequantization scales `[out…]` per output channel.
    Scaled(Value, Value),
}

impl Weight {
    /// Returns the weight with all output dimensions merged into one.
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

/// Returns the largest value of an 8-bit type. Quantization scales the largest magnitude of each row to this value;
/// integers range from -127 to 127.
fn largest(dtype: DType) -> f32 {
    if dtype == DType::I8 { f32::from(i8::MAX) } else { F8::MAX }
}

/// Quantizes `x [rows…, in]` to an 8-bit type and returns it with f32 scales `[rows…, 1]`. The largest magnitude of
/// each row is scaled to the largest value of the type.
fn scaled(x: &Value, dtype: DType) -> (Value, Value) {
    let x = x.to(DType::F32);
    // The lower bound keeps rows of zeros at 0 instead of NaN.
    let rows = x.abs().max_keep(&[-1]).maximum(&x.builder().scalar(1e-30, DType::F32)) / f64::from(largest(dtype));
    let narrow = x / &rows;
    // Round first, because conversion to integers truncates.
    let narrow = if dtype == DType::I8 { narrow.round() } else { narrow };
    (narrow.to(dtype), rows)
}

/// Converts the product `[rows…, out…]` of activations and a quantized weight to f32: multiplies it by the weight's
/// scales `channels` and, if the activations were [`scaled`], by their scales `rows`, then adds the bias.
pub(super) fn unscaled(product: &Value, rows: Option<&Value>, channels: &Value, bias: Option<&Value>) -> Value {
    let mut y = product.to(DType::F32);
    if let Some(rows) = rows {
        let leading = &rows.dims()[..rows.rank() - 1];
        y = y * rows.reshape([leading, &vec![1; channels.rank()]].concat());
    }
    let y = y * channels;
    bias.map_or(y.clone(), |bias| y + bias.to(DType::F32))
}

/// Symmetric 4 x 4 Hadamard matrix with equal row sums. Its normalized Kronecker powers are their own inverses.
const HADAMARD: [f32; 16] = [1.0, 1.0, 1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0, 1.0];

impl Params {
    /// Returns this prefix with the matrix that rotates the inputs of quantized linear layers, if the run rotates them.
    pub(super) fn rotating(&self) -> Params {
        if !self.quantization.is_convrot() {
            return self.clone();
        }
        // The Kronecker product of four 4 x 4 matrices: each varies along two of the eight dimensions.
        let small = self.builder().constant(&[4, 4], &HADAMARD) * 0.5;
        let parts = (0..4).map(|i| small.broadcast_in_dim(&[4; 8], &[i, i + 4]));
        let whole = parts.reduce(|product, part| product * part).map(|product| product.reshape([ROTATED_INPUTS; 2]));
        // All entries are 1/16 or -1/16, which bf16 represents exactly.
        self.with_rotation(whole.map(|matrix| matrix.to(self.dtype())))
    }

    /// Rotates the input `x [rows…, in]` of the quantized linear layers under this prefix. Returns the prefix for
    /// layers whose input is already rotated, and the rotated input. Without rotation, returns the prefix and `x`
    /// unchanged.
    pub(super) fn rotated(&self, x: &Value) -> (Params, Value) {
        let Some(matrix) = self.rotation_of(x) else { return (self.clone(), x.clone()) };
        let (rows, inner) = (&x.dims()[..x.rank() - 1], x.dim(-1));
        let groups = x.reshape([rows, &[inner / ROTATED_INPUTS, ROTATED_INPUTS]].concat());
        let _scope = self.builder().scope("rotation");
        let y = linear_by_batch(self, &groups, matrix, x.dtype()).reshape(x.dims().to_vec());
        (self.with_rotation(None), y)
    }

    /// Returns the matrix by which the groups of `x [rows…, in]` must be multiplied.
    fn rotation_of(&self, x: &Value) -> Option<&Value> {
        self.rotation.as_ref().filter(|_| self.is_quantized() && x.dim(-1).is_multiple_of(ROTATED_INPUTS))
    }

    /// Quantizes the input `x [rows…, in]` of the quantized linear layers under this prefix to `dtype` and returns it
    /// with f32 scales `[rows…, 1]`. Rotates it first, unless it is rotated already.
    pub fn quantized_rows(&self, x: &Value, dtype: DType) -> (Value, Value) {
        let by_kernel = self.lowering().rotates_by_kernel && self.layout().is_single();
        let matrix = self.rotation_of(x).filter(|_| by_kernel);
        if let Some(kernel) = matrix.and_then(|matrix| RowRotation::new(x, matrix)) {
            let _scope = self.builder().scope("rotation");
            return kernel.quantized();
        }
        scaled(&self.rotated(x).1, dtype)
    }

    /// Returns the 8-bit type of a weight under this prefix that is read from the tensors `keys`. `None`: the weight is
    /// not quantized, or is fused from weights of which one must not be quantized.
    fn quantized_dtype(&self, keys: &[String]) -> Option<DType> {
        match self.quantization {
            _ if !self.is_quantized() || keys.iter().any(|key| self.unquantized.contains(key)) => None,
            Quantization::None => None,
            Quantization::Fp8 => Some(DType::F8E4M3FN),
            Quantization::Int8 { .. } => Some(DType::I8),
        }
    }

    /// Returns the weight `[out…, in]` of a linear layer, or several weights of the same shape stacked along a new
    /// leading dimension. The checkpoint stores each as `[product(out), in]`. The weight is quantized if
    /// [`Params::quantized`] enables quantization for this prefix and [`Build::unquantized`](crate::Build) has none of
    /// its tensors.
    pub fn weight(&self, names: &[&str], shape: &[usize], axes: &[Axis]) -> Weight {
        let inner = shape.last().copied().unwrap_or(1);
        let stored = [shape.iter().product::<usize>() / inner, inner];
        let deviation = (inner as f32).sqrt().recip();
        let keys = self.keys_of(names);
        let Some(dtype) = self.quantized_dtype(&keys) else {
            let init = Init::normal(deviation);
            return Weight::Plain(match names {
                [one] => self.get_as(one, &stored, shape, axes, init),
                several => self.fused(several, shape, &stored, axes, init),
            });
        };
        let key = self.key(&names.join("+"));
        let (shape, axes) = match names {
            [_] => (shape.to_vec(), axes.to_vec()),
            several => ([&[several.len()], shape].concat(), [&[Axis::Replicated], axes].concat()),
        };
        let out = shape.len() - 1;
        // Random values use the full range of the 8-bit type and have the intended deviation after scaling.
        let scale = deviation * Init::LARGEST_DEVIATION / largest(dtype);
        let (narrow, wide) = (Type::new(dtype, shape.clone()), Type::new(DType::F32, &shape[..out]));
        let rotated = self.quantization.is_convrot();
        if rotated && !inner.is_multiple_of(ROTATED_INPUTS) {
            let message = format!(
                "'{}' has {inner} inputs, but int8-convrot weights need a multiple of {ROTATED_INPUTS}; use int8 instead",
                self.activation(&names.join("+"))
            );
            self.builder().reject("runtime.weights", message);
        }
        let source = match rotated {
            true => Source::Rotated { keys: keys.clone(), shape: stored },
            false => Source::Stack { keys: keys.clone(), shape: stored.to_vec() },
        };
        let weight = self.declare(key.clone(), source, narrow, &axes, Init::normal(deviation / scale));
        let source = Source::Scales { keys, shape: stored, of: dtype, rotated };
        let channels = self.declare(format!("{key}_scale"), source, wide, &axes[..out], Init { mean: scale, std: 0.0 });
        Weight::Scaled(weight, channels)
    }
}
