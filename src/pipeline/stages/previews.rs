//! Previews of a run: determines after which steps they are shown, and fits the map from latents to RGB.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use ndarray::{Array2, Array3, Array5, Axis as Dim, Ix3};

use super::decoding::decoded_frames;
use super::denoising::Pass;
use crate::av::Av;
use crate::config::Config;
use crate::hlo::DType;
use crate::media::Frames;
use crate::models::diffusion_decoder::noise_shape;
use crate::models::pixels::Pixels;
use crate::pipeline::error::{PipelineError, Result, one_line};
use crate::pipeline::model::OpenModel;
use crate::pipeline::output::tensors::fixed;
use crate::pipeline::phase::Phase;
use crate::pipeline::plan::origin::Weights;
use crate::pipeline::preview::PreviewOptions;
use crate::pipeline::preview::latent_map::{CellSize, MapStatistics};
use crate::pipeline::preview::map_file::{MapFile, read_map};
use crate::pipeline::preview::thread::{
    DecodedTask, MapSource, PreviewThread, SharedStatistics, StepTask, TokenLayout,
};
use crate::pipeline::programs::build::warn_once;
use crate::pipeline::runner::Runner;
use crate::request::{Request, Shapes};
use crate::runtime::ShardedTensor;
use crate::sampling::{StepRecord, TokenConditions, TorchRng};
use crate::tensor::Tensor;
use crate::weights::Component;

/// Number of latent cells after which the map is not fitted any further: about five videos of 768 x 512 pixels and 121
/// frames. Each has 6,144 cells, and adds those of its decoded predictions and of its finished latents.
const ENOUGH_CELLS: usize = 1 << 16;

/// Previews of a running batch.
pub(crate) struct Previews {
    options: PreviewOptions,
    thread: PreviewThread,
    /// Number of videos without the padding of the batch.
    videos: usize,
    cell: CellSize,
    /// Whether the map is fitted further by this run.
    learns: bool,
    /// Whether a map is available: passed by the user, or fitted to earlier videos or to a prediction of this run.
    is_fitted: bool,
    /// Whether predictions of this run were decoded in the second half of a pass, so that the map fits this video.
    is_tuned: bool,
    /// Size of the latents that the decoder's program takes: frames, rows and columns.
    decoder: [usize; 3],
    /// Format in which the decoder's program returns frames.
    pixels: Pixels,
    /// Whether the diffusion decoder decodes the video in tiles. Its tile program takes features instead of latents, so
    /// predictions are not decoded.
    decodes_features: bool,
    /// Whether a preview has failed; no more are then shown.
    has_failed: bool,
    /// Whether the run has several processes, which must all decode the same predictions.
    is_grouped: bool,
}

/// Values of a finished call of the denoising loop that a preview needs.
pub(crate) struct FinishedCall<'a> {
    /// Number of finished evaluations, before and after the call.
    pub(crate) evaluations: [usize; 2],
    /// Video latents before the call, as tokens.
    pub(crate) before: &'a Tensor,
    /// Video latents after the call, as tokens.
    pub(crate) after: &'a Tensor,
    /// State of the loop, on the devices.
    pub(crate) carried: &'a [ShardedTensor],
    /// Video noise of the call's evaluations. `None`: the sampler uses no noise.
    pub(crate) noise: Option<Tensor>,
}

/// Evaluations of a pass after which previews are shown.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct PreviewSchedule {
    /// Number of finished evaluations and of finished steps at each preview, in order.
    at: Vec<[usize; 2]>,
    /// Whether a call must contain only the last evaluation before a preview.
    isolates: bool,
}

impl PreviewSchedule {
    /// Creates the schedule of a pass with `steps` steps and `evaluations` evaluations, with a preview every `every`
    /// steps and after the last one. `isolates`: whether the last evaluation before a preview
    /// needs its own call.
    fn new(steps: usize, evaluations: usize, every: usize, isolates: bool) -> Self {
        let in_step = evaluations / steps.max(1);
        let at = (1..=steps).filter(|step| step % every == 0 || *step == steps);
        let at = at.map(|step| [if step == steps { evaluations } else { step * in_step }, step]);
        PreviewSchedule { at: at.collect(), isolates }
    }

    /// Returns the end of the call that starts after `done` evaluations and would otherwise end after `end`.
    pub(crate) fn end_of_call(&self, done: usize, end: usize) -> usize {
        let next = self.at.iter().map(|[evaluation, _]| *evaluation).find(|evaluation| *evaluation > done);
        match next.filter(|next| self.isolates && *next <= end) {
            Some(next) if next == done + 1 => next,
            Some(next) => next - 1,
            None => end,
        }
    }

