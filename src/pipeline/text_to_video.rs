//! Video with sound: from a prompt, and frames that are given, to frames and samples, in one stage or two.

use std::ops::ControlFlow;

use ndarray::{Array2, Array3, Array4, Array5, Axis as Dim, Ix3, Ix5};

use super::batch::{Batch, Dump, split};
use super::calls;
use super::clock::{Clock, Took};
use super::denoising::{Denoising, FIRST, SECOND};
use super::error::{PipelineError, Result};
use super::given::{self, GivenFrame};
use super::models::{Models, Sizes};
use super::saved::Saving;
use super::stages::Stages;
use super::tiles::{self, Tiling};
use crate::config;
use crate::media::Frames;
use crate::models::transformer::CrossTimestep;
use crate::models::upsampler;
use crate::models::video_vae::Pixels;
use crate::nn::Build;
use crate::runtime::Outputs;
use crate::sampling::denoise::{DenoiseShape, Sampler};
use crate::sampling::guidance::{Branch, RescaleScope, Scales, branches};
use crate::sampling::latents::{AudioShape, VideoShape, pack_audio, unpack_audio};
use crate::tensor::Tensor;

/// What is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// What to show.
    pub prompt: String,
    /// What to avoid.
    pub negative_prompt: String,
    /// Pixels.
    pub width: usize,
    /// Pixels.
    pub height: usize,
    /// Frames.
    pub num_frames: usize,
    /// Frames a second.
    pub frame_rate: f64,
    /// Of the noise.
    pub seed: u64,
    /// Where it is drawn.
    pub noise: config::Noise,
    /// Noise levels, from the first step's to the final 0.
    pub sigmas: Vec<f32>,
    /// Guidance of video and audio.
    pub scales: [Scales; 2],
    /// Layers that the perturbed branch perturbs.
    pub stg_blocks: Vec<usize>,
    /// Standard deviations of the rescale term.
    pub rescale: RescaleScope,
    /// Text tokens.
    pub max_sequence_length: usize,
    /// The integrator.
    pub sampler: Sampler,
    /// Which noise level the attention between the streams sees.
    pub cross: CrossTimestep,
    /// Frames that are given.
    pub given: Vec<GivenFrame>,
    /// A second stage of this size: the first has half of it.
    pub refine: Option<Refine>,
    /// Tiles that the video is decoded in; whole without.
    pub tiling: Option<Tiling>,
}

/// What a second stage does with the first one's result.
#[derive(Clone, Debug, PartialEq)]
pub struct Refine {
    /// Noise levels; as much noise as the first one says is put in.
    pub sigmas: Vec<f32>,
    /// Whether its sound is kept, or the first stage's.
    pub keeps_audio: bool,
    /// How far channels of the upsampled latents take over mean and deviation of the first stage's, 0 to 1.
    pub adain: f32,
    /// How far large values of the upsampled latents are compressed, 0 to 1.
    pub tone_map: f32,
}

impl Request {
    /// Whether both can be rows of one batch: they differ in prompt and seed only.
    pub fn goes_with(&self, other: &Request) -> bool {
        let alike = Request { prompt: other.prompt.clone(), seed: other.seed, ..self.clone() };
        alike == *other
    }

    /// The requests of its stages: one of its own size, or one of half the size and one without guidance.
    pub fn stages(&self) -> (Request, Option<Request>) {
        let first = Request { refine: None, ..self.clone() };
        let Some(refine) = &self.refine else { return (first, None) };
        let second = Request {
            sigmas: refine.sigmas.clone(),
            scales: [Scales::NEUTRAL; 2],
            stg_blocks: Vec::new(),
            ..first.clone()
        };
        (Request { width: self.width / 2, height: self.height / 2, ..first }, Some(second))
    }

    /// What the denoising programs of `batch` such requests are written for.
    pub fn denoise_shape(&self, sizes: &Sizes, shapes: &Shapes, batch: usize) -> DenoiseShape {
        let branches = branches(self.scales[0], self.scales[1]);
        DenoiseShape {
            batch,
            tokens: shapes.tokens.into(),
            text: self.max_sequence_length,
            text_channels: sizes.text_channels.into(),
            stg_blocks: if branches.contains(&Branch::Perturbed) { self.stg_blocks.clone() } else { Vec::new() },
            // Each video is a request of its own: its neighbours have no part in its statistics.
            rescale: if batch > 1 { RescaleScope::PerSample } else { self.rescale },
            branches,
            levels: given::levels(&self.given).len(),
            cross: self.cross,
            sampler: self.sampler,
        }
    }
}

