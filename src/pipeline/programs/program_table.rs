//! Table of all programs, with one row per program. Commands, reports and timings iterate over the rows.

use std::sync::LazyLock;

use clap::builder::PossibleValue;

use super::component_inputs::{self as inputs, Ready, ReferenceArguments};
use super::configs::ModelConfigs;
use super::program_spec::{self as spec, ProgramSpec};
use super::transformer_inputs;
use crate::av::Av;
use crate::models::Network;
use crate::models::connectors::Input;
use crate::models::pixels::Pixels;
use crate::nn::Build;
use crate::pipeline::error::Result;
use crate::pipeline::phase::Phase;
use crate::weights::Component;

/// A program. The variants are in the order in which a run executes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum ProgramKind {
    TextEncoder,
    Connectors,
    DurationHead,
    VideoEncoder,
    AudioEncoder,
    Prepare,
    #[default]
    Denoise,
    Upsampler,
    FrameUpsampler,
    KeyframeUpsampler,
    RefinePrepare,
    Refine,
    TemporalUpsampler,
    RoundPrepare,
    Round,
    VideoDecoder,
    DiffusionFeatures,
    DiffusionDecoder,
    AudioDecoder,
    Vocoder,
    Transformer,
}

/// The runs that execute a program.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::pipeline) enum Runs {
    Always,
    /// Runs with two passes.
    TwoPasses,
    /// Runs with spatial upsampling between two passes.
    Spatial,
    /// Runs with temporal upsampling between two passes.
    Temporal,
    /// Runs that generate keyframes in both passes.
    Keyframes,
    /// Runs with temporal rounds (pipeline `dfr`).
    Rounds,
    /// Runs that encode images, an input video or reference videos.
    Images,
    /// Runs with input audio.
    GivenSound,
    /// Runs that generate audio.
    OwnSound,
    /// Runs in which the video VAE decodes the video.
    ByConvolution,
    /// Runs in which the diffusion decoder decodes the video.
    ByDiffusion,
    /// Runs in which the diffusion decoder decodes the video tile by tile.
    ByDiffusionTiles,
    /// No runs; only the command `ltx2 run` executes the program.
    Alone,
}

/// Where the sizes of a program come from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::pipeline) enum Sizes {
    /// Sizes of the first pass.
    First,
    /// Sizes of the last pass.
    Last,
    /// Size of the video before the last temporal round; without rounds, sizes of the first pass.
    BeforeRound,
    /// Size of the largest tile of the last temporal round.
    Tile,
    /// Size of the finished video.
    Output,
}

/// How `ltx2 run` runs a single program with the arguments of the reference implementation.
#[derive(Clone, Copy)]
pub(crate) struct SingleRun {
    /// Help text of the command line: the input and output tensors.
    pub(crate) help: &'static str,
    /// Names of the scalar arguments, which the flag `--set` passes.
    pub(in crate::pipeline) scalars: &'static [&'static str],
    /// Returns the program and its inputs, given the arguments.
    pub(in crate::pipeline) inputs: fn(&mut ReferenceArguments) -> Result<Ready>,
    /// Returns the smallest program that declares all parameters of the component.
    pub(in crate::pipeline) smallest: fn(&ModelConfigs, &Build) -> Result<Network>,
}

/// A program and its properties.
#[derive(Clone, Copy)]
pub(crate) struct ProgramRow {
    pub(crate) kind: ProgramKind,
    /// Name in sidecars, reports and JSON. On the command line, the name is written with hyphens.
    pub(crate) name: &'static str,
    /// Help text of the command line: one line.
    pub(crate) help: &'static str,
    /// Component to which most of the program's parameters belong.
    pub(crate) part: Component,
    /// Phase to which the program's time is added.
    pub(crate) phase: Phase,
    has_blocks: bool,
    pub(in crate::pipeline) sizes: Sizes,
    pub(in crate::pipeline) runs: Runs,
    pub(in crate::pipeline) write: fn(&ProgramSpec) -> Result<Network>,
    /// How `ltx2 run` runs the program. `None`: `ltx2 run` does not support it.
    pub(crate) alone: Option<SingleRun>,
}

impl ProgramRow {
    /// Creates a row with default properties: the program is part of every run, has no transformer blocks, and
    /// has the sizes of the first pass.
    const fn new(
        kind: ProgramKind,
        name: &'static str,
        help: &'static str,
        part: Component,
        phase: Phase,
        write: fn(&ProgramSpec) -> Result<Network>,
    ) -> Self {
        let (has_blocks, sizes, runs) = (false, Sizes::First, Runs::Always);
        ProgramRow { kind, name, help, part, phase, has_blocks, sizes, runs, write, alone: None }
    }

    const fn blocks(self) -> Self {
        ProgramRow { has_blocks: true, ..self }
    }

    const fn sizes(self, sizes: Sizes) -> Self {
        ProgramRow { sizes, ..self }
    }

    const fn runs(self, runs: Runs) -> Self {
        ProgramRow { runs, ..self }
    }

