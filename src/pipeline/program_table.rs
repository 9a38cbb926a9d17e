//! Every program, a row each: what commands, reports and timings iterate over.

use std::sync::LazyLock;

use clap::builder::PossibleValue;

use super::component_inputs::{self as inputs, Ready, ReferenceArguments};
use super::configs::ModelConfigs;
use super::error::Result;
use super::program_spec::{self as spec, ProgramSpec};
use super::transformer_inputs;
use crate::models::Network;
use crate::models::connectors::Input;
use crate::models::transformer::{self, ForwardShape};
use crate::models::video_vae::Pixels;
use crate::nn::Build;
use crate::weights::Component;

/// A program. Those of a run are in the order of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
#[allow(missing_docs)] // Described in the table.
pub enum ProgramKind {
    TextEncoder,
    Connectors,
    VideoEncoder,
    Prepare,
    #[default]
    Denoise,
    Upsampler,
    RefinePrepare,
    Refine,
    VideoDecoder,
    AudioDecoder,
    Vocoder,
    Transformer,
}

/// Requests whose run has a program.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Runs {
    Always,
    /// With two passes.
    TwoPasses,
    /// With image conditioning.
    Images,
    /// None: it runs alone.
    Alone,
}

/// How a program runs without the others, on the reference's arguments.
pub struct SingleRun {
    /// Tensors in and out, for the command line.
    pub help: &'static str,
    /// Scalars it takes.
    pub(super) scalars: &'static [&'static str],
    /// Program and inputs of the arguments.
    pub(super) inputs: fn(&mut ReferenceArguments) -> Result<Ready>,
    /// The smallest program that declares all parameters.
    pub(super) smallest: fn(&ModelConfigs, &Build) -> Result<Network>,
}

/// A program's row.
pub struct ProgramRow {
    /// Identity.
    pub kind: ProgramKind,
    /// Name in sidecars, reports and JSON; with hyphens on the command line.
    pub name: &'static str,
    /// One line for the command line.
    pub help: &'static str,
    /// Checkpoint folder of most of its parameters.
    pub part: Component,
    /// Phase that it is timed with, by the program that phase is named after.
    pub phase: ProgramKind,
    has_blocks: bool,
    /// Whether its sizes are the last pass', of two.
    pub(super) last_pass: bool,
    pub(super) runs: Runs,
    pub(super) write: fn(&ProgramSpec) -> Result<Network>,
    /// How `ltx2 run` runs it, where it does.
    pub alone: Option<SingleRun>,
}

