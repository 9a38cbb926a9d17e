//! Checks requests against the model's architecture and the server's limits, without a device.

use std::path::Path;

use super::errors::{media_error, request_error};
use super::read::invalid;
use super::request_fields::RequestFields;
use super::span::probed;
use crate::config::{Config, Reference, Serve, VideoUse, whole_frames};
use crate::media::probe_clip;
use crate::models::presets::Preset;
use crate::pipeline::plan::origin;
use crate::pipeline::programs::configs::ModelConfigs;
use crate::request::{self, ModelSizes, Request, coordinate_grids};
use crate::sampling::latents::VideoGrid;
use crate::serve::error::ApiError;
use crate::serve::job::ExpectedVideo;
use crate::weights::Component;

/// Properties of the server's model that determine which requests it can run.
pub(super) struct Resolver {
    /// Dimensions of the model; `None` if its files are unavailable and it has no built-in preset.
    sizes: Option<ModelSizes>,
    /// Converts the size and length of a video to a number of tokens.
    grid: VideoGrid,
    /// Whether the model can predict a video's duration; true if this is unknown.
    has_duration_head: bool,
    /// Whether the model has a diffusion decoder; true if this is unknown.
    has_diffusion_decoder: bool,
}

impl Resolver {
    /// Reads the model's properties from its files. Falls back to its built-in preset, then to the default transformer.
    pub(super) fn from_config(config: &Config) -> Self {
        let carried = || Preset::named(&config.model.path).map(ModelConfigs::of_preset);
        let found = origin::sources(config).ok().map(|(origin, _)| ModelConfigs::from(origin).for_run(config));
        let configs = found.or_else(carried);
        let sizes = configs.as_ref().and_then(|configs| configs.sizes().ok());
        let has = |component| configs.as_ref().is_none_or(|configs| configs.origin().has(component));
        let [has_duration_head, has_diffusion_decoder] =
            [Component::DurationHead, Component::DiffusionDecoder].map(has);
        let transformer = configs.and_then(|configs| configs.transformer().ok()).unwrap_or_default();
        let grid = coordinate_grids(&transformer).0;
        Resolver { sizes, grid, has_duration_head, has_diffusion_decoder }
    }

    /// Rejects a request that the model cannot run, or that exceeds the server's limits on frames or tokens
    /// (`too_large`). Returns the size of the finished video; `None` if the model predicts its length.
    pub(super) fn check(
        &self,
        config: &Config,
        serve: &Serve,
        given: &RequestFields,
    ) -> Result<Option<ExpectedVideo>, ApiError> {
        let fault = |error| request_error(error, given);
        if given.get("use_diffusion_decoder").is_some_and(|on| *on == true) && !self.has_diffusion_decoder {
            let name = given.name("use_diffusion_decoder");
            return Err(invalid(&name, "the model has no diffusion decoder; remove this field"));
        }
        request::conditions(config).map_err(fault)?;
        let Some(frames) = config.request.num_frames.count() else {
            return self.check_auto(config, serve, given).map(|()| None);
        };
        let resolved = self.sizes.as_ref().map(|sizes| request::resolve(config, sizes)).transpose().map_err(fault)?;
        let made = resolved.as_ref().map_or(doubled(config, frames), |request| request.output_frames());
        if made > serve.max_frames {
            let name = if given.get("num_frames").is_none() && given.get("seconds").is_some() {
                "seconds"
            } else {
                "num_frames"
            };
            let name = given.name(name);
            let why =
                format!("{name}: {made} frames exceed the server's limit of {} (serve.max_frames)", serve.max_frames);
            return Err(ApiError::field("too_large", name, why));
        }
        check_mask(config, frames, given)?;
        if config.pipeline.spec().video != Some(VideoUse::Whole) {
            self.check_tokens(config, frames, serve, given)?;
        }
        expected(config, resolved.as_ref(), frames, given).map(Some)
    }

