//! Videos that are made together: as many as the layout splits a batch over.

use std::thread::JoinHandle;

use crate::request::{ModelSizes, NoiseOrder, Request, Shapes};
use ndarray::{Array, Array3, ArrayD, Axis as Dim, Ix3, RemoveAxis};

use super::error::{PipelineError, Result};
use super::executor::Executor;
use super::tensors::fixed;
use crate::av::Av;
use crate::config;
use crate::hlo::DType;
use crate::models::diffusion_decoder::{DiffusionDecoderConfig, noise_shape};
use crate::nn::{Axis, Layout};
use crate::runtime::noise;
use crate::sampling::denoise::StreamRole;
use crate::sampling::latents::{AudioShape, VideoShape, pack_audio, unpack_audio};
use crate::sampling::noise::TorchRng;
use crate::tensor::Tensor;

/// Videos that a layout makes at a time: the parts of `batch`, 1 without such a rule.
pub fn videos_at_once(layout: &Layout) -> usize {
    layout.parts("transformer.latents.video", Axis::Batch).max(1)
}

/// Requests that differ in prompt and seed only, padded to what the layout makes at a time, so that the last ones
/// run the program of all others.
pub struct Batch<'a> {
    asked: &'a [Request],
    size: usize,
}

impl<'a> Batch<'a> {
    /// The batch of these requests.
    ///
    /// # Errors
    /// No request, or two that no program serves together.
    pub fn new(asked: &'a [Request], layout: &Layout) -> Result<Self> {
        let Some(first) = asked.first() else { return Err(PipelineError::Input("a batch needs a request".into())) };
        if let Some(other) = asked.iter().position(|r| !r.can_batch_with(first)) {
            let message = format!("video {other} of the batch differs from the first in more than prompt and seed");
            return Err(PipelineError::Input(message));
        }
        Ok(Batch { asked, size: asked.len().next_multiple_of(videos_at_once(layout)) })
    }

    /// The same in programs of so many rows at least.
    #[must_use]
    pub(crate) fn of_rows(self, rows: usize) -> Self {
        Batch { size: self.size.max(rows), ..self }
    }

    /// A request that stands for all: its sizes, steps and guidance are those of every video.
    pub(crate) fn shared(&self) -> &'a Request {
        &self.asked[0]
    }

    /// Rows of the programs: videos, the filling included.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Videos asked for.
    pub(crate) fn asked(&self) -> usize {
        self.asked.len()
    }

    /// A request for each row; the last one pads.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &'a Request> + use<'a> {
        let last = &self.asked[self.asked.len() - 1];
        self.asked.iter().chain(std::iter::repeat(last)).take(self.size)
    }

    /// The noise of its rows, each from its own seed.
    pub fn noise(&self) -> Noise {
        let seeds = self.rows().map(|request| request.seed);
        match self.shared().noise {
            config::Noise::Torch => Noise::Torch(seeds.map(TorchRng::new).collect()),
            config::Noise::Device => {
                let seeds: Vec<u64> = seeds.collect();
                let steps = seeds.iter().map(|seed| TorchRng::new(*seed)).collect();
                Noise::Device { seeds, pass: 0, steps }
            }
        }
    }
}

/// Tensors of a pass's starting noise, one row of each: their names and shapes.
pub(super) fn draws(shapes: &Shapes, sizes: &ModelSizes) -> Vec<(&'static str, Vec<usize>)> {
    let (v, a) = (&shapes.video, &shapes.audio);
    let mut draws = Vec::new();
    if shapes.drawn.video {
        draws.push(("video", vec![1, v.channels, v.frames, v.height, v.width]));
    }
    if shapes.drawn.audio {
        draws.push(("audio", vec![1, a.channels, a.length, a.mel_bins]));
    }
    if shapes.drawn.video && shapes.appended > 0 {
        draws.push(("appended", vec![1, shapes.appended, sizes.transformer.in_channels]));
    }
    draws
}

/// The noise that a video is decoded from.
pub(super) fn decoder_draws(c: &DiffusionDecoderConfig, v: &VideoShape) -> Vec<(&'static str, Vec<usize>)> {
    vec![("decoder", noise_shape(c, [1, v.frames, v.height, v.width]).to_vec())]
}

/// Noise of a batch, drawn pass by pass: each pass continues after the draws of the one before.
pub enum Noise {
    /// A generator for each row.
    Torch(Vec<TorchRng>),
    /// On a device.
    Device {
        /// Of each row.
        seeds: Vec<u64>,
        /// Passes drawn so far.
        pass: usize,
        /// Generators of the rows that steps draw from, where they continue the request's.
        steps: Vec<TorchRng>,
    },
}

/// How torch's generator draws a pass' starting noise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DrawOrder {
    /// Streams that are drawn as sequences of tokens, appended ones included; others have the shape of their latents.
    pub tokens: Av<bool>,
    /// Type that the video's is drawn in; the sound's is f32.
    pub video: DType,
}