    const fn alone(
        self,
        help: &'static str,
        scalars: &'static [&'static str],
        inputs: fn(&mut ReferenceArguments) -> Result<Ready>,
        smallest: fn(&ModelConfigs, &Build) -> Result<Network>,
    ) -> Self {
        ProgramRow { alone: Some(SingleRun { help, scalars, inputs, smallest }), ..self }
    }
}

/// The rows of all programs, indexed by [`ProgramKind`].
#[rustfmt::skip]
pub(crate) static TABLE: [ProgramRow; 21] = [
    ProgramRow::new(ProgramKind::TextEncoder, "text_encoder", "Prompts to embeddings, all prompts in one pass",
        Component::TextEncoder, Phase::TextEncoder, spec::text_encoder)
        .alone("`input_ids`, `attention_mask` to `prompt_embeds`", &["output_hidden_states"], inputs::text_encoder,
            |c, build| c.text_encoder_program(1, 8, false, build)),
    ProgramRow::new(ProgramKind::Connectors, "connectors", "Embeddings to the text contexts of both streams",
        Component::Connectors, Phase::Connectors, spec::connectors)
        .alone("`prompt_embeds` or `text_encoder_hidden_states`, `attention_mask` to `video`, `audio`",
            &[], inputs::connectors,
            |c, build| c.connectors_program(1, c.connectors()?.token_multiple(), Input::HiddenStates, build)),
    ProgramRow::new(ProgramKind::DurationHead, "duration_head", "Text contexts of a prompt to the video's duration in seconds",
        Component::DurationHead, Phase::Connectors, spec::duration_head)
        .runs(Runs::Alone)
        .alone("`video_tokens`, `audio_tokens` to `seconds`", &[], inputs::duration_head,
            |c, build| c.duration_head_program(1, Av::both(1), build)),
    ProgramRow::new(ProgramKind::VideoEncoder, "video_encoder", "Frames to latents",
        Component::Vae, Phase::Denoise, spec::video_encoder)
        .runs(Runs::Images)
        .alone("`video` to `latents`", &[], inputs::video_encoder, |c, build| {
            let v = c.video_vae()?;
            c.video_encoder_program([1, 0, 1 + v.temporal(), 4 * v.spatial(), 4 * v.spatial()], build)
        }),
    ProgramRow::new(ProgramKind::AudioEncoder, "audio_encoder", "Mel spectrogram to latents",
        Component::AudioVae, Phase::Denoise, spec::audio_encoder)
        .runs(Runs::GivenSound)
        .alone("`mel` to `latents`", &[], inputs::audio_encoder, |c, build| {
            let audio = c.audio_vae()?;
            c.audio_encoder_program([1, 0, audio.frames_of(2), audio.bins()], build)
        }),
    ProgramRow::new(ProgramKind::Prepare, "prepare", "Step-invariant inputs of the denoising loop",
        Component::Transformer, Phase::Denoise, spec::prepare)
        .blocks(),
    ProgramRow::new(ProgramKind::Denoise, "denoise", "Denoising loop of the first pass",
        Component::Transformer, Phase::Denoise, spec::denoise)
        .blocks(),
    ProgramRow::new(ProgramKind::Upsampler, "upsampler", "Latents to larger latents, between two passes",
        Component::LatentUpsampler, Phase::Upsampler, spec::upsampler)
        .runs(Runs::Spatial)
        .alone("`latents` to larger `latents`, both un-normalised", &[], inputs::upsampler,
            |c, build| c.upsampler_program([1, 0, 2, 4, 4], build)),
    ProgramRow::new(ProgramKind::FrameUpsampler, "frame_upsampler",
        "Latents to latents with twice as many frames, between two passes", Component::TemporalUpsampler, Phase::Upsampler, spec::frame_upsampler)
        .runs(Runs::Temporal),
    ProgramRow::new(ProgramKind::KeyframeUpsampler, "keyframe_upsampler", "Keyframes to larger keyframes, between two passes",
        Component::LatentUpsampler, Phase::Upsampler, spec::keyframe_upsampler)
        .runs(Runs::Keyframes),
    ProgramRow::new(ProgramKind::RefinePrepare, "refine_prepare", "Step-invariant inputs of the second pass's loop",
        Component::Transformer, Phase::Refine, spec::prepare)
        .blocks().sizes(Sizes::Last).runs(Runs::TwoPasses),
    ProgramRow::new(ProgramKind::Refine, "refine", "Denoising loop of the second pass",
        Component::Transformer, Phase::Refine, spec::denoise)
        .blocks().sizes(Sizes::Last).runs(Runs::TwoPasses),
    ProgramRow::new(ProgramKind::TemporalUpsampler, "temporal_upsampler", "Latents to latents with twice as many frames, in a temporal round",
        Component::TemporalUpsampler, Phase::Round, spec::temporal_upsampler)
        .sizes(Sizes::BeforeRound).runs(Runs::Rounds)
        .alone("`latents` to `latents` with more frames, both un-normalised", &[], inputs::temporal_upsampler,
            |c, build| c.temporal_upsampler_program([1, 0, 2, 4, 4], build)),
    ProgramRow::new(ProgramKind::RoundPrepare, "round_prepare", "Step-invariant inputs of a temporal round's loop",
        Component::Transformer, Phase::Round, spec::prepare)
        .blocks().sizes(Sizes::Tile).runs(Runs::Rounds),
    ProgramRow::new(ProgramKind::Round, "round", "Denoising loop of a temporal round, for its largest tile",
        Component::Transformer, Phase::Round, spec::denoise)
        .blocks().sizes(Sizes::Tile).runs(Runs::Rounds),
    ProgramRow::new(ProgramKind::VideoDecoder, "video_decoder", "Latents to frames",
        Component::Vae, Phase::VideoDecoder, spec::video_decoder)
        .sizes(Sizes::Output).runs(Runs::ByConvolution)
        .alone("`latents` to `video`", &[], inputs::video_decoder,
            |c, build| c.video_decoder_program([1, 0, 1, 4, 4], Pixels::Values, build)),
    ProgramRow::new(ProgramKind::DiffusionFeatures, "diffusion_features", "Latents to the features that tiles are decoded from",
        Component::DiffusionDecoder, Phase::VideoDecoder, spec::diffusion_features)
        .sizes(Sizes::Output).runs(Runs::ByDiffusionTiles),
    ProgramRow::new(ProgramKind::DiffusionDecoder, "diffusion_decoder", "Latents and noise to frames",
        Component::DiffusionDecoder, Phase::VideoDecoder, spec::diffusion_decoder)
        .sizes(Sizes::Output).runs(Runs::ByDiffusion)
        .alone("`latents`, un-normalised, and `noise` to `video`", &[], inputs::diffusion_decoder,
            |c, build| c.diffusion_decoder_program([1, 0, 1, 1, 1], Pixels::Values, build)),
    ProgramRow::new(ProgramKind::AudioDecoder, "audio_decoder", "Latents to mel spectrogram",
        Component::AudioVae, Phase::AudioDecoder, spec::audio_decoder)
        .runs(Runs::OwnSound)
        .alone("`latents` to `mel`", &[], inputs::audio_decoder,
            |c, build| c.audio_decoder_program([1, 0, 2, c.audio_vae()?.latent_bins()], build)),
    // The size of the vocoder's input is the product of channels and bins, so one of them can be fixed.
    ProgramRow::new(ProgramKind::Vocoder, "vocoder", "Mel spectrogram to samples", Component::Vocoder, Phase::AudioDecoder, spec::vocoder)
        .runs(Runs::OwnSound)
        .alone("`mel` to `audio`", &["clamp"], inputs::vocoder,
            |c, build| c.vocoder_program([1, 1, 8, c.vocoder()?.generator.in_channels], build)),
    ProgramRow::new(ProgramKind::Transformer, "transformer", "One forward pass on the reference implementation's arguments",
        Component::Transformer, Phase::Denoise, spec::transformer)
        .blocks().runs(Runs::Alone)
        .alone("`hidden_states`, `encoder_hidden_states`, `timestep` … to `video`, `audio`",
            transformer_inputs::SCALARS,
            transformer_inputs::transformer, transformer_inputs::smallest),
];

