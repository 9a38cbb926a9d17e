//! The programs of a run, one per file. Each file declares when a run executes the program, for which sizes and how it
//! is built, how it is called, and its inputs in `ltx2 run`. `PROGRAMS` lists all programs.

mod audio_decoder;
mod audio_encoder;
pub(in crate::pipeline) mod background_load;
pub mod build;
pub mod call;
pub mod compile;
pub mod component;
pub mod configs;
mod connectors;
pub(crate) mod denoise;
mod diffusion_decoder;
mod duration_head;
pub mod executor;
pub(in crate::pipeline) mod files;
pub mod init;
pub mod parameters;
mod prepare;
pub(crate) mod prompt_enhancer;
mod temporal_upsampler;
mod text_encoder;
mod transformer;
mod upsampler;
mod video_decoder;
mod video_encoder;
mod vocoder;
pub mod warm;

use std::sync::LazyLock;

use clap::builder::PossibleValue;

use self::build::{ProgramSpec, Programs};
use self::call::Call;
use self::component::{NamedInputs, Ready, ReferenceArguments, SingleRun};
use self::configs::ModelConfigs;
use self::executor::Inputs;
use super::error::{PipelineError, Result};
use super::phase::Phase;
use crate::models::Network;
use crate::nn::Build;
use crate::request::Request;
use crate::weights::Component;

/// A program. The variants are in the order in which a run executes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum ProgramKind {
    PromptEnhancer,
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

/// All programs, indexed by [`ProgramKind`]. Commands, reports and timings iterate over them.
pub(crate) static PROGRAMS: [&ProgramDeclaration; 22] = [
    &prompt_enhancer::PROMPT_ENHANCER,
    &text_encoder::TEXT_ENCODER,
    &connectors::CONNECTORS,
    &duration_head::DURATION_HEAD,
    &video_encoder::VIDEO_ENCODER,
    &audio_encoder::AUDIO_ENCODER,
    &prepare::PREPARE,
    &denoise::DENOISE,
    &upsampler::UPSAMPLER,
    &upsampler::FRAME_UPSAMPLER,
    &upsampler::KEYFRAME_UPSAMPLER,
    &prepare::REFINE_PREPARE,
    &denoise::REFINE,
    &temporal_upsampler::TEMPORAL_UPSAMPLER,
    &prepare::ROUND_PREPARE,
    &denoise::ROUND,
    &video_decoder::VIDEO_DECODER,
    &diffusion_decoder::DIFFUSION_FEATURES,
    &diffusion_decoder::DIFFUSION_DECODER,
    &audio_decoder::AUDIO_DECODER,
    &vocoder::VOCODER,
    &transformer::TRANSFORMER,
];

/// Static description of a program kind: its names, component and phase, and the functions that decide whether it runs
/// and build it.
pub(crate) struct ProgramDeclaration {
    pub(crate) kind: ProgramKind,
    /// Name in sidecars, reports and JSON. On the command line, the name is written with hyphens.
    pub(crate) name: &'static str,
    /// Help text of the command line: one line.
    pub(crate) help: &'static str,
    /// Component to which most of the program's parameters belong.
    pub(crate) component: Component,
    /// Phase to which the program's time is added.
    pub(crate) phase: Phase,
    /// Returns whether a run executes the program.
    runs: fn(&Programs) -> bool,
    /// Returns the request with the program's sizes. If the run does not have the program, the error names what the
    /// program needs.
    request: fn(&Programs) -> std::result::Result<&Request, &'static str>,
    network: fn(&ProgramSpec) -> Result<Network>,
    /// Description of the program for `ltx2 run`. `None`: `ltx2 run` does not support the program.
    pub(crate) single_run: Option<SingleRun>,
}

impl ProgramKind {
    pub(crate) fn declaration(self) -> &'static ProgramDeclaration {
        PROGRAMS[self as usize]
    }

    /// Returns the pass (1 or 2) whose LoRAs apply to the program. Temporal rounds use those of the first pass.
    pub(crate) fn pass(self) -> u8 {
        if matches!(self, ProgramKind::Refine | ProgramKind::RefinePrepare) { 2 } else { 1 }
    }

    /// Returns the name that sidecars, reports and JSON use.
    pub fn name(self) -> &'static str {
        self.declaration().name
    }

    /// Returns the name that the command line uses.
    pub(crate) fn flag(self) -> &'static str {
        static FLAGS: LazyLock<Vec<String>> =
            LazyLock::new(|| PROGRAMS.iter().map(|program| program.name.replace('_', "-")).collect());
        &FLAGS[self as usize]
    }

    /// Returns the program with this command-line name. The error lists all names.
    pub(crate) fn named(name: &str) -> std::result::Result<Self, String> {
        let all = || PROGRAMS.iter().map(|program| program.kind.flag()).collect::<Vec<_>>().join(", ");
        let program = PROGRAMS.iter().find(|program| program.kind.flag() == name);
        program.map(|program| program.kind).ok_or_else(|| format!("unknown program '{name}'; use one of {}", all()))
    }
}

impl clap::ValueEnum for ProgramKind {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<ProgramKind>> =
            LazyLock::new(|| PROGRAMS.iter().map(|program| program.kind).collect());
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.flag()).help(self.declaration().help))
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
    fn programs_are_indexed_by_kind() {
        assert!(PROGRAMS.iter().enumerate().all(|(place, program)| program.kind as usize == place));
        assert_eq!(ProgramKind::named("refine-prepare"), Ok(ProgramKind::RefinePrepare));
        assert!(ProgramKind::named("diffuse").is_err_and(|e| e.contains("text-encoder, connectors, ")));
    }
}
