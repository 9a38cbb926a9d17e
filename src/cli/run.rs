//! `ltx2 run`: one component on given tensors.

use std::path::PathBuf;

use super::{UsageError, print};

use crate::config::{Config, Model, WeightSource, parse_mesh};
use crate::dtype::DType;
use crate::nn::{Build, Lowering, Numerics};
use crate::pipeline::models::Parts;
use crate::pipeline::origin;
use crate::pipeline::run::{RunComponent, Scalars, run_component};
use crate::pipeline::stages::Stages;
use crate::pipeline::tensors;
use crate::runtime::{Engine, EngineOptions, platform};

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
    /// Weights from the files, or random ones made on the device; also as `--set model.weights=random`.
    #[arg(long, value_name = "FROM")]
    weights: Option<WeightSource>,
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
    /// How tensors are spread over the mesh: a YAML file, or the name of one that is shipped.
    #[arg(long, default_value = "replicated")]
    layout: String,
    /// Devices along each axis, e.g. `cfg=2,context=4`; the layout's own if not given.
    #[arg(long)]
    mesh: Option<String>,
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
        let message = format!("{} exists; give --force to overwrite it", args.output.display());
        return Err(UsageError(message).into());
    }
    let mut scalars = parse_scalars(&args.set)?;
    let mesh = args.mesh.as_deref().map(parse_mesh).transpose()?;
    let placed = Config { layout: args.layout.clone(), mesh, ..Config::default() };
    let devices = placed.virtual_devices()?;
    let tensors = tensors::read(&args.inputs)?;
    let model = Model {
        path: args.model.clone(),
        text_encoder: args.text_encoder.clone(),
        weights: weights(args.weights, &mut scalars)?,
        ..Model::default()
    };
    let placed = Config { model, ..placed };
    let (origin, weights) = origin::of_run(&placed)?;
    let parts = Parts::from(origin);
    let (_, client) = platform::open(&args.platform.parse().map_err(UsageError)?, Some(devices))?;
    let mut stages = Stages::new(Engine::new(client, EngineOptions::default()), weights);
    let build = Build {
        dtype: if args.dtype == "f32" { DType::F32 } else { DType::BF16 },
        numerics: if args.numerics == "official" { Numerics::Official } else { Numerics::Default },
        layout: placed.placement(stages.engine().devices().len())?,
        lowering: Lowering::of(&stages.engine().platform(), stages.engine().devices()[0].kind()),
    };
    let results = run_component(args.component, &parts, &mut stages, tensors, &scalars, &build)?;
    tensors::write(&args.output, &results)?;
    print(&format!("{}\n", args.output.display()))
}

/// Where weights come from: a key of the YAML that stands among the scalars, under the flag.
fn weights(flag: Option<WeightSource>, scalars: &mut Scalars) -> anyhow::Result<WeightSource> {
    let set = scalars.remove("model.weights").map(serde_json::from_value).transpose();
    let set = set.map_err(|e| UsageError(format!("--set model.weights: {e}")))?;
    Ok(flag.or(set).unwrap_or(WeightSource::File))
}

fn parse_scalars(set: &[String]) -> anyhow::Result<Scalars> {
    set.iter()
        .map(|pair| {
            let (key, value) =
                pair.split_once('=').ok_or_else(|| UsageError(format!("--set {pair}: use KEY=VALUE")))?;
            let json = match value {
                "True" => serde_json::Value::Bool(true),
                "False" => serde_json::Value::Bool(false),
                v => serde_json::from_str(v).unwrap_or_else(|_| serde_json::Value::String(v.to_string())),
            };
            Ok((key.to_string(), json))
        })
        .collect()
}
