//! Generates a video with audio from a prompt and conditions: encodes the prompt, denoises, optionally upsamples and
//! denoises again, and decodes.

use std::collections::HashMap;
use std::iter::empty;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ndarray::{Array2, Array3, Array5, Axis as Dim};

use super::batch::{Batch, DrawOrder, Dump, batch_size};
use super::clip_ends::ClipEnds;
use super::clock::{Clock, PhaseTime};
use super::decoding::DecoderNoise;
use super::denoise_loop::CallNoise;
pub use super::denoising::SkippedSteps;
use super::denoising::{DenoisedTokens, FIRST, InitialTokens, Pass, SECOND};
use super::packing::unpack;
use super::previews::Previews;
use super::prompts::{TextContexts, contexts_of, read_contexts, tokens};
use super::run::Run;
use crate::av::Av;
use crate::interrupts::InterruptGuard;
use crate::media::{self, Audio, Frames, HdrFrames, Mp4Options, VideoStream};
use crate::models::upsampler::{self, Upsampling};
use crate::pipeline::error::{PipelineError, Result, one_line};
use crate::pipeline::output::assembly::assemble;
use crate::pipeline::output::partial_results::{self, NamedTensors};
use crate::pipeline::output::tensors::fixed;
use crate::pipeline::phase::{Phase, Watch};
use crate::pipeline::plan::options::RunOptions;
use crate::pipeline::preview::thread::PreviewThread;
use crate::pipeline::programs::ProgramKind;
use crate::pipeline::runner::Runner;
use crate::request::{OutputComposition, RefinePass, Request, Shapes, keyframe_step, upsampling_steps};
use crate::runtime::Outputs;
use crate::tensor::Tensor;

/// Metadata keys of files with frames and samples.
pub(crate) const FRAME_RATE: &str = "frame_rate";
pub(crate) const SAMPLE_RATE: &str = "sample_rate";

/// A generated video. To write it to a file, use [`write_mp4`](Generated::write_mp4). `frames.data()` returns the bytes
/// of the frames, `frames.sha256()` their hash, and [`sound`](Generated::sound) the audio for the writers of [`media`].
pub struct Generated {
    /// Frames; the SDR preview if the video is HDR.
    pub frames: Frames,
    /// Scene-linear frames. `None`: the video is SDR.
    pub hdr: Option<HdrFrames>,
    /// Whether the frames are those of the input video, unchanged.
    pub(crate) are_given: bool,
    /// Encoder that received the frames during decoding. `None`: no encoder has received them.
    pub(crate) stream: Option<VideoStream>,
    /// Audio samples `[channels, samples]`.
    pub audio: Array2<f32>,
    /// Audio sample rate in Hz.
    pub sample_rate: usize,
    /// Frames per second.
    pub frame_rate: f64,
    /// Requested number of frames. It determines the duration of an audio-only result, which has no frames.
    pub(crate) num_frames: usize,
    /// Time of each phase, for the complete batch.
    pub timings: Vec<PhaseTime>,
    /// Number of steps of the first pass. Some samplers evaluate the transformer more than once per step.
    pub steps: usize,
    /// Number of steps of the first pass that this run computed: neither skipped by the step cache nor loaded from a
    /// checkpoint. `timings` has their time.
    pub computed_steps: usize,
    /// Steps that the step cache skipped, for each pass with a step cache.
    pub skipped: Vec<SkippedSteps>,
    /// Number of videos in the batch.
    pub batch: usize,
    /// Number of prompt tokens that were truncated.
    pub cut_tokens: usize,
    /// Intermediate tensors by dump name; empty if no dump was requested.
    pub dump: Vec<(String, Tensor)>,
    /// Un-normalised latents by dump name, which are saved if the output files cannot be written.
    pub(crate) latents: NamedTensors,
    /// Saves the denoising state if the command is interrupted before the output files are written. In a server, delays
    /// an interrupt until the files are written.
    pub(crate) guard: Option<Arc<InterruptGuard>>,
    /// Thread that computes the last previews and fits the map while the video is written. Dropping the last handle waits
    /// for it. `None`: previews are off.
    pub(crate) previews: Option<Arc<PreviewThread>>,
}

impl Generated {
    /// Returns the time of a computed step of the first pass. `None`: this run has computed no step.
    pub fn step_time(&self) -> Option<Duration> {
        let denoising = self.timings.iter().find(|took| took.phase == Phase::Denoise)?;
        denoising.total.checked_div(u32::try_from(self.computed_steps).ok()?)
    }

