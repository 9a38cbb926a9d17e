//! The parts of a model and their folders in the diffusers layout.

use std::fmt;

/// A part of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Component {
    TextEncoder,
    /// The text encoder's tokenizer: no weights.
    Tokenizer,
    /// Text projection and the two connectors.
    Connectors,
    /// The dual-stream diffusion transformer.
    Transformer,
    /// Video encoder and decoder.
    Vae,
    /// Audio encoder and decoder.
    AudioVae,
    /// Mel spectrogram to waveform.
    Vocoder,
    /// Sigma schedule: a configuration only.
    Scheduler,
    /// Latent upsampler of the two-stage pipelines.
    LatentUpsampler,
    /// Video decoder by diffusion, in place of the video VAE's (LTX-2.5).
    DiffusionDecoder,
    /// Predicts a video's duration from its prompt (LTX-2.5).
    DurationHead,
    /// Doubles the frames of video latents (LTX-2.5).
    TemporalUpsampler,
}

impl Component {
    /// Every component, in the order of a request.
    pub(crate) const ALL: [Component; 12] = [
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

    /// Whether some runs do without it.
    pub(crate) const fn is_optional(self) -> bool {
        use Component::{DiffusionDecoder, DurationHead, LatentUpsampler, TemporalUpsampler};
        matches!(self, LatentUpsampler | TemporalUpsampler | DurationHead | DiffusionDecoder)
    }

    const fn facts(self) -> &'static Facts {
        &FACTS[self as usize]
    }

    /// The folder's name: `transformer`, `audio_vae` …
    pub const fn folder(self) -> &'static str {
        self.facts().folder
    }

    pub(crate) fn from_folder(name: &str) -> Option<Self> {
        Component::ALL.into_iter().find(|c| c.folder() == name)
    }

    pub(crate) const fn config_file(self) -> &'static str {
        self.facts().config_file
    }

    /// The start of its weight files' names; none when it has no weights.
    pub(crate) const fn weights_stem(self) -> Option<&'static str> {
        self.facts().weights_stem
    }

    /// The key under `model` that takes it from elsewhere.
    pub(crate) const fn override_key(self) -> Option<&'static str> {
        self.facts().override_key
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.facts().label)
    }
}

/// Names by which a component is found and told from the others.
struct Facts {
    folder: &'static str,
    label: &'static str,
    config_file: &'static str,
    weights_stem: Option<&'static str>,
    override_key: Option<&'static str>,
}

/// A component of weights that diffusers saved, or a part of them.
const fn row(folder: &'static str, label: &'static str, override_key: Option<&'static str>) -> Facts {
    Facts { folder, label, config_file: "config.json", weights_stem: Some("diffusion_pytorch_model"), override_key }
}

/// In the order of the variants.
static FACTS: [Facts; 12] = [
    Facts { weights_stem: Some("model"), ..row("text_encoder", "text encoder", Some("text_encoder")) },
    Facts {
        config_file: "tokenizer_config.json",
        weights_stem: None,
        ..row("tokenizer", "tokenizer", Some("tokenizer"))
    },
    row("connectors", "connectors", None),
    row("transformer", "transformer", None),
    row("vae", "video VAE", Some("vae")),
    row("audio_vae", "audio VAE", Some("audio_vae")),
    row("vocoder", "vocoder", Some("vocoder")),
    Facts { config_file: "scheduler_config.json", weights_stem: None, ..row("scheduler", "scheduler", None) },
    row("latent_upsampler", "latent upsampler", Some("upsampler")),
    row("diffusion_decoder", "diffusion decoder", None),
    row("duration_head", "duration head", Some("duration_head")),
    row("temporal_latent_upsampler", "temporal latent upsampler", Some("temporal_upsampler")),
];
