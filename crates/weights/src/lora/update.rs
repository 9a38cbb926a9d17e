//! The update that an adapter file makes to one tensor of the model.

use std::collections::BTreeMap;
use std::path::Path;

use super::keys::LoraTensorRole;
use super::metadata::Listed;
use super::wrong;
use crate::checkpoint::TensorView;
use crate::error::WeightsError;
use crate::merge_order::MergeOrder;

/// A matrix, or a product of two.
#[derive(Clone, Debug)]
pub(crate) enum Factor {
    Whole(TensorView),
    Product([TensorView; 2]),
}

/// The change of a tensor, before it is multiplied by alpha / rank and the strength.
#[derive(Clone, Debug)]
pub(crate) enum Delta {
    /// A LoRA: `up · down`, of `[out, rank]` and `[rank, in]`.
    LowRank { up: TensorView, down: TensorView },
    /// A LoHa: the elementwise product of two matrix products.
    Hadamard([[TensorView; 2]; 2]),
    /// A LoKr: the Kronecker product `w1 ⊗ w2`.
    Kronecker([Factor; 2]),
    /// A stored difference.
    Full(TensorView),
}

/// Kind of norms that the magnitude of a DoRA replaces in the updated matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Norms {
    /// Norms of the rows, `[out]`, as PEFT computes them.
    PeftRows,
    /// Norms of the rows, `[out, 1]`, as LyCORIS computes them.
    Rows,
    /// Norms of the columns, `[1, in]`.
    Columns,
}

/// An adapter's update of one tensor.
#[derive(Clone, Debug)]
pub struct Update {
    pub(crate) delta: Delta,
    /// Magnitude of a DoRA, and the norms that it replaces; `None` for other adapters.
    pub(crate) magnitude: Option<(TensorView, Norms)>,
    /// Shape of the change.
    shape: Vec<usize>,
    /// Alpha; equal to the divisor if the file contains no alpha.
    pub(super) alpha: f64,
    /// The rank, or its square root for rank-stabilized LoRAs.
    pub(super) divisor: f64,
    /// Whether Lightricks' loader supports the naming scheme of the update's tensors.
    official: bool,
}

impl Factor {
    fn shape(&self) -> [usize; 2] {
        match self {
            Factor::Whole(view) => [view.shape()[0], view.shape()[1]],
            Factor::Product([a, b]) => [a.shape()[0], b.shape()[1]],
        }
    }

    fn views(&self) -> &[TensorView] {
        match self {
            Factor::Whole(view) => std::slice::from_ref(view),
            Factor::Product(pair) => pair,
        }
    }

    fn rank(&self) -> Option<usize> {
        match self {
            Factor::Whole(_) => None,
            Factor::Product([_, b]) => Some(b.shape()[0]),
        }
    }
}

impl Delta {
    fn shape(&self) -> Vec<usize> {
        match self {
            Delta::LowRank { up, down } => vec![up.shape()[0], down.shape()[1]],
            Delta::Hadamard([[a, b], _]) => vec![a.shape()[0], b.shape()[1]],
            Delta::Kronecker([one, two]) => {
                let ([a, c], [b, d]) = (one.shape(), two.shape());
                vec![a.saturating_mul(b), c.saturating_mul(d)]
            }
            Delta::Full(view) => view.shape().to_vec(),
        }
    }

    /// Returns the rank; `None` if the matrices do not determine it.
    fn rank(&self) -> Option<usize> {
        match self {
            Delta::LowRank { down, .. } => Some(down.shape()[0]),
            Delta::Hadamard([[_, b], _]) => Some(b.shape()[0]),
            Delta::Kronecker([one, two]) => one.rank().or(two.rank()),
            Delta::Full(_) => None,
        }
    }

    /// Returns all tensors.
    fn views(&self) -> Vec<&TensorView> {
        match self {
            Delta::LowRank { up, down } => vec![down, up],
            Delta::Hadamard(pairs) => pairs.iter().flatten().collect(),
            Delta::Kronecker(factors) => factors.iter().flat_map(Factor::views).collect(),
            Delta::Full(view) => vec![view],
        }
    }
}

impl Update {
    /// Returns the shape of the change.
    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the tensors of the change and of its magnitude.
    pub(crate) fn views(&self) -> Vec<&TensorView> {
        self.delta.views().into_iter().chain(self.magnitude.iter().map(|(view, _)| view)).collect()
    }

