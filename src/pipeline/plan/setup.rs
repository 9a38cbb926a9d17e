//! Derives the options of the platform, the programs and the engine from a configuration.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::origin::{CONVROT_COMPONENTS, Weights};
use crate::analysis::Chip;
use crate::config::{
    self, ActivationType, Config, Dtype, FlagValue, LayerForm, WatchdogWord, WeightStreaming, WeightType,
};
use crate::hlo::DType;
use crate::kernels::AttentionKernel;
use crate::nn::{Build, Lowering, Quantization, RoundingPoints, Streaming};
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::processes::report_exit;
use crate::pjrt::discover::Platform;
use crate::pjrt::{GpuOptions, OptionValue};
use crate::runtime::platforms::{self, PlatformSpec, alternatives};
use crate::runtime::processes::Group;
use crate::runtime::{DeviceWatchdog, EngineOptions, Toolchain, WaitLimit, platform};
use crate::weights::Component;

/// Returns the options with which programs are built for `devices` devices of a platform. `kind`: the device kind that
/// the plugin reports.
///
/// # Errors
/// Returns an error if the platform does not support the layout, the mesh, the attention kernel or a number format.
pub fn build(config: &Config, devices: usize, platform: &str, kind: &str) -> Result<Build> {
    build_on(config, devices, &Toolchain::of_kind(platform, kind))
}

fn build_on(config: &Config, devices: usize, toolchain: &Toolchain) -> Result<Build> {
    let (spec, platform) = (toolchain.spec(), toolchain.platform.as_str());
    let lowering = (spec.lowering)(toolchain);
    let foreign = |why| {
        let capability = toolchain.compute_capability.as_ref().map(|own| format!(" with compute capability {own}"));
        format!("runtime.attention: {why}, but the platform is {platform}{}; use auto", capability.unwrap_or_default())
    };
    let attention = config.runtime.attention.kernel(lowering.attention);
    let lowering = lowering.with_attention(attention.map_err(|why| PipelineError::Usage(foreign(why)))?);
    Ok(Build {
        dtype: match config.runtime.dtype {
            Dtype::Bf16 => DType::BF16,
            Dtype::F32 => DType::F32,
        },
        numerics: match config.runtime.numerics {
            config::Numerics::Default => RoundingPoints::Default,
            config::Numerics::Official => RoundingPoints::Official,
        },
        layout: config.placement(devices)?,
        quantization: quantization(config, &lowering, platform)?,
        unquantized: Arc::default(),
        streaming: streaming(config, &spec, platform)?,
        added_loras: None,
        lowering: Lowering { unroll_layers: unrolls_layers(config, &lowering, platform)?, ..lowering },
    })
}

/// Returns whether loops over layers are unrolled. `lowering`: that of the platform.
///
/// # Errors
/// Returns an error for `runtime.layers: loop` on a platform that unrolls layers if the weights are fp8 or streamed.
fn unrolls_layers(config: &Config, lowering: &Lowering, platform: &str) -> Result<bool> {
    let unrolls = match config.runtime.layers {
        LayerForm::Auto => lowering.unroll_layers,
        LayerForm::Unrolled => true,
        LayerForm::Loop => false,
    };
    let other = match (config.runtime.weights, config.runtime.stream) {
        _ if unrolls || !lowering.unroll_layers => return Ok(unrolls),
        (WeightType::Fp8, _) => "runtime.weights: fp8",
        (_, WeightStreaming::On) => "runtime.stream: on",
        _ => return Ok(unrolls),
    };
    Err(PipelineError::Usage(format!(
        "runtime.layers: loop does not support {other} on platform {platform}; set runtime.layers to auto or unrolled"
    )))
}

/// Returns whether a configuration replaces the unrolled layers of a platform by loops. Their stacked weights cannot be
/// streamed.
pub(super) fn loops_instead(config: &Config, spec: &PlatformSpec) -> bool {
    config.runtime.layers == LayerForm::Loop && (spec.lowering)(&Toolchain::default()).unroll_layers
}