/// How it is computed.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How the networks become programs.
    pub build: Build,
    /// Steps run at a time; `None` for all.
    pub chunk: Option<usize>,
    /// Keeps the intermediate tensors.
    pub dump: bool,
    /// Keeps the steps behind it in a file, or goes on from such.
    pub saving: Option<Saving>,
}

/// The stages of a request, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Prompt to embeddings.
    TextEncoder,
    /// Embeddings to the transformer's context.
    Connectors,
    /// Step-independent work and the loop.
    Denoise,
    /// Latents to twice their size.
    Upsampler,
    /// The second stage's loop.
    Refine,
    /// Latents to frames.
    VideoDecoder,
    /// Latents to mel spectrogram to samples.
    AudioDecoder,
}

impl Stage {
    /// As tables call it.
    pub fn name(self) -> &'static str {
        match self {
            Stage::TextEncoder => "text encoder",
            Stage::Connectors => "connectors",
            Stage::Denoise => "denoise",
            Stage::Upsampler => "upsampler",
            Stage::Refine => "refine",
            Stage::VideoDecoder => "video decoder",
            Stage::AudioDecoder => "audio decoder",
        }
    }
}

/// What a running request tells; the answer says whether to go on.
pub type Watch<'a> = &'a mut dyn FnMut(Stage, usize, usize) -> ControlFlow<()>;

/// A finished request.
pub struct Generated {
    /// Frames.
    pub frames: Frames,
    /// Samples `[channels, samples]`.
    pub audio: Array2<f32>,
    /// Samples a second.
    pub sample_rate: usize,
    /// Time of each stage; of all videos made together.
    pub timings: Vec<Took>,
    /// Steps of the first stage.
    pub steps: usize,
    /// Videos made together with this one, itself included.
    pub batch: usize,
    /// Prompt tokens that did not fit.
    pub cut_tokens: usize,
    /// Intermediate tensors by their dump names, where asked for.
    pub dump: Vec<(String, Tensor)>,
}

/// Latent sizes of a request.
pub struct Shapes {
    /// Video latents.
    pub video: VideoShape,
    /// Audio latents.
    pub audio: AudioShape,
    /// Tokens of both, the appended ones included.
    pub tokens: [usize; 2],
    /// Video tokens of given frames that stand behind the video's own.
    pub appended: usize,
}

impl Shapes {
    /// The latents of a request.
    ///
    /// # Errors
    /// An illegal size, with the two nearest legal ones.
    pub fn new(sizes: &Sizes, width: usize, height: usize, num_frames: usize, frame_rate: f64) -> Result<Self> {
        let video = sizes.video_grid.latents(1, sizes.video_channels, width, height, num_frames)?;
        let audio = sizes.audio_grid.latents(1, sizes.audio_channels, num_frames, frame_rate)?;
        let tokens = [sizes.video_grid.tokens(&video), audio.length];
        Ok(Shapes { video, audio, tokens, appended: 0 })
    }

    /// The latents and tokens of a stage's request.
    ///
    /// # Errors
    /// As [`Shapes::new`].
    pub fn of(sizes: &Sizes, r: &Request) -> Result<Self> {
        let shapes = Shapes::new(sizes, r.width, r.height, r.num_frames, r.frame_rate)?;
        let picture = sizes.video_grid.tokens(&VideoShape { frames: 1, ..shapes.video });
        let appended = picture * r.given.iter().filter(|g| g.appended).count();
        Ok(Shapes { tokens: [shapes.tokens[0] + appended, shapes.tokens[1]], appended, ..shapes })
    }
}

/// Runs one request. Programs and parameters that `stages` already has are reused.
///
/// # Errors
/// What is wrong with model, request or device; [`PipelineError::Interrupted`] when `watch` says so.
pub fn text_to_video(
    models: &Models,
    stages: &mut Stages,
    request: &Request,
    settings: &Settings,
    watch: Watch,
) -> Result<Generated> {
    let mut all = text_to_videos(models, stages, std::slice::from_ref(request), settings, watch)?;
    all.pop().ok_or_else(|| PipelineError::Input("no video was made".into()))
}

