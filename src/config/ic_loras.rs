//! Table of the published IC-LoRAs: where each is, which model it was trained for, and which reference videos it follows.
//!
//! Facts that the sources do not state are `None`, or say that they are unknown. Model
//! cards were not read for trigger words.

use std::path::Path;

use super::pipeline::Pipeline;
use crate::media::PreprocessKind;
use crate::weights::Version;

/// Input that an IC-LoRA follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IcLoraInput {
    /// Reference videos.
    Videos,
    /// Reference videos in which the region to generate is painted green (`#66FF00`), as the mask prescribes.
    Masked,
    /// Inputs of this pipeline, the only one that supports the IC-LoRA.
    Pipeline(Pipeline),
}

/// A published IC-LoRA.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PublishedIcLora {
    /// Name for `--ic-lora`. Several model generations may have an IC-LoRA of this name.
    pub name: &'static str,
    /// Model generation that it was trained for.
    pub base: Version,
    /// Another model generation for which it is published. `None`: there is none.
    pub also: Option<Version>,
    /// `org/name` on the Hugging Face hub.
    pub repository: &'static str,
    /// File in the repository. `None`: the sources do not name it; it is the only safetensors file.
    pub file: Option<&'static str>,
    /// Pixels of the generated video per pixel of the reference, along each side, if the file's header does not state it.
    /// `None`: not stated.
    pub downscale: Option<usize>,
    /// What the reference videos show.
    pub reference: &'static str,
    /// Conversion of reference videos that do not set `preprocess`.
    pub preprocess: PreprocessKind,
    /// Kind of input.
    pub input: IcLoraInput,
    /// Published strength. `None`: not stated.
    pub strength: Option<f64>,
    /// Where these facts are stated.
    pub source: &'static str,
}

const CARD: &str = "model card";
const COLLECTION: &str = "ComfyUI-LTXVideo README.md; collection Lightricks/ltx-23-creative-lab";
const UNKNOWN: &str = "unknown; see the model card";
const CONTROLS: &str = "ComfyUI-LTXVideo 2.0/LTX-2_ICLoRA_All_Distilled.json";

/// A row whose repository, file and strength (1, as in all published commands and workflows) are known.
const fn row(
    name: &'static str,
    base: Version,
    repository: &'static str,
    file: &'static str,
    reference: &'static str,
    source: &'static str,
) -> PublishedIcLora {
    PublishedIcLora {
        name,
        base,
        also: None,
        repository,
        file: Some(file),
        downscale: None,
        reference,
        preprocess: PreprocessKind::None,
        input: IcLoraInput::Videos,
        strength: Some(1.0),
        source,
    }
}

/// A row of which only the repository is known.
const fn listed(name: &'static str, base: Version, repository: &'static str) -> PublishedIcLora {
    let unknown = row(name, base, repository, "", UNKNOWN, CARD);
    PublishedIcLora { file: None, strength: None, ..unknown }
}

const fn scaled(downscale: usize, row: PublishedIcLora) -> PublishedIcLora {
    PublishedIcLora { downscale: Some(downscale), ..row }
}

/// A row that Lightricks also lists for LTX-2.3.
const fn also_2_3(row: PublishedIcLora) -> PublishedIcLora {
    PublishedIcLora { also: Some(Version::V2_3), ..row }
}

const fn without_strength(row: PublishedIcLora) -> PublishedIcLora {
    PublishedIcLora { strength: None, ..row }
}

