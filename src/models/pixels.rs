//! Form in which frames leave the device.

use crate::hlo::{DType, Output, Value};
use crate::nn::{Params, ShardedVideo};

/// Form of a video decoder's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pixels {
    /// `video [b, out_channels, frames, height, width]`, f32, about -1..1.
    Values,
    /// `video [b, frames, height, width, out_channels]`, bytes: -1..1 as 0..255, what lies outside limited, halves to the
    /// even one; and `finite`, whether every value was a number before it became a byte.
    Bytes,
}

impl Pixels {
    /// Results of a program that made `video [b, out_channels, frames, height, width]`, f32.
    pub(crate) fn results(self, p: &Params, sharded: &ShardedVideo, video: &Value) -> Vec<(Output, Value)> {
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
