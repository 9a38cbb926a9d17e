//! Storage form of 8-bit values that are read as another type.

use super::Entry;

/// Storage form of a tensor whose 8-bit values are read as another floating-point type.
#[derive(Clone, Debug)]
pub(super) enum EightBits<T = Entry> {
    Integers {
        /// 8-bit integers that are subtracted from the rows: one per row, or one for all.
        zero_points: Option<Box<T>>,
    },
    E5M2,
}

impl<T> EightBits<T> {
    pub(super) fn try_map<U, E>(&self, of: impl FnOnce(&T) -> Result<U, E>) -> Result<EightBits<U>, E> {
        Ok(match self {
            EightBits::Integers { zero_points } => {
                EightBits::Integers { zero_points: zero_points.as_deref().map(of).transpose()?.map(Box::new) }
            }
            EightBits::E5M2 => EightBits::E5M2,
        })
    }

    pub(super) fn map(&self, of: impl FnOnce(&T) -> Box<T>) -> Self {
        match self {
            EightBits::Integers { zero_points } => EightBits::Integers { zero_points: zero_points.as_deref().map(of) },
            EightBits::E5M2 => EightBits::E5M2,
        }
    }
}
