//! Chooses for `runtime.layers: auto` whether the programs of a run unroll their loops over layers.
//!
//! Only `ltx2 generate` on a platform that unrolls layers has a choice. It depends on the request and the devices, but
//! not on the compile cache, so that a request has the same result whether or not its programs are cached. A rerun of a
//! sidecar does not choose: it has the recorded form on the platform of the recorded run, unless that is a loop whose
//! weights may not fit in the memory of this device. On another platform, it chooses as any run.

use super::layouts::{RankingDevices, step_ms};
use super::memory::Limits;
use super::run_plan::RunPlan;
use super::setup;
use super::stream;
use crate::analysis::{Chip, Work};
use crate::config::{Config, LayerForm, WeightStreaming, WeightType};
use crate::models::Network;
use crate::nn::{Build, Lowering};
use crate::pipeline::error::Result;
use crate::pipeline::stages::batch::videos_per_batch;
use crate::request::ClipChain;
use crate::runtime::{Toolchain, device_bytes};

/// Seconds per transformer block by which a denoising loop with unrolled layers takes longer to read from the compile
/// cache than one with a loop over layers. On an H200, the program of LTX-2.3 with 48 blocks is read in 8.8 s if it is
/// unrolled, otherwise in less than 1 s. (It compiles in 44.6 s or 5 s. The choice must not depend on the cache, so the
/// smaller difference counts.) The width of a block has little influence, because a wider block has as many kernels.
const READ_SECONDS: f64 = (8.8 - 1.0) / 48.0;

/// Smallest fraction of the predicted time (reading unrolled programs plus denoising) that a loop over layers must save to
/// be chosen. Below it, the run uses unrolled layers and shares cached programs with `warm`, `serve` and longer runs.
const MIN_GAIN: f64 = 1.0 / 3.0;

/// Number of times that a loop over layers moves the weights of a layer through device memory before they are used: it
/// reads them from the stack and writes the copy. For LTX-2.0, these are 75 GB per evaluation, which take 21 ms on an
/// H200 (docs/decisions/cuda-forms.md).
const MOVES: f64 = 2.0;

/// Reason for the form of layers where there is no choice.
pub(in crate::pipeline) const PLATFORM_DEFAULT: &str = "default of the platform";

/// Reason for the form of layers in a rerun of a sidecar.
const RECORDED: &str = "form of the run that the sidecar records";

/// Reason for unrolled layers if the estimated needs of a loop exceed the memory.
const MAY_NOT_FIT: &str = "the weights may not fit in memory and would be streamed, which a loop does not support";

/// Predicted times of all denoising loops of a command, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct LayerTimes {
    /// All evaluations of the transformer with unrolled layers, for all videos.
    denoising: f64,
    /// Copies of stacked weights in a loop over layers, for all videos.
    copies: f64,
    /// Additional time to read unrolled programs from the compile cache.
    reading: f64,
}

impl LayerTimes {
    /// Predicts the times of a plan. `videos`: number of videos of the command. `looped`: options with loops over layers.
    fn new(plan: &RunPlan, chip: &Chip, looped: &Build, videos: usize) -> Result<Self> {
        let RunPlan { config, programs, .. } = plan;
        let chain = config.request.num_frames.count().and_then(|frames| ClipChain::from_config(config, frames));
        let runs =
            videos.div_ceil(videos_per_batch(&plan.requests, &looped.layout)) * chain.map_or(1, |chain| chain.clips());
        let blocks = programs.layers();
        let mut times = LayerTimes { denoising: 0.0, copies: 0.0, reading: 0.0 };
        for (kind, steps) in programs.loops(config.sampler.steps) {
            let network = programs.network(kind, looped)?;
            let evaluations = (steps * runs) as f64;
            times.denoising += evaluations * step_ms(&network, looped, chip, blocks) / 1e3;
            times.copies += evaluations * copy_seconds(&network, chip);
            times.reading += blocks as f64 * READ_SECONDS;
        }
        Ok(times)
    }

    /// Returns whether a loop over layers shortens the command by at least [`MIN_GAIN`] of its predicted time.
    fn favor_loop(self) -> bool {
        self.reading - self.copies >= MIN_GAIN * (self.denoising + self.reading)
    }

    /// Returns the choice and its reason.
    fn choice(self) -> LayerChoice {
        let form = if self.favor_loop() { LayerForm::Loop } else { LayerForm::Unrolled };
        let LayerTimes { denoising, copies, reading } = self;
        let reason = format!(
            "predicted: {denoising:.1} s of denoising, to which a loop adds {copies:.1} s; reading unrolled programs from \
             the compile cache takes {reading:.1} s longer"
        );
        LayerChoice { form, reason }
    }
}