/// Runs requests that differ in prompt and seed only, as rows of one batch. The numbers of each are those of the
/// request alone.
///
/// # Errors
/// As [`text_to_video`]; requests that differ in more.
pub fn text_to_videos(
    models: &Models,
    stages: &mut Stages,
    requests: &[Request],
    settings: &Settings,
    watch: Watch,
) -> Result<Vec<Generated>> {
    let mut clock = Clock::start(stages);
    let build = &settings.build;
    let batch = Batch::new(requests, &settings.build.layout)?;
    let mut dump = Dump::new(batch.asked(), settings.dump);
    let request = batch.shared();
    let (first, second) = request.stages();
    stages.enter(1)?;
    let branches = branches(request.scales[0], request.scales[1]);

    // Text: the prompts are rows of one batch, so that the encoder runs once.
    let kinds = 1 + usize::from(branches.contains(&Branch::Negative));
    let (ids, mask, cut_tokens) = tokens(models, &batch, kinds)?;
    let embeds = calls::text_encoder(models, stages, ids, mask.clone(), build)?.run(stages)?;

    // While it runs, the host makes what the loop reads beside the text, where there is room for both.
    let mut noise = batch.noise();
    let mut begin = |stages: &mut Stages, dump: &mut Dump| {
        Denoising::new(models, stages, &first, &batch, &mut noise, None, build, (FIRST, dump))
    };
    // A run that ended in its second stage goes on there.
    let saved = settings.saving.as_ref().and_then(|s| s.found(Stage::Refine)).and_then(|s| s.sound.clone());
    let early = (stages.keeps_all() && saved.is_none()).then(|| begin(stages, &mut dump)).transpose()?;

    clock.wait(&embeds)?;
    // By way of the host: a layout may place the text of encoder and connectors differently.
    let embeds = embeds.tensor("prompt_embeds")?;
    if dump.is_wanted() {
        let embeds = embeds.to_f32();
        for (kind, name) in ["prompt_embeds", "negative_prompt_embeds"].iter().take(kinds).enumerate() {
            dump.keep_row(name, &embeds, kinds, kind);
        }
    }
    clock.ends(Stage::TextEncoder, stages);

    let text = calls::connectors(models, stages, embeds, mask, build)?.run(stages)?;
    clock.wait(&text)?;
    clock.ends(Stage::Connectors, stages);

    let mut shapes = Shapes::of(&models.sizes, &first)?;
    let mut latents = match &saved {
        Some(sound) => [Array3::default((0, 0, 0)), sound.clone()],
        None => {
            let denoising = match early {
                Some(denoising) => denoising,
                None => begin(stages, &mut dump)?,
            };
            denoising.run(models, stages, &text, None, settings, &mut clock, watch)?
        }
    };
    clock.ends(Stage::Denoise, stages);

    if let (Some(second), Some(refine)) = (&second, &request.refine) {
        let before = match saved {
            Some(_) => None,
            None => {
                let (video, audio) = unpack(models, &shapes, batch.size(), latents.clone())?;
                dump.keep_row("stage_1.latents.video", &video, 1, 0);
                dump.keep_row("stage_1.latents.audio", &audio, 1, 0);
                let to = Shapes::of(&models.sizes, second)?;
                Some([upsample(models, stages, video, &to, refine, build)?, latents[1].clone()])
            }
        };
        shapes = Shapes::of(&models.sizes, second)?;
        clock.ends(Stage::Upsampler, stages);
        let [_, sound] = latents;
        stages.enter(2)?;
        let stage = (SECOND, &mut dump);
        let denoising = Denoising::new(models, stages, second, &batch, &mut noise, before, build, stage)?;
        let [video, refined] = denoising.run(models, stages, &text, Some(&sound), settings, &mut clock, watch)?;
        latents = [video, if refine.keeps_audio { refined } else { sound }];
        clock.ends(Stage::Refine, stages);
    }
    let (video_latents, audio_latents) = unpack(models, &shapes, batch.size(), latents)?;
    dump.keep_row("latents.video", &video_latents, 1, 0);
    dump.keep_row("latents.audio", &audio_latents, 1, 0);

    let tiling = request.tiling.as_ref();
    let videos = decode_video(models, stages, video_latents, tiling, build, batch.asked(), (&mut dump, &mut clock))?;
    clock.ends(Stage::VideoDecoder, stages);

    let audios = split(decode_audio(models, stages, audio_latents, build, &mut clock)?, batch.asked());
    dump.keep_each("audio", &audios);
    clock.ends(Stage::AudioDecoder, stages);

    let timings = clock.took();
    let each = videos.into_iter().zip(audios).zip(cut_tokens).zip(dump.finish());
    let made = each.map(|(((frames, audio), cut_tokens), dump)| Generated {
        frames,
        audio: audio.index_axis_move(Dim(0), 0),
        sample_rate: models.sample_rate,
        timings: timings.clone(),
        steps: first.sigmas.len() - 1,
        batch: batch.asked(),
        cut_tokens,
        dump,
    });
    Ok(made.collect())
}

