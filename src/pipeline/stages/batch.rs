//! Batches of requests whose videos are generated together. The layout determines the batch size.

use std::thread::JoinHandle;

use crate::request::{ModelSizes, NoiseOrder, Request, Shapes};
use ndarray::{Array, Array3, ArrayD, Axis as Dim, Ix3, RemoveAxis};

use crate::av::Av;
use crate::config;
use crate::hlo::DType;
use crate::models::diffusion_decoder::{DiffusionDecoderConfig, noise_shape};
use crate::nn::{Axis, Layout};
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::output::tensors::fixed;
use crate::pipeline::programs::executor::Executor;
use crate::runtime::noise;
use crate::sampling::denoise::StreamRole;
use crate::sampling::latents::{AudioShape, VideoShape, pack_audio, unpack_audio};
use crate::sampling::noise::TorchRng;
use crate::tensor::Tensor;

/// Returns how many videos a layout generates at a time: the number of shards of the batch axis of the video latents,
/// or 1 if that axis is not sharded.
pub fn videos_at_once(layout: &Layout) -> usize {
    layout.parts("transformer.latents.video", Axis::Batch).max(1)
}

/// Returns how many videos of a command are generated at a time: [`videos_at_once`], or 1 if their result would depend on
/// the batch.
pub(crate) fn videos_per_batch(requests: &[Request], layout: &Layout) -> usize {
    if requests.iter().any(Request::has_adaptive_cache) { 1 } else { videos_at_once(layout) }
}

/// Requests that differ only in prompt and seed, one per row. The number of rows is padded to a multiple of
/// [`videos_at_once`], so that the last batch of a run uses the same programs as the others.
pub struct Batch<'a> {
    /// Requested videos, excluding padding; at least one.
    pub asked: &'a [Request],
    /// Number of rows that the programs process, including padding; [`batch_size`] returns it.
    pub size: usize,
}

/// Returns the number of rows of a batch of these requests: at least `least`, and a multiple of [`videos_at_once`].
///
/// # Errors
/// Returns an error if there are no requests, or if two requests differ in more than prompt and seed.
pub fn batch_size(asked: &[Request], layout: &Layout, least: usize) -> Result<usize> {
    let Some(first) = asked.first() else { return Err(PipelineError::Input("a batch needs a request".into())) };
    if let Some(other) = asked.iter().position(|r| !r.can_batch_with(first)) {
        let message = format!(
            "video {other} of the batch differs from the first in more than prompt and seed; run it separately"
        );
        return Err(PipelineError::Input(message));
    }
    Ok(asked.len().next_multiple_of(videos_at_once(layout)).max(least))
}

impl<'a> Batch<'a> {
    /// Returns the first request; all requests of the batch have the same sizes, steps and guidance.
    pub(crate) fn shared(&self) -> &'a Request {
        &self.asked[0]
    }

    /// Returns the request of each row; padding rows repeat the last request.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &'a Request> + use<'a> {
        let last = &self.asked[self.asked.len() - 1];
        self.asked.iter().chain(std::iter::repeat(last)).take(self.size)
    }

    /// Returns one noise generator per row, seeded with the seed of the row's request.
    pub fn noise(&self) -> BatchNoise {
        let seeds = self.rows().map(|request| request.seed);
        match self.shared().noise {
            config::Noise::Torch => BatchNoise::Torch(seeds.map(TorchRng::new).collect()),
            config::Noise::Device => {
                let seeds: Vec<u64> = seeds.collect();
                let steps = seeds.iter().map(|seed| TorchRng::new(*seed)).collect();
                BatchNoise::Device { seeds, pass: 0, steps }
            }
        }
    }
}

/// Returns the name and the shape (for one row) of each noise tensor that is drawn at the start of a pass.
pub(in crate::pipeline) fn draws(shapes: &Shapes, sizes: &ModelSizes) -> Vec<(&'static str, Vec<usize>)> {
    let (v, a) = (&shapes.video, &shapes.audio);
    let mut draws = Vec::new();
    if shapes.drawn.video {
        draws.push(("video", vec![1, v.channels, v.frames, v.height, v.width]));
    }
    if shapes.drawn.audio {
        draws.push(("audio", vec![1, a.channels, a.length, a.mel_bins]));
    }
    if shapes.drawn.video && shapes.appended.video > 0 {
        draws.push(("appended", vec![1, shapes.appended.video, sizes.transformer.in_channels]));
    }
    draws
}

/// Returns the name and the shape (for one row) of the diffusion decoder's noise.
pub(in crate::pipeline) fn decoder_draws(
    c: &DiffusionDecoderConfig,
    v: &VideoShape,
) -> Vec<(&'static str, Vec<usize>)> {
    vec![("decoder", noise_shape(c, [1, v.frames, v.height, v.width]).to_vec())]
}

