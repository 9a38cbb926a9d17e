//! The published models of the shipped presets: repositories, files and licences. Names come from the public listings and
//! from Lightricks' code.

/// Repository of Gemma 3, the text encoder of LTX-2.0 and LTX-2.3.
pub const GEMMA_3: &str = "google/gemma-3-12b-it-qat-q4_0-unquantized";

const LTX_2: &str = "Lightricks/LTX-2";
const LTX_2_3: &str = "Lightricks/LTX-2.3";
const LTX_2_5: &str = "Lightricks/LTX-2.5";

/// Repositories on the hub and their licences.
const LICENCES: [(&str, &str); 4] = [
    (LTX_2, "LTX-2 Community License Agreement"),
    (LTX_2_3, "LTX-2 Community License Agreement"),
    (LTX_2_5, "LTX-2.x Community License Agreement"),
    (GEMMA_3, "Gemma Terms of Use"),
];

/// A file of a published model, or a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishedFile {
    /// `org/name`.
    pub repository: &'static str,
    /// Path in the repository. A path that ends with `/` is a folder; the empty path is the whole repository.
    pub path: &'static str,
    /// What a model needs the file for.
    pub purpose: &'static str,
    /// Size in megabytes that third parties have recorded; `None`: not recorded.
    pub megabytes: Option<u32>,
}

/// The files that presets need.
#[derive(Clone, Copy, Debug)]
pub struct PublishedModel {
    /// Names of the presets.
    pub presets: &'static [&'static str],
    /// The model for `-m`, `org/name` or `org/name/file`, as in the presets.
    pub model: &'static str,
    /// The files, the transformer first.
    pub files: &'static [PublishedFile],
    /// The distilled LoRA, which the request must name: its path, and the value of `model.loras` in which `{}` is its
    /// path. `None`: the presets need no LoRA.
    pub loras: Option<(&'static str, &'static str)>,
}

const fn file(
    repository: &'static str,
    path: &'static str,
    purpose: &'static str,
    megabytes: Option<u32>,
) -> PublishedFile {
    PublishedFile { repository, path, purpose, megabytes }
}

const ENCODER_2_0: PublishedFile = file(LTX_2, "text_encoder/", "text encoder (Gemma 3)", None);
const TOKENIZER_2_0: PublishedFile = file(LTX_2, "tokenizer/", "tokenizer", None);
const UPSAMPLER_2_0: PublishedFile = file(LTX_2, "latent_upsampler/", "spatial upsampler", None);
const LORA_2_0: PublishedFile = file(LTX_2, "ltx-2-19b-distilled-lora-384.safetensors", "distilled LoRA", Some(7670));
const FOLDERS_2_0: [PublishedFile; 9] = [
    file(LTX_2, "transformer/", "transformer, dev", None),
    file(LTX_2, "model_index.json", "list of components", None),
    file(LTX_2, "connectors/", "connectors", None),
    ENCODER_2_0,
    TOKENIZER_2_0,
    file(LTX_2, "scheduler/", "noise schedule", None),
    file(LTX_2, "vae/", "video VAE", None),
    file(LTX_2, "audio_vae/", "audio VAE", None),
    file(LTX_2, "vocoder/", "vocoder", None),
];

const ENCODER_2_3: PublishedFile = file(GEMMA_3, "", "text encoder (Gemma 3) and tokenizer", Some(24370));
const DEV_2_3: PublishedFile =
    file(LTX_2_3, "ltx-2.3-22b-dev.safetensors", "dev: all components except the text encoder", Some(46_000));
const UPSAMPLER_2_3: PublishedFile =
    file(LTX_2_3, "ltx-2.3-spatial-upscaler-x2-1.1.safetensors", "spatial upsampler", Some(996));

const TRANSFORMER_2_5: PublishedFile = file(
    LTX_2_5,
    "diffusion_models/ltx-2.5-22b-dev-transformer-bf16.safetensors",
    "transformer, dev, with connectors",
    Some(42_018),
);
const DISTILLED_2_5: PublishedFile = file(
    LTX_2_5,
    "diffusion_models/ltx-2.5-22b-distilled-transformer-bf16.safetensors",
    "transformer, distilled, with connectors",
    Some(42_018),
);
const ENCODER_2_5: PublishedFile = file(
    LTX_2_5,
    "text_encoders/gemma4-12b-with-proj-ltx-2.5-bf16.safetensors",
    "text encoder (Gemma 4), text projections, tokenizer",
    Some(26_264),
);
const VIDEO_VAE_2_5: PublishedFile =
    file(LTX_2_5, "vae/ltx-2.5-video-vae-bf16.safetensors", "video VAE with diffusion decoder", Some(1472));
const AUDIO_VAE_2_5: PublishedFile =
    file(LTX_2_5, "vae/ltx-2.5-audio-vae-bf16.safetensors", "audio VAE and vocoder", Some(365));
const DURATION_2_5: PublishedFile =
    file(LTX_2_5, "model_patches/ltx-2.5-duration-head-bf16.safetensors", "duration head", Some(4));
