//! Weights of the 8-bit float type e5m2, which compiled programs do not use.

use std::sync::Arc;

use super::Checkpoint;
use super::view::decoder::{ByRow, Codes, NumberDecoder, RowOperator};
use crate::error::WeightsError;
use ltx2_stablehlo::DType;

/// Reads e5m2 as bf16, which represents every e5m2 value exactly, or as f32 if there are dequantization scales. Scales
/// of an unsupported shape or type are kept and reported by validation.
pub(super) fn restore(all: &mut Checkpoint) -> Result<(), WeightsError> {
    for name in all.names_of("f8_e5m2") {
        let mut entry = all.entry(&name)?.clone();
        let scales = format!("{name}_scale");
        let operand = all.scales_of(&name).ok().flatten().filter(|scales| scales.decoder.is_none());
        let operand = operand.filter(|scales| matches!(scales.dtype, DType::BF16 | DType::F16 | DType::F32));
        let (mut dtype, mut decoder): (_, Arc<dyn NumberDecoder>) = (DType::BF16, Arc::new(Codes::E5M2));
        if let Some(operand) = operand {
            all.remove(&scales);
            dtype = DType::F32;
            decoder = Arc::new(ByRow {
                start: 0,
                columns: entry.columns(),
                inner: decoder,
                operand,
                operator: RowOperator::Multiply,
            });
        }
        entry.decode(dtype.name(), dtype, decoder);
        all.put(&name, entry);
    }
    Ok(())
}
