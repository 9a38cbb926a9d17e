//! Output formats of the video decoders.

use ltx2_nn::{Params, ShardedVideo};
use ltx2_stablehlo::{DType, ProgramOutput, Value};

/// Output format of a video decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pixels {
    /// `video [b, out_channels, frames, height, width]`, f32, approximately -1..1.
    Values,
    /// `video [b, frames, height, width, out_channels]`, u8: values are clamped to -1..1, mapped to 0..255 and rounded
    /// half to even. A second output, `finite`, indicates whether all values were finite before the conversion.
    Bytes,
}

impl Pixels {
    /// Returns the program outputs for a decoded f32 `video [b, out_channels, frames, height, width]`.
    pub fn results(self, p: &Params, sharded: &ShardedVideo, video: &Value) -> Vec<(ProgramOutput, Value)> {
        match self {
            Pixels::Values => vec![sharded.output(p, "video", video)],
            Pixels::Bytes => {
                let _scope = p.builder().scope("bytes");
                let finite = video.is_finite().min_keep(&[0, 1, 2, 3, 4]).reshape(vec![]);
                let bytes = ((video * 0.5 + 0.5).clamp(0.0, 1.0) * 255.0).round().to(DType::U8);
                vec![sharded.channels_last(p, "video", &bytes), p.output("finite", &finite, &[], &[])]
            }
        }
    }
}
