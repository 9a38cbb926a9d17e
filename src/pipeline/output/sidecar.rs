//! Sidecars: JSON files next to the videos that record how each was made.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use super::writer::{FinishedVideo, write_json};
use crate::config::{Config, LayerForm, SET_LAYERS};
use crate::pipeline::enhancement::Enhancement;
use crate::pipeline::error::{PipelineError, Result, one_line};
use crate::pipeline::plan::layers::PLATFORM_DEFAULT;
use crate::pipeline::plan::run_plan::RunPlan;
use crate::pipeline::plan::videos::Job;
use crate::pipeline::runner::Runner;

/// Returns the sidecar of a video without the output hashes and the timings. The key `enhancement` exists only if the
/// prompt was enhanced.
pub(crate) fn sidecar(plan: &RunPlan, job: &Job, model: &Value, runner: &Runner, versions: &Value) -> Value {
    let config = &plan.config;
    let mut own = json!({
        "config": config.effective(&job.prompt, job.seed),
        "seed": job.seed,
        "model": model,
        "inputs": plan.inputs,
        "programs": runner.executor.program_hashes().collect::<BTreeMap<_, _>>(),
        "layers": layers(plan, runner),
        "versions": versions,
    });
    if plan.layer_reason.is_some() {
        // `layers` records the form that replaced `auto`. It applies only to reruns on the same platform.
        own["config"]["runtime"]["layers"] = LayerForm::Auto.name().into();
    }
    if let Some(record) = plan.enhancement.as_ref().map(|own: &Enhancement| own.of_video(config, &job.prompt)) {
        own["enhancement"] = record;
    }
    own
}

/// Returns the platform, the form of the loop over layers in the programs of a run, and the reason for the form.
fn layers(plan: &RunPlan, runner: &Runner) -> Value {
    let form = if runner.build.lowering.unroll_layers { LayerForm::Unrolled } else { LayerForm::Loop };
    let default = match plan.config.runtime.layers {
        LayerForm::Auto => PLATFORM_DEFAULT,
        _ => SET_LAYERS,
    };
    let reason = plan.layer_reason.as_deref().unwrap_or(default);
    json!({"platform": runner.executor.engine().platform(), "form": form.name(), "reason": reason})
}

/// Returns the identity of the model for sidecars. If the model's files can no longer be read, logs a warning and
/// returns null.
pub(in crate::pipeline) fn sidecar_model(config: &Config, runner: &Runner) -> Value {
    runner.model.identity(config).unwrap_or_else(|error| {
        tracing::warn!("the sidecar records no model fingerprint: {}", one_line(&error));
        Value::Null
    })
}

/// Writes a sidecar to `path`, after adding hashes and timings to it.
pub(in crate::pipeline) fn write_sidecar(
    mut sidecar: Value,
    path: &Path,
    video: &FinishedVideo,
    figures: &Value,
    replace: bool,
) -> Result<()> {
    sidecar["sha256"] = json!({"frames": video.frames_sha256, "samples": video.samples_sha256});
    if let Some(hdr) = &video.hdr_sha256 {
        sidecar["sha256"]["hdr"] = hdr.clone().into();
    }
    sidecar["timings"] = figures.clone();
    write_json(path, &sidecar, replace)
}

/// Writes a sidecar next to the file in which the results were saved. Does nothing if `error` is not
/// [`PipelineError::ResultsSaved`].
pub(in crate::pipeline) fn keep_sidecar(error: &PipelineError, sidecar: Value, video: &FinishedVideo, figures: &Value) {
    if let PipelineError::ResultsSaved { kept, .. } = error {
        let written = write_sidecar(sidecar, &kept.with_extension("json"), video, figures, false);
        written.unwrap_or_else(|error| tracing::warn!("{}", one_line(&error)));
    }
}