const DETAILER: PublishedIcLora = also_2_3(row(
    "detailer",
    Version::V2_0,
    "Lightricks/LTX-2-19b-IC-LoRA-Detailer",
    "ltx-2-19b-ic-lora-detailer.safetensors",
    "the video to refine",
    "ComfyUI-LTXVideo 2.0/LTX-2_V2V_Detailer.json; Lightricks/LTX-2 MODELS-LTX-2.3.md",
));
const CANNY: PublishedIcLora = PublishedIcLora {
    preprocess: PreprocessKind::Canny,
    ..row(
        "canny-control",
        Version::V2_0,
        "Lightricks/LTX-2-19b-IC-LoRA-Canny-Control",
        "ltx-2-19b-ic-lora-canny-control.safetensors",
        "Canny edges, computed from any video",
        "ComfyUI-LTXVideo 2.0/LTX-2_ICLoRA_All_Distilled.json, which detects edges with ComfyUI's Canny (0.4, 0.8) after \
         scaling; thresholds 100 and 200 at the file's size: Lightricks/LTX-2 \
         packages/ltx-trainer/scripts/compute_reference.py",
    )
};
const DEPTH: PublishedIcLora = row(
    "depth-control",
    Version::V2_0,
    "Lightricks/LTX-2-19b-IC-LoRA-Depth-Control",
    "ltx-2-19b-ic-lora-depth-control.safetensors",
    "depth maps, from your own file",
    CONTROLS,
);
const POSE: PublishedIcLora = also_2_3(row(
    "pose-control",
    Version::V2_0,
    "Lightricks/LTX-2-19b-IC-LoRA-Pose-Control",
    "ltx-2-19b-ic-lora-pose-control.safetensors",
    "drawn poses, from your own file",
    "ComfyUI-LTXVideo 2.0/LTX-2_ICLoRA_All_Distilled.json; Lightricks/LTX-2 MODELS-LTX-2.3.md",
));
const UNION_2_0: PublishedIcLora = scaled(
    2,
    row(
        "union-control",
        Version::V2_0,
        "Lightricks/LTX-2-19b-IC-LoRA-Union-Control",
        "ltx-2-19b-ic-lora-union-control-ref0.5.safetensors",
        "depth maps or drawn poses, from your own file; or Canny edges, from your own file or with `preprocess: canny`",
        "DiffSynth-Studio's model table; ComfyUI-LTXVideo 2.0/LTX-2_ICLoRA_All_Distilled_ref0.5.json",
    ),
);
const UNION: PublishedIcLora = scaled(
    2,
    row(
        "union-control",
        Version::V2_3,
        "Lightricks/LTX-2.3-22b-IC-LoRA-Union-Control",
        "ltx-2.3-22b-ic-lora-union-control-ref0.5.safetensors",
        "depth maps or drawn poses, from your own file; or Canny edges, from your own file or with `preprocess: canny`",
        "model card; ComfyUI-LTXVideo 2.3/LTX-2.3_ICLoRA_Union_Control_Distilled.json",
    ),
);
const MOTION_TRACK: PublishedIcLora = scaled(
    2,
    row(
        "motion-track-control",
        Version::V2_3,
        "Lightricks/LTX-2.3-22b-IC-LoRA-Motion-Track-Control",
        "ltx-2.3-22b-ic-lora-motion-track-control-ref0.5.safetensors",
        "colored splines along the paths of motion, from your own file",
        "model card; ComfyUI-LTXVideo 2.3/LTX-2.3_ICLoRA_Motion_Track_Distilled.json",
    ),
);
const COLORIZATION: PublishedIcLora = scaled(
    1,
    without_strength(row(
        "colorization",
        Version::V2_3,
        "Lightricks/LTX-2.3-22b-IC-LoRA-Colorization",
        "ltx-2.3-22b-ic-lora-colorization-0.9.safetensors",
        "a gray or desaturated video; `preprocess: gray` makes one of a colored video",
        CARD,
    )),
);
const CROSS_EYED: PublishedIcLora = without_strength(row(
    "cross-eyed",
    Version::V2_3,
    "Lightricks/LTX-2.3-22b-IC-LoRA-Cross-Eyed",
    "ltx-2.3-22b-ic-lora-cross-eyed-0.9.safetensors",
    "a close-up portrait",
    CARD,
));
const DAY_TO_NIGHT: PublishedIcLora = scaled(
    1,
    without_strength(row(
        "day-to-night",
        Version::V2_3,
        "Lightricks/LTX-2.3-22b-IC-LoRA-Day-To-Night",
        "ltx-2.3-22b-ic-lora-day-to-night-0.9.safetensors",
        "a video of a scene by day",
        CARD,
    )),
);
const DEBLUR: PublishedIcLora = scaled(
    1,
    without_strength(row(
        "deblur",
        Version::V2_3,
        "Lightricks/LTX-2.3-22b-IC-LoRA-Deblur",
        "ltx-2.3-22b-ic-lora-deblur-0.9.safetensors",
        "a video that is out of focus",
        CARD,
    )),
);
const DECOMPRESSION: PublishedIcLora = without_strength(row(
    "decompression",
    Version::V2_3,
    "Lightricks/LTX-2.3-22b-IC-LoRA-Decompression",
    "ltx-2.3-22b-ic-lora-decompression-0.9.safetensors",
    "a video with compression artifacts",
    COLLECTION,
));
const IN_OUTPAINTING: PublishedIcLora = PublishedIcLora {
    input: IcLoraInput::Masked,
    ..scaled(
        1,
        row(
            "in-outpainting",
            Version::V2_3,
            "Lightricks/LTX-2.3-22b-IC-LoRA-In-Outpainting",
            "ltx-2.3-22b-ic-lora-in-outpainting-0.9.safetensors",
            "the video with the region to generate painted green (#66FF00), from your own file",
            "ComfyUI-LTXVideo 2.3/LTX-2.3_ICLoRA_Inpaint_Two_Stage_Distilled.json",
        ),
    )
};
const INGREDIENTS: PublishedIcLora = scaled(
    1,
    row(
        "ingredients",
        Version::V2_3,
        "Lightricks/LTX-2.3-22b-IC-LoRA-Ingredients",
        "ltx-2.3-22b-ic-lora-ingredients-0.9.safetensors",
        "a still sheet of characters, props and places, repeated for the length of the video, from your own file",
        "model card; ComfyUI-LTXVideo 2.3/LTX-2.3_ICLoRA_Ingredients_Single_Stage_Distilled.json",
    ),
);
const INSTANT_SHAVE: PublishedIcLora = scaled(
    1,
    row(
        "instant-shave",
        Version::V2_3,
        "Lightricks/LTX-2.3-22b-IC-LoRA-Instant-Shave",
        "ltx-2.3-22b-ic-lora-instant-shave-0.9.safetensors",
        "a video of a person with a beard",
        "ComfyUI-LTXVideo 2.3/LTX-2.3_V2V_ICLoRA_Single_Stage_Distilled.json",
    ),
);
const WATER_SIMULATION: PublishedIcLora = without_strength(row(
    "water-simulation",
    Version::V2_3,
    "Lightricks/LTX-2.3-22b-IC-LoRA-Water-Simulation",
    "ltx-2.3-22b-ic-lora-water-simulation-0.9.safetensors",
    "the video to which water is added",
    COLLECTION,
));
const UPSCALER: &str = "ComfyUI-LTXVideo 2.3/LTX-2.3_ICLoRA_Pixel_Spatial_Upscaler_Distilled.json";
const UPSCALER_X2: PublishedIcLora = scaled(
    2,
    row(
        "pixel-spatial-upscaler-x2",
        Version::V2_3,
        "Lightricks/LTX-2.3-22b-IC-LoRA-Pixel-Spatial-Upscaler",
        "ltx-2.3-22b-ic-lora-pixel-spatial-upscaler-x2-0.9.safetensors",
        "the video to enlarge, at half the size of the result",
        UPSCALER,
    ),
);
const UPSCALER_X4: PublishedIcLora = scaled(
    4,
    row(
        "pixel-spatial-upscaler-x4",
        Version::V2_3,
        "Lightricks/LTX-2.3-22b-IC-LoRA-Pixel-Spatial-Upscaler",
        "ltx-2.3-22b-ic-lora-pixel-spatial-upscaler-x4-0.9.safetensors",
        "the video to enlarge, at a quarter of the size of the result",
        UPSCALER,
    ),
);
const HDR: PublishedIcLora = PublishedIcLora {
    input: IcLoraInput::Pipeline(Pipeline::Hdr),
    ..row(
        "hdr",
        Version::V2_3,
        "Lightricks/LTX-2.3-22b-IC-LoRA-HDR",
        "ltx-2.3-22b-ic-lora-hdr-0.9.safetensors",
        "an SDR video",
        "ComfyUI-LTXVideo 2.3/LTX-2.3_ICLoRA_HDR_Distilled.json",
    )
};
const DUBIT: PublishedIcLora = PublishedIcLora {
    input: IcLoraInput::Pipeline(Pipeline::DubIt),
    ..scaled(
        1,
        row(
            "dubit",
            Version::V2_3,
            "Lightricks/LTX-2.3-22b-IC-LoRA-DubIt",
            "ltx-2.3-22b-ic-lora-dubit-0.9.safetensors",
            "the video to dub, with its sound",
            "Lightricks/LTX-2 MODELS-LTX-2.3.md; ComfyUI-LTXVideo 2.3/LTX-2.3_ICLoRA_Lipdub_Two_Stage_Distilled.json",
        ),
    )
};
const UPSCALER_2_5: PublishedIcLora = scaled(
    2,
    row(
        "pixel-spatial-upscaler-x2",
        Version::V2_5,
        "Lightricks/LTX-2.5-22b-IC-LoRA-Pixel-Spatial-Upscaler",
        "ltx-2.5-22b-ic-lora-pixel-spatial-upscaler-x2-1.0.safetensors",
        "the video to enlarge, at half the size of the result",
        "model card; Lightricks/LTX-2 README.md and dfr_pipeline.py",
    ),
);

