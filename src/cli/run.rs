//! `ltx2 run`: one component on given tensors.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, bail};

use crate::dtype::DType;
use crate::nn::{Layout, Numerics};
use crate::pipeline::run::{RunComponent, Scalars, run_component};
use crate::pipeline::stages::Stages;
use crate::pipeline::text_to_video::Settings;
use crate::runtime::{Engine, EngineOptions, platform};
use crate::tensor::Tensor;
use crate::weights::{Checkpoint, ModelSource, Overrides};

/// Runs one component on the tensors of a safetensors file, under the reference's argument names.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  ltx2 run transformer --model models/nano --inputs in.safetensors -o out.safetensors --set num_frames=4 --set height=5 --set width=8
  ltx2 run vocoder --model models/nano --inputs mel.safetensors -o audio.safetensors --dtype f32")]
pub struct Args {
    /// What to run.
    #[arg(value_enum)]
    component: RunComponent,
    /// A model: diffusers folder, single file, or org/name in the local Hugging Face cache.
    #[arg(long)]
    model: String,
    /// A text encoder from elsewhere.
    #[arg(long)]
    text_encoder: Option<String>,
    /// Input tensors (safetensors).
    #[arg(long)]
    inputs: PathBuf,
    /// Where the results go (safetensors).
    #[arg(short, long)]
    output: PathBuf,
    /// Platform: auto, cpu, cuda, tpu, or a plugin's path.
    #[arg(long, default_value = "auto")]
    platform: String,
    /// Weights and activations.
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16"])]
    dtype: String,
    /// Rounding order of bf16 where the references differ.
    #[arg(long, default_value = "default", value_parser = ["default", "official"])]
    numerics: String,
    /// Scalars of the reference's call, e.g. `fps=24`.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Overwrites the output file.
    #[arg(long)]
    force: bool,
}

/// Runs the command.
///
/// # Errors
/// What is wrong with inputs, model or device.
pub fn run(args: &Args) -> anyhow::Result<()> {
    if args.output.exists() && !args.force {
        bail!("{} exists; give --force to overwrite it", args.output.display());
    }
    let scalars = parse_scalars(&args.set)?;
    let tensors = read_tensors(&args.inputs)?;
    let overrides = Overrides { text_encoder: args.text_encoder.clone(), ..Overrides::default() };
    let source = Rc::new(ModelSource::open(&args.model, &overrides)?);
    let (_, client) = platform::open(&args.platform, None)?;
    let mut stages = Stages::new(Engine::new(client, EngineOptions::default()), source.clone());
    let settings = Settings {
        dtype: if args.dtype == "f32" { DType::F32 } else { DType::BF16 },
        numerics: if args.numerics == "official" { Numerics::Official } else { Numerics::Default },
        layout: Layout::default(),
        chunk: None,
    };
    let results = run_component(args.component, &source, &mut stages, tensors, &scalars, &settings)?;
    write_tensors(&args.output, &results)?;
    println!("{}", args.output.display());
    Ok(())
}

fn parse_scalars(set: &[String]) -> anyhow::Result<Scalars> {
    set.iter()
        .map(|pair| {
            let (key, value) = pair.split_once('=').with_context(|| format!("--set {pair}: use KEY=VALUE"))?;
            let json = match value {
                "True" => serde_json::Value::Bool(true),
                "False" => serde_json::Value::Bool(false),
                v => serde_json::from_str(v).unwrap_or_else(|_| serde_json::Value::String(v.to_string())),
            };
            Ok((key.to_string(), json))
        })
        .collect()
}

fn read_tensors(path: &Path) -> anyhow::Result<BTreeMap<String, Tensor>> {
    let file = Checkpoint::open(path)?;
    file.names().map(|name| Ok((name.to_string(), file.get(name)?.to_tensor()?))).collect()
}

/// Writes tensors as a safetensors file, atomically.
///
/// # Errors
/// The file that cannot be written.
pub fn write_tensors(path: &Path, tensors: &[(String, Tensor)]) -> anyhow::Result<()> {
    let bytes: Vec<_> = tensors.iter().map(|(n, t)| (n, t.shape().to_vec(), t.dtype(), t.bytes())).collect();
    let views = bytes
        .iter()
        .map(|(name, shape, dtype, data)| {
            let dtype = match dtype {
                DType::BF16 => safetensors::Dtype::BF16,
                DType::I32 => safetensors::Dtype::I32,
                DType::I64 => safetensors::Dtype::I64,
                _ => safetensors::Dtype::F32,
            };
            Ok((name.as_str(), safetensors::tensor::TensorView::new(dtype, shape.clone(), data)?))
        })
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    let file = safetensors::serialize(views, None)?;
    crate::media::write_atomically(path, &file).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(())
}
