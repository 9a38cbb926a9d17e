//! Enhances the prompts of a run before its videos are generated, with an endpoint or with the text encoder.
//!
//! Each distinct prompt is enhanced once and separately, so that the result does not depend on the other prompts of the
//! run. The text encoder runs in the session that generates the videos, so its weights are loaded once; only with
//! `request.num_frames: auto`, it runs in the session that predicts the number of frames.

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::config::Config;
use crate::pipeline::enhancement::{EnhancedPrompt, Enhancement, Enhancer};
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::model::OpenModel;
use crate::pipeline::phase::{Phase, Watch};
use crate::pipeline::plan::origin::Origin;
use crate::pipeline::plan::resolved::ResolvedConfig;
use crate::pipeline::plan::run_plan::RunPlan;
use crate::pipeline::plan::videos::{Job, RunVideos};
use crate::pipeline::programs::configs::ModelConfigs;
use crate::pipeline::session::Session;
use crate::runtime::processes::Group;

/// Enhances the prompts of a run that are not enhanced yet, and replaces the prompts of `jobs`. `watch`: called before
/// each prompt and after the last one. `one`: enhances a prompt with a seed.
///
/// # Errors
/// Returns the first error of `one`, or an error if `watch` stops the run; `jobs` is then unchanged.
pub(in crate::pipeline) fn enhance_all(
    enhancer: &Enhancer,
    config: &Config,
    known: Option<&Enhancement>,
    jobs: &mut [Job],
    watch: Watch,
    mut one: impl FnMut(&str, u64) -> Result<EnhancedPrompt>,
) -> Result<Enhancement> {
    if let Some(warning) = Enhancer::unseen_inputs(config) {
        tracing::warn!("{warning}");
    }
    let seed = config.enhancement_seed();
    let mut prompts = known.map_or_else(Vec::new, |known| known.prompts.clone());
    let is_enhanced = |prompt: &str| known.is_some_and(|known| known.has_enhanced(prompt));
    let distinct = config.distinct_prompts(jobs);
    let missing: Vec<&String> = distinct.iter().filter(|prompt| !is_enhanced(prompt)).collect();
    let mut is_stopped = |done: usize| watch(Phase::PromptEnhancer, done, missing.len()).is_break();
    for (done, prompt) in missing.iter().enumerate() {
        if is_stopped(done) {
            return Err(PipelineError::Interrupted(done, missing.len()));
        }
        let own = one(prompt, seed)?;
        tracing::info!("enhanced prompt: {}", own.enhanced.split_whitespace().collect::<Vec<_>>().join(" "));
        prompts.push(own);
    }
    if !missing.is_empty() && is_stopped(missing.len()) {
        return Err(PipelineError::Interrupted(0, 0));
    }
    let enhancement = enhancer.record(prompts).with_known(known.map_or(0, |known| known.prompts.len()));
    for job in jobs.iter_mut().filter(|job| !is_enhanced(&job.prompt)) {
        enhancement.replace(&mut job.prompt, seed);
    }
    Ok(enhancement)
}

/// Asks the endpoint to enhance a prompt. In a multi-process run, only process 0 asks, and sends the result to the others.
///
/// # Errors
/// Returns an error if the endpoint gives no usable answer; in all processes.
pub(in crate::pipeline) fn ask(
    enhancer: &Enhancer,
    prompt: &str,
    seed: u64,
    group: Option<&Arc<Group>>,
) -> Result<EnhancedPrompt> {
    let Some(group) = group else { return enhancer.ask(prompt, seed) };
    let own = match group.id() {
        0 => match enhancer.ask(prompt, seed) {
            Ok(enhanced) => Ok(enhanced),
            // Every process must report the same error.
            Err(PipelineError::Enhancement(why)) => Err(why),
            Err(other) => Err(other.to_string()),
        },
        _ => Err(String::new()),
    };
    let bug = |error: serde_json::Error| PipelineError::Bug(error.to_string());
    let all = group.all_gather(&serde_json::to_string(&own).map_err(bug)?)?;
    let first: std::result::Result<EnhancedPrompt, String> = serde_json::from_str(&all[0]).map_err(bug)?;
    first.map_err(PipelineError::Enhancement)
}

/// Enhances the prompts of a run without generating its videos. Of the model's weights, loads at most those of the text
/// encoder.
///
/// # Errors
/// Returns an error if the model, the device or the endpoint fails.
pub fn enhance_prompts(config: &Config, videos: &RunVideos) -> Result<Vec<EnhancedPrompt>> {
    let own = videos.resolved(config);
    let mut jobs = videos.jobs.clone();
    let go_on: Watch = &mut |_, _, _| ControlFlow::Continue(());
    if own.enhance.endpoint.is_some() {
        // The model may be on another machine.
        let configs = ModelConfigs::from(Origin::find(&own)?).for_run(&own);
        let Some(enhancer) = Enhancer::new(&own, &configs, None)? else { return Ok(Vec::new()) };
        let known = videos.enhancement.as_ref();
        let one = |prompt: &str, seed| ask(&enhancer, prompt, seed, None);
        let all = enhance_all(&enhancer, &own, known, &mut jobs, go_on, one)?;
        return Ok(all.prompts);
    }
    let short = ResolvedConfig::text_only(&own, own.frame_step() + 1);
    let model = OpenModel::from_config(&short)?;
    let enhancer = Enhancer::new(&own, &model.configs, Some(&*model.tokenizer))?;
    let Some(enhancer) = enhancer else { return Ok(Vec::new()) };
    let Session { mut runner, .. } = Session::start(RunPlan::of_model(&short, &model)?, model, None)?;
    let generate = |prompt: &str, seed| enhancer.generate(&mut runner, prompt, seed);
    Ok(enhance_all(&enhancer, &own, videos.enhancement.as_ref(), &mut jobs, go_on, generate)?.prompts)
}