impl ProgramKind {
    pub(crate) fn row(self) -> &'static ProgramRow {
        &TABLE[self as usize]
    }

    /// Returns the name that sidecars, reports and JSON use.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns the name that the command line uses.
    pub(crate) fn flag(self) -> &'static str {
        static FLAGS: LazyLock<Vec<String>> =
            LazyLock::new(|| TABLE.iter().map(|row| row.name.replace('_', "-")).collect());
        &FLAGS[self as usize]
    }

    /// Returns whether the program runs the transformer's blocks.
    pub(crate) fn has_blocks(self) -> bool {
        self.row().has_blocks
    }

    /// Returns the program with this command-line name. The error lists all names.
    pub(crate) fn named(name: &str) -> std::result::Result<Self, String> {
        let all = || TABLE.iter().map(|row| row.kind.flag()).collect::<Vec<_>>().join(", ");
        let row = TABLE.iter().find(|row| row.kind.flag() == name);
        row.map(|row| row.kind).ok_or_else(|| format!("unknown program '{name}'; use one of {}", all()))
    }
}

impl clap::ValueEnum for ProgramKind {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<ProgramKind>> = LazyLock::new(|| TABLE.iter().map(|row| row.kind).collect());
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.flag()).help(self.row().help))
    }
}

impl serde::Serialize for ProgramKind {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_indexed_by_program_kind() {
        assert!(TABLE.iter().enumerate().all(|(place, row)| row.kind as usize == place));
        assert_eq!(ProgramKind::named("refine-prepare"), Ok(ProgramKind::RefinePrepare));
        assert!(ProgramKind::named("diffuse").is_err_and(|e| e.contains("text-encoder, connectors, ")));
    }
}