/// Noise generators of a batch. Every pass draws from the same generators: a pass continues the random sequence where
/// the previous pass stopped.
pub enum BatchNoise {
    /// One host generator per row, which draws the same numbers as torch's CPU generator.
    Torch(Vec<TorchRng>),
    /// A program that generates the noise on a device.
    Device {
        /// Seed of each row.
        seeds: Vec<u64>,
        /// Number of draws so far. A pass draws once for the batch; the diffusion decoder draws once for the batch or,
        /// with tiled decoding, once per tile.
        pass: usize,
        /// Host generator of each row, used by samplers that take the noise of their steps from the request's
        /// generator.
        steps: Vec<TorchRng>,
    },
}

/// Shape and element type in which the host generators draw the starting noise of a pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DrawOrder {
    /// Whether a stream's noise is drawn in the shape of its tokens, including appended tokens (tokens of conditions
    /// after the video's own), instead of the shape of its latents.
    pub tokens: Av<bool>,
    /// Element type in which the video noise is drawn. Audio noise is drawn in f32.
    pub video: DType,
}

impl Default for DrawOrder {
    fn default() -> Self {
        DrawOrder { tokens: Av::both(false), video: DType::F32 }
    }
}

impl DrawOrder {
    /// Returns the draw order for a pass. `refines`: whether the pass starts from the latents of the previous pass;
    /// `dtype`: the run's element type. In diffusers, noise has the element type of the latents to which it is added;
    /// the upsampler returns latents in `dtype`, so a refining pass draws video noise in `dtype`.
    pub fn for_pass(request: &Request, refines: bool, dtype: DType) -> Self {
        let narrow = refines && request.noise_order == NoiseOrder::Diffusers;
        DrawOrder { tokens: request.draws_tokens(refines), video: if narrow { dtype } else { DType::F32 } }
    }
}

/// Noise tensors drawn at the start of a pass.
pub struct NoiseTensors {
    /// Video noise in the shape of the latents, `[b, C, F, H, W]`. `None`: the video stream starts without noise.
    pub video: Option<ArrayD<f32>>,
    /// Audio noise in the shape of the latents, `[b, C, L, M]`. `None`: the audio stream starts without noise.
    pub audio: Option<ArrayD<f32>>,
    /// Noise of the tokens that conditions append to the video tokens, `[b, extra, c]`.
    pub appended: Option<ArrayD<f32>>,
}

impl NoiseTensors {
    /// Packs the noise into tokens, without appended tokens. A stream without noise yields an empty array.
    pub(crate) fn tokens(self, sizes: &ModelSizes) -> Result<Av<Array3<f32>>> {
        let none = || Array3::zeros((0, 0, 0));
        let video = self.video.map(|video| Ok::<_, PipelineError>(sizes.video_grid.pack(fixed(video)?.view())?));
        let audio = self.audio.map(|audio| Ok::<_, PipelineError>(pack_audio(fixed(audio)?.view())));
        Ok(Av { video: video.transpose()?.unwrap_or_else(none), audio: audio.transpose()?.unwrap_or_else(none) })
    }

    /// Returns the starting tokens of a pass with `batch` videos: the noise, with appended tokens after each stream's own
    /// tokens. Appended audio tokens are zeros, because all of them are conditions without noise. If the request has no video or no audio, the tokens of that stream are zeros.
    pub(crate) fn start(mut self, shapes: &Shapes, sizes: &ModelSizes, batch: usize) -> Result<Av<Array3<f32>>> {
        let appended = self.appended.take();
        let mut start = self.tokens(sizes)?;
        if let Some(appended) = appended {
            let behind = fixed::<_, Ix3>(appended)?;
            let all = ndarray::concatenate(Dim(1), &[start.video.view(), behind.view()]);
            start.video = all.map_err(|e| PipelineError::Input(e.to_string()))?;
        }
        if shapes.appended.audio > 0 {
            let (rows, _, channels) = start.audio.dim();
            let behind = Array3::zeros((rows, shapes.appended.audio, channels));
            let all = ndarray::concatenate(Dim(1), &[start.audio.view(), behind.view()]);
            start.audio = all.map_err(|e| PipelineError::Input(e.to_string()))?;
        }
        let channels = sizes.transformer.streams().map(|stream| stream.in_channels);
        let absent = start.as_mut().zip(shapes.roles).zip(shapes.tokens.zip(channels)).into_iter();
        for ((start, _), (n, c)) in absent.filter(|((_, role), _)| *role == StreamRole::Absent) {
            *start = Array3::zeros((batch, n, c));
        }
        Ok(start)
    }
}