    /// Rejects a request for a predicted length if the model cannot predict durations, or if the longest possible
    /// prediction exceeds the token limit.
    fn check_auto(&self, config: &Config, serve: &Serve, given: &RequestFields) -> Result<(), ApiError> {
        // The diffusers pipeline has a default length for models without a duration head.
        if !self.has_duration_head && config.reference != Reference::Diffusers {
            let name = given.name("num_frames");
            return Err(invalid(&name, "auto requires a model that predicts durations; set a number of frames"));
        }
        self.check_tokens(config, whole_frames(serve.max_frames), serve, given)
    }

    fn check_tokens(
        &self,
        config: &Config,
        frames: usize,
        serve: &Serve,
        given: &RequestFields,
    ) -> Result<(), ApiError> {
        let (width, height, frames) = (config.request.width, config.request.height, doubled(config, frames));
        let tokens = self.grid.latents(1, 1, width, height, frames).map(|latents| self.grid.tokens(&latents));
        let tokens = tokens.map_err(|error| request_error(error.into(), given))?;
        if tokens > serve.max_tokens {
            let name = given.name(if given.get("width").is_some() { "width" } else { "size" });
            let why = format!(
                "{name}: {width}x{height} with {frames} frames has {tokens} video tokens, more than the server's limit \
                 of {} (serve.max_tokens); reduce the size or the number of frames",
                serve.max_tokens
            );
            return Err(ApiError::field("too_large", name, why));
        }
        Ok(())
    }
}

/// Rejects a mask video with fewer frames than the video.
fn check_mask(config: &Config, frames: usize, given: &RequestFields) -> Result<(), ApiError> {
    let mask = config.request.mask.as_deref().map(Path::new);
    let Some(mask) = mask.filter(|path| path.extension().is_some_and(|extension| extension == "mp4")) else {
        return Ok(());
    };
    let name = given.name("mask");
    let own = probe_clip(mask, Path::new("ffmpeg")).map_err(|error| media_error(&error, &name))?.frames;
    if own == 1 || own >= frames {
        return Ok(());
    }
    Err(invalid(
        &name,
        format!("has {own} frames, but the video has {frames}; use a longer mask, or an image for all frames"),
    ))
}

/// Returns the size of the finished video, given the number of frames that are denoised.
fn expected(
    config: &Config,
    resolved: Option<&Request>,
    frames: usize,
    given: &RequestFields,
) -> Result<ExpectedVideo, ApiError> {
    let r = &config.request;
    let made = resolved.map_or(doubled(config, frames), Request::output_frames);
    let fps = resolved.map_or(r.frame_rate * f64::from(1 << rounds(config)), Request::output_rate);
    let own = ExpectedVideo { width: r.width, height: r.height, num_frames: made, fps };
    let video = r.video.as_deref().map(Path::new);
    Ok(match (config.pipeline.spec().video, &r.extend, video) {
        (Some(VideoUse::Overlap), Some(extend), Some(video)) => {
            let added = frames.saturating_sub(extend.overlap);
            ExpectedVideo { num_frames: probed(video, given)?.frames + added, ..own }
        }
        (Some(VideoUse::Whole), _, Some(video)) => {
            let info = probed(video, given)?;
            let num_frames = if frames >= whole_frames(info.frames) { info.frames } else { frames };
            ExpectedVideo { width: info.width, height: info.height, num_frames, ..own }
        }
        _ => own,
    })
}

/// Returns the number of DFR rounds, each of which doubles the frame rate.
fn rounds(config: &Config) -> usize {
    if config.pipeline.spec().has_rounds() { config.dfr.temporal_rounds } else { 0 }
}

/// Returns the number of frames after the DFR rounds.
fn doubled(config: &Config, frames: usize) -> usize {
    (0..rounds(config)).fold(frames, |frames, _| 2 * frames.saturating_sub(1) + 1)
}