    /// Returns the name that the file gives to the update's first tensor, for error messages.
    pub(crate) fn key(&self) -> &str {
        self.delta.views()[0].key()
    }

    /// Describes the shapes of the update's tensors, with their names in the file, for error messages.
    pub(super) fn shapes(&self) -> String {
        let views = self.delta.views();
        let others = views[1..].iter().map(|view| format!(" and `{}` has {:?}", view.key(), view.shape()));
        format!("has shape {:?}{}", views[0].shape(), others.collect::<String>())
    }

    /// Returns the rank of a LoRA; `None` for other kinds.
    pub(crate) fn rank(&self) -> Option<usize> {
        self.delta.rank().filter(|_| self.is_lora())
    }

    /// Returns whether the update is a LoRA, the only kind to which [`MergeOrder`] applies.
    pub(crate) fn is_lora(&self) -> bool {
        matches!(self.delta, Delta::LowRank { .. }) && self.magnitude.is_none()
    }

    /// Returns the factor of the change. The official merge orders ignore alpha, as Lightricks' loader does, except for
    /// naming schemes that this loader does not support.
    pub(crate) fn factor(&self, order: MergeOrder, strength: f64) -> f64 {
        match matches!(order, MergeOrder::Official | MergeOrder::Official1) && self.official && self.is_lora() {
            true => strength,
            false => strength * self.alpha / self.divisor,
        }
    }
}

/// Returns the updates of a module's `weight` and `bias`. `module`: its name in the file. Alpha is read from the file's
/// tensor or, if there is none, from the configuration.
///
/// # Errors
/// Returns an error if a tensor is missing, or if tensors do not fit together.
pub(super) fn assemble(
    path: &Path,
    module: &str,
    found: BTreeMap<LoraTensorRole, TensorView>,
    listed: Listed,
) -> Result<Vec<(&'static str, Update)>, WeightsError> {
    let mut parts = LoraTensors { path, found };
    let mut deltas = [parts.low_rank()?, parts.hadamard()?, parts.kronecker()?, parts.full(LoraTensorRole::Diff)]
        .into_iter()
        .flatten();
    let delta = deltas.next();
    if let (Some(delta), Some(other)) = (&delta, deltas.next()) {
        let reason = format!("updates the same weight as `{}`", delta.views()[0].key());
        return Err(wrong(path, other.views()[0].key(), reason));
    }
    let matrices = delta.as_ref().filter(|delta| !matches!(delta, Delta::Full(_)));
    let needs_matrices = [
        LoraTensorRole::Alpha,
        LoraTensorRole::UpBias,
        LoraTensorRole::PeftMagnitude,
        LoraTensorRole::LycorisMagnitude,
    ];
    let lone = needs_matrices.iter().find_map(|role| parts.found.get(role)).filter(|_| matrices.is_none());
    if let Some(view) = lone {
        return Err(wrong(path, view.key(), "has no matrices to which it applies"));
    }
    let magnitude = matrices.map(|delta| parts.magnitude(delta)).transpose()?.flatten();
    let scaling = matrices.map(|delta| parts.scaling(delta, listed)).transpose()?.unwrap_or((1.0, 1.0));
    let [lora_bias, bias] = [LoraTensorRole::UpBias, LoraTensorRole::DiffBias].map(|role| parts.full(role));
    if let (Some(one), Some(other)) = (&lora_bias, &bias) {
        let reason = format!("updates the same bias as `{}`", one.views()[0].key());
        return Err(wrong(path, other.views()[0].key(), reason));
    }
    let official = ["diffusion_model.", "text_embedding_projection."].iter().any(|prefix| module.starts_with(prefix));
    let update = |delta: Delta, magnitude, (alpha, divisor): (f64, f64)| {
        let official = official && delta.views()[0].key().ends_with(".lora_A.weight");
        Update { shape: delta.shape(), delta, magnitude, alpha, divisor, official }
    };
    let weight = delta.map(|delta| ("weight", update(delta, magnitude, scaling)));
    let lora_bias = lora_bias.map(|delta| ("bias", update(delta, None, scaling)));
    let bias = bias.map(|delta| ("bias", update(delta, None, (1.0, 1.0))));
    Ok([weight, lora_bias, bias].into_iter().flatten().collect())
}

/// The tensors of one module in a file.
struct LoraTensors<'a> {
    path: &'a Path,
    found: BTreeMap<LoraTensorRole, TensorView>,
}

