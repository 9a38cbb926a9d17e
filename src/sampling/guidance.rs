//! Guidance: several predictions of the clean latents, combined.

use crate::av::Av;
use crate::hlo::{Builder, Comparison, DType, Type, Value};

/// One prediction a step. Branches are rows of one batch, the conditional one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Branch {
    /// On the prompt.
    Conditional,
    /// On the negative prompt.
    Negative,
    /// On the prompt, self-attention perturbed in some layers.
    Perturbed,
    /// On the prompt, the streams not attending to each other.
    Isolated,
}

/// One stream's scales. A neutral value switches its term off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scales {
    /// Away from the negative prompt; neutral at 1.
    pub cfg: f32,
    /// Away from the perturbed prediction; neutral at 0.
    pub stg: f32,
    /// Away from the isolated prediction; neutral at 1.
    pub modality: f32,
    /// Part of the conditional prediction's standard deviation that the guided one takes over; neutral at 0.
    pub rescale: f32,
}

impl Scales {
    /// No guidance.
    pub const NEUTRAL: Scales = Scales { cfg: 1.0, stg: 0.0, modality: 1.0, rescale: 0.0 };

    /// The program's input row.
    pub fn row(self) -> [f32; 4] {
        [self.cfg, self.stg, self.modality, self.rescale]
    }
}

/// The branches that the scales of both streams need.
pub fn branches(scales: Av<Scales>) -> Vec<Branch> {
    let any = |f: fn(Scales) -> bool| scales.into_iter().any(f);
    let needed = [
        (Branch::Conditional, true),
        (Branch::Negative, any(|s| s.cfg != 1.0)),
        (Branch::Perturbed, any(|s| s.stg != 0.0)),
        (Branch::Isolated, any(|s| s.modality != 1.0)),
    ];
    needed.into_iter().filter(|(_, n)| *n).map(|(b, _)| b).collect()
}

/// Scope of the standard deviations of the rescale term.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum RescaleScope {
    /// Each sample for itself (diffusers).
    #[default]
    PerSample,
    /// All samples together (the official code).
    Batch,
}

/// Combines the branches' clean predictions `[samples, n, channels]`, f32, with `scales [4]`:
/// `c + (cfg-1)(c-u) + stg(c-p) + (modality-1)(c-m)`, then the rescale.
pub fn combine(
    branches: &[Branch],
    predictions: &[Value],
    scales: &Value,
    scope: RescaleScope,
    counted: &Counted,
) -> Value {
    let _scope = scales.builder().scope("guidance");
    let conditional = &predictions[0];
    let scale = |i: usize| scales.at(0, i);
    let mut guided = conditional.clone();
    for (branch, prediction) in branches.iter().zip(predictions) {
        let factor = match branch {
            Branch::Conditional => continue,
            Branch::Negative => scale(0) - 1.0,
            Branch::Perturbed => scale(1),
            Branch::Isolated => scale(2) - 1.0,
        };
        guided = guided + (conditional - prediction) * factor;
    }
    if branches.len() == 1 {
        return guided;
    }
    let axes: &[isize] = if scope == RescaleScope::Batch { &[0, 1, 2] } else { &[1, 2] };
    let rescale = scale(3);
    let ratio = counted.deviation(conditional, axes) / counted.deviation(&guided, axes);
    let rescaled = &guided * ratio * &rescale + &guided * (rescale.like(1.0) - &rescale);
    // Selected, so that a neutral factor leaves every bit alone.
    rescale.compare(Comparison::Ne, &rescale.like(0.0)).select(&rescaled, &guided)
}

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

    /// The unbiased standard deviation over axes, kept with size 1.
    fn deviation(&self, x: &Value, axes: &[isize]) -> Value {
        let n: usize = axes.iter().map(|&a| self.content[a as usize]).product();
        let counted = |x: Value| self.mask.iter().fold(x, |x, mask| x * mask);
        let mean = counted(x.clone()).sum_keep(axes) / n as f64;
        let centred = counted(x - mean);
        (centred.square().sum_keep(axes) / (n.saturating_sub(1).max(1)) as f64).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_needed_branches_run() {
        use Branch::*;
        let cfg = Scales { cfg: 4.0, ..Scales::NEUTRAL };
        assert_eq!(branches(Av::both(Scales::NEUTRAL)), [Conditional]);
        assert_eq!(branches(Av { video: Scales::NEUTRAL, audio: cfg }), [Conditional, Negative]);
        let full = Scales { cfg: 3.0, stg: 1.0, modality: 3.0, rescale: 0.7 };
        assert_eq!(branches(Av { video: full, audio: cfg }), [Conditional, Negative, Perturbed, Isolated]);
    }
}