/// Returns the predicted seconds of an evaluation's copies of stacked weights.
fn copy_seconds(network: &Network, chip: &Chip) -> f64 {
    let bytes: usize = network.params.iter().map(|param| device_bytes(&network.program, param)).sum();
    chip.op_time(Work { bytes: MOVES * bytes as f64, ..Work::default() }).total()
}

/// A form of layers and the reason for it.
#[derive(Clone, Debug, PartialEq)]
struct LayerChoice {
    form: LayerForm,
    reason: String,
}

/// Returns the form of layers with which a rerun of a sidecar reproduces the run bit for bit. `None`: the run is not a
/// rerun, the recorded run had another platform, the configuration sets the form, or this run's weights need unrolled
/// layers.
fn recorded_form(config: &Config, toolchain: &Toolchain) -> Option<LayerForm> {
    let runtime = &config.runtime;
    let recorded = runtime.recorded_layers.as_ref().filter(|_| runtime.layers == LayerForm::Auto)?;
    let is_same = recorded.platform.as_ref().is_none_or(|platform| *platform == toolchain.platform);
    let needs_unrolled = runtime.weights == WeightType::Fp8 || runtime.stream == WeightStreaming::On;
    let can_repeat = recorded.form == LayerForm::Unrolled || !needs_unrolled;
    // Where `auto` always selects a loop, no record is needed.
    let has_choice = (toolchain.spec().lowering)(toolchain).unroll_layers;
    (is_same && can_repeat && has_choice).then_some(recorded.form)
}

impl RunPlan {
    /// Replaces `runtime.layers: auto` by the form that the sidecar of a rerun records for this platform.
    pub(super) fn repeat_recorded_layers(&mut self, toolchain: &Toolchain) {
        let Some(form) = recorded_form(&self.config, toolchain) else { return };
        let choice = LayerChoice { form, reason: RECORDED.into() };
        tracing::info!("{}", choice.line());
        self.config.set_layers(form);
        self.layer_reason = Some(choice.reason);
    }

    /// Replaces `runtime.layers: auto` by a form if the platform unrolls layers, and logs the choice of `ltx2 generate`.
    /// Replaces a recorded loop, with a warning, if the weights may not fit in memory. Returns the resulting value of
    /// `runtime.layers`. `build`: options with the configured or recorded form, otherwise the platform's, and with the
    /// streaming that was chosen without compiling. `limits`: usable memory.
    ///
    /// # Errors
    /// Returns an error if a program cannot be built.
    pub(in crate::pipeline) fn choose_layers(
        &mut self,
        chip: Option<&Chip>,
        build: &Build,
        limits: impl FnOnce() -> Result<Limits>,
    ) -> Result<LayerForm> {
        let form = self.config.runtime.layers;
        if form == LayerForm::Loop && self.layer_reason.as_deref() == Some(RECORDED) {
            return self.check_recorded_loop(build, limits()?);
        }
        if form != LayerForm::Auto || !build.lowering.unroll_layers {
            return Ok(form);
        }
        let Some(videos) = self.command_videos else {
            self.config.set_layers(LayerForm::Unrolled);
            self.layer_reason = Some(PLATFORM_DEFAULT.into());
            return Ok(LayerForm::Unrolled);
        };
        let choice = self.layer_choice(chip, build, videos, limits)?;
        tracing::info!("{}", choice.line());
        self.config.set_layers(choice.form);
        self.layer_reason = Some(choice.reason);
        Ok(choice.form)
    }

    /// Replaces a recorded loop by unrolled layers if the weights may not fit in memory.
    fn check_recorded_loop(&mut self, build: &Build, limits: Limits) -> Result<LayerForm> {
        if stream::fits_unstreamed(&self.config, &self.programs, build, limits)? {
            return Ok(LayerForm::Loop);
        }
        tracing::warn!(
            "runtime.layers: auto: the sidecar records a loop, but {MAY_NOT_FIT}; the layers are unrolled, so the result may \
             differ from the recorded run; to use a loop, set runtime.layers to loop"
        );
        self.config.set_layers(LayerForm::Unrolled);
        self.layer_reason = Some(MAY_NOT_FIT.into());
        Ok(LayerForm::Unrolled)
    }