    /// Returns the number of finished steps if a preview is shown after `done` evaluations.
    fn step_at(&self, done: usize) -> Option<usize> {
        self.at.iter().find(|[evaluation, _]| *evaluation == done).map(|[_, step]| *step)
    }

    /// Returns whether a preview is shown after `done` evaluations.
    pub(crate) fn is_due(&self, done: usize) -> bool {
        self.step_at(done).is_some()
    }
}

/// Returns the sizes of a latent cell of a model.
fn cell_size(model: &OpenModel) -> CellSize {
    let grid = &model.sizes.video_grid;
    let channels = model.sizes.video_channels;
    CellSize { channels, pixels: grid.spatial_compression, frames: grid.temporal_compression }
}

/// Checks the map of `output.preview_decoder`.
///
/// # Errors
/// Returns an error if the file cannot be read or does not match the model.
pub(in crate::pipeline) fn check_map(config: &Config, model: &OpenModel) -> Result<()> {
    let path = config.output.preview_decoder.as_ref().filter(|_| config.output.preview_every.is_some());
    path.map_or(Ok(()), |path| read_map(Path::new(path), cell_size(model)).map(drop))
}

/// Returns a hash that identifies the decoder: its component, weights and configuration.
fn decoder_key(model: &OpenModel) -> Result<String> {
    let component = if model.diffusion.is_some() { Component::DiffusionDecoder } else { Component::Vae };
    let hash = match &model.weights {
        Weights::Files(source) => source.fingerprint(component)?,
        Weights::Random(seed) => model.configs.origin().random_fingerprint(*seed, &[component].into())?,
    };
    Ok(format!("{}-{hash}", component.folder()))
}

/// Returns the size of the latents that the decoder's program takes. `last`: shapes of the last pass.
fn decoder_size(model: &OpenModel, request: &Request, last: &Shapes) -> [usize; 3] {
    let (grid, shape) = (&model.sizes.video_grid, &last.video);
    let frames = match &request.dfr {
        Some(_) => (request.output_frames() - 1) / grid.temporal_compression + 1,
        None => shape.frames,
    };
    let size = [frames, shape.height, shape.width];
    match &request.tiling {
        Some(tiling) => tiling.largest(size, grid.spatial_compression, grid.temporal_compression),
        None => size,
    }
}

impl Previews {
    /// Prepares the previews of a batch of `videos` requests, of which `request` is one. `None`: the run generates no
    /// video, or previews are off.
    ///
    /// # Errors
    /// Returns an error if the map that the user passed cannot be read or does not match the model.
    pub(crate) fn start(
        runner: &mut Runner,
        request: &Request,
        options: Option<&PreviewOptions>,
        videos: usize,
        dumps: bool,
    ) -> Result<Option<Self>> {
        let Some(options) = options else { return Ok(None) };
        let (first, second) = request.passes();
        let last = second.as_ref().unwrap_or(&first);
        let shapes = Shapes::from_request(&runner.model.sizes, last)?;
        if !shapes.denoised().video || !request.decodes_video() || request.hdr.is_some() {
            tracing::info!("no previews: this run generates no SDR video");
            return Ok(None);
        }
        let cell = cell_size(&runner.model);
        let is_grouped = runner.executor.engine().is_grouped();
        let source = match &options.decoder {
            Some(path) => MapSource::Given(Arc::new(read_map(path, cell)?)),
            None => fitted_source(runner, options, cell, is_grouped)?,
        };
        let known = match &source {
            MapSource::Given(_) => usize::MAX,
            MapSource::Fitted { known, .. } => known_cells(runner, known),
        };
        let is_tiled = request.tiling.is_some();
        let previews = Previews {
            options: options.clone(),
            thread: PreviewThread::start(source, Arc::clone(&options.sink))?,
            videos,
            learns: options.fits && known < ENOUGH_CELLS,
            is_fitted: known > 0,
            is_tuned: false,
            decoder: decoder_size(&runner.model, request, &shapes),
            cell,
            pixels: if is_tiled || dumps { Pixels::Values } else { Pixels::Bytes },
            decodes_features: is_tiled && runner.model.diffusion.is_some(),
            has_failed: false,
            is_grouped,
        };
        previews.warn_without_map(runner);
        Ok(Some(previews))
    }