pub(super) fn fixed<A, D: ndarray::Dimension>(a: ndarray::ArrayD<A>) -> Result<ndarray::Array<A, D>> {
    a.into_dimensionality().map_err(|e| PipelineError::Input(e.to_string()))
}

/// The prompts of a batch, `kinds` a video, as ids and mask `[prompts, tokens]`, and for each video asked for the number
/// of tokens that did not fit.
///
/// # Errors
/// The tokenizer's.
pub fn tokens(models: &Models, batch: &Batch, kinds: usize) -> Result<(Tensor, Tensor, Vec<usize>)> {
    let tokens = batch.shared().max_sequence_length;
    let mut ids = Array2::<i32>::zeros((batch.size() * kinds, tokens));
    let mut mask = ids.clone();
    let mut cut = vec![0; batch.asked()];
    for (video, request) in batch.rows().enumerate() {
        let prompts = [("prompt", &request.prompt), ("negative prompt", &request.negative_prompt)];
        for (kind, (name, prompt)) in prompts.into_iter().take(kinds).enumerate() {
            let encoded = models.tokenizer.encode(prompt, tokens)?;
            let row = video * kinds + kind;
            ids.row_mut(row).assign(&ndarray::ArrayView1::from(&encoded.ids));
            mask.row_mut(row).assign(&ndarray::ArrayView1::from(&encoded.mask));
            // The filling says nothing.
            let Some(most) = cut.get_mut(video).filter(|_| encoded.cut > 0) else { continue };
            tracing::warn!("the {name} is longer than {tokens} tokens: {} were cut from its end", encoded.cut);
            *most = encoded.cut.max(*most);
        }
    }
    Ok((Tensor::from(ids), Tensor::from(mask), cut))
}

/// Unpacked latents as the loop's tokens.
///
/// # Errors
/// None that sizes of a request can cause.
pub fn pack(models: &Models, video: &Array5<f32>, audio: &Array4<f32>) -> Result<[Array3<f32>; 2]> {
    Ok([models.sizes.video_grid.pack(video.view())?, pack_audio(audio.view())])
}

/// A stream's contexts `[prompts, t, channels]` as the branches read them, `[videos, branches, t, channels]`.
pub(super) fn branch_text(text: &Outputs, name: &str, shape: &DenoiseShape) -> Result<Tensor> {
    let text = text.tensor(name)?.into_f32();
    let kinds = text.shape()[0] / shape.batch;
    let kind = |branch: &Branch| usize::from(*branch == Branch::Negative);
    let wanted: Vec<usize> =
        (0..shape.batch).flat_map(|video| shape.branches.iter().map(move |b| video * kinds + kind(b))).collect();
    let dims = [&[shape.batch, shape.branches.len()], &text.shape()[1..]].concat();
    let in_order = wanted.iter().copied().eq(0..text.shape()[0]);
    let rows = if in_order { text } else { text.select(Dim(0), &wanted) }.into_shape_with_order(dims);
    Ok(Tensor::F32(rows.map_err(|e| PipelineError::Input(e.to_string()))?))
}

