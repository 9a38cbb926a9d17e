//! `ltx2 run`: runs one component on given tensors.

use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use serde::de::DeserializeOwned;

use super::args::{ComponentArgs, files, platform_help};
use super::{UsageError, check_output_file, print};

use crate::config::{ActivationType, Config, Dtype, Model, Numerics, Runtime, WeightSource, WeightType, parse_mesh};
use crate::pipeline::output::tensors;
use crate::pipeline::plan::loras::Loras;
use crate::pipeline::plan::{origin, setup};
use crate::pipeline::programs::component::{Scalars, run_component};
use crate::pipeline::programs::configs::ModelConfigs;
use crate::pipeline::programs::executor::Executor;
use crate::pipeline::programs::parameters::check_files;
use crate::pipeline::programs::{PROGRAMS, ProgramKind};
use crate::runtime::{Engine, platform};

/// Runs one component. Its input tensors come from a safetensors file and are named like the arguments of the reference
/// implementation.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  ltx2 run transformer --model models/nano --inputs in.safetensors -o out.safetensors --set num_frames=4 --set height=5 --set width=8
  ltx2 run vocoder --model models/nano --inputs mel.safetensors -o audio.safetensors --dtype f32")]
pub(crate) struct RunFileArgs {
    /// Component to run.
    #[arg(value_parser = components())]
    component: ProgramKind,
    /// Model: diffusers folder, folder of single files, single file, or org/name in the local Hugging Face cache.
    #[arg(long)]
    model: String,
    #[command(flatten)]
    components: ComponentArgs,
    /// Source of the weights: files, or random numbers generated on the device; same as `--set model.weights=random`.
    #[arg(long, value_name = "FROM")]
    weights: Option<WeightSource>,
    /// LoRA file and its strength [default: 1]; repeatable.
    #[arg(long, value_name = "FILE[=STRENGTH]")]
    lora: Vec<String>,
    /// Safetensors file with the input tensors.
    #[arg(long)]
    inputs: PathBuf,
    /// Safetensors file to write the output tensors to.
    #[arg(short, long)]
    output: PathBuf,
    #[arg(long, default_value = "auto", help = platform_help())]
    platform: String,
    /// Data type of weights and activations.
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16"])]
    dtype: String,
    /// Rounding order of bf16 where the reference implementations differ.
    #[arg(long, default_value = "default", value_parser = ["default", "official"])]
    numerics: String,
    /// Layout, which maps logical tensor axes to mesh axes: a YAML file or the name of a shipped layout.
    #[arg(long, default_value = "replicated")]
    layout: String,
    /// Devices per mesh axis, e.g. `cfg=2,context=4` [default: the layout's mesh].
    #[arg(long)]
    mesh: Option<String>,
    /// Sets a scalar argument of the component, e.g. `fps=24`, or a key such as `runtime.weights=int8` or
    /// `model.lora_merge=exact`; repeatable.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Overwrites an existing output file.
    #[arg(long)]
    force: bool,
}

fn components() -> impl TypedValueParser<Value = ProgramKind> {
    let value = |kind: ProgramKind, help| PossibleValue::new(kind.flag()).help(help);
    let values = PROGRAMS.iter().filter_map(|program| Some(value(program.kind, program.single_run.as_ref()?.help)));
    PossibleValuesParser::new(values).try_map(|name| ProgramKind::named(&name))
}

pub(crate) fn run(args: &RunFileArgs) -> anyhow::Result<()> {
    check_output_file("--output", Some(&args.output), &["safetensors"], args.force)?;
    let mut scalars = parse_scalars(&args.set)?;
    let mesh = args.mesh.as_deref().map(parse_mesh).transpose()?;
    let runtime = Runtime {
        dtype: if args.dtype == "f32" { Dtype::F32 } else { Dtype::Bf16 },
        numerics: if args.numerics == "official" { Numerics::Official } else { Numerics::Default },
        weights: key(&mut scalars, "runtime.weights")?.unwrap_or(WeightType::Bf16),
        activations: key(&mut scalars, "runtime.activations")?.unwrap_or(ActivationType::Bf16),
        ..Runtime::default()
    };
    let placed = Config { layout: args.layout.clone(), mesh, runtime, ..Config::default() };
    let devices = placed.virtual_devices()?;
    let tensors = tensors::read(&args.inputs)?;
    let model = Model {
        path: args.model.clone(),
        loras: serde_json::from_value(files(&args.lora))?,
        lora_merge: key(&mut scalars, "model.lora_merge")?.unwrap_or_default(),
        weights: args.weights.or(key(&mut scalars, "model.weights")?).unwrap_or(WeightSource::File),
        ..args.components.model()
    };
    let placed = Config { model, ..placed };
    let (origin, weights) = origin::sources(&placed)?;
    let configs = ModelConfigs::from(origin);
    check_files(&configs, &weights, [args.component.declaration().component])?;
    let options = setup::engine_options(&placed);
    options.watchdog.report_aborts();
    let (_, client) = platform::open(&args.platform.parse().map_err(UsageError)?, Some(devices))?;
    if args.component == ProgramKind::Transformer {
        setup::log_weights(&placed.runtime, &weights)?;
    }
    let loras = Loras::open(&placed.model)?;
    loras.check(&weights, &configs)?;
    let mut executor = Executor::new(Engine::new(client, options), weights);
    executor.keep_loras(loras)?;
    let build = setup::build_for(&placed, executor.engine().devices().len(), executor.engine().toolchain())?;
    let results = run_component(args.component, &configs, &mut executor, tensors, &scalars, &build)?;
    tensors::write(&args.output, &results)?;
    print(&format!("{}\n", args.output.display()))
}

/// Removes a configuration key from the scalars of `--set` and parses its value.
fn key<T: DeserializeOwned>(scalars: &mut Scalars, name: &str) -> anyhow::Result<Option<T>> {
    let set = scalars.remove(name).map(serde_json::from_value).transpose();
    Ok(set.map_err(|e| UsageError(format!("--set {name}: {e}")))?)
}

fn parse_scalars(set: &[String]) -> anyhow::Result<Scalars> {
    set.iter()
        .map(|pair| {
            let (key, value) =
                pair.split_once('=').ok_or_else(|| UsageError(format!("--set {pair}: expected KEY=VALUE")))?;
            let json = match value {
                "True" => serde_json::Value::Bool(true),
                "False" => serde_json::Value::Bool(false),
                v => serde_json::from_str(v).unwrap_or_else(|_| serde_json::Value::String(v.to_string())),
            };
            Ok((key.to_string(), json))
        })
        .collect()
}
