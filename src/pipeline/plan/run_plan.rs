//! The plan of a run: its configuration, requests and programs. Methods of [`RunPlan`] choose the H.264 encoder, the
//! layout and the mesh, and record them in the configuration.

use std::path::Path;

use serde_json::Value;

use super::loras::Loras;
use super::outputs;
use super::preflight::{check_chain, check_input_files, check_placement, give, inputs};
use super::resolved::ResolvedConfig;
use super::videos::{Job, RunVideos};
use crate::config::{Config, Pipeline, training_length_warning};
use crate::media::RoundTrip;
use crate::pipeline::enhancement::{Enhancement, Enhancer};
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::model::OpenModel;
use crate::pipeline::output::{hdr_files, recorded};
use crate::pipeline::programs::build::{Programs, warn_once};
use crate::pipeline::stages::{duration, previews};
use crate::request::Request;
use crate::runtime::processes::Group;

/// Number of transformer blocks of the published models.
const PUBLISHED_BLOCKS: usize = 48;

/// Plan of what a run executes. `generate`, its dry run, `check`, `compile`, `warm`, `bench`, `profile` and `serve` all
/// make this plan.
pub struct RunPlan {
    /// Configuration of the run, with the decisions of this plan.
    pub config: ResolvedConfig,
    /// Request of each job, with the input video and audio attached; empty for a plan of programs only.
    pub requests: Vec<Request>,
    /// Programs of the run.
    pub programs: Programs,
    /// Hashes of the input files by path, for sidecars; null if no sidecar is written.
    pub inputs: Value,
    /// Enhances the prompts. `None`: the run does not enhance prompts, or they are enhanced.
    pub(crate) enhancer: Option<Enhancer>,
    /// Enhanced prompts, for sidecars. `None`: no prompt has been enhanced.
    pub(crate) enhancement: Option<Enhancement>,
    /// H.264 encoder of the conditioning images. `None`: not chosen yet, or there are no images to encode.
    pub(crate) round_trip: Option<RoundTrip>,
    /// Number of videos of an `ltx2 generate` command, including those that an interrupted run has finished. `None`: the
    /// plan is of another command, or the number of frames was predicted with the platform's form of layers.
    pub(crate) command_videos: Option<usize>,
    /// Reason for the form of layers that replaced `runtime.layers: auto`. `None`: the configured value is unchanged.
    pub(crate) layer_reason: Option<String>,
    /// Whether programs are compiled so that a trace distinguishes their operations.
    pub(crate) traceable: bool,
}

impl RunPlan {
    /// Plans the programs of a configuration. Reads no weights and no input files. `layers`: number of transformer
    /// blocks to use; `None`: all.
    ///
    /// # Errors
    /// Returns an error if the model does not exist or does not support the sizes of the request.
    pub fn of_programs(config: &Config, layers: Option<usize>) -> Result<Self> {
        Ok(RunPlan::with_programs(config, Programs::from_config(config, layers)?))
    }

    /// Same as [`RunPlan::of_programs`] with all blocks, for a model that is already open.
    ///
    /// # Errors
    /// Returns an error if the model does not support the sizes of the request.
    pub fn of_model(config: &Config, model: &OpenModel) -> Result<Self> {
        Ok(RunPlan::with_programs(config, Programs::from_configs(config, model.configs.clone(), None)?))
    }

    fn with_programs(config: &Config, programs: Programs) -> Self {
        let (config, requests, inputs) = (config.into(), Vec::new(), Value::Null);
        RunPlan {
            config,
            requests,
            programs,
            inputs,
            enhancer: None,
            enhancement: None,
            round_trip: None,
            command_videos: None,
            layer_reason: None,
            traceable: false,
        }
    }