    fn layer_choice(
        &self,
        chip: Option<&Chip>,
        build: &Build,
        videos: usize,
        limits: impl FnOnce() -> Result<Limits>,
    ) -> Result<LayerChoice> {
        let config = &self.config;
        let unrolled = |reason: &str| Ok(LayerChoice { form: LayerForm::Unrolled, reason: reason.into() });
        let Some(chip) = chip else {
            return unrolled("no chip file describes this device, so the run time is not predicted");
        };
        if config.runtime.weights != WeightType::Bf16 {
            return unrolled("run time is predicted only for unquantized weights");
        }
        if config.request.enhance_prompt && config.enhance.endpoint.is_none() {
            return unrolled("the text encoder enhances prompts, which is slower with a loop");
        }
        if build.streaming.is_some() {
            return unrolled("weights are streamed, which a loop does not support");
        }
        let looped = Build { lowering: Lowering { unroll_layers: false, ..build.lowering }, ..build.clone() };
        let choice = LayerTimes::new(self, chip, &looped, videos)?.choice();
        if choice.form == LayerForm::Loop && !stream::fits_unstreamed(config, &self.programs, &looped, limits()?)? {
            return unrolled(MAY_NOT_FIT);
        }
        Ok(choice)
    }
}

impl LayerChoice {
    /// Returns the choice as a log line.
    fn line(&self) -> String {
        format!("runtime.layers: auto: {} ({})", self.form.name(), self.reason)
    }
}