/// Tokens of `batch` videos to un-normalised latents `[b, C, F, H, W]` and `[b, C, L, M]`.
pub fn unpack(
    models: &Models,
    shapes: &Shapes,
    batch: usize,
    [video, mut audio]: [Array3<f32>; 2],
) -> Result<(Array5<f32>, Array4<f32>)> {
    let mut video = models.sizes.video_grid.unpack(video.view(), &VideoShape { batch, ..shapes.video })?;
    models.video_statistics.denormalize(&mut video, 1)?;
    models.audio_statistics.denormalize(&mut audio, 2)?;
    Ok((video, unpack_audio(audio.view(), &AudioShape { batch, ..shapes.audio })?))
}

/// Un-normalised latents to normalised tokens of twice the size.
fn upsample(
    models: &Models,
    stages: &mut Stages,
    latents: Array5<f32>,
    to: &Shapes,
    refine: &Refine,
    build: &Build,
) -> Result<Array3<f32>> {
    let size = [to.video.frames, to.video.height, to.video.width];
    let upsampled = calls::upsampler(models, stages, latents.clone(), size, build)?.run(stages)?;
    let mut upsampled: Array5<f32> = fixed(upsampled.tensor("latents")?.into_f32())?;
    if refine.adain != 0.0 {
        upsampled = upsampler::adain(upsampled.view(), latents.view(), refine.adain);
    }
    if refine.tone_map != 0.0 {
        upsampled = upsampler::tone_map(upsampled.view(), refine.tone_map);
    }
    models.video_statistics.normalize(&mut upsampled, 1)?;
    Ok(models.sizes.video_grid.pack(upsampled.view())?)
}

/// Latents to the frames of each video asked for. Bytes leave the device, but where the values themselves are dumped.
fn decode_video(
    models: &Models,
    stages: &mut Stages,
    latents: Array5<f32>,
    tiling: Option<&Tiling>,
    build: &Build,
    asked: usize,
    (dump, clock): (&mut Dump, &mut Clock),
) -> Result<Vec<Frames>> {
    let (video, flag) = match tiling {
        Some(tiling) => (Tensor::from(tiles::decode(models, stages, &latents, tiling, build, clock)?), None),
        None => {
            let pixels = if dump.is_wanted() { Pixels::Values } else { Pixels::Bytes };
            let decoded = calls::video_decoder(models, stages, latents, pixels, build)?.run(stages)?;
            clock.wait(&decoded)?;
            let flag = if dump.is_wanted() { None } else { Some(decoded.tensor("finite")?) };
            (decoded.tensor("video")?, flag)
        }
    };
    let (finite, frames) = match video {
        Tensor::U8(bytes) => {
            let frames = split(fixed::<_, Ix5>(bytes)?, asked).into_iter();
            let finite = flag.is_none_or(|flag| flag.to_i64().iter().all(|v| *v == 1));
            (
                finite,
                frames
                    .map(|one| Frames::new(one.index_axis_move(Dim(0), 0)))
                    .collect::<std::result::Result<Vec<_>, _>>()?,
            )
        }
        values => {
            let values = values.into_f32();
            let finite = values.iter().all(|v| v.is_finite());
            let turned =
                fixed::<_, Ix5>(values)?.permuted_axes([0, 2, 1, 3, 4]).mapv(|v| (v * 0.5 + 0.5).clamp(0.0, 1.0));
            let videos = split(turned.as_standard_layout().into_owned(), asked);
            dump.keep_each("video", &videos);
            (
                finite,
                videos
                    .iter()
                    .map(|one| Frames::from_video(one.index_axis(Dim(0), 0)))
                    .collect::<std::result::Result<Vec<_>, _>>()?,
            )
        }
    };
    if !finite {
        return Err(PipelineError::NotFinite("the decoded frames".into()));
    }
    Ok(frames)
}

/// Latents to samples `[b, channels, samples]`.
fn decode_audio(
    models: &Models,
    stages: &mut Stages,
    latents: Array4<f32>,
    build: &Build,
    clock: &mut Clock,
) -> Result<Array3<f32>> {
    let decoded = calls::audio_decoder(models, stages, latents, build)?.run(stages)?;
    let sounds = calls::vocoder(models, stages, &decoded, build)?.run(stages)?;
    clock.wait(&sounds)?;
    let samples = sounds.tensor("audio")?.into_f32();
    if samples.iter().any(|v| !v.is_finite()) {
        return Err(PipelineError::NotFinite("the decoded samples".into()));
    }
    fixed::<_, Ix3>(samples)
}