impl BatchNoise {
    /// Draws the starting noise of a pass: first video, then audio, then appended tokens. Noise that is drawn on a
    /// device ignores `order` and has the shape of the latents.
    ///
    /// # Errors
    /// Returns an error if the program that draws on the device fails.
    pub fn draw(
        &mut self,
        executor: &mut Executor,
        shapes: &Shapes,
        sizes: &ModelSizes,
        order: DrawOrder,
    ) -> Result<NoiseTensors> {
        if order != DrawOrder::default() && matches!(self, BatchNoise::Torch(_)) {
            return self.draw_in(executor, shapes, sizes, order);
        }
        let mut joined = self.rows(executor, &draws(shapes, sizes), DType::F32)?.into_iter();
        let mut next = || joined.next().unwrap_or_else(|| ArrayD::default(ndarray::IxDyn(&[0])));
        let Av { video, audio } = shapes.drawn.map(|drawn| drawn.then(&mut next));
        Ok(NoiseTensors { video, audio, appended: (shapes.drawn.video && shapes.appended.video > 0).then(next) })
    }

    /// Implements [`BatchNoise::draw`] on the host for a [`DrawOrder`] other than the default.
    fn draw_in(
        &mut self,
        executor: &mut Executor,
        shapes: &Shapes,
        sizes: &ModelSizes,
        DrawOrder { tokens, video: dtype }: DrawOrder,
    ) -> Result<NoiseTensors> {
        let channels = sizes.transformer.streams().map(|stream| stream.in_channels);
        let mut all = draws(shapes, sizes);
        if tokens.video {
            all.retain(|(name, _)| *name != "appended");
        }
        // Appended audio tokens start without noise.
        let drawn = Av { audio: shapes.own_tokens().audio, ..shapes.tokens };
        for ((name, of_tokens), (n, c)) in Av::NAMES.zip(tokens).zip(drawn.zip(channels)) {
            for (_, shape) in all.iter_mut().filter(|(drawn, _)| of_tokens && *drawn == name) {
                *shape = vec![1, n, c];
            }
        }
        let one = |draw: &(&'static str, Vec<usize>)| {
            let dtype = if draw.0 == Av::NAMES.video { dtype } else { DType::F32 };
            Ok(self.rows(executor, std::slice::from_ref(draw), dtype)?.remove(0))
        };
        let mut drawn = all.iter().map(one).collect::<Result<Vec<ArrayD<f32>>>>()?.into_iter();
        let Av { mut video, mut audio } = shapes.drawn.map(|is_drawn| is_drawn.then(|| drawn.next()).flatten());
        let mut appended = drawn.next();
        if let Some(all) = video.take_if(|_| tokens.video) {
            let all = fixed::<_, Ix3>(all)?;
            let (own, rest) = all.view().split_at(Dim(1), shapes.own_tokens().video);
            let shape = VideoShape { batch: all.shape()[0], ..shapes.video };
            appended = (shapes.appended.video > 0).then(|| rest.to_owned().into_dyn());
            video = Some(sizes.video_grid.unpack(own, &shape)?.into_dyn());
        }
        if let Some(tokens) = audio.take_if(|_| tokens.audio) {
            let all = fixed::<_, Ix3>(tokens)?;
            audio = Some(unpack_audio(all.view(), &AudioShape { batch: all.shape()[0], ..shapes.audio })?.into_dyn());
        }
        Ok(NoiseTensors { video, audio, appended })
    }

    /// Draws the diffusion decoder's noise, `[b, channels, frames, height, width]`, rounded to `dtype`. Must be called
    /// after the noise of all passes is drawn.
    pub(crate) fn draw_decoder(
        &mut self,
        executor: &mut Executor,
        c: &DiffusionDecoderConfig,
        video: &VideoShape,
        dtype: DType,
    ) -> Result<ArrayD<f32>> {
        Ok(self.rows(executor, &decoder_draws(c, video), dtype)?.remove(0))
    }

    /// Returns the host generator of each row, for samplers that take the noise of their steps from the request's
    /// generator.
    pub(crate) fn of_steps(&mut self) -> &mut [TorchRng] {
        match self {
            BatchNoise::Torch(generators) => generators,
            BatchNoise::Device { steps, .. } => steps,
        }
    }

    /// Runs [`BatchNoise::draw_decoder`] on a host thread, concurrently with the device. Moves the host generators to
    /// the thread, so nothing can be drawn afterwards. `None`: noise is drawn on a device, so no thread is started.
    pub(crate) fn draw_decoder_in_background(
        &mut self,
        c: &DiffusionDecoderConfig,
        video: &VideoShape,
        dtype: DType,
    ) -> Option<JoinHandle<Result<ArrayD<f32>>>> {
        let BatchNoise::Torch(generators) = self else { return None };
        let (mut generators, draws) = (std::mem::take(generators), decoder_draws(c, video));
        let work = move || Ok(joined(drawn(&mut generators, &draws, dtype))?.remove(0));
        Some(std::thread::spawn(work))
    }