/// Describes, without compiling, the form of layers that `runtime.layers: auto` chooses in `ltx2 generate` for devices of
/// a kind. `None`: the configuration sets the form, its number of frames is predicted, or the platform uses loops.
///
/// # Errors
/// Returns an error if the devices or the model do not support the configuration.
pub(crate) fn describe_layers(config: &Config, devices: RankingDevices) -> Result<Option<String>> {
    if config.runtime.layers != LayerForm::Auto || config.request.num_frames.count().is_none() {
        return Ok(None);
    }
    let mut plan = RunPlan::of_programs(config, None)?;
    plan.place(devices)?;
    let build = setup::build_for(&plan.config, devices.count, devices.toolchain)?;
    let capacity = Limits::of_capacity(&plan.config, devices.capacity);
    let limits = || Ok(capacity);
    if plan.layer_reason.is_some() {
        let form = plan.choose_layers(devices.chip, &build, limits)?;
        return Ok(plan.layer_reason.map(|reason| LayerChoice { form, reason }.line()));
    }
    if !build.lowering.unroll_layers {
        return Ok(None);
    }
    Ok(Some(plan.layer_choice(devices.chip, &build, config.jobs()?.len(), limits)?.line()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RecordedLayers;
    use crate::runtime::Target;

    /// Returns what `auto` chooses on one H200 for a preset, and the predicted times.
    fn chosen(preset: &str, set: &[&str], videos: Option<usize>) -> (LayerForm, RunPlan) {
        let target: Target = "cuda:h200:1x1x1".parse().expect("a target");
        chosen_on(&target, target.chip().as_ref(), preset, set, videos)
    }

    fn chosen_on(
        target: &Target,
        chip: Option<&Chip>,
        preset: &str,
        set: &[&str],
        videos: Option<usize>,
    ) -> (LayerForm, RunPlan) {
        let (toolchain, count, capacity) = target.described();
        let config = Config::load(preset, ["layout=replicated"].iter().chain(set).copied()).expect("a configuration");
        let mut plan = RunPlan::of_programs(&config, None).expect("a plan");
        plan.command_videos = videos;
        let build = setup::build_for(&plan.config, count, &toolchain).expect("a build");
        let limits = Limits::of_capacity(&config, capacity);
        let form = plan.choose_layers(chip, &build, || Ok(limits)).expect("a choice");
        assert_eq!(plan.config.runtime.layers, form);
        let looped = setup::build_for(&plan.config, count, &toolchain).expect("a build").lowering;
        assert_eq!(looped, Lowering { unroll_layers: form == LayerForm::Unrolled, ..build.lowering });
        (form, plan)
    }

    const SMALL: [&str; 4] = ["request.width=384", "request.height=256", "request.num_frames=41", "sampler.steps=4"];
    const LARGE: [&str; 4] = ["request.width=768", "request.height=512", "request.num_frames=121", "sampler.steps=40"];

    #[test]
    fn short_runs_loop_over_layers_and_long_runs_unroll_them() {
        for preset in ["ltx2", "ltx2_3"] {
            let (small, plan) = chosen(preset, &SMALL, Some(1));
            assert_eq!(small, LayerForm::Loop, "{preset}: {:?}", plan.layer_reason);
            let reason = plan.layer_reason.expect("a reason");
            assert!(reason.contains("reading unrolled programs") && reason.ends_with("takes 7.8 s longer"), "{reason}");
            let (large, plan) = chosen(preset, &LARGE, Some(1));
            assert_eq!(large, LayerForm::Unrolled, "{preset}: {:?}", plan.layer_reason);
            eprintln!("{preset}: {reason}\n{preset}: {}", plan.layer_reason.unwrap_or_default());
            // All videos of a command count, and so do all clips.
            assert_eq!(chosen(preset, &SMALL, Some(1000)).0, LayerForm::Unrolled, "{preset}");
        }
        let clips = [&SMALL[..2], &["request.num_frames=7201", "sampler.steps=4", "request.chain={clip: 41}"]].concat();
        assert_eq!(chosen("ltx2_3", &clips, Some(1)).0, LayerForm::Unrolled);
    }

    /// The measured copies of 21 ms and step of 655 ms are those of benchmarks/gpu.md.
    #[test]
    fn predicted_copies_are_close_to_measurement() {
        let target: Target = "cuda:h200:1x1x1".parse().expect("a target");
        let (toolchain, count, _) = target.described();
        let config = Config::load("ltx2", ["layout=replicated", "runtime.layers=loop"].iter().chain(&LARGE).copied());
        let config = config.expect("a configuration");
        let plan = RunPlan::of_programs(&config, None).expect("a plan");
        let looped = setup::build_for(&config, count, &toolchain).expect("a build");
        let times = LayerTimes::new(&plan, &target.chip().expect("known"), &looped, 1).expect("times");
        let [copies, step] = [times.copies, times.denoising].map(|seconds| seconds / 40.0 * 1e3);
        assert!((15.0..27.0).contains(&copies) && (500.0..750.0).contains(&step), "{copies} and {step} ms");
    }

    #[test]
    fn other_commands_and_unsuitable_runs_keep_unrolled_layers() {
        let (form, plan) = chosen("ltx2_3", &SMALL, None);
        assert_eq!((form, plan.layer_reason.as_deref()), (LayerForm::Unrolled, Some(PLATFORM_DEFAULT)));
        let with = |more: &'static str| [&SMALL[..], &[more]].concat();
        for (more, why) in [
            ("runtime.weights=int8", "unquantized"),
            ("runtime.stream=on", "weights are streamed"),
            ("request.enhance_prompt=true", "enhances prompts"),
            ("runtime.memory_limit=30", "may not fit in memory"),
        ] {
            let (form, plan) = chosen("ltx2_3", &with(more), Some(1));
            let reason = plan.layer_reason.unwrap_or_default();
            assert!(form == LayerForm::Unrolled && reason.contains(why), "{more}: {reason}");
        }
        let target: Target = "cuda:h200:1x1x1".parse().expect("a target");
        let (form, plan) = chosen_on(&target, None, "ltx2_3", &SMALL, Some(1));
        assert!(form == LayerForm::Unrolled && plan.layer_reason.is_some_and(|why| why.contains("no chip file")));
    }

    #[test]
    fn platforms_with_loops_and_configured_forms_are_not_changed() {
        let tpu: Target = "tpu:v6e:1x1".parse().expect("a target");
        assert_eq!(chosen_form(&tpu, &[]), LayerForm::Auto);
        let h200: Target = "cuda:h200:1x1x1".parse().expect("a target");
        assert_eq!(chosen_form(&h200, &["runtime.layers=loop", "sampler.steps=40"]), LayerForm::Loop);
        assert_eq!(chosen_form(&h200, &["runtime.layers=unrolled"]), LayerForm::Unrolled);
    }

    #[test]
    fn rerun_repeats_the_recorded_form_on_the_same_platform() {
        let [h200, tpu, cpu] = ["cuda:h200:1x1x1", "tpu:v6e:1x1", "cpu:1"].map(|name| name.parse().expect("a target"));
        let rerun = |target: &Target, platform: Option<&str>, form, set: &[&str]| {
            let (toolchain, count, capacity) = target.described();
            let set = [&SMALL[..], &["layout=replicated"], set].concat();
            let mut config = Config::load("ltx2_3", set.iter().copied()).expect("a configuration");
            config.runtime.recorded_layers = Some(RecordedLayers { platform: platform.map(String::from), form });
            let mut plan = RunPlan::of_programs(&config, None).expect("a plan");
            let devices = RankingDevices { toolchain: &toolchain, count, capacity, chip: None };
            plan.place(devices).expect("placed");
            assert_eq!(plan.layer_reason.is_some(), plan.config.runtime.layers != config.runtime.layers);
            let build = setup::build_for(&plan.config, count, &toolchain).expect("a build");
            (plan.config.runtime.layers, build.lowering.unroll_layers)
        };
        use LayerForm::{Auto, Loop, Unrolled};
        // `auto` would select a loop for this request, and unrolled layers for a longer one.
        for form in [Loop, Unrolled] {
            assert_eq!(rerun(&h200, Some("cuda"), form, &[]), (form, form == Unrolled));
            assert_eq!(rerun(&h200, None, form, &["sampler.steps=40"]), (form, form == Unrolled));
            // On another platform, its default applies.
            for other in [&tpu, &cpu] {
                assert_eq!(rerun(other, Some("cuda"), form, &[]), (Auto, false));
                assert_eq!(rerun(other, None, form, &[]), (Auto, false));
            }
            assert_eq!(rerun(&h200, Some("cpu"), form, &[]), (Auto, true));
            assert_eq!(rerun(&h200, Some("cuda"), form, &["runtime.layers=loop"]), (Loop, false));
        }
        // These weights need unrolled layers.
        assert_eq!(rerun(&h200, Some("cuda"), Loop, &["runtime.stream=on"]), (Auto, true));
        assert_eq!(rerun(&h200, Some("cuda"), Loop, &["runtime.weights=fp8"]), (Auto, true));
    }

    /// A loop that fits in the memory of the recorded run's device, and not in that of this one.
    #[test]
    fn recorded_loop_that_may_not_fit_is_unrolled() {
        let target: Target = "cuda:h200:1x1x1".parse().expect("a target");
        let (toolchain, count, capacity) = target.described();
        let rerun = |form, limit: &str, layers: &str| {
            let set = [&SMALL[..], &["layout=replicated", layers, limit]].concat();
            let mut config = Config::load("ltx2_3", set.iter().copied()).expect("a configuration");
            config.runtime.recorded_layers = Some(RecordedLayers { platform: Some("cuda".into()), form });
            let mut plan = RunPlan::of_programs(&config, None).expect("a plan");
            let devices = RankingDevices { toolchain: &toolchain, count, capacity, chip: None };
            plan.place(devices).expect("placed");
            let build = setup::build_for(&plan.config, count, &toolchain).expect("a build");
            let limits = Limits::of_capacity(&plan.config, capacity);
            let form = plan.choose_layers(None, &build, || Ok(limits)).expect("a choice");
            assert_eq!(plan.config.runtime.layers, form);
            let line = describe_layers(&config, devices).expect("a description");
            assert_eq!(line.is_some(), plan.layer_reason.is_some());
            assert!(line.is_none_or(|line| line.contains(form.name())));
            (form, plan.layer_reason)
        };
        use LayerForm::{Loop, Unrolled};
        let (auto, large, small) = ("runtime.layers=auto", "runtime.memory_limit=100", "runtime.memory_limit=30");
        assert_eq!(rerun(Loop, large, auto), (Loop, Some(RECORDED.into())));
        assert_eq!(rerun(Loop, small, auto), (Unrolled, Some(MAY_NOT_FIT.into())));
        // Unrolled layers can be streamed, and a configured loop is never replaced.
        assert_eq!(rerun(Unrolled, small, auto), (Unrolled, Some(RECORDED.into())));
        assert_eq!(rerun(Loop, small, "runtime.layers=loop"), (Loop, None));
    }

    fn chosen_form(target: &Target, set: &[&str]) -> LayerForm {
        let (toolchain, count, _) = target.described();
        let set = [&SMALL[..], &["layout=replicated"], set].concat();
        let config = Config::load("ltx2_3", set.iter().copied()).expect("a configuration");
        let mut plan = RunPlan::of_programs(&config, None).expect("a plan");
        plan.command_videos = Some(1);
        let build = setup::build_for(&config, count, &toolchain).expect("a build");
        let none = || -> Result<Limits> { panic!("needs no memory limit") };
        let form = plan.choose_layers(target.chip().as_ref(), &build, none).expect("a choice");
        assert_eq!(plan.layer_reason, None);
        form
    }
}
