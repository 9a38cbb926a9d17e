//! A model with everything that requests need: configurations, tokenizer, latent statistics and weights.

use std::collections::BTreeMap;
use std::sync::Arc;

use ndarray::Array5;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::error::Result;
use super::plan::origin::{self, Origin, Weights};
use super::plan::verify;
use super::plan::videos::Job;
use super::programs::configs::ModelConfigs;
use crate::av::Av;
use crate::config::{Config, Reference};
use crate::models::tokenizer::Tokenizer;
use crate::request::{self, ModelSizes, Request, Shapes};
use crate::sampling::latents::LatentStatistics;
use crate::sampling::sigmas::FlowMatch;
pub use crate::weights::Component;
use crate::weights::ModelSource;
use crate::weights::fingerprint::SAMPLED;

/// Returns statistics with mean 0 and standard deviation 1, with which normalisation does not change latents.
fn plain_statistics(length: usize, scaling_factor: f32) -> LatentStatistics {
    LatentStatistics { mean: vec![0.0; length], std: vec![1.0; length], scaling_factor }
}

/// An opened model.
pub struct OpenModel {
    /// Configurations of the components, from which programs are built.
    pub configs: ModelConfigs,
    /// Sizes that programs and requests depend on, derived from the configurations.
    pub sizes: ModelSizes,
    /// Noise schedule from the model's scheduler config.
    pub scheduler: FlowMatch,
    pub tokenizer: Arc<Tokenizer>,
    /// Means and standard deviations that normalise video latents and audio tokens.
    pub statistics: Av<LatentStatistics>,
    /// Means and standard deviations of the latents that the diffusion decoder expects. `None`: the VAE decodes the
    /// video.
    pub(crate) diffusion: Option<LatentStatistics>,
    /// Audio sample rate in Hz.
    pub(crate) sample_rate: usize,
    /// Source of the parameters.
    pub(crate) weights: Weights,
}

impl OpenModel {
    /// Opens the model of a configuration, with weights from files or random weights (`model.weights`). Verifies every
    /// component that the run reads.
    ///
    /// # Errors
    /// Returns the errors of [`OpenModel::open`] and [`OpenModel::random`].
    pub fn from_config(config: &Config) -> Result<Self> {
        match origin::sources(config)? {
            (_, Weights::Files(source)) => {
                OpenModel::read(&source, ModelConfigs::from_source(&source).for_run(config), config)
            }
            (origin, Weights::Random(seed)) => OpenModel::drawn(ModelConfigs::from(origin).for_run(config), seed),
        }
    }

    /// Opens a model with random weights, drawn from `seed`. Configurations and tokenizer are read from the model's
    /// files if these are on this machine.
    ///
    /// # Errors
    /// Returns an error if a configuration or the tokenizer is invalid; the error quotes its path.
    pub fn random(origin: Origin, seed: u64) -> Result<Self> {
        OpenModel::drawn(ModelConfigs::from(origin), seed)
    }

    fn drawn(configs: ModelConfigs, seed: u64) -> Result<Self> {
        let files = match configs.origin() {
            Origin::Files(source) => source.tokenizer().ok(),
            Origin::Preset(_) => None,
        };
        tracing::warn!(
            "RANDOM WEIGHTS of {} (seed {seed}), generated on the device: the output is noise. Also placeholders: \
             latent statistics (mean 0, standard deviation 1){}",
            configs.origin().name(),
            if files.is_some() { "" } else { ", tokenizer (bytes)" }
        );
        let tokenizer = match &files {
            Some(files) => verify::open_tokenizer(files, &configs)?,
            None => verify::placeholder_tokenizer(&configs)?,
        };
        let (vae, audio) = (configs.video_vae()?, configs.audio_vae()?);
        let video = plain_statistics(vae.latent_channels, vae.scaling_factor);
        let statistics = Av { video, audio: plain_statistics(audio.base_channels, 1.0) };
        let diffusion = match configs.decodes_by_diffusion()? {
            true => Some(plain_statistics(configs.diffusion_decoder()?.latent_channels, 1.0)),
            false => None,
        };
        OpenModel::with(configs, tokenizer, statistics, diffusion, Weights::Random(seed))
    }

    /// Opens a model from its files: verifies the components of a text-to-video run, and reads configurations,
    /// tokenizer and latent statistics.
    ///
    /// # Errors
    /// Returns an error if a component is missing or invalid; the error quotes its path.
    pub fn open(source: &Arc<ModelSource>) -> Result<Self> {
        OpenModel::read(source, ModelConfigs::from_source(source), &Config::default())
    }

