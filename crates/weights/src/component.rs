//! The components of a model and their folders in the diffusers layout.

use std::fmt;

/// A component of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Component {
    /// Gemma, the language model that encodes prompts: Gemma 3, or Gemma 4 for LTX-2.5.
    TextEncoder,
    /// The text encoder's tokenizer; has no weights.
    Tokenizer,
    /// The text projection and the two connectors.
    Connectors,
    /// The dual-stream diffusion transformer.
    Transformer,
    /// Video encoder and decoder.
    Vae,
    /// Audio encoder and decoder.
    AudioVae,
    /// Vocoder, which converts mel spectrograms to waveforms.
    Vocoder,
    /// Sigma schedule; has only a configuration.
    Scheduler,
    /// Spatial latent upsampler of the two-stage pipelines.
    LatentUpsampler,
    /// Diffusion-based video decoder that replaces the video VAE's decoder (LTX-2.5).
    DiffusionDecoder,
    /// Duration head, which predicts a video's duration from its prompt (LTX-2.5).
    DurationHead,
    /// Temporal latent upsampler, which doubles the number of frames of video latents (LTX-2.5).
    TemporalUpsampler,
}

impl Component {
    /// All components, in the order in which a request uses them.
    pub const ALL: [Component; 12] = [
        Component::TextEncoder,
        Component::Tokenizer,
        Component::Connectors,
        Component::Transformer,
        Component::Scheduler,
        Component::LatentUpsampler,
        Component::TemporalUpsampler,
        Component::DurationHead,
        Component::Vae,
        Component::DiffusionDecoder,
        Component::AudioVae,
        Component::Vocoder,
    ];

    /// Returns whether a model can run without this component.
    pub const fn is_optional(self) -> bool {
        use Component::{DiffusionDecoder, DurationHead, LatentUpsampler, TemporalUpsampler};
        matches!(self, LatentUpsampler | TemporalUpsampler | DurationHead | DiffusionDecoder)
    }

    const fn facts(self) -> &'static ComponentNames {
        &FACTS[self as usize]
    }

    /// Returns the name of the component's folder: `transformer`, `audio_vae`, …
    pub const fn folder(self) -> &'static str {
        self.facts().folder
    }

    /// Returns the component with this folder name. `None`: no component has it.
    pub fn from_folder(name: &str) -> Option<Self> {
        Component::ALL.into_iter().find(|c| c.folder() == name)
    }

    /// Returns the name of the configuration file in the component's folder: `config.json`, `tokenizer_config.json` or
    /// `scheduler_config.json`.
    pub const fn config_file(self) -> &'static str {
        self.facts().config_file
    }

    /// Returns the stem of the weight files' names. `None`: the component has no weights.
    pub const fn weights_stem(self) -> Option<&'static str> {
        self.facts().weights_stem
    }

    /// Returns the key under `model` in the YAML that replaces this component. `None`: it cannot be replaced
    /// separately.
    pub const fn override_key(self) -> Option<&'static str> {
        self.facts().override_key
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.facts().label)
    }
}

/// Names of a component: its folder, its label in messages, its files and its YAML key.
struct ComponentNames {
    folder: &'static str,
    label: &'static str,
    config_file: &'static str,
    weights_stem: Option<&'static str>,
    override_key: Option<&'static str>,
}

/// Returns the names of a component whose weight files have the stem `diffusion_pytorch_model`.
const fn row(folder: &'static str, label: &'static str, override_key: Option<&'static str>) -> ComponentNames {
    ComponentNames {
        folder,
        label,
        config_file: "config.json",
        weights_stem: Some("diffusion_pytorch_model"),
        override_key,
    }
}

/// Names of the components, in the order of the variants of [`Component`].
static FACTS: [ComponentNames; 12] = [
    ComponentNames { weights_stem: Some("model"), ..row("text_encoder", "text encoder", Some("text_encoder")) },
    ComponentNames {
        config_file: "tokenizer_config.json",
        weights_stem: None,
        ..row("tokenizer", "tokenizer", Some("tokenizer"))
    },
    row("connectors", "connectors", Some("connectors")),
    row("transformer", "transformer", None),
    row("vae", "video VAE", Some("vae")),
    row("audio_vae", "audio VAE", Some("audio_vae")),
    row("vocoder", "vocoder", Some("vocoder")),
    ComponentNames { config_file: "scheduler_config.json", weights_stem: None, ..row("scheduler", "scheduler", None) },
    row("latent_upsampler", "latent upsampler", Some("upsampler")),
    row("diffusion_decoder", "diffusion decoder", None),
    row("duration_head", "duration head", Some("duration_head")),
    row("temporal_latent_upsampler", "temporal latent upsampler", Some("temporal_upsampler")),
];

/// Calls the macro `$apply` with the field of [`Overrides`](crate::Overrides), the variant of [`Component`] and the
/// command-line flag of each component that can be replaced.
#[macro_export]
macro_rules! for_each_override {
    ($apply:ident) => {
        $apply! {
            text_encoder TextEncoder "text-encoder",
            tokenizer Tokenizer "tokenizer",
            connectors Connectors "connectors",
            vae Vae "vae",
            audio_vae AudioVae "audio-vae",
            vocoder Vocoder "vocoder",
            upsampler LatentUpsampler "upsampler",
            temporal_upsampler TemporalUpsampler "temporal-upsampler",
            duration_head DurationHead "duration-head"
        }
    };
}
