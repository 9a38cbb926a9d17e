//! LoRAs that are added at run time instead of merged: matrices of all LoRAs of a run, concatenated along
//! the rank.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};

use super::Component;
use super::checkpoint::{TensorView, widen};
use super::error::WeightsError;
use super::lora::{Delta, FileIdentity, LoraFile, ScaledLora, locate, updates};
use super::merge_order::MergeOrder;
use super::validate::check_finite;
use ltx2_stablehlo::DType;

/// One of the two matrices of a LoRA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoraSide {
    /// `A`, `[rank, in]`.
    Down,
    /// `B`, `[out, rank]`.
    Up,
}

/// Smallest ranks of programs; larger ranks are multiples of the last one.
const RANKS: [usize; 4] = [16, 32, 64, 128];

/// Returns the rank of programs that add LoRAs: the sum of the largest ranks of the files, rounded up, so that LoRAs of
/// similar rank use the same programs. It does not depend on the strengths. `None`: there are no LoRAs.
pub fn program_rank(ranks: impl IntoIterator<Item = usize>) -> Option<usize> {
    let total = ranks.into_iter().reduce(|total, rank| total + rank)?;
    let last = RANKS[RANKS.len() - 1];
    Some(RANKS.into_iter().find(|rank| *rank >= total).unwrap_or_else(|| total.next_multiple_of(last)))
}

/// Largest ranks of LoRA files. A file is read only once unless its path, size or modification time changes.
#[derive(Debug, Default)]
pub struct LoraRanks(Mutex<BTreeMap<String, (FileIdentity, usize)>>);

impl LoraRanks {
    /// Returns the largest rank of a file. `name`: as in [`LoraFile::open`].
    ///
    /// # Errors
    /// Returns the errors of [`LoraFile::open`].
    pub fn largest(&self, name: &str) -> Result<usize, WeightsError> {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let identity = FileIdentity::of(&locate(name)?)?;
        if let Some((known, rank)) = lock().get(name)
            && *known == identity
        {
            return Ok(*rank);
        }
        let rank = LoraFile::open(name)?.largest_rank();
        lock().insert(name.into(), (identity, rank));
        Ok(rank)
    }
}

/// Returns whether programs can add a LoRA to this tensor, a weight of a linear layer in a transformer block.
fn is_covered(component: Component, name: &str) -> bool {
    component == Component::Transformer && name.starts_with("transformer_blocks.") && name.ends_with(".weight")
}

/// Checks that programs can add all updates of a file. The file must have passed [`LoraFile::check`].
///
/// # Errors
/// Returns an error with the first tensor that is not a LoRA of a linear layer of the transformer blocks.
pub fn check(file: &LoraFile) -> Result<(), WeightsError> {
    for (component, name) in file.targets() {
        let Some(update) = file.get(component, name) else { continue };
        let reason = match (update.is_lora(), is_covered(component, name)) {
            (true, true) => continue,
            (false, _) => format!("updates `{name}` by other means than a LoRA"),
            (true, false) => format!("updates `{name}` of the {component}, which is not in a transformer block"),
        };
        return Err(WeightsError::Lora {
            path: file.path().to_path_buf(),
            key: update.key().into(),
            reason: format!("{reason}; apply: add does not support this, use apply: merge for this file"),
        });
    }
    Ok(())
}

/// A matrix of all LoRAs of a run for one weight: `[rank, in]` or `[out, rank]`. Rows or columns that belong to no LoRA
/// are zeros.
pub struct AddedMatrix {
    side: LoraSide,
    shape: [usize; 2],
    parts: Vec<Part>,
}

/// The matrix of one LoRA.
struct Part {
    view: TensorView,
    /// First row of `A`, or first column of `B`.
    first: usize,
    /// Factor of `B`; 1 for `A`.
    factor: f32,
    strength: f64,
}