/// All programs, at the places of their kinds.
pub static TABLE: [ProgramRow; 12] = [
    ProgramRow {
        alone: Some(SingleRun {
            help: "`input_ids`, `attention_mask` to `prompt_embeds`",
            scalars: &["output_hidden_states"],
            inputs: inputs::text_encoder,
            smallest: |c, build| c.text_encoder_program(1, 8, false, build),
        }),
        ..row(
            ProgramKind::TextEncoder,
            "text_encoder",
            "Prompts to embeddings, all prompts in one pass",
            Component::TextEncoder,
            spec::text_encoder,
        )
    },
    ProgramRow {
        alone: Some(SingleRun {
            help: "`prompt_embeds` or `text_encoder_hidden_states`, `attention_mask` to `video`, `audio`",
            scalars: &[],
            inputs: inputs::connectors,
            smallest: |c, build| c.connectors_program(1, c.connectors()?.token_multiple(), Input::HiddenStates, build),
        }),
        ..row(
            ProgramKind::Connectors,
            "connectors",
            "Embeddings to the transformer's contexts",
            Component::Connectors,
            spec::connectors,
        )
    },
    ProgramRow {
        phase: ProgramKind::Denoise,
        runs: Runs::Images,
        alone: Some(SingleRun {
            help: "`video` to `latents`",
            scalars: &[],
            inputs: inputs::video_encoder,
            smallest: |c, build| {
                let v = c.video_vae()?;
                c.video_encoder_program([1, 0, 1 + v.temporal(), 4 * v.spatial(), 4 * v.spatial()], build)
            },
        }),
        ..row(ProgramKind::VideoEncoder, "video_encoder", "Frames to latents", Component::Vae, spec::video_encoder)
    },
    ProgramRow {
        phase: ProgramKind::Denoise,
        has_blocks: true,
        ..row(
            ProgramKind::Prepare,
            "prepare",
            "Step-invariant inputs of the denoising loop",
            Component::Transformer,
            spec::prepare,
        )
    },
    ProgramRow {
        has_blocks: true,
        ..row(
            ProgramKind::Denoise,
            "denoise",
            "Denoising loop; of two passes, the first's",
            Component::Transformer,
            spec::denoise,
        )
    },
    ProgramRow {
        runs: Runs::TwoPasses,
        alone: Some(SingleRun {
            help: "`latents` to larger `latents`, both un-normalised",
            scalars: &[],
            inputs: inputs::upsampler,
            smallest: |c, build| c.upsampler_program([1, 0, 2, 4, 4], build),
        }),
        ..row(
            ProgramKind::Upsampler,
            "upsampler",
            "Latents to larger latents, between two passes",
            Component::LatentUpsampler,
            spec::upsampler,
        )
    },
    ProgramRow {
        phase: ProgramKind::Refine,
        has_blocks: true,
        // Both passes encode image conditioning at their own sizes.
        last_pass: true,
        runs: Runs::TwoPasses,
        ..row(
            ProgramKind::RefinePrepare,
            "refine_prepare",
            "Step-invariant inputs of the second pass' loop",
            Component::Transformer,
            spec::prepare,
        )
    },
    ProgramRow {
        has_blocks: true,
        last_pass: true,
        runs: Runs::TwoPasses,
        ..row(ProgramKind::Refine, "refine", "Denoising loop of the second pass", Component::Transformer, spec::denoise)
    },
    ProgramRow {
        last_pass: true,
        alone: Some(SingleRun {
            help: "`latents` to `video`",
            scalars: &[],
            inputs: inputs::video_decoder,
            smallest: |c, build| c.video_decoder_program([1, 0, 1, 4, 4], Pixels::Values, build),
        }),
        ..row(ProgramKind::VideoDecoder, "video_decoder", "Latents to frames", Component::Vae, spec::video_decoder)
    },
    ProgramRow {
        alone: Some(SingleRun {
            help: "`latents` to `mel`",
            scalars: &[],
            inputs: inputs::audio_decoder,
            smallest: |c, build| c.audio_decoder_program([1, 0, 2, c.audio_vae()?.latent_bins()], build),
        }),
        ..row(
            ProgramKind::AudioDecoder,
            "audio_decoder",
            "Latents to mel spectrogram",
            Component::AudioVae,
            spec::audio_decoder,
        )
    },
    ProgramRow {
        phase: ProgramKind::AudioDecoder,
        alone: Some(SingleRun {
            help: "`mel` to `audio`",
            scalars: &["clamp"],
            inputs: inputs::vocoder,
            // One channel as wide as all: only the product of channels and bins counts.
            smallest: |c, build| c.vocoder_program([1, 1, 8, c.vocoder()?.generator.in_channels], build),
        }),
        ..row(ProgramKind::Vocoder, "vocoder", "Mel spectrogram to samples", Component::Vocoder, spec::vocoder)
    },
    ProgramRow {
        has_blocks: true,
        runs: Runs::Alone,
        alone: Some(SingleRun {
            help: "`hidden_states`, `encoder_hidden_states`, `timestep` … to `video`, `audio`",
            scalars: transformer_inputs::SCALARS,
            inputs: transformer_inputs::transformer,
            smallest: |c, build| {
                let c = c.transformer()?;
                let text_channels = match c.use_prompt_embeddings {
                    true => [c.caption_channels; 2],
                    false => [c.cross_attention_dim, c.audio_cross_attention_dim],
                };
                let shape = ForwardShape { text_channels: text_channels.into(), ..ForwardShape::default() };
                Ok(transformer::program(&c, &shape, build)?)
            },
        }),
        ..row(
            ProgramKind::Transformer,
            "transformer",
            "One forward pass on the reference's arguments",
            Component::Transformer,
            spec::transformer,
        )
    },
];

/// A program of every run, timed by itself.
const fn row(
    kind: ProgramKind,
    name: &'static str,
    help: &'static str,
    part: Component,
    write: fn(&ProgramSpec) -> Result<Network>,
) -> ProgramRow {
    let (has_blocks, last_pass, runs) = (false, false, Runs::Always);
    ProgramRow { kind, name, help, part, phase: kind, has_blocks, last_pass, runs, write, alone: None }
}

impl ProgramKind {
    /// Its row.
    pub fn row(self) -> &'static ProgramRow {
        &TABLE[self as usize]
    }

    /// Name in sidecars, reports and JSON.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Name in tables for readers.
    pub fn label(self) -> String {
        self.name().replace('_', " ")
    }

    /// Name on the command line.
    pub fn flag(self) -> &'static str {
        static FLAGS: LazyLock<Vec<String>> =
            LazyLock::new(|| TABLE.iter().map(|row| row.name.replace('_', "-")).collect());
        &FLAGS[self as usize]
    }

    /// Whether it runs the transformer's blocks.
    pub fn has_blocks(self) -> bool {
        self.row().has_blocks
    }

    /// The program that the command line names so.
    ///
    /// # Errors
    /// No such program; all there are.
    pub fn named(name: &str) -> std::result::Result<Self, String> {
        let all = || TABLE.iter().map(|row| row.kind.flag()).collect::<Vec<_>>().join(", ");
        let row = TABLE.iter().find(|row| row.kind.flag() == name);
        row.map(|row| row.kind).ok_or_else(|| format!("no program '{name}'; there are {}", all()))
    }

    /// Programs that phases of a run are named after, in order.
    pub fn phases() -> impl Iterator<Item = Self> {
        TABLE.iter().filter(|row| row.phase == row.kind && row.runs != Runs::Alone).map(|row| row.kind)
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
    fn rows_are_at_the_places_of_their_kinds() {
        assert!(TABLE.iter().enumerate().all(|(place, row)| row.kind as usize == place));
        assert_eq!(ProgramKind::named("refine-prepare"), Ok(ProgramKind::RefinePrepare));
        assert!(ProgramKind::named("diffuse").is_err_and(|e| e.contains("text-encoder, connectors, ")));
        let phases: Vec<&str> = ProgramKind::phases().map(ProgramKind::name).collect();
        let all = ["text_encoder", "connectors", "denoise", "upsampler", "refine", "video_decoder", "audio_decoder"];
        assert_eq!(phases, all);
    }
}