    /// Waits until all previews of the batch have been received and the map is stored.
    pub fn finish_previews(&self) {
        if let Some(previews) = &self.previews {
            previews.wait();
        }
    }

    /// Returns the frame rate and the sample rate, as metadata of a file with the frames and samples.
    pub(crate) fn rates(&self) -> HashMap<String, String> {
        let rates = [(FRAME_RATE, self.frame_rate.to_string()), (SAMPLE_RATE, self.sample_rate.to_string())];
        rates.map(|(key, value)| (key.to_string(), value)).into()
    }

    /// Returns the audio samples with their sample rate.
    ///
    /// # Errors
    /// Returns an error if the audio is neither mono nor stereo.
    pub fn sound(&self) -> Result<Audio> {
        Ok(Audio::new(self.audio.clone(), u32::try_from(self.sample_rate).unwrap_or(u32::MAX))?)
    }

    /// Returns the audio as it is written to files: with exactly the duration of the frames (for an audio-only result,
    /// of the requested number of frames). The audio decoder's output is up to 45 ms shorter, so it is padded with
    /// silence.
    ///
    /// # Errors
    /// Returns an error if the audio is neither mono nor stereo.
    pub fn file_sound(&self) -> Result<Audio> {
        let frames = if self.frames.count() > 0 { self.frames.count() } else { self.num_frames };
        Ok(self.sound()?.with_frame_duration(frames, self.frame_rate)?)
    }

    /// Writes an MP4 file. Replaces an existing file. For other formats and encoder options, use [`media`].
    ///
    /// # Errors
    /// Returns an error if encoding fails or the file cannot be written.
    pub fn write_mp4(&self, path: impl AsRef<Path>) -> Result<()> {
        let (rate, sound) = (self.frame_rate, self.sound()?);
        media::write_mp4(path.as_ref(), &self.frames, rate, Some(&sound), &Mp4Options::default())?;
        Ok(())
    }
}

impl Runner {
    /// Runs one request. Reuses the programs and the parameters of earlier requests.
    ///
    /// # Errors
    /// Returns an error if the model, the request or a device fails; [`PipelineError::Interrupted`] if `watch` returns
    /// `Break`.
    pub fn generate(&mut self, request: &Request, options: &RunOptions, watch: Watch) -> Result<Generated> {
        let mut all = self.generate_batch(std::slice::from_ref(request), options, watch)?;
        Ok(all.pop().expect("one video per request"))
    }

    /// Runs requests that differ only in prompt and seed as one batch. Each result is numerically identical to the
    /// result of running the request alone, except with an adaptive step cache, which skips a step only if all videos
    /// may skip it.
    ///
    /// # Errors
    /// Returns the errors of [`Runner::generate`], or an error if the requests differ in more than prompt and seed.
    pub fn generate_batch(
        &mut self,
        requests: &[Request],
        options: &RunOptions,
        watch: Watch,
    ) -> Result<Vec<Generated>> {
        if requests.iter().any(|request| request.chain.is_some()) {
            let why = "request.chain: a video of several clips is written while it is generated; use `ltx2 generate` or \
                       Runner::generate_chain, or remove request.chain";
            return Err(PipelineError::Usage(why.into()));
        }
        self.generate_clips(requests, None, options, watch)
    }

    /// Runs a batch of requests. For chained videos, `clip_ends` contains the final tokens of the previous clip, from
    /// which this clip starts; they are replaced with the final tokens of this clip.
    pub(in crate::pipeline) fn generate_clips(
        &mut self,
        requests: &[Request],
        clip_ends: Option<&mut ClipEnds>,
        options: &RunOptions,
        watch: Watch,
    ) -> Result<Vec<Generated>> {
        let run = || {
            let mut clock = Clock::start(&self.executor);
            clock.add(self.enhancing.take());
            let size = batch_size(requests, &self.build.layout, options.rows)?;
            let batch = Batch { asked: requests, size };
            let dump = Dump::new(batch.asked.len(), options.dump);
            self.executor.enter(1)?;
            let sound = self.input_sound(batch.shared())?;
            let (noise, runner) = (batch.noise(), &mut *self);
            let (shown, count) = (options.previews.as_ref(), batch.asked.len());
            let previews = Previews::start(runner, batch.shared(), shown, count, options.dump)?;
            let (done, computed_steps, skipped, guard) = (0, 0, Vec::new(), None);
            let run = Run {
                noise,
                sound,
                previous_sound: None,
                runner,
                batch,
                clip_ends,
                clock,
                dump,
                options,
                watch,
                previews,
                done,
                computed_steps,
                skipped,
                guard,
            };
            run.finish()
        };
        run().map_err(|error| self.explain(error))
    }
}