    fn read(source: &Arc<ModelSource>, configs: ModelConfigs, config: &Config) -> Result<Self> {
        let mut components = configs.components(config);
        let decoder = components.take(&Component::DiffusionDecoder);
        source.require(components.iter().copied())?;
        // If the selected decoder is missing, this call fails with an error that says which file to pass.
        let by_diffusion = configs.decodes_by_diffusion()?;
        components.extend(decoder);
        verify::components(&configs, source, &components)?;
        source.unverified()?.iter().for_each(|line| tracing::warn!("{line}"));
        let of = |part| verify::statistics(&configs, source, part);
        let statistics = Av {
            video: match configs.origin().has(Component::Vae) && config.pipeline.spec().has_video() {
                true => of(Component::Vae)?,
                false => {
                    let vae = configs.video_vae()?;
                    plain_statistics(vae.latent_channels, vae.scaling_factor)
                }
            },
            audio: of(Component::AudioVae)?,
        };
        let diffusion = match by_diffusion {
            true => Some(of(Component::DiffusionDecoder)?),
            false => None,
        };
        let tokenizer = verify::tokenizer(&configs, source)?;
        OpenModel::with(configs, tokenizer, statistics, diffusion, Weights::Files(source.clone()))
    }

    fn with(
        configs: ModelConfigs,
        tokenizer: Tokenizer,
        statistics: Av<LatentStatistics>,
        diffusion: Option<LatentStatistics>,
        weights: Weights,
    ) -> Result<Self> {
        Ok(OpenModel {
            tokenizer: Arc::new(tokenizer),
            statistics,
            diffusion,
            sample_rate: configs.vocoder()?.output_sampling_rate,
            scheduler: verify::schedule(&configs)?,
            sizes: configs.sizes()?,
            configs,
            weights,
        })
    }

    /// Returns whether the diffusion decoder decodes the video, instead of the VAE.
    pub fn decodes_by_diffusion(&self) -> bool {
        self.diffusion.is_some()
    }

    /// Converts un-normalised latents `[b, C, F, H, W]`, which have the statistics of the VAE, to those that the
    /// decoder expects.
    pub(crate) fn decoded_latents(&self, mut video: Array5<f32>) -> Result<Array5<f32>> {
        if let Some(own) = self.diffusion.as_ref().filter(|own| **own != self.statistics.video) {
            self.statistics.video.normalize(&mut video, 1)?;
            own.denormalize(&mut video, 1)?;
        }
        Ok(video)
    }

    /// Creates the request for a job of a configuration.
    ///
    /// # Errors
    /// Returns an error if the model does not support the sizes or the noise schedule.
    pub fn request(&self, config: &Config, job: &Job) -> Result<Request> {
        let request = request::resolve(config, &self.sizes)?;
        let shapes = Shapes::from_request(&self.sizes, &request.passes().0)?;
        let by_diffusers = config.guidance.stg_streams == Reference::Diffusers;
        let stg = request.all_scales().into_iter().flatten().any(|s| s.stg != 0.0);
        if stg && by_diffusers && !self.sizes.transformer.perturbed_attn && job.index == 0 {
            tracing::warn!(
                "guidance.video.stg and guidance.audio.stg have no effect: guidance.stg_streams is diffusers, which does not \
                 perturb a model without perturbed_attn; set them to 0, or guidance.stg_streams to official"
            );
        }
        let c = &self.sizes.transformer;
        let of_2_5 = c.use_keyframes_abs_pos_embedding || !c.ff_bias;
        if let Some(other) =
            request::scheduler_mismatch_warning(config, &self.scheduler).filter(|_| of_2_5 && job.index == 0)
        {
            tracing::warn!("{}: {other}", self.configs.origin().config_place(Component::Scheduler).display());
        }
        let sigmas = request::sigmas(config, &self.scheduler, &shapes)?;
        Ok(Request { prompt: job.prompt.clone(), seed: job.seed, sigmas, ..request })
    }

    /// Verifies every component that a run of `config` reads. These may be more than those verified when the model was
    /// opened.
    pub(crate) fn verify(&self, config: &Config) -> Result<()> {
        let components = self.configs.components(config);
        match &self.weights {
            Weights::Files(source) => verify::components(&self.configs, source, &components),
            // A built-in preset has no tokenizer; prompts are then tokenized by bytes.
            Weights::Random(_) => {
                let configured = components.iter().filter(|part| **part != Component::Tokenizer);
                configured.into_iter().try_for_each(|part| self.configs.origin().json(*part).map(drop))
            }
        }
    }

    /// Returns the model's path and the fingerprints of the components that a run of `config` reads, for the run's
    /// sidecar.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read.
    pub fn identity(&self, config: &Config) -> Result<Value> {
        let components = self.configs.components(config);
        let path = self.configs.origin().name();
        let source = match &self.weights {
            Weights::Files(source) => source,
            Weights::Random(seed) => {
                let mut random = json!({
                    "path": path,
                    "weights": "random",
                    "weights_seed": seed,
                    "fingerprint": self.configs.origin().random_fingerprint(*seed, &components)?,
                });
                if let Some(blocks) = self.configs.blocks() {
                    random["blocks"] = json!(blocks);
                }
                return Ok(random);
            }
        };
        let parts = components.into_iter().map(|part| Ok((part.folder(), source.fingerprint(part)?)));
        let parts = parts.collect::<Result<BTreeMap<_, _>>>()?;
        let all = hex::encode(Sha256::digest(json!(parts).to_string()));
        Ok(json!({"path": path, "fingerprint": format!("{SAMPLED}{all}"), "parts": parts}))
    }
}