/// All rows, by model generation.
pub const IC_LORAS: [PublishedIcLora; 30] = [
    DETAILER,
    CANNY,
    DEPTH,
    POSE,
    UNION_2_0,
    UNION,
    MOTION_TRACK,
    COLORIZATION,
    CROSS_EYED,
    DAY_TO_NIGHT,
    DEBLUR,
    DECOMPRESSION,
    IN_OUTPAINTING,
    INGREDIENTS,
    INSTANT_SHAVE,
    WATER_SIMULATION,
    UPSCALER_X2,
    UPSCALER_X4,
    HDR,
    DUBIT,
    listed("clean-plate", Version::V2_3, "Lightricks/LTX-2.3-22b-IC-LoRA-Clean-Plate"),
    UPSCALER_2_5,
    listed("clean-plate", Version::V2_5, "Lightricks/LTX-2.5-22b-IC-LoRA-Clean-Plate"),
    listed("colorization", Version::V2_5, "Lightricks/LTX-2.5-22b-IC-LoRA-Colorization"),
    listed("day-to-night", Version::V2_5, "Lightricks/LTX-2.5-22b-IC-LoRA-Day-To-Night"),
    listed("deblur", Version::V2_5, "Lightricks/LTX-2.5-22b-IC-LoRA-Deblur"),
    listed("decompression", Version::V2_5, "Lightricks/LTX-2.5-22b-IC-LoRA-Decompression"),
    listed("ingredients", Version::V2_5, "Lightricks/LTX-2.5-22b-IC-LoRA-Ingredients"),
    listed("restore", Version::V2_5, "Lightricks/LTX-2.5-22b-IC-LoRA-Restore"),
    listed("water-simulation", Version::V2_5, "Lightricks/LTX-2.5-22b-IC-LoRA-Water-Simulation"),
];