/// Returns the streaming that the configuration requests. `None` for `off`, for `auto` (the memory plan decides), and
/// on CPU.
fn streaming(config: &Config, spec: &PlatformSpec, platform: &str) -> Result<Option<Streaming>> {
    if config.runtime.stream != WeightStreaming::On || spec.is_host {
        return Ok(None);
    }
    if !spec.streams_weights {
        let why = format!("runtime.stream: on is not supported on platform {platform}; set it to off");
        return Err(PipelineError::Usage(why));
    }
    Ok(Some(streamed(config.runtime.resident_blocks.unwrap_or(0))))
}

/// Returns options that stream the weights of all layers except `resident` transformer blocks.
pub(in crate::pipeline) fn streamed(resident: usize) -> Streaming {
    Streaming { component: Component::Transformer.folder(), resident, min_bytes: STREAMED_BYTES }
}

/// Size in bytes of the smallest weight that is streamed. Copies of smaller ones would be bound by their latency.
const STREAMED_BYTES: usize = 1 << 20;

/// Same as [`build`], for the devices of an opened plugin. An untested libtpu version may reject the attention kernel,
/// because the kernel's serialized form has no compatibility guarantee. XLA operations then replace the kernel, unless
/// the configuration explicitly requests it.
pub(crate) fn build_for(config: &Config, devices: usize, toolchain: &Toolchain) -> Result<Build> {
    let build = build_on(config, devices, toolchain)?;
    let may_be_refused = toolchain.is_untested() && config.runtime.attention == AttentionKernel::Auto;
    Ok(Build { lowering: Lowering { attention_may_be_rejected: may_be_refused, ..build.lowering }, ..build })
}

/// Returns the chip model for time predictions: the one in the configuration, or the built-in model of the device kind.
/// Fails if the device kind is unknown.
pub(crate) fn chip(config: &Config, device_kind: &str) -> std::result::Result<Chip, String> {
    let own = config.chip()?;
    own.map_or_else(|| Chip::of_device(device_kind).cloned().map_err(|e| e.to_string()), Ok)
}

/// Default fraction of a GPU's memory that programs may use. With this value, a model of 62 GiB and its
/// programs fit on a card with 80 GB. The rest is for the driver, machine code and allocations of libraries.
const MEMORY_FRACTION: f32 = 0.9;

/// Returns the platform options for this process, which may be one of several.
pub(crate) fn platform_options(config: &Config, group: Option<&Group>) -> Result<platform::PlatformOptions> {
    let fraction = Some(config.runtime.memory_fraction.unwrap_or(MEMORY_FRACTION));
    let each = config.runtime.distributed.devices_per_process.zip(group);
    let shared =
        each.map(|(n, group)| (group.local_rank() * n..(group.local_rank() + 1) * n).map(|i| i as i64).collect());
    let visible = config.runtime.visible_devices.clone().or(shared);
    Ok(platform::PlatformOptions {
        node: group.map(Group::node),
        trial: trial_limit(config),
        cpu_devices: Some(config.virtual_devices()?),
        gpu: GpuOptions { memory_fraction: fraction, visible_devices: visible, ..GpuOptions::default() },
    })
}

/// Rejects flags that environment variables set but the configured plugin does not know. Does not start the plugin.
pub(crate) fn check_flags(config: &Config) -> Result<()> {
    let choice = config.platform().map_err(PipelineError::Input)?;
    let options = platform::PlatformOptions { trial: trial_limit(config), ..platform::PlatformOptions::default() };
    Ok(platform::check_flags(&choice, &options)?)
}

/// Returns the timeout for the trial run of a plugin file that has not been used before. `None`: the default timeout.
fn trial_limit(config: &Config) -> Option<Duration> {
    match config.runtime.watchdog {
        config::Watchdog::Word(WatchdogWord::Auto) => None,
        config::Watchdog::Word(WatchdogWord::Off) => Some(Duration::MAX),
        config::Watchdog::Seconds(seconds) => Some(Duration::from_secs(seconds)),
    }
}