    /// Returns the evaluations of a pass after which previews are shown; none in temporal rounds, whose tiles are not
    /// complete videos.
    pub(crate) fn schedule(&self, pass: &Pass, evaluations: usize) -> PreviewSchedule {
        let steps = pass.request.sigmas.len() - 1;
        if pass.names.phase() == Phase::Round || !pass.shapes.denoised().video {
            return PreviewSchedule::default();
        }
        let isolates = pass.shape.sampler.noises() == 0;
        PreviewSchedule::new(steps, evaluations, self.options.every, isolates)
    }

    /// Requests the preview of a finished step. May decode the prediction first, to fit the map. If a preview fails, logs
    /// a warning and shows no more of them.
    ///
    /// # Errors
    /// Returns an error if weights that were evicted cannot be loaded again, or, in a run of several processes, if
    /// decoding fails.
    pub(crate) fn show(
        &mut self,
        runner: &mut Runner,
        pass: &Pass,
        schedule: &PreviewSchedule,
        call: FinishedCall,
    ) -> Result<()> {
        let [_, done] = call.evaluations;
        let Some(step) = schedule.step_at(done).filter(|_| !self.has_failed) else { return Ok(()) };
        let steps = pass.request.sigmas.len() - 1;
        let record = match record(pass, call) {
            Ok(record) => record,
            Err(error) => {
                self.fail(&error);
                return Ok(());
            }
        };
        let (grid, own) = (runner.model.sizes.video_grid, pass.shapes.own_tokens().video);
        let layout = TokenLayout { grid, shape: pass.shapes.video, own };
        let sampler = pass.shape.sampler.clone();
        if self.wants_decoding(runner, 2 * step >= steps)
            && let Ok(latents) = layout.latents(&sampler.clean_prediction(&record))
        {
            let since = Instant::now();
            match self.decode(runner, &latents) {
                Ok(task) => {
                    self.thread.decoded(task);
                    (self.is_fitted, self.is_tuned) = (true, 2 * step >= steps);
                    tracing::debug!("decoded a prediction for previews in {:.2} s", since.elapsed().as_secs_f64());
                }
                Err(error) if self.is_grouped => return Err(error),
                Err(error) => {
                    self.learns = false;
                    tracing::warn!("previews: cannot fit the map to the decoder: {}", one_line(&error));
                }
            }
            pass.reload(runner)?;
        }
        let seconds = pass.request.num_frames as f64 / pass.request.frame_rate;
        self.thread.step(StepTask {
            sampler,
            record,
            layout,
            phase: pass.names.phase(),
            step,
            steps,
            videos: self.videos,
            clip: self.options.clip,
            frame_rate: pass.shapes.video.frames as f64 / seconds,
        });
        Ok(())
    }

    /// Warns of an error, and shows no more previews.
    pub(crate) fn fail(&mut self, error: &PipelineError) {
        self.has_failed = true;
        tracing::warn!("previews: {}; no more previews of this video are shown", one_line(error));
    }

    /// Returns whether to decode the prediction of a step. `is_late`: whether the step is in the second half of its
    /// pass.
    fn wants_decoding(&self, runner: &Runner, is_late: bool) -> bool {
        self.learns && self.no_decoding(runner).is_none() && (!self.is_fitted || (is_late && !self.is_tuned))
    }

