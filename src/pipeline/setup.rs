//! From a configuration to devices: how a platform is opened, how programs are built and compiled.

use std::path::Path;
use std::time::Duration;

use super::error::{PipelineError, Result};
use super::origin::Weights;
use super::processes::last_words;
use crate::analysis::Chip;
use crate::config::{self, ActivationType, Config, Dtype, FlagValue, WatchdogWord, WeightType};
use crate::hlo::DType;
use crate::kernels::AttentionKernel;
use crate::media::RoundTrip;
use crate::nn::{Build, Lowering, Numerics, Quantization};
use crate::pjrt::{CudaOptions, OptionValue};
use crate::runtime::processes::Group;
use crate::runtime::{EngineOptions, Toolchain, WaitLimit, Watchdog, platform};

/// How programs are built for a number of devices of a platform (`cpu`, `cuda`, `tpu`), whose plugin calls them `kind`.
///
/// # Errors
/// Errors of layout and mesh.
pub fn build(config: &Config, devices: usize, platform: &str, kind: &str) -> Result<Build> {
    let lowering = Lowering::of(platform, kind);
    let foreign = |kernel| format!("runtime.attention: {kernel}, the platform is {platform}");
    let attention = config.runtime.attention.kernel(lowering.attention);
    let lowering = lowering.with_attention(attention.map_err(|kernel| PipelineError::Usage(foreign(kernel)))?);
    Ok(Build {
        dtype: match config.runtime.dtype {
            Dtype::Bf16 => DType::BF16,
            Dtype::F32 => DType::F32,
        },
        numerics: match config.runtime.numerics {
            config::Numerics::Default => Numerics::Default,
            config::Numerics::Official => Numerics::Official,
        },
        layout: config.placement(devices)?,
        quantization: quantization(config, &lowering, platform)?,
        lowering,
    })
}

/// The same for a plugin's devices. A libtpu that was never tried may refuse attention's kernel, whose text carries no
/// promise, where the configuration does not ask for it.
///
/// # Errors
/// Those of [`build`].
pub(crate) fn build_for(config: &Config, devices: usize, toolchain: &Toolchain) -> Result<Build> {
    let Toolchain { platform, kind, .. } = toolchain;
    let build = build(config, devices, platform, kind)?;
    let untried = platform == "tpu" && toolchain.tested_libtpu().is_none();
    let may_be_refused = untried && config.runtime.attention == AttentionKernel::Auto;
    Ok(Build { lowering: Lowering { attention_may_be_refused: may_be_refused, ..build.lowering }, ..build })
}

/// The chip that times are predicted with: the configuration's, else that of the devices.
///
/// # Errors
/// A file that cannot be read; devices of a kind that no embedded file names.
pub(crate) fn chip(config: &Config, device_kind: &str) -> std::result::Result<Chip, String> {
    let own = config.chip()?;
    own.map_or_else(|| Chip::of_device(device_kind).cloned().map_err(|e| e.to_string()), Ok)
}

/// The H.264 encoder of conditioning images, where there are such, and the configuration with it decided: a repetition
/// elsewhere either has it or says so. Several processes need the same one, each encodes the images for itself.
///
/// # Errors
/// ffmpeg is asked for and not there; processes with different encoders.
pub(crate) fn round_trip(config: &mut Config, group: Option<&Group>) -> Result<Option<RoundTrip>> {
    if config.request.images.iter().all(|image| image.crf(&config.conditioning) == 0) {
        return Ok(None);
    }
    let chosen = RoundTrip::choose(config.conditioning.h264, Path::new("ffmpeg"))?;
    config.conditioning.h264 = chosen.encoder();
    if let Some(group) = group {
        group.ensure_equal(&chosen.to_string(), |name, its, first| {
            format!("{name} puts images through H.264 by {its}, process 0 by {first}; set conditioning.h264 to builtin")
        })?;
    }
    Ok(Some(chosen))
}

/// The part of a CUDA device's memory that is taken where nothing is said: a model of 62 GiB and its programs fit a card of
/// 80 GB. The rest is for the driver, for code and for what libraries take themselves.
const MEMORY_FRACTION: f32 = 0.9;

