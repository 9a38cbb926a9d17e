//! The parts of a model and their folders in the diffusers layout.

use std::fmt;

/// A part of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Component {
    /// Gemma-3.
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
}

impl Component {
    /// Every component, in the order of a request.
    pub const ALL: [Component; 9] = [
        Component::Tokenizer,
        Component::TextEncoder,
        Component::Connectors,
        Component::Transformer,
        Component::Scheduler,
        Component::LatentUpsampler,
        Component::Vae,
        Component::AudioVae,
        Component::Vocoder,
    ];

    /// The folder's name: `transformer`, `audio_vae` …
    pub const fn folder(self) -> &'static str {
        match self {
            Component::TextEncoder => "text_encoder",
            Component::Tokenizer => "tokenizer",
            Component::Connectors => "connectors",
            Component::Transformer => "transformer",
            Component::Vae => "vae",
            Component::AudioVae => "audio_vae",
            Component::Vocoder => "vocoder",
            Component::Scheduler => "scheduler",
            Component::LatentUpsampler => "latent_upsampler",
        }
    }

    /// The component of a folder's name.
    pub fn from_folder(name: &str) -> Option<Self> {
        Component::ALL.into_iter().find(|c| c.folder() == name)
    }

    /// The configuration's file name inside the folder.
    pub const fn config_file(self) -> &'static str {
        match self {
            Component::Scheduler => "scheduler_config.json",
            Component::Tokenizer => "tokenizer_config.json",
            _ => "config.json",
        }
    }

    /// The start of its weight files' names; none when it has no weights.
    pub const fn weights_stem(self) -> Option<&'static str> {
        match self {
            Component::TextEncoder => Some("model"),
            Component::Tokenizer | Component::Scheduler => None,
            _ => Some("diffusion_pytorch_model"),
        }
    }

    /// The key under `model` that takes it from elsewhere.
    pub const fn override_key(self) -> Option<&'static str> {
        match self {
            Component::TextEncoder => Some("text_encoder"),
            Component::Tokenizer => Some("tokenizer"),
            Component::Vae => Some("vae"),
            Component::AudioVae => Some("audio_vae"),
            Component::Vocoder => Some("vocoder"),
            Component::LatentUpsampler => Some("upsampler"),
            Component::Connectors | Component::Transformer | Component::Scheduler => None,
        }
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Component::TextEncoder => "text encoder",
            Component::Vae => "video VAE",
            Component::AudioVae => "audio VAE",
            Component::LatentUpsampler => "latent upsampler",
            other => other.folder(),
        })
    }
}