const UPSAMPLER_2_5: PublishedFile = file(
    LTX_2_5,
    "latent_upscale_models/ltx-2.5-latent-spatial-upscaler-x2-bf16-1.0.safetensors",
    "spatial upsampler",
    Some(996),
);
const TEMPORAL_2_5: PublishedFile = file(
    LTX_2_5,
    "latent_upscale_models/ltx-2.5-latent-temporal-upscaler-x2-bf16-1.0.safetensors",
    "temporal upsampler",
    Some(262),
);
const LORA_2_5: PublishedFile =
    file(LTX_2_5, "loras/ltx-2.5-22b-distilled-lora-450-bf16.safetensors", "distilled LoRA", Some(8900));

/// `model.loras` of two-stage presets.
const IN_SECOND_STAGE: &str = "[{path: {}, stages: [2]}]";
/// `model.loras` of high-quality presets.
const IN_BOTH_STAGES: &str = "[{path: {}, strength: 0.25, stages: [1]}, {path: {}, strength: 0.5, stages: [2]}]";

const LORA_OF_2_0: &str = "Lightricks/LTX-2/ltx-2-19b-distilled-lora-384.safetensors";
const LORA_OF_2_3: &str = "Lightricks/LTX-2.3/ltx-2.3-22b-distilled-lora-384-1.1.safetensors";
const LORA_OF_2_5: &str = "Lightricks/LTX-2.5/loras/ltx-2.5-22b-distilled-lora-450-bf16.safetensors";

const TWO_STAGE_2_0: [PublishedFile; 11] = {
    let [a, b, c, d, e, f, g, h, i] = FOLDERS_2_0;
    [a, b, c, d, e, f, g, h, i, UPSAMPLER_2_0, LORA_2_0]
};
const TWO_STAGE_2_3: [PublishedFile; 4] = [
    DEV_2_3,
    ENCODER_2_3,
    UPSAMPLER_2_3,
    file(LTX_2_3, "ltx-2.3-22b-distilled-lora-384-1.1.safetensors", "distilled LoRA", Some(7610)),
];
const TWO_STAGE_2_5: [PublishedFile; 7] =
    [TRANSFORMER_2_5, ENCODER_2_5, VIDEO_VAE_2_5, AUDIO_VAE_2_5, DURATION_2_5, UPSAMPLER_2_5, LORA_2_5];

/// The published models, by generation.
pub const MODELS: [PublishedModel; 13] = {
    const DEV_OF_2_3: &str = "Lightricks/LTX-2.3/ltx-2.3-22b-dev.safetensors";
    const DEV_OF_2_5: &str = "Lightricks/LTX-2.5/diffusion_models/ltx-2.5-22b-dev-transformer-bf16.safetensors";
    const DISTILLED_OF_2_5: &str =
        "Lightricks/LTX-2.5/diffusion_models/ltx-2.5-22b-distilled-transformer-bf16.safetensors";
    const fn model(
        presets: &'static [&'static str],
        model: &'static str,
        files: &'static [PublishedFile],
        loras: Option<(&'static str, &'static str)>,
    ) -> PublishedModel {
        PublishedModel { presets, model, files, loras }
    }
    [
        model(&["ltx2", "ltx2_full_guidance"], LTX_2, &FOLDERS_2_0, None),
        model(&["ltx2_two_stage"], LTX_2, &TWO_STAGE_2_0, Some((LORA_OF_2_0, IN_SECOND_STAGE))),
        model(&["ltx2_hq"], LTX_2, &TWO_STAGE_2_0, Some((LORA_OF_2_0, IN_BOTH_STAGES))),
        model(
            &["ltx2_distilled"],
            "Lightricks/LTX-2/ltx-2-19b-distilled.safetensors",
            &[
                file(
                    LTX_2,
                    "ltx-2-19b-distilled.safetensors",
                    "distilled: all components except the text encoder",
                    Some(43_300),
                ),
                ENCODER_2_0,
                TOKENIZER_2_0,
                file(LTX_2, "ltx-2-spatial-upscaler-x2-1.0.safetensors", "spatial upsampler", Some(996)),
            ],
            None,
        ),
        model(&["ltx2_3"], DEV_OF_2_3, &[DEV_2_3, ENCODER_2_3], None),
        model(&["ltx2_3_two_stage"], DEV_OF_2_3, &TWO_STAGE_2_3, Some((LORA_OF_2_3, IN_SECOND_STAGE))),
        model(&["ltx2_3_hq"], DEV_OF_2_3, &TWO_STAGE_2_3, Some((LORA_OF_2_3, IN_BOTH_STAGES))),
        model(
            &["ltx2_3_distilled"],
            "Lightricks/LTX-2.3/ltx-2.3-22b-distilled-1.1.safetensors",
            &[
                file(
                    LTX_2_3,
                    "ltx-2.3-22b-distilled-1.1.safetensors",
                    "distilled: all components except the text encoder",
                    Some(46_000),
                ),
                ENCODER_2_3,
                UPSAMPLER_2_3,
            ],
            None,
        ),
        model(
            &["ltx2_5"],
            DEV_OF_2_5,
            &[TRANSFORMER_2_5, ENCODER_2_5, VIDEO_VAE_2_5, AUDIO_VAE_2_5, DURATION_2_5],
            None,
        ),
        model(&["ltx2_5_two_stage"], DEV_OF_2_5, &TWO_STAGE_2_5, Some((LORA_OF_2_5, IN_SECOND_STAGE))),
        model(&["ltx2_5_hq"], DEV_OF_2_5, &TWO_STAGE_2_5, Some((LORA_OF_2_5, IN_BOTH_STAGES))),
        model(
            &["ltx2_5_distilled"],
            DISTILLED_OF_2_5,
            &[DISTILLED_2_5, ENCODER_2_5, VIDEO_VAE_2_5, AUDIO_VAE_2_5, DURATION_2_5, UPSAMPLER_2_5],
            None,
        ),
        model(
            &["ltx2_5_dfr"],
            DISTILLED_OF_2_5,
            &[DISTILLED_2_5, ENCODER_2_5, VIDEO_VAE_2_5, AUDIO_VAE_2_5, DURATION_2_5, UPSAMPLER_2_5, TEMPORAL_2_5],
            None,
        ),
    ]
};