impl Default for DrawOrder {
    fn default() -> Self {
        DrawOrder { tokens: Av::both(false), video: DType::F32 }
    }
}

impl DrawOrder {
    /// The order of a pass of the request that `refines` latents or not, in a run of `dtype`. diffusers' upsampler leaves latents
    /// in that type, and noise is drawn in the latents'.
    pub fn of(request: &Request, refines: bool, dtype: DType) -> Self {
        let narrow = refines && request.noise_order == NoiseOrder::Diffusers;
        DrawOrder { tokens: request.draws_tokens(refines), video: if narrow { dtype } else { DType::F32 } }
    }
}

/// Starting noise of a pass.
pub struct Drawn {
    /// Unpacked, `[b, C, F, H, W]`; none where that stream takes none.
    pub video: Option<ArrayD<f32>>,
    /// Unpacked, `[b, C, L, M]`; none where that stream takes none.
    pub audio: Option<ArrayD<f32>>,
    /// Of tokens behind the video's own, `[b, extra, c]`.
    pub appended: Option<ArrayD<f32>>,
}

impl Drawn {
    /// As the loop's tokens, without those that are appended; no tokens of a stream that none was drawn for.
    ///
    /// # Errors
    /// None that sizes of a request can cause.
    pub(crate) fn tokens(self, sizes: &ModelSizes) -> Result<Av<Array3<f32>>> {
        let none = || Array3::zeros((0, 0, 0));
        let video = self.video.map(|video| Ok::<_, PipelineError>(sizes.video_grid.pack(fixed(video)?.view())?));
        let audio = self.audio.map(|audio| Ok::<_, PipelineError>(pack_audio(fixed(audio)?.view())));
        Ok(Av { video: video.transpose()?.unwrap_or_else(none), audio: audio.transpose()?.unwrap_or_else(none) })
    }

    /// Tokens that a pass of `batch` videos starts from, as far as noise makes them: appended ones behind the video's own,
    /// zeros of a stream that is absent.
    ///
    /// # Errors
    /// None that sizes of a request can cause.
    pub(crate) fn start(mut self, shapes: &Shapes, sizes: &ModelSizes, batch: usize) -> Result<Av<Array3<f32>>> {
        let appended = self.appended.take();
        let mut start = self.tokens(sizes)?;
        if let Some(appended) = appended {
            let behind = fixed::<_, Ix3>(appended)?;
            let all = ndarray::concatenate(Dim(1), &[start.video.view(), behind.view()]);
            start.video = all.map_err(|e| PipelineError::Input(e.to_string()))?;
        }
        let channels = sizes.transformer.streams().map(|stream| stream.in_channels);
        let absent = start.as_mut().zip(shapes.roles).zip(shapes.tokens.zip(channels)).into_iter();
        for ((start, _), (n, c)) in absent.filter(|((_, role), _)| *role == StreamRole::Absent) {
            *start = Array3::zeros((batch, n, c));
        }
        Ok(start)
    }
}

impl Noise {
    /// The noise of a pass: video first, then audio, then appended tokens. A device draws each in its unpacked shape.
    ///
    /// # Errors
    /// Errors of the device that draws.
    pub fn draw(
        &mut self,
        executor: &mut Executor,
        shapes: &Shapes,
        sizes: &ModelSizes,
        order: DrawOrder,
    ) -> Result<Drawn> {
        if order != DrawOrder::default() && matches!(self, Noise::Torch(_)) {
            return self.draw_in(executor, shapes, sizes, order);
        }
        let mut joined = self.rows(executor, &draws(shapes, sizes), DType::F32)?.into_iter();
        let mut next = || joined.next().unwrap_or_else(|| ArrayD::default(ndarray::IxDyn(&[0])));
        let Av { video, audio } = shapes.drawn.map(|drawn| drawn.then(&mut next));
        Ok(Drawn { video, audio, appended: (shapes.drawn.video && shapes.appended > 0).then(next) })
    }

    /// The noise of a pass in an order of its own.
    fn draw_in(
        &mut self,
        executor: &mut Executor,
        shapes: &Shapes,
        sizes: &ModelSizes,
        DrawOrder { tokens, video: dtype }: DrawOrder,
    ) -> Result<Drawn> {
        let channels = sizes.transformer.streams().map(|stream| stream.in_channels);
        let mut all = draws(shapes, sizes);
        if tokens.video {
            all.retain(|(name, _)| *name != "appended");
        }
        for ((name, of_tokens), (n, c)) in Av::NAMES.zip(tokens).zip(shapes.tokens.zip(channels)) {
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
            let (own, rest) = all.view().split_at(Dim(1), shapes.own_tokens());
            let shape = VideoShape { batch: all.shape()[0], ..shapes.video };
            appended = (shapes.appended > 0).then(|| rest.to_owned().into_dyn());
            video = Some(sizes.video_grid.unpack(own, &shape)?.into_dyn());
        }
        if let Some(tokens) = audio.take_if(|_| tokens.audio) {
            let all = fixed::<_, Ix3>(tokens)?;
            audio = Some(unpack_audio(all.view(), &AudioShape { batch: all.shape()[0], ..shapes.audio })?.into_dyn());
        }
        Ok(Drawn { video, audio, appended })
    }

