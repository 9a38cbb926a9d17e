//! Statistics over the elements of a tensor that count.

use crate::hlo::{Builder, Comparison, DType, Type, Value};

/// The elements that statistics are taken over: samples and tokens that only pad a tensor do not count.
pub struct Counted {
    /// Sizes that count.
    content: [usize; 3],
    /// 1 for what counts, 0 for the rest, `[samples, n, 1]`, f32; `None` where everything does.
    mask: Option<Value>,
}

impl Counted {
    /// The leading `content` of a tensor like `x [samples, n, channels]`.
    pub fn new(b: &Builder, x: &Value, content: [usize; 3]) -> Self {
        let inside = |axis: usize| {
            let position = b.iota(Type::new(DType::I32, [x.dims()[0], x.dims()[1], 1]), axis);
            position.compare(Comparison::Lt, &position.like(content[axis] as f64))
        };
        let mask = (x.dims() != content).then(|| inside(0).and(&inside(1)).to(x.dtype()));
        Counted { content, mask }
    }

    /// The sum over a sample's tokens and channels, `[samples, 1, 1]`.
    pub(super) fn sum(&self, x: &Value) -> Value {
        self.mask.iter().fold(x.clone(), |x, mask| x * mask).sum_keep(&[1, 2])
    }

    /// The unbiased standard deviation over axes, kept with size 1.
    pub(super) fn deviation(&self, x: &Value, axes: &[isize]) -> Value {
        let n: usize = axes.iter().map(|&a| self.content[a as usize]).product();
        let counted = |x: Value| self.mask.iter().fold(x, |x, mask| x * mask);
        let mean = counted(x.clone()).sum_keep(axes) / n as f64;
        let centred = counted(x - mean);
        (centred.square().sum_keep(axes) / (n.saturating_sub(1).max(1)) as f64).sqrt()
    }
}