impl Run<'_> {
    fn finish(mut self) -> Result<Vec<Generated>> {
        let request = self.batch.shared();
        let (first, second) = request.passes();
        // A run that was interrupted in its second pass resumes in this pass.
        let found = self.options.checkpoint.as_ref().and_then(|s| s.found(Phase::Refine));
        self.skipped = found.map(|saved| saved.skipped.clone()).unwrap_or_default();
        let saved = found.and_then(|saved| saved.sound.clone());

        self.begins(Phase::TextEncoder)?;
        let (text, early, cut_tokens) = match &request.text_embeddings {
            Some(path) => {
                let rows = self.batch.size;
                let text = read_contexts(path, &self.runner.model.sizes, request.max_sequence_length, rows)?;
                (text, None, vec![0; self.batch.asked.len()])
            }
            None => self.encode_prompts(request, &first, saved.is_none())?,
        };
        self.ends(Phase::Connectors);

        let mut shapes = Shapes::from_request(&self.runner.model.sizes, &first)?;
        let mut decoder_noise = None;
        let mut made = match &saved {
            Some(sound) => {
                self.skip_noise(&first, &shapes)?;
                let video = Array3::default((0, 0, 0));
                DenoisedTokens { tokens: Av { video: video.clone(), audio: sound.clone() }, generated: video }
            }
            None => {
                let pass = match early {
                    Some(pass) => pass,
                    None => self.begin(&first, None, FIRST)?,
                };
                if second.is_none() {
                    decoder_noise = self.begin_decoder_noise(&shapes, request, &first);
                }
                self.denoise(pass, &text, None)?
            }
        };
        self.ends(Phase::Denoise);
        self.done = first.sigmas.len() - 1;

        if let (Some(second), Some(refine)) = (&second, &request.refine) {
            let to = Shapes::from_request(&self.runner.model.sizes, second)?;
            let sound = made.tokens.audio.clone();
            self.begins(Phase::Upsampler)?;
            let before = match saved {
                Some(_) => None,
                None => Some(self.upsample(&shapes, &to, made, request, refine)?),
            };
            shapes = to;
            self.ends(Phase::Upsampler);
            self.runner.executor.enter(2)?;
            self.previous_sound = Some(sound.clone());
            made = match (&refine.tiles, before) {
                (Some(tiling), Some(before)) => {
                    let made = self.refine_tiles(second, tiling, shapes.video, before, &text)?;
                    decoder_noise = self.begin_decoder_noise(&shapes, request, second);
                    made
                }
                (_, before) => {
                    let pass = self.begin(second, before, SECOND)?;
                    decoder_noise = self.begin_decoder_noise(&shapes, request, second);
                    self.denoise(pass, &text, Some(&sound))?
                }
            };
            if !refine.keeps_audio {
                made.tokens.audio = sound;
            }
            self.ends(Phase::Refine);
        }
        let tokens = match (&second, &request.dfr) {
            (Some(second), Some(dfr)) => self.run_temporal_rounds(dfr, request, second, &mut shapes, made, &text)?,
            _ => made.tokens,
        };
        self.decode(&shapes, tokens, decoder_noise, first.sigmas.len() - 1, cut_tokens)
    }

    /// Encodes the prompts of the batch. If `begins` is set and the devices have enough memory, also begins the first pass
    /// meanwhile. Returns the text contexts, the pass, and the number of truncated tokens of each video.
    fn encode_prompts<'r>(
        &mut self,
        request: &Request,
        first: &'r Request,
        begins: bool,
    ) -> Result<(TextContexts, Option<Pass<'r>>, Vec<usize>)> {
        // All prompts are rows of one batch, so that the text encoder runs only once.
        let kinds = request.prompts();
        let (ids, mask, cut_tokens) = tokens(&self.runner.model, &self.batch, kinds)?;
        let embeds = self.runner.text_encoder(ids, mask.clone())?.run(&self.runner.executor)?;
        // While the text encoder runs, prepare the other inputs of the denoising loop.
        let early = match self.runner.executor.keeps_all() && begins {
            true => Some(self.begin(first, None, FIRST)?),
            false => None,
        };
        let embeds = self.embeddings(&embeds, kinds)?;
        let text = self.runner.connectors(embeds, mask)?.run(&self.runner.executor)?;
        self.clock.wait(&text)?;
        Ok((contexts_of(&text)?, early, cut_tokens))
    }

    /// Decodes normalised tokens to the finished videos. `steps`: number of steps of the first pass.
    fn decode(
        mut self,
        shapes: &Shapes,
        tokens: Av<Array3<f32>>,
        decoder_noise: Option<DecoderNoise>,
        steps: usize,
        cut_tokens: Vec<usize>,
    ) -> Result<Vec<Generated>> {
        let request = self.batch.shared();
        let (video, audio) = unpack(&self.runner.model, shapes, self.batch.size, tokens)?;
        self.dump.keep_row("latents.video", &video, 1, 0);
        self.dump.keep_row("latents.audio", &audio, 1, 0);

        let latents = partial_results::latents(&video, &audio, self.batch.asked.len());
        let mut previews = self.previews.take().map(|previews| {
            let latents = previews.learns().then(|| video.clone());
            (previews, latents)
        });
        let mut videos = Vec::new();
        let decoded = self.decode_streams(video, audio, shapes, decoder_noise, &mut videos);
        let (audios, sample_rate) = decoded.map_err(|error| {
            let frames: Vec<Frames> = videos.drain(..).map(|video| video.frames).collect();
            partial_results::keep_latents(self.runner.explain(error), self.options, &latents, &frames)
        })?;

        if let Some((previews, Some(latents))) = &mut previews {
            let (latents, frames) = (std::mem::take(latents), videos.iter().map(|video| &video.frames));
            let learned = previews.learn(&self.runner.model, latents, frames);
            learned.unwrap_or_else(|error| tracing::warn!("previews: {}", one_line(&error)));
        }
        let previews = previews.map(|(previews, _)| Arc::new(previews.into_thread()));
        self.runner.last_previews = previews.as_ref().map(Arc::downgrade).unwrap_or_default();
        let timings = self.clock.took();
        // The guard is dropped when the files of all videos are written.
        let guard = self.guard.take().map(Arc::new);
        let each = videos.into_iter().zip(audios).zip(cut_tokens).zip(self.dump.finish()).zip(latents);
        let made = each.map(|((((video, audio), cut_tokens), dump), latents)| Generated {
            frames: video.frames,
            hdr: video.hdr,
            are_given: false,
            stream: video.stream,
            audio: audio.index_axis_move(Dim(0), 0),
            sample_rate,
            frame_rate: request.output_rate(),
            num_frames: request.num_frames,
            timings: timings.clone(),
            steps,
            computed_steps: self.computed_steps,
            skipped: self.skipped.clone(),
            batch: self.batch.asked.len(),
            cut_tokens,
            dump,
            latents,
            guard: guard.clone(),
            previews: previews.clone(),
        });
        let whole = made.map(|mut made| {
            if let Some(clip) = request.clip.as_ref().filter(|_| request.composition != OutputComposition::None) {
                let times = shapes.coords(&self.runner.model.sizes, request.frame_rate);
                (made.frames, made.audio) = assemble(request, clip, &times, made.frames, made.audio, sample_rate);
                let all = made.frames.count() == clip.frames.count();
                made.are_given = all && request.composition == OutputComposition::Frames;
            }
            made
        });
        Ok(whole.collect())
    }

    /// Draws and discards the noise of the first pass, including that of its steps. The second pass of a resumed run
    /// then draws the same noise as without an interrupt.
    fn skip_noise(&mut self, first: &Request, shapes: &Shapes) -> Result<()> {
        let (order, sizes) = (DrawOrder::for_pass(first, false, self.runner.build.dtype), &self.runner.model.sizes);
        self.noise.draw(&mut self.runner.executor, shapes, sizes, order)?;
        if first.sampler.continues_request() {
            let mut noise = CallNoise::of_pass(first, empty(), self.noise.of_steps(), shapes.step_tokens(sizes));
            let evaluations = first.sampler.evaluations(first.sigmas.len() - 1);
            (0..evaluations).step_by(first.sampler.noises()).for_each(|_| drop(noise.draw()));
        }
        Ok(())
    }

    /// Reports the start of a phase that has no steps. Returns an error if the progress callback stops the run.
    pub(in crate::pipeline) fn begins(&mut self, phase: Phase) -> Result<()> {
        match (self.watch)(phase, 0, 1) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(PipelineError::Interrupted(self.done, self.batch.shared().sigmas.len() - 1)),
        }
    }

    pub(in crate::pipeline) fn ends(&mut self, phase: Phase) {
        self.clock.ends(phase, &self.runner.executor);
    }

    /// Downloads the text encoder's output, so that the connectors can receive it with another sharding: a layout may
    /// shard text differently in the two components.
    fn embeddings(&mut self, encoded: &Outputs, kinds: usize) -> Result<Tensor> {
        self.clock.wait(encoded)?;
        let embeds = encoded.tensor("prompt_embeds")?;
        if self.dump.is_wanted() {
            let embeds = embeds.to_f32();
            for (kind, name) in ["prompt_embeds", "negative_prompt_embeds"].iter().take(kinds).enumerate() {
                self.dump.keep_row(name, &embeds, kinds, kind);
            }
        }
        self.ends(Phase::TextEncoder);
        Ok(embeds)
    }

    /// Upsamples the tokens of the first pass to the size of the second pass. In the pipeline `dfr`, also upsamples the
    /// keyframes that the first pass generated and, with a detailing LoRA, returns the tokens of the first pass as a
    /// reference video.
    fn upsample(
        &mut self,
        from: &Shapes,
        to: &Shapes,
        made: DenoisedTokens,
        request: &Request,
        refine: &RefinePass,
    ) -> Result<InitialTokens> {
        let sound = made.tokens.audio.clone();
        let keyframes = request.dfr.as_ref().map(|_| self.upsample_keyframes(from, to, &made.generated));
        let generated = keyframes.transpose()?;
        let follows = request.dfr.as_ref().is_some_and(|dfr| dfr.detailing);
        let references = if follows { vec![made.tokens.video.clone()] } else { Vec::new() };
        let (video, audio) = unpack(&self.runner.model, from, self.batch.size, made.tokens)?;
        self.dump.keep_row("stage_1.latents.video", &video, 1, 0);
        self.dump.keep_row("stage_1.latents.audio", &audio, 1, 0);
        let mut upsampled = video.clone();
        for step in upsampling_steps(&refine.upsample, &from.video, &to.video) {
            let program = match step.upsampling {
                Upsampling::TemporalX2 => ProgramKind::FrameUpsampler,
                Upsampling::SpatialX2 | Upsampling::SpatialX1_5 => ProgramKind::Upsampler,
            };
            let made = self.runner.upsampler(program, upsampled, &step)?.run(&self.runner.executor)?;
            upsampled = fixed(made.tensor("latents")?.into_f32())?;
        }
        if refine.adain != 0.0 {
            upsampled = upsampler::adain(upsampled.view(), video.view(), refine.adain);
        }
        if refine.tone_map != 0.0 {
            upsampled = upsampler::tone_map(upsampled.view(), refine.tone_map);
        }
        let model = &self.runner.model;
        model.statistics.video.normalize(&mut upsampled, 1)?;
        let video = model.sizes.video_grid.pack(upsampled.view())?;
        Ok(InitialTokens { tokens: Av { video, audio: sound }, generated, carried: None, references })
    }

    /// Upsamples normalised tokens of keyframes to the size of the second pass.
    fn upsample_keyframes(&mut self, from: &Shapes, to: &Shapes, tokens: &Array3<f32>) -> Result<Array3<f32>> {
        let mut latents = self.unpacked(tokens, from.video)?;
        self.keep_latents("stage_1.keyframes", &latents)?;
        self.runner.model.statistics.video.denormalize(&mut latents, 1)?;
        let keyframes = latents.dim().2;
        let step = keyframe_step(keyframes, &from.video, &to.video);
        let upsampled =
            self.runner.upsampler(ProgramKind::KeyframeUpsampler, latents, &step)?.run(&self.runner.executor)?;
        let mut latents: Array5<f32> = fixed(upsampled.tensor("latents")?.into_f32())?;
        let model = &self.runner.model;
        model.statistics.video.normalize(&mut latents, 1)?;
        Ok(model.sizes.video_grid.pack(latents.view())?)
    }
}