    /// Returns why predictions are not decoded during denoising; `None` if they are.
    fn no_decoding(&self, runner: &Runner) -> Option<&'static str> {
        if self.decodes_features {
            return Some("the tiled diffusion decoder cannot decode predictions");
        }
        let evicts = !runner.executor.keeps_all();
        evicts.then_some("decoding would evict the transformer's weights, which do not fit next to the decoder's")
    }

    /// Warns if this run will show no previews, because no map has been fitted and none can be.
    fn warn_without_map(&self, runner: &Runner) {
        let Some(why) = self.no_decoding(runner).filter(|_| !self.is_fitted) else { return };
        let remedy = match self.is_grouped {
            true => "in runs with several processes, set output.preview_decoder",
            false => "previews start with the next video",
        };
        warn_once(vec![format!("no previews for this video: {why}; {remedy}")]);
    }

    /// Decodes normalized latents with the run's decoder.
    fn decode(&self, runner: &mut Runner, latents: &Array5<f32>) -> Result<DecodedTask> {
        let (latents, counted) = resized(latents, self.decoder);
        let mut video = latents.clone();
        runner.model.statistics.video.denormalize(&mut video, 1)?;
        let video = runner.model.decoded_latents(video)?;
        let call = match runner.model.diffusion {
            Some(_) => {
                let noise = decoder_noise(runner, &video)?;
                runner.diffusion_decoder(video, noise, self.pixels)?
            }
            None => runner.video_decoder(video, self.pixels)?,
        };
        let decoded = call.run(&runner.executor)?;
        decoded.iter().try_for_each(|(_, output)| output.wait())?;
        let frames = decoded_frames(&decoded, self.videos)?;
        Ok(DecodedTask { counted, ..self.decoded_task(latents, frames.iter()) })
    }

    /// Selects the frames to which the map is fitted.
    fn decoded_task<'f>(&self, latents: Array5<f32>, frames: impl Iterator<Item = &'f Frames>) -> DecodedTask {
        let (_, _, count, height, width) = latents.dim();
        let frames = frames.map(|all| self.cell.shown_frames(all, count)).collect();
        DecodedTask { frames, latents, counted: [count, height, width] }
    }

    /// Adds the latents and frames of the finished videos to the data to which the map is fitted. `latents`:
    /// un-normalized latents `[b, C, F, H, W]`.
    pub(crate) fn learn<'f>(
        &self,
        model: &OpenModel,
        mut latents: Array5<f32>,
        frames: impl Iterator<Item = &'f Frames>,
    ) -> Result<()> {
        model.statistics.video.normalize(&mut latents, 1)?;
        self.thread.decoded(self.decoded_task(latents, frames));
        Ok(())
    }

    /// Returns the handle of the thread, which may still compute previews and fit the map.
    pub(crate) fn into_thread(self) -> PreviewThread {
        self.thread
    }

    /// Returns whether to call [`Previews::learn`]. The other processes of a run have no frames.
    pub(crate) fn learns(&self) -> bool {
        self.learns && !self.is_grouped
    }
}

/// Returns latents `[b, C, F, H, W]` of a size that the decoder's program takes, and how many of their frames, rows and
/// columns are not padding. Larger latents are cropped to the first frames, at the center. Smaller ones, such as those of
/// the first stage, are padded by repeating their last frame, row or column.
fn resized(latents: &Array5<f32>, size: [usize; 3]) -> (Array5<f32>, [usize; 3]) {
    let (batch, channels, frames, height, width) = latents.dim();
    let own = [frames, height, width];
    let counted = [0, 1, 2].map(|axis| own[axis].min(size[axis]));
    let (y, x) = ((height - counted[1]) / 2, (width - counted[2]) / 2);
    let [f, h, w] = size;
    let resized = Array5::from_shape_fn((batch, channels, f, h, w), |(b, c, f, h, w)| {
        latents[[b, c, f.min(counted[0] - 1), y + h.min(counted[1] - 1), x + w.min(counted[2] - 1)]]
    });
    (resized, counted)
}

/// Returns the number of cells that earlier videos have added. Waits for those of the last batch if there are no others.
fn known_cells(runner: &Runner, known: &SharedStatistics) -> usize {
    let cells = || known.lock().unwrap_or_else(PoisonError::into_inner).cells;
    if let Some(last) = runner.last_previews.upgrade().filter(|_| cells() == 0) {
        last.wait();
    }
    cells()
}

/// Returns the map that is fitted to the runner's decoder, with the sums of earlier videos.
fn fitted_source(runner: &mut Runner, options: &PreviewOptions, cell: CellSize, is_grouped: bool) -> Result<MapSource> {
    let key = decoder_key(&runner.model)?;
    // Processes that read different files would not decode together.
    let folder = options.folder.as_ref().filter(|_| !is_grouped);
    let file = folder.map(|folder| MapFile::new(folder, &key, cell));
    let known = runner.preview_maps.entry(key).or_insert_with(|| {
        let stored = file.as_ref().map_or(Ok(None), MapFile::read).unwrap_or_else(|error| {
            tracing::warn!("previews: cannot use the stored map, so a new one is fitted: {}", one_line(&error));
            None
        });
        Arc::new(Mutex::new(stored.unwrap_or_else(|| MapStatistics::new(cell))))
    });
    Ok(MapSource::Fitted { known: Arc::clone(known), file })
}