/// Returns the quantization of the transformer blocks' matmuls. Fails for int8 activations without int8 weights, and
/// for fp8 on a platform whose default is a loop over layers. `lowering`: that of the platform.
fn quantization(config: &Config, lowering: &Lowering, platform: &str) -> Result<Quantization> {
    let activations = config.runtime.activations == ActivationType::Int8;
    match (config.runtime.weights, config.runtime.activations) {
        (WeightType::Int8, _) => Ok(Quantization::Int8 { activations, rotated: false }),
        (WeightType::Int8Convrot, _) => Ok(Quantization::Int8 { activations, rotated: true }),
        (_, ActivationType::Int8) => Err(PipelineError::Usage(
            "runtime.activations: int8 requires integer weights; set runtime.weights to int8 too".into(),
        )),
        (WeightType::Bf16, _) => Ok(Quantization::None),
        (WeightType::Fp8, _) if lowering.unroll_layers => Ok(Quantization::Fp8),
        (WeightType::Fp8, _) => {
            let unrolls = |own: &Platform| (platforms::spec(*own).lowering)(&Toolchain::default()).unroll_layers;
            let names = alternatives(Platform::ALL.into_iter().rev().filter(unrolls).map(Platform::name));
            Err(PipelineError::Usage(format!(
                "runtime.weights: fp8 requires {names}, but the platform is {platform}; int8 works on every platform"
            )))
        }
    }
}

/// Logs the number format of the transformer blocks, and that of the checkpoint. Also logs which components keep their
/// int8-convrot weights.
pub(crate) fn log_weights(runtime: &config::Runtime, stored: &Weights) -> Result<()> {
    let weights = runtime.weights;
    if let (Weights::Files(source), WeightType::Int8Convrot) = (stored, weights) {
        for (part, others) in
            CONVROT_COMPONENTS.iter().filter_map(|part| Some((part, source.non_convrot_weights(*part)?)))
        {
            tracing::info!("{}", describe_convrot(*part, &others));
        }
    }
    let stored = stored.describe_blocks()?;
    let used = match weights {
        // Weights that are not quantized have the data type of the run.
        WeightType::Bf16 => format!("runtime.dtype {}", if runtime.dtype == Dtype::F32 { "f32" } else { "bf16" }),
        quantized => format!("runtime.weights {}", weight_name(quantized)),
    };
    tracing::info!("transformer blocks: {used}; the checkpoint has {stored}");
    if weights != WeightType::Int8Convrot && stored.contains(weight_name(WeightType::Int8Convrot)) {
        let done = if weights == WeightType::Bf16 { "decoded" } else { "quantized again" };
        tracing::info!(
            "the checkpoint's int8-convrot weights are {done}; to use them unchanged, with less memory and faster \
             loading, set runtime.weights to int8-convrot"
        );
    }
    Ok(())
}

/// Describes how a run uses the weights of a component whose file stores some linear weights as int8-convrot. `others`:
/// names of the linear weights in other forms. Gates, which are never quantized, are not counted.
pub fn describe_convrot(part: Component, others: &BTreeSet<String>) -> String {
    let unchanged = format!("{}: int8-convrot weights are used unchanged", part.folder());
    match others.iter().filter(|name| !name.contains(".to_gate_logits.")).count() {
        0 => unchanged,
        count => format!(
            "{unchanged}, unless they are fused with a weight in another form; {count} weights in other forms are not \
             quantized"
        ),
    }
}

/// Returns the value of `runtime.weights`.
fn weight_name(weights: WeightType) -> &'static str {
    match weights {
        WeightType::Bf16 => "bf16",
        WeightType::Fp8 => "fp8",
        WeightType::Int8 => "int8",
        WeightType::Int8Convrot => "int8-convrot",
    }
}

/// Returns the options with which programs are compiled and run.
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

