//! Scales of the reference videos that an IC-LoRA was trained with, as its header says them.

use super::checkpoint::Checkpoint;
use super::error::WeightsError;
use super::lora::locate;

/// Keys of the header: Lightricks' trainer writes the first, and newer ones of it the twin; musubi-tuner prefixes what it writes.
const DOWNSCALE: [&str; 4] = [
    "reference_downscale_factor",
    "ss_reference_downscale_factor",
    "reference_spatial_scale_factor",
    "ss_reference_spatial_scale_factor",
];
const TEMPORAL: [&str; 2] = ["reference_temporal_scale_factor", "ss_reference_temporal_scale_factor"];
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
    /// No such file; a scale that is no whole number from 1 to [`MOST`]; keys that disagree; a LoRA whose videos need more than
    /// frames.
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
        let one_of = |keys: &[&'static str]| {
            let mut found: Option<(usize, &str)> = None;
            for key in keys {
                match (scale(key)?, found) {
                    (Some(own), Some((known, first))) if own != known => {
                        return Err(fail(key, format!("{own} in the header, where {first} is {known}")));
                    }
                    (Some(own), None) => found = Some((own, key)),
                    _ => {}
                }
            }
            Ok(found.map(|(scale, _)| scale))
        };
        Ok(ReferenceScales { downscale: one_of(&DOWNSCALE)?, temporal: one_of(&TEMPORAL)? })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::*;

    /// The scales of a LoRA whose header has these entries, or the error.
    fn scales(entries: &[(&str, &str)]) -> Result<[Option<usize>; 2], String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lora.safetensors");
        let about: Map<String, Value> = entries.iter().map(|(key, text)| ((*key).into(), (*text).into())).collect();
        let header =
            json!({"__metadata__": about, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).to_string();
        std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 4]].concat()).unwrap();
        let scales = ReferenceScales::of(path.to_str().unwrap()).map_err(|error| error.to_string())?;
        Ok([scales.downscale, scales.temporal])
    }

    #[test]
    fn scales_are_read_by_the_names_of_every_trainer() {
        assert_eq!(scales(&[]), Ok([None, None]));
        for key in DOWNSCALE {
            assert_eq!(scales(&[(key, "2")]), Ok([Some(2), None]), "{key}");
        }
        for key in TEMPORAL {
            assert_eq!(scales(&[(key, "4")]), Ok([None, Some(4)]), "{key}");
        }
        assert_eq!(scales(&[(DOWNSCALE[0], "2"), (DOWNSCALE[2], "2")]), Ok([Some(2), None]));
        let error = scales(&[(DOWNSCALE[0], "1"), (DOWNSCALE[1], "2")]).unwrap_err();
        assert!(error.contains(DOWNSCALE[1]) && error.contains("where reference_downscale_factor is 1"), "{error}");
        assert!(scales(&[(DOWNSCALE[1], "2.5")]).unwrap_err().contains("no whole number from 1 to 64"));
    }
}
