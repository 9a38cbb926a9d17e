//! Scales of the reference videos that an IC-LoRA was trained with, from its header.

use super::checkpoint::Checkpoint;
use super::error::WeightsError;
use super::lora::locate;

/// Header keys of the spatial scale. Lightricks' trainer writes the first key, newer versions of the trainer the third;
/// musubi-tuner adds the prefix `ss_`.
const DOWNSCALE: [&str; 4] = [
    "reference_downscale_factor",
    "ss_reference_downscale_factor",
    "reference_spatial_scale_factor",
    "ss_reference_spatial_scale_factor",
];
const TEMPORAL: [&str; 2] = ["reference_temporal_scale_factor", "ss_reference_temporal_scale_factor"];
/// Header key of LoRAs that generate HDR video: the name of a curve, or `true`.
const HDR: &str = "hdr_transform";
/// Header key of older LoRAs that generate HDR video.
const HDR_FLAG: &str = "use_hdr_transform";

/// Maximum scale. Published LoRAs use at most 2; beyond 64, a reference would have about one pixel.
const MOST: usize = 64;

/// Ratios of the sizes of the generated video and the reference video, and the curve of HDR video. `None`: not stated in
/// the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReferenceScales {
    /// Pixels of the generated video per pixel of the reference, along each side.
    pub downscale: Option<usize>,
    /// Frames of the generated video per frame of the reference.
    pub temporal: Option<usize>,
    /// Name of the curve in which the LoRA generates HDR video; `true` if the header states no name.
    pub hdr: Option<String>,
}

impl ReferenceScales {
    /// Reads the scales from the header of the LoRA `name`, which is a path or a name in the Hugging Face cache.
    ///
    /// # Errors
    /// Returns an error if the file is missing, if a scale is not an integer from 1 to 64, or if keys contradict each
    /// other.
    pub fn read(name: &str) -> Result<Self, WeightsError> {
        let checkpoint = Checkpoint::open(&locate(name)?)?;
        let fail = |key: &str, reason: String| WeightsError::Lora {
            path: checkpoint.path().to_path_buf(),
            key: key.into(),
            reason,
        };
        let scale = |key: &str| {
            let Some(text) = checkpoint.metadata(key) else { return Ok(None) };
            let value = text.trim().parse::<usize>().ok().filter(|value| (1..=MOST).contains(value));
            let wrong = || fail(key, format!("has the header value `{text}`, not a whole number from 1 to {MOST}"));
            value.map(Some).ok_or_else(wrong)
        };
        let one_of = |keys: &[&'static str]| {
            let mut found: Option<(usize, &str)> = None;
            for key in keys {
                match (scale(key)?, found) {
                    (Some(own), Some((known, first))) if own != known => {
                        return Err(fail(
                            key,
                            format!("has the header value {own}, but `{first}` has {known}; the values must be equal"),
                        ));
                    }
                    (Some(own), None) => found = Some((own, key)),
                    _ => {}
                }
            }
            Ok(found.map(|(scale, _)| scale))
        };
        let stated = |key: &str| checkpoint.metadata(key).filter(|text| !text.trim().is_empty());
        let flag = stated(HDR_FLAG).filter(|flag| !flag.trim().eq_ignore_ascii_case("false"));
        let hdr = stated(HDR).map(|curve| curve.trim().to_string()).or(flag.map(|_| "true".into()));
        Ok(ReferenceScales { downscale: one_of(&DOWNSCALE)?, temporal: one_of(&TEMPORAL)?, hdr })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::*;

    /// Returns the values of a LoRA whose header has these entries, or the error message.
    fn header(entries: &[(&str, &str)]) -> Result<ReferenceScales, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lora.safetensors");
        let about: Map<String, Value> = entries.iter().map(|(key, text)| ((*key).into(), (*text).into())).collect();
        let header =
            json!({"__metadata__": about, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).to_string();
        std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 4]].concat()).unwrap();
        ReferenceScales::read(path.to_str().unwrap()).map_err(|error| error.to_string())
    }

    fn scales(entries: &[(&str, &str)]) -> Result<[Option<usize>; 2], String> {
        header(entries).map(|own| [own.downscale, own.temporal])
    }

    #[test]
    fn hdr_curve_is_read_from_either_key() {
        let hdr = |entries: &[(&str, &str)]| header(entries).expect("valid").hdr;
        assert_eq!(hdr(&[]), None);
        assert_eq!(hdr(&[(HDR, "logc3")]), Some("logc3".into()));
        assert_eq!(hdr(&[(HDR_FLAG, "True")]), Some("true".into()));
        assert_eq!(hdr(&[(HDR_FLAG, "true"), (HDR, "acescct")]), Some("acescct".into()));
        assert_eq!(hdr(&[(HDR_FLAG, "false"), (HDR, "")]), None);
    }

    #[test]
    fn reference_scales_accept_keys_of_all_trainers() {
        assert_eq!(scales(&[]), Ok([None, None]));
        for key in DOWNSCALE {
            assert_eq!(scales(&[(key, "2")]), Ok([Some(2), None]), "{key}");
        }
        for key in TEMPORAL {
            assert_eq!(scales(&[(key, "4")]), Ok([None, Some(4)]), "{key}");
        }
        assert_eq!(scales(&[(DOWNSCALE[0], "2"), (DOWNSCALE[2], "2")]), Ok([Some(2), None]));
        let error = scales(&[(DOWNSCALE[0], "1"), (DOWNSCALE[1], "2")]).unwrap_err();
        assert!(error.contains(DOWNSCALE[1]) && error.contains("but `reference_downscale_factor` has 1"), "{error}");
        assert!(scales(&[(DOWNSCALE[1], "2.5")]).unwrap_err().contains("not a whole number from 1 to 64"));
    }
}