    /// Plans a run and verifies its output files, the disk space for them, its model components, requests, input files and
    /// LoRAs. If the run repeats a sidecar, compares its inputs and its model with those that the sidecar records. If the
    /// number of frames is predicted, the requests and programs have the largest number that can be predicted.
    ///
    /// # Errors
    /// Returns the first error that the run would report before it compiles a program.
    pub fn new(config: &Config, videos: &RunVideos) -> Result<(Self, OpenModel)> {
        if !videos.outputs.is_empty() {
            let own = &config.request;
            if own.prompt.is_none() && own.prompts.is_none() && own.text_embeddings.is_none() {
                let why = "no prompt; pass --prompt or --prompts, or set request.prompt in the YAML file";
                return Err(PipelineError::Usage(why.into()));
            }
            outputs::check_places(config, videos)?;
            hdr_files::check_encoder(config)?;
        }
        outputs::check_cache(config);
        let longest = match duration::longest(config, &videos.jobs)? {
            Some(frames) => ResolvedConfig::with_frames(config, frames)?,
            None => ResolvedConfig::from(config),
        };
        // Report unsupported requests and mismatched components before missing files.
        let plan = match RunPlan::of_programs(&longest, None) {
            Err(error @ (PipelineError::Usage(_) | PipelineError::Request(_) | PipelineError::Input(_))) => {
                return Err(error);
            }
            other => other,
        };
        // `config` still has `auto`, so that the duration head is among the components to verify.
        let model = OpenModel::from_config(config)?;
        // A benchmark only times the prompt enhancer.
        let enhancer = match videos.outputs.is_empty() {
            true => None,
            false => Enhancer::new(config, &model.configs, Some(&*model.tokenizer))?,
        };
        let requests = videos.jobs.iter().map(|job| model.request(&longest, job));
        let mut requests = requests.collect::<Result<Vec<Request>>>()?;
        give(&longest, &mut requests)?;
        let warning =
            requests.first().and_then(|r| training_length_warning(&longest, r.output_frames(), r.output_rate()));
        warning.iter().for_each(|warning| tracing::warn!("{warning}"));
        check_input_files(&requests, &model.sizes)?;
        previews::check_map(config, &model)?;
        let mut plan = plan?;
        check_placement(&longest, &plan.programs)?;
        plan.config = ResolvedConfig::from(config);
        plan.choose_encoder(None)?;
        plan.warn_of_missing_lora();
        Loras::open(&config.model)?.check(&model.weights, &model.configs)?;
        model.identity(config)?;
        recorded::check_rerun(&longest, videos.sidecar.as_ref(), &model)?;
        check_chain(&requests, videos, config.output.audio)?;
        if config.request.num_frames.count().is_some() {
            outputs::check_room(config, videos, &requests, model.sample_rate)?;
        }
        let longest_prompt = match &enhancer {
            Some(enhancer) => enhancer.longest(&model.tokenizer, &config.distinct_prompts(&videos.jobs))?,
            None => 0,
        };
        plan.programs = plan.programs.dumping(videos.dump.is_some()).enhancing(longest_prompt);
        (plan.requests, plan.inputs) = (requests, inputs(&longest)?);
        (plan.enhancer, plan.enhancement) = (enhancer, videos.recorded_enhancement());
        Ok((plan, model))
    }

    /// Replaces the prompts of the plan by the enhanced ones. `jobs`: the run's videos, with enhanced prompts. Does
    /// nothing if `enhancement` is `None`.
    pub(crate) fn set_enhanced(&mut self, enhancement: Option<Enhancement>, jobs: &[Job]) {
        let Some(enhancement) = enhancement else { return };
        self.config.set_enhanced_clips(&enhancement);
        self.config.set_prompts_enhanced();
        let clips = self.config.request.chain.as_ref().map(|chain| &chain.prompts);
        for (request, job) in self.requests.iter_mut().zip(jobs) {
            request.prompt.clone_from(&job.prompt);
            if let (Some(chain), Some(clips)) = (&mut request.chain, clips) {
                chain.prompts.clone_from(clips);
            }
        }
        (self.enhancer, self.enhancement) = (None, Some(enhancement));
    }

    /// Warns if a model of the published size runs a pipeline whose second stage needs the distilled LoRA, without a LoRA
    /// for this stage. The toy model and test models have no such LoRA.
    pub(crate) fn warn_of_missing_lora(&self) {
        let Config { pipeline, model, .. } = &*self.config;
        let needs = matches!(pipeline, Pipeline::TwoStage | Pipeline::Keyframes | Pipeline::Hq);
        let has = model.loras.iter().any(|lora| lora.strength != 0.0 && lora.stages.contains(&2));
        if needs && !has && self.programs.layers() == PUBLISHED_BLOCKS {
            warn_once(vec![format!(
                "pipeline {}: no LoRA applies to the second stage, whose few steps without guidance need the distilled \
                 LoRA of the model; pass it with --set 'model.loras=[{{path: FILE, stages: [2]}}]'",
                pipeline.name()
            )]);
        }
    }

    /// Chooses the H.264 encoder of the conditioning images and records it in the configuration, so that a repeated run
    /// uses the same encoder or reports that it is missing. In a multi-process run, all processes must have the same
    /// encoder, because each encodes the images itself.
    ///
    /// # Errors
    /// Returns an error if the configured encoder is missing, or if another process has a different one.
    pub(crate) fn choose_encoder(&mut self, group: Option<&Group>) -> Result<()> {
        let Config { request, conditioning, .. } = &*self.config;
        if request.images.iter().all(|image| image.crf(conditioning) == 0) {
            return Ok(());
        }
        let chosen = RoundTrip::choose(conditioning.h264, Path::new("ffmpeg"))?;
        if let Some(group) = group {
            group.ensure_equal(&chosen.to_string(), |name, its, first| {
                format!("{name} encodes images with {its}, process 0 with {first}; set conditioning.h264 to builtin")
            })?;
        }
        self.config.set_encoder(chosen.encoder());
        self.round_trip = Some(chosen);
        Ok(())
    }
}
