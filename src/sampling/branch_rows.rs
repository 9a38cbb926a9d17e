//! Guidance branches as batch rows of a forward pass: videos times branches, padded to multiples of the mesh axes.

use super::guidance::Branch;
use super::guidance_steps::BranchSet;
use super::shape::DenoiseShape;
use crate::hlo::{DType, Type, Value};
use crate::models::transformer::{Isolation, Perturbation, TextContext, TextRows};
use crate::nn::{Axis, Params};

/// Batch rows of a forward pass: one for each video and guidance branch.
pub(super) struct BranchRows {
    pub(crate) branches: Vec<Branch>,
    /// Branches per video, including padding.
    pub(crate) count: usize,
    pub(crate) perturbation: Option<Perturbation>,
    pub(crate) isolation: Isolation,
    /// Rows of the text context that the batch rows use; `None` if the text context has the same rows as the batch.
    text: Option<TextRows>,
}

impl BranchRows {
    /// Returns the number of branches, including padding.
    pub(crate) fn padded(p: &Params, branches: usize) -> usize {
        let branches = Type::new(DType::F32, [branches]);
        p.layout().padded(&p.activation("branches"), &branches, &[Axis::Branch], 1).dims[0]
    }

    /// Returns the rows of all branches of `shape`.
    pub(crate) fn all(p: &Params, shape: &DenoiseShape, videos: usize) -> Self {
        let count = Self::padded(p, shape.branches.len());
        let (perturbation, isolation) = masks(p, shape, &shape.branches, [count, videos]);
        BranchRows { branches: shape.branches.clone(), count, perturbation, isolation, text: None }
    }

    /// Returns the rows of one branch set.
    pub(crate) fn for_set(p: &Params, shape: &DenoiseShape, set: &BranchSet, videos: usize) -> Self {
        let (branches, count) = (&set.branches, Self::padded(p, set.branches.len()));
        let (mut perturbation, isolation) = masks(p, shape, branches, [count, videos]);
        if let Some(own) = &mut perturbation {
            let layers = own.layers.as_mut().zip(set.perturbed).into_iter();
            layers.filter(|(_, perturbed)| !perturbed).for_each(|(layers, _)| layers.clear());
        }
        let place =
            |own| shape.branches.iter().position(|known| known == own).expect("the shape has all branches of its sets");
        // Padding rows read the text of the first branch.
        let places = branches.iter().map(place).chain(std::iter::repeat(0)).take(count).collect();
        let text = (*branches != shape.branches).then_some(TextRows { videos, places });
        BranchRows { branches: branches.clone(), count, perturbation, isolation, text }
    }

    /// Repeats each video of a tensor `[b, n, …]` for each branch. Returns `[rows, n, …]`.
    pub(crate) fn repeat_per_branch(&self, p: &Params, x: &Value, sequence: Axis) -> Value {
        let (videos, rest) = (x.dim(0), &x.dims()[1..]);
        let each = x.unsqueeze(1).broadcast_to(&[&[videos, self.count], rest].concat());
        let axes = [&[Axis::Batch, Axis::Branch, sequence][..], &vec![Axis::Replicated; rest.len() - 1]].concat();
        let each = p.place("branches", &each, &axes);
        let x = each.reshape([&[videos * self.count], rest].concat());
        p.place("rows", &x, &[&[Axis::CfgBatch][..], &axes[2..]].concat())
    }

    /// Returns the text context with one row for each batch row.
    pub(crate) fn context(&self, p: &Params, context: &TextContext) -> TextContext {
        self.text.as_ref().map_or_else(|| context.clone(), |rows| context.of_rows(p, rows))
    }

    /// Returns the negative-prompt prediction; `predictions` has one prediction per branch.
    pub(crate) fn negative<'a>(&self, predictions: &'a [Value]) -> &'a Value {
        let at = self.branches.iter().position(|branch| *branch == Branch::Negative);
        &predictions[at.expect("every set has a negative branch if the sampler reads it")]
    }
}

/// Returns the masks of the perturbed and the isolated branch, which change the attention instead of the text. A mask
/// has one value per row: 0 in the rows of its branch, 1 in all others. There are `branches * videos` rows.
fn masks(
    p: &Params,
    shape: &DenoiseShape,
    own: &[Branch],
    [branches, videos]: [usize; 2],
) -> (Option<Perturbation>, Isolation) {
    let mask = |branch: Branch, dims: &[usize]| {
        let each = (0..branches).map(|i| i32::from(own.get(i) != Some(&branch)));
        let rows: Vec<i32> = (0..videos).flat_map(|_| each.clone()).collect();
        let dims: Vec<usize> = std::iter::once(rows.len()).chain(dims.iter().copied()).collect();
        p.builder().vector_i32(&rows).to(DType::F32).reshape(dims)
    };
    let perturbation = own
        .contains(&Branch::Perturbed)
        .then(|| Perturbation { stg_mask: mask(Branch::Perturbed, &[1, 1, 1]), layers: shape.stg_blocks.clone() });
    let isolation = match own.contains(&Branch::Isolated) {
        true => Isolation::Masked(mask(Branch::Isolated, &[1, 1])),
        false => Isolation::None,
    };
    (perturbation, isolation)
}