impl LoraTensors<'_> {
    fn low_rank(&mut self) -> Result<Option<Delta>, WeightsError> {
        let Some([down, up]) = self.pair([LoraTensorRole::Down, LoraTensorRole::Up], "LoRA", ["lora_A", "lora_B"])?
        else {
            return Ok(None);
        };
        self.check_product(&down, &up, [0, 1])?;
        Ok(Some(Delta::LowRank { up, down }))
    }

    fn hadamard(&mut self) -> Result<Option<Delta>, WeightsError> {
        let one = self.product([LoraTensorRole::Hada1A, LoraTensorRole::Hada1B], "LoHa", ["hada_w1_a", "hada_w1_b"])?;
        let two = self.product([LoraTensorRole::Hada2A, LoraTensorRole::Hada2B], "LoHa", ["hada_w2_a", "hada_w2_b"])?;
        let pairs = match (one, two) {
            (None, None) => return Ok(None),
            (Some(one), Some(two)) => [one, two],
            (Some([a, _]), None) | (None, Some([a, _])) => {
                return Err(wrong(
                    self.path,
                    a.key(),
                    "is a LoHa matrix without its counterpart; both hada_w1 and hada_w2 are required",
                ));
            }
        };
        let [one, two] = &pairs;
        for (view, other) in one.iter().zip(two) {
            if view.shape() != other.shape() {
                let both = format!("has shape {:?} and `{}` has {:?}", view.shape(), other.key(), other.shape());
                return Err(wrong(self.path, view.key(), format!("{both}; the shapes must be equal")));
            }
        }
        Ok(Some(Delta::Hadamard(pairs)))
    }

    fn kronecker(&mut self) -> Result<Option<Delta>, WeightsError> {
        let one = self.factor(
            LoraTensorRole::Kron1,
            [LoraTensorRole::Kron1A, LoraTensorRole::Kron1B],
            ["lokr_w1_a", "lokr_w1_b"],
        )?;
        let two = self.factor(
            LoraTensorRole::Kron2,
            [LoraTensorRole::Kron2A, LoraTensorRole::Kron2B],
            ["lokr_w2_a", "lokr_w2_b"],
        )?;
        let factors = match (one, two) {
            (None, None) => return Ok(None),
            (Some(one), Some(two)) => [one, two],
            (Some(one), None) | (None, Some(one)) => {
                let reason = "is a LoKr matrix without its counterpart; both lokr_w1 and lokr_w2 are required";
                return Err(wrong(self.path, one.views()[0].key(), reason));
            }
        };
        let [one, two] = &factors;
        if let Some((rank, other)) = one.rank().zip(two.rank()).filter(|(rank, other)| rank != other) {
            let reason = format!("has rank {other}, but `{}` has {rank}", one.views()[0].key());
            return Err(wrong(self.path, two.views()[0].key(), reason));
        }
        Ok(Some(Delta::Kronecker(factors)))
    }

    fn full(&mut self, role: LoraTensorRole) -> Option<Delta> {
        self.found.remove(&role).map(Delta::Full)
    }

    /// Removes and returns a factor of a LoKr: a matrix, or a product of two.
    fn factor(
        &mut self,
        whole: LoraTensorRole,
        pair: [LoraTensorRole; 2],
        names: [&str; 2],
    ) -> Result<Option<Factor>, WeightsError> {
        let pair = self.product(pair, "LoKr", names)?;
        let Some(view) = self.found.remove(&whole) else { return Ok(pair.map(Factor::Product)) };
        if let Some([a, _]) = pair {
            return Err(wrong(self.path, a.key(), format!("updates the same weight as `{}`", view.key())));
        }
        match view.shape() {
            [_, _] => Ok(Some(Factor::Whole(view))),
            shape => Err(wrong(self.path, view.key(), format!("has shape {shape:?}; it must have two dimensions"))),
        }
    }

    /// Removes and returns two matrices, `[n, rank]` and `[rank, m]`; `None` if neither exists.
    fn product(
        &mut self,
        roles: [LoraTensorRole; 2],
        kind: &str,
        names: [&str; 2],
    ) -> Result<Option<[TensorView; 2]>, WeightsError> {
        let pair = self.pair(roles, kind, names)?;
        if let Some([a, b]) = &pair {
            self.check_product(a, b, [1, 0])?;
        }
        Ok(pair)
    }

    /// Removes and returns two matrices; `None` if neither exists. Fails if only one exists.
    fn pair(
        &mut self,
        roles: [LoraTensorRole; 2],
        kind: &str,
        names: [&str; 2],
    ) -> Result<Option<[TensorView; 2]>, WeightsError> {
        match roles.map(|role| self.found.remove(&role)) {
            [None, None] => Ok(None),
            [Some(one), Some(other)] => Ok(Some([one, other])),
            [Some(one), None] | [None, Some(one)] => {
                let [a, b] = names;
                let reason = format!("is a {kind} matrix without its counterpart; both {a} and {b} are required");
                Err(wrong(self.path, one.key(), reason))
            }
        }
    }

    /// Checks that two tensors are matrices and that the given dimensions of both, the ranks, are equal.
    fn check_product(&self, one: &TensorView, other: &TensorView, dims: [usize; 2]) -> Result<(), WeightsError> {
        let both = format!("has shape {:?} and `{}` has {:?}", one.shape(), other.key(), other.shape());
        if one.shape().len() != 2 || other.shape().len() != 2 {
            return Err(wrong(self.path, one.key(), format!("{both}; both must have two dimensions")));
        }
        let (rank, inner) = (one.shape()[dims[0]], other.shape()[dims[1]]);
        match rank == inner && rank > 0 {
            true => Ok(()),
            false => Err(wrong(self.path, one.key(), format!("{both}; the ranks must be equal and greater than 0"))),
        }
    }

    /// Removes and returns the magnitude of a DoRA; `None` for other adapters.
    fn magnitude(&mut self, delta: &Delta) -> Result<Option<(TensorView, Norms)>, WeightsError> {
        let roles = [(LoraTensorRole::PeftMagnitude, Norms::PeftRows), (LoraTensorRole::LycorisMagnitude, Norms::Rows)];
        let mut found = roles.into_iter().filter_map(|(role, norms)| Some((self.found.remove(&role)?, norms)));
        let (Some((view, norms)), other) = (found.next(), found.next()) else { return Ok(None) };
        if let Some((other, _)) = other {
            return Err(wrong(self.path, other.key(), format!("updates the same weight as `{}`", view.key())));
        }
        let (rows, columns) = (delta.shape()[0], delta.shape()[1]);
        let norms = match *view.shape() {
            [count] | [count, 1] if count == rows => norms,
            [1, count] if count == columns && norms == Norms::Rows => Norms::Columns,
            ref shape => {
                let reason = format!("has shape {shape:?}, but its weight has {rows} rows and {columns} columns");
                return Err(wrong(self.path, view.key(), reason));
            }
        };
        Ok(Some((view, norms)))
    }

    /// Removes alpha, and returns it with the number by which it is divided.
    fn scaling(&mut self, delta: &Delta, listed: Listed) -> Result<(f64, f64), WeightsError> {
        let rank = delta.rank().map(|rank| rank as f64);
        let own = self.found.remove(&LoraTensorRole::Alpha);
        let key = own.as_ref().map_or(delta.views()[0].key(), TensorView::key).to_string();
        let (alpha, divisor) = match (own, listed.alpha, rank.or(listed.rank)) {
            (Some(view), _, _) => match (self.scalar(&view)?, rank) {
                (alpha, Some(rank)) => (alpha, rank),
                // LyCORIS ignores alpha if both matrices of a LoKr are whole.
                (_, None) => (1.0, 1.0),
            },
            (None, Some(alpha), Some(rank)) if listed.is_rank_stabilized => (alpha, rank.sqrt()),
            (None, Some(alpha), Some(rank)) => (alpha, rank),
            (None, Some(_), None) => {
                return Err(wrong(self.path, &key, "has an alpha in the configuration, but no rank (`r`)"));
            }
            (None, None, _) => (rank.unwrap_or(1.0), rank.unwrap_or(1.0)),
        };
        match ((alpha / divisor) as f32).is_finite() {
            true => Ok((alpha, divisor)),
            false => Err(wrong(
                self.path,
                &key,
                format!("gives the factor {alpha} / {divisor}, which is not a finite number"),
            )),
        }
    }

    /// Reads an alpha.
    fn scalar(&self, view: &TensorView) -> Result<f64, WeightsError> {
        let values = view.to_tensor()?.to_f32();
        match values.as_slice() {
            Some([value]) => Ok(f64::from(*value)),
            _ => Err(wrong(self.path, view.key(), format!("has shape {:?}; it must be one number", view.shape()))),
        }
    }
}