/// Returns the watchdog that limits the time of executions and transfers.
fn watchdog(config: &Config) -> DeviceWatchdog {
    let limit = match config.runtime.watchdog {
        config::Watchdog::Word(WatchdogWord::Off) => return DeviceWatchdog::default(),
        config::Watchdog::Word(WatchdogWord::Auto) => WaitLimit::Auto,
        config::Watchdog::Seconds(seconds) => WaitLimit::Fixed(Duration::from_secs(seconds)),
    };
    let say = |message: &str, going_on: Option<&str>| {
        going_on.iter().for_each(|line| tracing::info!("{line}"));
        report_exit(message);
    };
    DeviceWatchdog::new(limit, Box::new(say))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Kernel;
    use crate::runtime::platforms;

    #[test]
    fn cudnn_is_rejected_on_gpus_before_ampere() {
        let mut config = Config::default();
        let mut toolchain = Toolchain::of_kind("cuda", "NVIDIA T4");
        for (capability, kernel) in [("8.0", Kernel::Cudnn { required: false }), ("7.5", Kernel::Plain)] {
            toolchain.compute_capability = Some(capability.into());
            let lowering = build_for(&config, 1, &toolchain).expect("supported").lowering;
            assert_eq!((lowering.attention, lowering.rotates_by_kernel), (kernel, capability == "8.0"));
        }
        config.runtime.attention = AttentionKernel::Cudnn;
        let error = build_for(&config, 1, &toolchain).expect_err("rejected").to_string();
        let want = "runtime.attention: cudnn requires CUDA and a GPU of compute capability 8.0 or newer, but the \
                    platform is cuda with compute capability 7.5; use auto";
        assert!(error.contains(want), "{error}");
    }

    #[test]
    fn layer_form_replaces_the_platform_default() {
        let mut config = Config::default();
        let unrolls = |config: &Config, platform| build(config, 1, platform, "").map(|own| own.lowering.unroll_layers);
        let forms =
            [(LayerForm::Auto, [false, true, false]), (LayerForm::Unrolled, [true; 3]), (LayerForm::Loop, [false; 3])];
        for (form, want) in forms {
            config.runtime.layers = form;
            let got = ["cpu", "cuda", "tpu"].map(|platform| unrolls(&config, platform).expect("accepted"));
            assert_eq!(got, want, "{form:?}");
        }
        // Only the lowering's form of layers changes.
        let own = build(&config, 1, "cuda", "").expect("accepted").lowering;
        let default = build(&Config::default(), 1, "cuda", "").expect("accepted").lowering;
        assert_eq!(Lowering { unroll_layers: true, ..own }, default);
    }

    #[test]
    fn loop_is_rejected_with_fp8_or_streamed_weights_only_where_layers_are_unrolled() {
        let mut config = Config::default();
        config.runtime.layers = LayerForm::Loop;
        let error = |config: &Config, platform| build(config, 1, platform, "").expect_err("rejected").to_string();
        config.runtime.stream = WeightStreaming::On;
        let want = "runtime.layers: loop does not support runtime.stream: on on platform cuda; set runtime.layers to \
                    auto or unrolled";
        assert!(error(&config, "cuda").contains(want), "{}", error(&config, "cuda"));
        assert!(build(&config, 1, "tpu", "").is_ok(), "loops are the default on TPU");
        config.runtime.stream = WeightStreaming::Auto;
        config.runtime.weights = WeightType::Fp8;
        assert!(error(&config, "cuda").contains(&want.replace("runtime.stream: on", "runtime.weights: fp8")));
        // Unrolled layers do not add fp8 to a platform without it.
        config.runtime.layers = LayerForm::Unrolled;
        assert!(error(&config, "tpu").contains("runtime.weights: fp8 requires cuda"), "{}", error(&config, "tpu"));
    }

    #[test]
    fn streaming_is_ignored_on_cpu_and_rejected_on_unsupported_platforms() {
        let mut config = Config::default();
        let each = |config: &Config| {
            ["cpu", "cuda", "tpu"].map(|name| streaming(config, &platforms::spec_by_name(name), name))
        };
        // The memory plan decides on `auto`.
        assert!(each(&config).into_iter().all(|own| own.expect("accepted").is_none()));
        config.runtime.stream = WeightStreaming::On;
        let resident = each(&config).map(|own| own.expect("accepted").map(|own| own.resident));
        assert_eq!(resident, [None, Some(0), Some(0)]);
        let error = streaming(&config, &platforms::spec_by_name("xpu"), "xpu").expect_err("rejected").to_string();
        assert!(error.contains("runtime.stream: on is not supported on platform xpu"), "{error}");
    }
}
