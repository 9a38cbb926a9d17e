//! Statistics of a tensor that exclude its padding.

use crate::hlo::{Builder, Comparison, DType, Type, Value};

/// Sums and standard deviations over a tensor without its padding samples and tokens.
pub struct MaskedStatistics {
    /// Dimensions without padding.
    content: [usize; 3],
    /// Mask `[samples, n, 1]`: 1 for content, 0 for padding. `None`: there is no padding.
    mask: Option<Value>,
}

impl MaskedStatistics {
    /// Creates statistics of tensors shaped like `x [samples, n, channels]`, over the first `content` elements along
    /// each dimension.
    pub fn new(b: &Builder, x: &Value, content: [usize; 3]) -> Self {
        let inside = |axis: usize| {
            let position = b.iota(Type::new(DType::I32, [x.dims()[0], x.dims()[1], 1]), axis);
            position.compare(Comparison::Lt, &position.like(content[axis] as f64))
        };
        let mask = (x.dims() != content).then(|| inside(0).and(&inside(1)).to(x.dtype()));
        MaskedStatistics { content, mask }
    }

    /// Returns the sum over the tokens and channels of each sample, `[samples, 1, 1]`.
    pub(super) fn sum(&self, x: &Value) -> Value {
        self.mask.iter().fold(x.clone(), |x, mask| x * mask).sum_keep(&[1, 2])
    }

    /// Returns the unbiased standard deviation over `axes`, which keep size 1.
    pub(super) fn deviation(&self, x: &Value, axes: &[isize]) -> Value {
        let n: usize = axes.iter().map(|&a| self.content[a as usize]).product();
        let counted = |x: Value| self.mask.iter().fold(x, |x, mask| x * mask);
        let mean = counted(x.clone()).sum_keep(axes) / n as f64;
        let centred = counted(x - mean);
        (centred.square().sum_keep(axes) / (n.saturating_sub(1).max(1)) as f64).sqrt()
    }
}
