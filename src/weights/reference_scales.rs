//! Scales of the reference videos that an IC-LoRA was trained with, as its header says them.

use super::checkpoint::Checkpoint;
use super::error::WeightsError;
use super::lora::locate;

/// Keys of the header.
const DOWNSCALE: &str = "reference_downscale_factor";
const TEMPORAL: &str = "reference_temporal_scale_factor";
/// Key of LoRAs whose videos are to be taken out of a logarithmic curve.
const HDR: &str = "hdr_transform";

/// The largest scale: published LoRAs say 2 at most, and beyond this a reference of any video is a pixel.
const MOST: usize = 64;

/// Pixels, and frames, of a video that one of a reference's stands for; none where the header says nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReferenceScales {
    /// Along each side.
    pub(crate) downscale: Option<usize>,
    /// In time.
    pub(crate) temporal: Option<usize>,
}

impl ReferenceScales {
    /// Reads the header of a LoRA, by its name in a configuration.
    ///
    /// # Errors
    /// No such file; a scale that is no whole number from 1 to [`MOST`]; a LoRA whose videos need more than frames.
    pub(crate) fn of(name: &str) -> Result<Self, WeightsError> {
        let checkpoint = Checkpoint::open(&locate(name)?)?;
        let fail = |key: &str, reason: String| WeightsError::Lora {
            path: checkpoint.path().to_path_buf(),
            key: key.into(),
            reason,
        };
        if let Some(curve) = checkpoint.metadata(HDR) {
            return Err(fail(HDR, format!("{curve}: a LoRA of high dynamic range, whose videos are not decoded here")));
        }
        let scale = |key: &str| {
            let Some(text) = checkpoint.metadata(key) else { return Ok(None) };
            let value = text.trim().parse::<usize>().ok().filter(|value| (1..=MOST).contains(value));
            let wrong = || fail(key, format!("`{text}` in the header is no whole number from 1 to {MOST}"));
            value.map(Some).ok_or_else(wrong)
        };
        Ok(ReferenceScales { downscale: scale(DOWNSCALE)?, temporal: scale(TEMPORAL)? })
    }
}