impl AddedMatrix {
    /// Returns a matrix for the weight `name` of shape `[out, in]`. `rank`: that of the program, at least the sum of
    /// the LoRAs' ranks. `order` determines whether alphas apply.
    pub fn new(
        loras: &[ScaledLora],
        order: MergeOrder,
        name: &str,
        weight: &[usize],
        rank: usize,
        side: LoraSide,
    ) -> Self {
        let mut first = 0;
        let mut parts = Vec::new();
        for (_, update, strength) in updates(loras, Component::Transformer, name) {
            let Delta::LowRank { up, down } = &update.delta else { continue };
            let (view, factor) = match side {
                LoraSide::Down => (down, 1.0),
                LoraSide::Up => (up, update.factor(order, strength) as f32),
            };
            parts.push(Part { view: view.clone(), first, factor, strength });
            first += down.shape()[0];
        }
        let outer = weight.first().copied().unwrap_or(1);
        let inner = weight.get(1).copied().unwrap_or(1);
        let shape = if side == LoraSide::Down { [rank, inner] } else { [outer, rank] };
        AddedMatrix { side, shape, parts }
    }

    /// Returns the dimensions.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Reads complete rows, converted to `dtype` (bf16, f16 or f32), from the byte `offset` of the first.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, or if a value is not finite.
    pub fn read_at(&self, dtype: DType, offset: usize, into: &mut [u8]) -> Result<(), WeightsError> {
        let columns = self.shape[1];
        let row = (columns * dtype.size()).max(1);
        let (first, count) = (offset / row, into.len() / row);
        let mut values = vec![0f32; count * columns];
        for part in &self.parts {
            match self.side {
                LoraSide::Down => part.copy_rows(first, columns, &mut values)?,
                LoraSide::Up => part.copy_columns(first, columns, &mut values)?,
            }
        }
        narrow(dtype, &values, into);
        let overflows = |value: &f32| !value.is_finite() || dtype == DType::F16 && !f16::from_f32(*value).is_finite();
        match self.parts.first().filter(|_| values.iter().any(overflows)) {
            None => Ok(()),
            Some(part) => Err(WeightsError::Lora {
                path: part.view.file().to_path_buf(),
                key: part.view.key().into(),
                reason: format!(
                    "with strength {} gives values that are not finite; check its alpha and the strength",
                    part.strength
                ),
            }),
        }
    }
}

impl Part {
    /// Copies the rows of `A` that `values` covers; its first row is row `first` of the whole matrix.
    fn copy_rows(&self, first: usize, columns: usize, values: &mut [f32]) -> Result<(), WeightsError> {
        let end = first + values.len() / columns.max(1);
        let (from, to) = (first.max(self.first), end.min(self.first + self.view.shape()[0]));
        if from >= to {
            return Ok(());
        }
        let target = &mut values[(from - first) * columns..(to - first) * columns];
        self.read(from - self.first, columns, target)
    }

    /// Copies the rows of `B`, from row `first`, to its columns of `values`.
    fn copy_columns(&self, first: usize, columns: usize, values: &mut [f32]) -> Result<(), WeightsError> {
        let width = self.view.shape()[1];
        let rows = values.len() / columns.max(1);
        let mut own = vec![0f32; rows * width];
        self.read(first, width, &mut own)?;
        for (to, from) in values.chunks_exact_mut(columns.max(1)).zip(own.chunks_exact(width.max(1))) {
            to[self.first..][..width].iter_mut().zip(from).for_each(|(to, from)| *to = from * self.factor);
        }
        Ok(())
    }

    /// Reads rows of `width` values from row `first` of the stored matrix.
    fn read(&self, first: usize, width: usize, into: &mut [f32]) -> Result<(), WeightsError> {
        let size = self.view.dtype().size();
        let mut bytes = vec![0; into.len() * size];
        let offset = first * width * size;
        self.view.read_at(offset, &mut bytes)?;
        check_finite(&self.view, offset, &bytes)?;
        widen(self.view.dtype(), &bytes, into);
        Ok(())
    }
}

/// Converts f32 values to little-endian values of `dtype`.
fn narrow(dtype: DType, values: &[f32], into: &mut [u8]) {
    let half = |into: &mut [u8], bits: fn(f32) -> u16| {
        let words = into.chunks_exact_mut(2).zip(values);
        words.for_each(|(to, value)| to.copy_from_slice(&bits(*value).to_le_bytes()));
    };
    match dtype {
        DType::BF16 => half(into, |value| bf16::from_f32(value).to_bits()),
        DType::F16 => half(into, |value| f16::from_f32(value).to_bits()),
        _ => {
            let words = into.chunks_exact_mut(4).zip(values);
            words.for_each(|(to, value)| to.copy_from_slice(&value.to_le_bytes()));
        }
    }
}