    /// Noise that videos are decoded from, `[b, channels, frames, height, width]`, of the type that the decoder computes in:
    /// what comes behind the passes'.
    ///
    /// # Errors
    /// Errors of the device that draws.
    pub(crate) fn draw_decoder(
        &mut self,
        executor: &mut Executor,
        c: &DiffusionDecoderConfig,
        video: &VideoShape,
        dtype: DType,
    ) -> Result<ArrayD<f32>> {
        Ok(self.rows(executor, &decoder_draws(c, video), dtype)?.remove(0))
    }

    /// Generators of the rows that steps draw from, where they continue the request's.
    pub(crate) fn of_steps(&mut self) -> &mut [TorchRng] {
        match self {
            Noise::Torch(generators) => generators,
            Noise::Device { steps, .. } => steps,
        }
    }

    /// The same in a thread, while a device computes: of torch's generators, which draw nothing else after it.
    pub(crate) fn begin_decoder(
        &mut self,
        c: &DiffusionDecoderConfig,
        video: &VideoShape,
        dtype: DType,
    ) -> Option<JoinHandle<Result<ArrayD<f32>>>> {
        let Noise::Torch(generators) = self else { return None };
        let (mut generators, draws) = (std::mem::take(generators), decoder_draws(c, video));
        let work = move || Ok(joined(drawn(&mut generators, &draws, dtype))?.remove(0));
        Some(std::thread::spawn(work))
    }

    /// The same of a tile, of `shape` but for the videos.
    pub(crate) fn draw_one(&mut self, executor: &mut Executor, shape: [usize; 4], dtype: DType) -> Result<ArrayD<f32>> {
        let [c, t, h, w] = shape;
        Ok(self.rows(executor, &[("decoder", vec![1, c, t, h, w])], dtype)?.remove(0))
    }

    /// Each of the draws, the rows one after the other.
    fn rows(
        &mut self,
        executor: &mut Executor,
        draws: &[(&'static str, Vec<usize>)],
        dtype: DType,
    ) -> Result<Vec<ArrayD<f32>>> {
        // Each row draws its own stream in order, whatever the others do.
        joined(match self {
            Noise::Torch(generators) => drawn(generators, draws, dtype),
            Noise::Device { seeds, pass, .. } => {
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

/// Draws of each of torch's generators.
fn drawn(generators: &mut [TorchRng], draws: &[(&'static str, Vec<usize>)], dtype: DType) -> Vec<Vec<ArrayD<f32>>> {
    let draw = |g: &mut TorchRng, shape: &[usize]| match dtype {
        DType::BF16 => g.normal_bf16_array(shape),
        _ => g.normal_array(shape),
    };
    generators.iter_mut().map(|g| draws.iter().map(|(_, shape)| draw(g, shape)).collect()).collect()
}

/// Rows one after the other, draw by draw; a single one is not copied.
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

/// The rows of an array, each `[1, …]`, the first `count`; a single one is not copied.
pub(crate) fn split<A: Clone, D: RemoveAxis>(all: Array<A, D>, count: usize) -> Vec<Array<A, D>> {
    if all.shape()[0] == 1 {
        return vec![all];
    }
    (0..count).map(|row| all.select(Dim(0), &[row])).collect()
}

/// Intermediate tensors of each video, copied only where they are wanted.
pub(crate) struct Dump {
    kept: Vec<Vec<(String, Tensor)>>,
    wanted: bool,
}

impl Dump {
    /// Nothing kept yet, for a number of videos.
    pub(crate) fn new(videos: usize, wanted: bool) -> Self {
        Dump { kept: vec![Vec::new(); videos], wanted }
    }

    /// Keeps each video's part of a tensor `[b · n, …]`: row `offset` of its `n`, as `[1, …]`.
    pub(crate) fn keep_row<D: RemoveAxis>(&mut self, name: &str, tensor: &Array<f32, D>, n: usize, offset: usize) {
        for (video, kept) in self.kept.iter_mut().enumerate().filter(|_| self.wanted) {
            kept.push((name.to_string(), Tensor::from(tensor.select(Dim(0), &[video * n + offset]))));
        }
    }

    /// Keeps each video's own tensor.
    pub(crate) fn keep_each<D: RemoveAxis>(&mut self, name: &str, each: &[Array<f32, D>]) {
        for (kept, tensor) in self.kept.iter_mut().zip(each).filter(|_| self.wanted) {
            kept.push((name.to_string(), Tensor::from(tensor.clone())));
        }
    }

    /// Whether anything is kept.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// Tensors that were kept, by video.
    pub(crate) fn finish(self) -> Vec<Vec<(String, Tensor)>> {
        self.kept
    }
}