/// Other names of IC-LoRAs, and the names in the table.
pub const ALIASES: [(&str, &str); 1] = [("lipdub", "dubit")];

impl PublishedIcLora {
    /// Returns the rows of a name or of its [alias](ALIASES), one per model generation.
    pub fn named(name: &str) -> impl Iterator<Item = &'static PublishedIcLora> {
        let name = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, name)| name);
        IC_LORAS.iter().filter(move |row| row.name == name)
    }

    /// Returns whether it is published for a model generation.
    pub fn supports(&self, version: Version) -> bool {
        self.base == version || self.also == Some(version)
    }

    /// Returns the only pipeline that supports it. `None`: every pipeline that follows reference videos does.
    pub fn needed_pipeline(&self) -> Option<Pipeline> {
        match self.input {
            IcLoraInput::Pipeline(pipeline) => Some(pipeline),
            IcLoraInput::Videos | IcLoraInput::Masked => None,
        }
    }

    /// Returns the row whose file has the same name as `path`, wherever that file is.
    pub fn of_file(path: &str) -> Option<&'static PublishedIcLora> {
        let file = Path::new(path).file_name()?;
        IC_LORAS.iter().find(|row| row.file.is_some_and(|own| file == own))
    }

    /// Returns `org/name/file`, or `org/name` if the file's name is unknown.
    pub fn hub_name(&self) -> String {
        self.file.map_or_else(|| self.repository.to_string(), |file| format!("{}/{file}", self.repository))
    }
}

/// Returns all names, each once.
pub fn names() -> Vec<&'static str> {
    let mut names: Vec<&str> = IC_LORAS.iter().map(|row| row.name).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Returns whether the table has this name.
pub(crate) fn is_name(name: &str) -> bool {
    PublishedIcLora::named(name).next().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::HubCache;

    #[test]
    fn rows_are_unique_and_name_their_generation() {
        for row in &IC_LORAS {
            assert_eq!(PublishedIcLora::named(row.name).filter(|own| own.supports(row.base)).count(), 1, "{row:?}");
            let version = match row.base {
                Version::V2_0 => "LTX-2-19b-IC-LoRA-",
                Version::V2_3 => "LTX-2.3-22b-IC-LoRA-",
                Version::V2_5 => "LTX-2.5-22b-IC-LoRA-",
            };
            let rest = row.repository.strip_prefix("Lightricks/").and_then(|name| name.strip_prefix(version));
            let rest = rest.unwrap_or_else(|| panic!("{row:?}")).to_lowercase();
            assert!(row.name.starts_with(&rest), "{row:?}");
            assert!(HubCache::is_name(&row.hub_name()) && !HubCache::is_name(row.name), "{row:?}");
            if let Some(file) = row.file {
                let start = format!("{}{}", version.to_lowercase(), row.name);
                assert!(file.starts_with(&start) && file.ends_with(".safetensors"), "{row:?}");
                assert_eq!(PublishedIcLora::of_file(&format!("/loras/{file}")), Some(row));
            }
            assert!(!row.reference.is_empty() && !row.source.is_empty(), "{row:?}");
        }
        assert_eq!(PublishedIcLora::of_file("other.safetensors"), None);
        assert!(is_name("deblur") && is_name("lipdub") && !is_name("sharpen"));
        assert_eq!(names().len(), 21);
    }
}