/// Draws noise for the diffusion decoder. The generators of the run are not used, so its results do not change.
fn decoder_noise(runner: &Runner, latents: &Array5<f32>) -> Result<Tensor> {
    let (batch, _, f, h, w) = latents.dim();
    let c = runner.model.configs.diffusion_decoder()?;
    let shape = noise_shape(&c, [batch, f, h, w]);
    let mut rng = TorchRng::new(0);
    Ok(Tensor::from(match runner.build.dtype {
        DType::BF16 => rng.normal_bf16_array(&shape),
        _ => rng.normal_array(&shape),
    }))
}

/// Copies what the sampler needs to compute the clean prediction of the video stream.
fn record(pass: &Pass, call: FinishedCall) -> Result<StepRecord> {
    let [start, end] = call.evaluations;
    let sampler = &pass.shape.sampler;
    let schedule = sampler.schedule(&pass.request.sigmas);
    let level = |at: usize| schedule.levels.get(at).copied().unwrap_or(0.0);
    let tokens = |tensor: &Tensor| fixed::<_, Ix3>(tensor.to_f32());
    let own = Av::in_turn(call.carried).video;
    let state = own.iter().skip(1).take(sampler.state().len());
    let state = state.map(|tensor| tokens(&tensor.download()?)).collect::<Result<Vec<Array3<f32>>>>()?;
    let noise = call.noise.map(|all| -> Result<Array3<f32>> {
        let all = all.into_f32();
        let last = (end - start).min(all.shape()[0]) - 1;
        fixed(all.index_axis(Dim(0), last).to_owned())
    });
    let after = tokens(call.after)?;
    let condition = pass.conditions.as_ref().filter(|_| pass.shape.conditioned.video).map(|conditions| {
        let (video, (batch, n, _)) = (&conditions.streams.video, after.dim());
        let mask = Array2::from_shape_fn((batch, n), |(_, n)| conditions.levels[video.level[[0, n]] as usize]);
        TokenConditions { mask, clean: video.clean_of(batch) }
    });
    Ok(StepRecord {
        sigma: level(start),
        next: level(end),
        coefficients: schedule.coefficients.get(end - 1).cloned().unwrap_or_default(),
        before: tokens(call.before)?,
        after,
        state,
        noise: noise.transpose()?,
        condition,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::s;

    #[test]
    fn latents_are_cropped_and_padded_to_the_size_of_the_decoder() {
        let latents = Array5::from_shape_fn((1, 1, 2, 4, 2), |(_, _, f, h, w)| (100 * f + 10 * h + w) as f32);
        let (resized, counted) = resized(&latents, [3, 2, 3]);
        assert_eq!(counted, [2, 2, 2]);
        let frame = |f: usize| resized.slice(s![0, 0, f, .., ..]).to_owned();
        assert_eq!(frame(0), ndarray::arr2(&[[10.0, 11.0, 11.0], [20.0, 21.0, 21.0]]));
        assert_eq!(frame(2), ndarray::arr2(&[[110.0, 111.0, 111.0], [120.0, 121.0, 121.0]]));
        assert_eq!(super::resized(&latents, [2, 4, 2]), (latents, [2, 4, 2]));
    }

    #[test]
    fn last_step_before_each_preview_is_a_separate_call() {
        let schedule = PreviewSchedule::new(10, 10, 4, true);
        assert_eq!(schedule.at, [[4, 4], [8, 8], [10, 10]]);
        let calls = |size: usize| {
            let mut ends = vec![0];
            while ends[ends.len() - 1] < 10 {
                let done = ends[ends.len() - 1];
                ends.push(schedule.end_of_call(done, (done + size).min(10)));
            }
            ends
        };
        assert_eq!(calls(8), [0, 3, 4, 7, 8, 9, 10]);
        assert_eq!(calls(1), (0..=10).collect::<Vec<_>>());
        assert_eq!(calls(3), [0, 3, 4, 7, 8, 9, 10]);
    }

    #[test]
    fn steps_with_two_evaluations_are_never_split() {
        let schedule = PreviewSchedule::new(4, 9, 2, false);
        assert_eq!(schedule.at, [[4, 2], [9, 4]]);
        assert_eq!(schedule.end_of_call(2, 4), 4);
        assert_eq!((schedule.step_at(4), schedule.step_at(8), schedule.step_at(9)), (Some(2), None, Some(4)));
    }

    #[test]
    fn schedule_without_previews_changes_no_call() {
        let schedule = PreviewSchedule::default();
        assert_eq!((schedule.end_of_call(0, 8), schedule.is_due(8)), (8, false));
    }
}
