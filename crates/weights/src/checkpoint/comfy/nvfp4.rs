//! nvfp4: 4-bit floats in blocks of 16 with an 8-bit scale for each block and an f32 scale for the tensor.
//!
//! Decoded values equal those of comfy-kitchen with f32 output. With bf16 output, comfy-kitchen also rounds the scales,
//! which doubles the rounding error.

use std::sync::Arc;

use super::QuantizedLayer;
use crate::checkpoint::TensorView;
use crate::checkpoint::view::decoder::NumberDecoder;
use crate::error::WeightsError;
use ltx2_stablehlo::F8;

/// Values per block.
const BLOCK: usize = 16;
/// Scales are stored in tiles of 128 rows and 4 blocks. Byte `(r % 32) * 16 + r / 32 * 4 + b` of a tile belongs to row
/// `r` and block `b` of the tile.
const TILE: [usize; 2] = [128, 4];
const TILE_BYTES: usize = TILE[0] * TILE[1];

/// Values of the 4-bit codes: 2 exponent bits and 1 mantissa bit.
const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

#[derive(Debug)]
struct Nvfp4 {
    columns: usize,
    /// e4m3 scales of the blocks.
    blocks: TensorView,
    /// f32 scale of the tensor.
    whole: TensorView,
}

/// Sets the decoder of an nvfp4 layer.
pub(super) fn restore(layer: &mut QuantizedLayer) -> Result<(), WeightsError> {
    // ModelOpt's files have equal names, types and shapes, but the first value of a pair is in the low bits of its byte.
    if layer.all.metadata("quantization_config").is_some_and(|config| config.contains("modelopt")) {
        return Err(layer.refused("but by NVIDIA ModelOpt, which stores pairs of values in another order"));
    }
    let [rows, bytes] = layer.matrix()?;
    let columns = 2 * bytes;
    if !columns.is_multiple_of(BLOCK) {
        return Err(layer.refused(&format!("but has {columns} columns, not a multiple of {BLOCK}")));
    }
    let tiles = rows.div_ceil(TILE[0]) * (columns / BLOCK).div_ceil(TILE[1]);
    let whole = layer.scales("weight_scale_2", "f32", &[1])?;
    let blocks = layer.scales("weight_scale", "f8_e4m3", &[tiles * TILE_BYTES])?;
    layer.decode("nvfp4", [rows, columns], Arc::new(Nvfp4 { columns, blocks, whole }))
}

impl NumberDecoder for Nvfp4 {
    fn unit(&self) -> (usize, usize) {
        (BLOCK, BLOCK / 2)
    }

    fn decode(&self, first: usize, codes: &[u8], values: &mut [f32]) -> Result<(), WeightsError> {
        let whole = self.whole.floats(0..1)?[0];
        let row_blocks = self.columns / BLOCK;
        let row_bytes = row_blocks.div_ceil(TILE[1]) * TILE_BYTES;
        let blocks = first / BLOCK..(first + values.len()) / BLOCK;
        let tiles = |block: usize| block / row_blocks / TILE[0];
        let scales = tiles(blocks.start) * row_bytes..(tiles(blocks.end.saturating_sub(1)) + 1) * row_bytes;
        let (start, mut bytes) = (scales.start, vec![0; scales.len()]);
        self.blocks.read_at(start, &mut bytes)?;
        let (mut row, mut column) = (blocks.start / row_blocks, blocks.start % row_blocks);
        for (codes, values) in codes.as_chunks::<{ BLOCK / 2 }>().0.iter().zip(values.as_chunks_mut::<BLOCK>().0) {
            let (in_tile, tile) = (row % TILE[0], row / TILE[0] * row_bytes + column / TILE[1] * TILE_BYTES);
            let at = tile + in_tile % 32 * 16 + in_tile / 32 * 4 + column % TILE[1];
            let scale = whole * f32::from(F8(bytes[at - start]));
            for (pair, byte) in values.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                *pair = [byte >> 4, byte & 15].map(|code| E2M1[usize::from(code)] * scale);
            }
            column += 1;
            if column == row_blocks {
                (row, column) = (row + 1, 0);
            }
        }
        Ok(())
    }

    fn operands(&self) -> Vec<&TensorView> {
        vec![&self.blocks, &self.whole]
    }
}