/// Options of the platform, for one of several processes or for a process alone.
///
/// # Errors
/// No such layout, or a mesh that cannot be meant.
pub(crate) fn platform_options(config: &Config, group: Option<&Group>) -> Result<platform::Options> {
    let fraction = Some(config.runtime.memory_fraction.unwrap_or(MEMORY_FRACTION));
    let each = config.runtime.distributed.devices_per_process.zip(group);
    let shared =
        each.map(|(n, group)| (group.local_rank() * n..(group.local_rank() + 1) * n).map(|i| i as i64).collect());
    let visible = config.runtime.visible_devices.clone().or(shared);
    Ok(platform::Options {
        node: group.map(Group::node),
        trial: trial_limit(config),
        cpu_devices: Some(config.virtual_devices()?),
        cuda: CudaOptions { memory_fraction: fraction, visible_devices: visible, ..CudaOptions::default() },
    })
}

/// Refuses flags of the environment that the plugin of a configuration does not know, without starting it.
///
/// # Errors
/// Such a flag.
pub(crate) fn check_flags(config: &Config) -> Result<()> {
    let choice = config.platform().map_err(PipelineError::Input)?;
    let options = platform::Options { trial: trial_limit(config), ..platform::Options::default() };
    Ok(platform::check_flags(&choice, &options)?)
}

/// Time for the trial of a new plugin file, where the configuration sets one.
fn trial_limit(config: &Config) -> Option<Duration> {
    match config.runtime.watchdog {
        config::Watchdog::Word(WatchdogWord::Auto) => None,
        config::Watchdog::Word(WatchdogWord::Off) => Some(Duration::MAX),
        config::Watchdog::Seconds(seconds) => Some(Duration::from_secs(seconds)),
    }
}

/// How a platform multiplies the transformer's blocks.
///
/// # Errors
/// 8-bit floats on a platform whose layers cannot differ.
fn quantization(config: &Config, lowering: &Lowering, platform: &str) -> Result<Quantization> {
    match (config.runtime.weights, config.runtime.activations) {
        (WeightType::Int8, activations) => Ok(Quantization::Int8 { activations: activations == ActivationType::Int8 }),
        (_, ActivationType::Int8) => Err(PipelineError::Usage(
            "runtime.activations: int8 is multiplied with integers only; set runtime.weights to int8 too".into(),
        )),
        (WeightType::Bf16, _) => Ok(Quantization::None),
        (WeightType::Fp8, _) if lowering.unroll_layers => Ok(Quantization::Fp8),
        (WeightType::Fp8, _) => Err(PipelineError::Usage(format!(
            "runtime.weights: fp8 is CUDA's, the platform is {platform}; int8 is everyone's"
        ))),
    }
}

/// Says what the transformer's blocks run in, and what the checkpoint has.
///
/// # Errors
/// The transformer's files cannot be read.
pub(crate) fn log_weights(weights: WeightType, stored: &Weights) -> Result<()> {
    let weights = match weights {
        WeightType::Bf16 => "bf16",
        WeightType::Fp8 => "fp8",
        WeightType::Int8 => "int8",
    };
    tracing::info!("blocks of the transformer: runtime.weights {weights}; the model has {}", stored.describe_blocks()?);
    Ok(())
}

/// How programs are compiled.
pub(crate) fn engine_options(config: &Config) -> EngineOptions {
    let flag = |value: &FlagValue| match value {
        FlagValue::Bool(v) => OptionValue::Bool(*v),
        FlagValue::Int(v) => OptionValue::Int(*v),
        FlagValue::Float(v) => OptionValue::Float(*v),
        FlagValue::Text(v) => OptionValue::Text(v.clone()),
    };
    EngineOptions {
        xla_flags: config.runtime.xla_flags.iter().map(|(n, v)| (n.clone(), flag(v))).collect(),
        compile_cache: config.compile_cache(),
        write_behind: None,
        traceable: false,
        watchdog: watchdog(config),
    }
}

/// The watchdog over executions and transfers.
fn watchdog(config: &Config) -> Watchdog {
    let limit = match config.runtime.watchdog {
        config::Watchdog::Word(WatchdogWord::Off) => return Watchdog::default(),
        config::Watchdog::Word(WatchdogWord::Auto) => WaitLimit::Auto,
        config::Watchdog::Seconds(seconds) => WaitLimit::Fixed(Duration::from_secs(seconds)),
    };
    let say = |message: &str, going_on: Option<&str>| {
        going_on.iter().for_each(|line| tracing::info!("{line}"));
        last_words(message);
    };
    Watchdog::new(limit, Box::new(say))
}