    /// Draws the diffusion decoder's noise for one tile. `shape` excludes the batch axis.
    pub(crate) fn draw_one(&mut self, executor: &mut Executor, shape: [usize; 4], dtype: DType) -> Result<ArrayD<f32>> {
        let [c, t, h, w] = shape;
        Ok(self.rows(executor, &[("decoder", vec![1, c, t, h, w])], dtype)?.remove(0))
    }

    /// Draws each tensor for all rows and concatenates the rows along the batch axis.
    fn rows(
        &mut self,
        executor: &mut Executor,
        draws: &[(&'static str, Vec<usize>)],
        dtype: DType,
    ) -> Result<Vec<ArrayD<f32>>> {
        // Each row has its own generator, so its noise does not depend on the other rows.
        joined(match self {
            BatchNoise::Torch(generators) => drawn(generators, draws, dtype),
            BatchNoise::Device { seeds, pass, .. } => {
                let program = executor.compile_program("noise", &noise::program(draws)?)?;
                let of_row = |seed: &u64| noise::draw(executor.engine(), &program, draws, *seed, *pass);
                let rows = seeds.iter().map(|seed| Ok(of_row(seed)?.into_iter().map(Tensor::into_f32).collect()));
                let rows = rows.collect::<Result<_>>()?;
                *pass += 1;
                rows
            }
        })
    }
}

/// Draws all tensors from each generator; returns the tensors of each row.
fn drawn(generators: &mut [TorchRng], draws: &[(&'static str, Vec<usize>)], dtype: DType) -> Vec<Vec<ArrayD<f32>>> {
    let draw = |g: &mut TorchRng, shape: &[usize]| match dtype {
        DType::BF16 => g.normal_bf16_array(shape),
        _ => g.normal_array(shape),
    };
    generators.iter_mut().map(|g| draws.iter().map(|(_, shape)| draw(g, shape)).collect()).collect()
}

/// Concatenates the rows of each tensor along the batch axis. A single row is moved, not copied.
fn joined(mut rows: Vec<Vec<ArrayD<f32>>>) -> Result<Vec<ArrayD<f32>>> {
    if rows.len() == 1 {
        return Ok(rows.remove(0));
    }
    let draws = rows.first().map_or(0, Vec::len);
    let joined = (0..draws).map(|i| {
        let views: Vec<_> = rows.iter().map(|row| row[i].view()).collect();
        ndarray::concatenate(Dim(0), &views).map_err(|e| PipelineError::Input(e.to_string()))
    });
    joined.collect()
}

/// Splits the first `count` rows of an array into arrays of shape `[1, …]`. A single row is moved, not copied.
pub(crate) fn split<A: Clone, D: RemoveAxis>(all: Array<A, D>, count: usize) -> Vec<Array<A, D>> {
    if all.shape()[0] == 1 {
        return vec![all];
    }
    (0..count).map(|row| all.select(Dim(0), &[row])).collect()
}

/// Collects the intermediate tensors of each video if the run requests a dump; otherwise does nothing.
pub(crate) struct Dump {
    kept: Vec<Vec<(String, Tensor)>>,
    wanted: bool,
}

impl Dump {
    pub(crate) fn new(videos: usize, wanted: bool) -> Self {
        Dump { kept: vec![Vec::new(); videos], wanted }
    }

    /// Adds one row of `tensor` per video, as `[1, …]`. `tensor` has `n` rows per video, `[b · n, …]`; the added row is
    /// number `offset` of these.
    pub(crate) fn keep_row<D: RemoveAxis>(&mut self, name: &str, tensor: &Array<f32, D>, n: usize, offset: usize) {
        for (video, kept) in self.kept.iter_mut().enumerate().filter(|_| self.wanted) {
            kept.push((name.to_string(), Tensor::from(tensor.select(Dim(0), &[video * n + offset]))));
        }
    }

    pub(crate) fn keep_each<D: RemoveAxis>(&mut self, name: &str, each: &[Array<f32, D>]) {
        for (kept, tensor) in self.kept.iter_mut().zip(each).filter(|_| self.wanted) {
            kept.push((name.to_string(), Tensor::from(tensor.clone())));
        }
    }

    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// Returns the collected tensors of each video.
    pub(crate) fn finish(self) -> Vec<Vec<(String, Tensor)>> {
        self.kept
    }
}
