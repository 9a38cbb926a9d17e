//! `ltx2 init`: writes a model with random weights.

use std::path::PathBuf;

use anyhow::Context;

use crate::hlo::DType;
use crate::models::presets::Preset;
use crate::pipeline::programs::init::init;

use super::print;

/// Writes a model with random weights in the diffusers layout.
#[derive(clap::Args, Debug)]
pub(crate) struct InitArgs {
    /// Sizes of the model: `nano`, `nano_2_3` and `nano_2_5` run on a laptop; `ltx2` is the published 19B model (76 GB
    /// in f32), `ltx2_3` and `ltx2_5` are the 22B models.
    #[arg(long, default_value = "nano", value_parser = clap::builder::PossibleValuesParser::new(Preset::names()))]
    preset: String,
    /// Random seed of the weights.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Data type of the written tensors.
    #[arg(long, default_value = "bf16", value_parser = ["bf16", "f32"])]
    dtype: String,
    /// Folder to write; must be new or empty.
    dir: PathBuf,
}

pub(crate) fn run(args: &InitArgs) -> anyhow::Result<()> {
    let preset = Preset::named(&args.preset).with_context(|| format!("unknown preset '{}'", args.preset))?;
    let dtype = if args.dtype == "f32" { DType::F32 } else { DType::BF16 };
    let written = init(&preset, args.seed, &args.dir, dtype)?;
    tracing::info!(
        "random '{}' model: {} parameters, {:.1} MiB",
        args.preset,
        written.parameters,
        written.bytes as f64 / 1048576.0
    );
    print(&format!("{}\n", args.dir.display()))
}
