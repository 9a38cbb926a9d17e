//! int8-convrot: weights whose rows were rotated, in groups of 256 columns, before quantization.

use std::sync::Arc;

use crate::checkpoint::TensorView;
use crate::checkpoint::view::decoder::NumberDecoder;
use crate::error::WeightsError;
use crate::rotation::{GROUP, rotate};

/// Decoder that reverses the rotation of the inner decoder's values. The inner decoder must decode each element
/// independently, and [`GROUP`] must divide the number of columns.
#[derive(Debug)]
pub(super) struct Rotated(pub(super) Arc<dyn NumberDecoder>);

impl NumberDecoder for Rotated {
    fn unit(&self) -> (usize, usize) {
        (GROUP, GROUP * self.0.unit().1)
    }

    fn decode(&self, first: usize, codes: &[u8], values: &mut [f32]) -> Result<(), WeightsError> {
        self.0.decode(first, codes, values)?;
        rotate(values);
        Ok(())
    }

    fn operands(&self) -> Vec<&TensorView> {
        self.0.operands()
    }

    fn rotated_scales(&self) -> Option<&TensorView> {
        self.0.operands().first().copied()
    }
}