impl PublishedModel {
    /// Returns the model of a preset.
    pub fn of_preset(name: &str) -> Option<&'static PublishedModel> {
        MODELS.iter().find(|model| model.presets.contains(&name))
    }

    /// Returns the presets whose files are in a repository, such as `Lightricks/LTX-2.5`.
    pub fn presets_of(repository: &str) -> Vec<&'static str> {
        let is_of = |model: &&PublishedModel| repository_of(model.model) == repository;
        MODELS.iter().filter(is_of).flat_map(|model| model.presets).copied().collect()
    }
}

/// Returns `org/name` of `org/name/path`.
pub fn repository_of(name: &str) -> &str {
    name.match_indices('/').nth(1).map_or(name, |(end, _)| &name[..end])
}

/// Returns the licence of a repository.
pub fn licence(repository: &str) -> Option<&'static str> {
    LICENCES.iter().find(|(name, _)| *name == repository).map(|(_, licence)| *licence)
}

/// Returns the repositories of the published models.
pub fn repositories() -> impl Iterator<Item = &'static str> {
    LICENCES.iter().map(|(name, _)| *name)
}

/// Returns the command that downloads `org/name` or `org/name/path`. If this is the model of presets, it is the command
/// for one of these, preferably one of `presets`.
pub fn pull_command(name: &str, presets: &[&str]) -> String {
    let is_of = |model: &&PublishedModel| model.model == name || repository_of(model.model) == name;
    let own: Vec<&str> = MODELS.iter().filter(is_of).flat_map(|model| model.presets).copied().collect();
    match own.iter().find(|preset| presets.contains(preset)).or(own.first()) {
        Some(preset) => format!("ltx2 pull {preset}"),
        None => format!("ltx2 pull {name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_and_loras_are_among_their_files() {
        let mut presets: Vec<&str> = MODELS.iter().flat_map(|model| model.presets).copied().collect();
        let count = presets.len();
        presets.sort_unstable();
        presets.dedup();
        assert_eq!((presets.len(), count), (14, 14), "each preset has one row");
        for model in &MODELS {
            let has = |name: &str| model.files.iter().any(|file| format!("{}/{}", file.repository, file.path) == name);
            assert!(model.model == LTX_2 && has("Lightricks/LTX-2/transformer/") || has(model.model), "{model:?}");
            if let Some((lora, value)) = model.loras {
                assert!(has(lora) && value.contains("{}"), "{model:?}");
            }
            assert!(model.files.iter().all(|file| licence(file.repository).is_some()), "{model:?}");
        }
    }

    #[test]
    fn pull_command_names_the_preset_of_a_model() {
        for (name, presets, command) in [
            ("Lightricks/LTX-2", &[][..], "ltx2 pull ltx2"),
            ("Lightricks/LTX-2.5", &[], "ltx2 pull ltx2_5"),
            ("Lightricks/LTX-2.5", &["ltx2_dfr", "ltx2_5_dfr"], "ltx2 pull ltx2_5_dfr"),
            (MODELS[11].model, &[], "ltx2 pull ltx2_5_distilled"),
            (MODELS[8].model, &["ltx2_5_hq"], "ltx2 pull ltx2_5_hq"),
            ("Lightricks/LTX-2.3/other.safetensors", &[], "ltx2 pull Lightricks/LTX-2.3/other.safetensors"),
            (GEMMA_3, &["ltx2_3"], "ltx2 pull google/gemma-3-12b-it-qat-q4_0-unquantized"),
        ] {
            assert_eq!(pull_command(name, presets), command);
        }
    }
}
