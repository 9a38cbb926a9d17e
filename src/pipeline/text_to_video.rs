//! Video with sound from a prompt and image conditions: encode, denoise, upsample, denoise, decode.

use std::iter::empty;
use std::ops::ControlFlow;
use std::panic::resume_unwind;
use std::path::Path;
use std::thread::JoinHandle;

use ndarray::{Array2, Array3, Array4, Array5, ArrayD, Axis as Dim, Ix3, Ix5, Slice};

use super::assembly::assemble;
use super::batch::{Batch, DrawOrder, Dump, split, videos_at_once};
use super::clip_ends::ClipEnds;
use super::clock::{Clock, PhaseTime};
use super::denoise_loop::CallNoise;
use super::denoising::{Before, Denoised, FIRST, SECOND};
use super::error::{PipelineError, Result};
use super::kept::{self, Named};
use super::options::RunOptions;
use super::packing::unpack;
use super::phase::{Phase, Watch};
use super::pieces::{Decoded, Pieces};
use super::program_table::ProgramKind;
use super::prompts::tokens;
use super::run::Run;
use super::runner::Runner;
use super::tensors::fixed;
use super::tiles;
use crate::av::Av;
use crate::failpoint;
use crate::media::{self, Audio, Frames, Mp4Options, VideoStream};
use crate::models::pixels::Pixels;
use crate::models::upsampler::{self, Upsampling};
use crate::request::{Assembly, RefinePass, Request, Shapes, Tiling, keyframe_step, upsampling_steps};
use crate::runtime::Outputs;
use crate::tensor::Tensor;

/// The decoder's noise, drawn by a thread.
type DecoderNoise = JoinHandle<Result<ArrayD<f32>>>;

/// A finished video: [`write_mp4`](Generated::write_mp4) writes it, `frames.data()` has its bytes, `frames.sha256()` their
/// hash, [`sound`](Generated::sound) the samples as [`media`] writes them.
pub struct Generated {
    pub frames: Frames,
    /// Whether they are all of the given video's, as its file has them.
    pub(crate) are_given: bool,
    /// Their encoder, where that began while they were decoded.
    pub(crate) stream: Option<VideoStream>,
    /// Samples `[channels, samples]`.
    pub audio: Array2<f32>,
    /// Samples a second.
    pub sample_rate: usize,
    /// Frames a second.
    pub frame_rate: f64,
    /// Frames that were asked for, of which a sound alone has none.
    pub(crate) num_frames: usize,
    /// Time of each phase, of all videos made together.
    pub timings: Vec<PhaseTime>,
    /// Steps of the first pass; a sampler may evaluate the transformer more than once a step.
    pub steps: usize,
    /// Videos made together with this one, itself included.
    pub batch: usize,
    /// Prompt tokens that did not fit.
    pub cut_tokens: usize,
    /// Intermediate tensors by their dump names, where asked for.
    pub dump: Vec<(String, Tensor)>,
    /// Un-normalised latents by their dump names, for when its files cannot be written.
    pub(crate) latents: Named,
}

impl Generated {
    /// The samples with their rate.
    ///
    /// # Errors
    /// Neither mono nor stereo.
    pub fn sound(&self) -> Result<Audio> {
        Ok(Audio::new(self.audio.clone(), u32::try_from(self.sample_rate).unwrap_or(u32::MAX))?)
    }

    /// The sound as files hold it: as long as the frames, or as the frames that a sound alone was asked for. The audio decoder's
    /// samples end up to 45 ms before; silence follows them.
    ///
    /// # Errors
    /// Neither mono nor stereo.
    pub fn file_sound(&self) -> Result<Audio> {
        let frames = if self.frames.count() > 0 { self.frames.count() } else { self.num_frames };
        Ok(self.sound()?.lasting(frames, self.frame_rate)?)
    }

    /// Writes an MP4, over a file of that name; [`media`] writes other files and has the encoder's options.
    ///
    /// # Errors
    /// The encoder's; a file that cannot be written.
    pub fn write_mp4(&self, path: impl AsRef<Path>) -> Result<()> {
        let (rate, sound) = (self.frame_rate, self.sound()?);
        media::write_mp4(path.as_ref(), &self.frames, rate, Some(&sound), &Mp4Options::default())?;
        Ok(())
    }
}

impl Runner {
    /// Runs one request. Programs and parameters of earlier requests are reused.
    ///
    /// # Errors
    /// Errors of model, request or device; [`PipelineError::Interrupted`] when `watch` says so.
    pub fn generate(&mut self, request: &Request, options: &RunOptions, watch: Watch) -> Result<Generated> {
        let mut all = self.generate_batch(std::slice::from_ref(request), options, watch)?;
        Ok(all.pop().expect("a video of each request"))
    }

    /// Runs requests that differ in prompt and seed only, as one batch. The numbers of each are those of the request
    /// alone.
    ///
    /// # Errors
    /// As [`Runner::generate`]; requests that differ in more.
    pub fn generate_batch(
        &mut self,
        requests: &[Request],
        options: &RunOptions,
        watch: Watch,
    ) -> Result<Vec<Generated>> {
        if requests.iter().any(|request| request.chain.is_some()) {
            let why = "request.chain: a video of several clips is written as it is made, by `ltx2 generate` or \
                       Runner::generate_chain; leave it out";
            return Err(PipelineError::Usage(why.into()));
        }
        self.generate_clips(requests, None, options, watch)
    }

    /// The same of clips that start from the ends of those before, and leave theirs.
    pub(super) fn generate_clips(
        &mut self,
        requests: &[Request],
        clip_ends: Option<&mut ClipEnds>,
        options: &RunOptions,
        watch: Watch,
    ) -> Result<Vec<Generated>> {
        self.run_clips(requests, clip_ends, options, watch).map_err(|error| self.explain(error))
    }

    fn run_clips(
        &mut self,
        requests: &[Request],
        clip_ends: Option<&mut ClipEnds>,
        options: &RunOptions,
        watch: Watch,
    ) -> Result<Vec<Generated>> {
        let clock = Clock::start(&self.executor);
        let batch = Batch::new(requests, &self.build.layout)?.of_rows(options.rows);
        let dump = Dump::new(batch.asked(), options.dump);
        self.executor.enter(1)?;
        let sound = self.given(batch.shared())?;
        let noise = batch.noise();
        Run { noise, sound, runner: self, batch, clip_ends, clock, dump, options, watch, done: 0 }.finish()
    }
}

impl Run<'_> {
    fn finish(mut self) -> Result<Vec<Generated>> {
        let request = self.batch.shared();
        let (first, second) = request.passes();
        // A run that ended in its second pass goes on there.
        let saved = self.options.saving.as_ref().and_then(|s| s.found(Phase::Refine)).and_then(|s| s.sound.clone());

        self.begins(Phase::TextEncoder)?;
        // The prompts are rows of one batch, so that the encoder runs once.
        let kinds = request.prompts();
        let (ids, mask, cut_tokens) = tokens(&self.runner.model, &self.batch, kinds)?;
        let embeds = self.runner.text_encoder(ids, mask.clone())?.run(&self.runner.executor)?;
        // While it runs, the host makes what the loop reads beside the text, where there is room for both.
        let early = match self.runner.executor.keeps_all() && saved.is_none() {
            true => Some(self.begin(&first, None, FIRST)?),
            false => None,
        };
        let embeds = self.embeddings(&embeds, kinds)?;
        let text = self.runner.connectors(embeds, mask)?.run(&self.runner.executor)?;
        self.clock.wait(&text)?;
        self.ends(Phase::Connectors);

        let mut shapes = Shapes::of(&self.runner.model.sizes, &first)?;
        let mut decoder_noise = None;
        let mut made = match &saved {
            Some(sound) => {
                self.skip_noise(&first, &shapes)?;
                let video = Array3::default((0, 0, 0));
                Denoised { tokens: Av { video: video.clone(), audio: sound.clone() }, generated: video }
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
            let to = Shapes::of(&self.runner.model.sizes, second)?;
            let sound = made.tokens.audio.clone();
            self.begins(Phase::Upsampler)?;
            let before = match saved {
                Some(_) => None,
                None => Some(self.upsample(&shapes, &to, made, refine, request.dfr.is_some())?),
            };
            shapes = to;
            self.ends(Phase::Upsampler);
            self.runner.executor.enter(2)?;
            let pass = self.begin(second, before, SECOND)?;
            decoder_noise = self.begin_decoder_noise(&shapes, request, second);
            made = self.denoise(pass, &text, Some(&sound))?;
            if !refine.keeps_audio {
                made.tokens.audio = sound;
            }
            self.ends(Phase::Refine);
        }
        let tokens = match (&second, &request.dfr) {
            (Some(second), Some(dfr)) => self.behind_passes(dfr, request, second, &mut shapes, made, &text)?,
            _ => made.tokens,
        };
        self.decode(&shapes, tokens, decoder_noise, first.sigmas.len() - 1, cut_tokens)
    }

    /// The finished videos of normalised tokens, after `steps` steps of the first pass.
    fn decode(
        mut self,
        shapes: &Shapes,
        tokens: Av<Array3<f32>>,
        decoder_noise: Option<DecoderNoise>,
        steps: usize,
        cut_tokens: Vec<usize>,
    ) -> Result<Vec<Generated>> {
        let request = self.batch.shared();
        let (video, audio) = unpack(&self.runner.model, shapes, self.batch.size(), tokens)?;
        self.dump.keep_row("latents.video", &video, 1, 0);
        self.dump.keep_row("latents.audio", &audio, 1, 0);

        let latents = kept::latents(&video, &audio, self.batch.asked());
        let mut videos = Vec::new();
        let decoded = self.decode_streams((video, audio), shapes, decoder_noise, &mut videos);
        let (audios, sample_rate) = decoded.map_err(|error| {
            let frames: Vec<Frames> = videos.drain(..).map(|video| video.frames).collect();
            kept::keep_latents(self.runner.explain(error), &self.options.outputs, &latents, &frames)
        })?;

        let timings = self.clock.took();
        let each = videos.into_iter().zip(audios).zip(cut_tokens).zip(self.dump.finish()).zip(latents);
        let made = each.map(|((((video, audio), cut_tokens), dump), latents)| Generated {
            frames: video.frames,
            are_given: false,
            stream: video.stream,
            audio: audio.index_axis_move(Dim(0), 0),
            sample_rate,
            frame_rate: request.output_rate(),
            num_frames: request.num_frames,
            timings: timings.clone(),
            steps,
            batch: self.batch.asked(),
            cut_tokens,
            dump,
            latents,
        });
        let whole = made.map(|mut made| {
            if let Some(clip) = request.clip.as_ref().filter(|_| request.assembly != Assembly::None) {
                let times = shapes.coords(&self.runner.model.sizes, request.frame_rate);
                (made.frames, made.audio) = assemble(request, clip, &times, made.frames, made.audio, sample_rate);
                let all = made.frames.count() == clip.frames.count();
                made.are_given = all && request.assembly == Assembly::Frames;
            }
            made
        });
        Ok(whole.collect())
    }

    /// Decodes latents: frames into `videos`, which has them even if the sound fails. Returns the sounds and their rate.
    fn decode_streams(
        &mut self,
        (video, audio): (Array5<f32>, Array4<f32>),
        shapes: &Shapes,
        decoder_noise: Option<DecoderNoise>,
        videos: &mut Vec<Decoded>,
    ) -> Result<(Vec<Array3<f32>>, usize)> {
        let request = self.batch.shared();
        let fail = |stream| failpoint::fail("decode", stream).map_err(|e| PipelineError::Input(e.to_string()));
        *videos = match request.decodes_video() {
            false => (0..self.batch.asked()).map(|_| Decoded::from(Frames::none())).collect(),
            true => {
                self.begins(Phase::VideoDecoder)?;
                fail("video")?;
                let video = self.runner.model.decoded_latents(video)?;
                self.decode_video(video, shapes, request, decoder_noise)?
            }
        };
        self.ends(Phase::VideoDecoder);
        self.begins(Phase::AudioDecoder)?;
        fail("audio")?;
        let (audios, sample_rate) = self.sounds(audio, request)?;
        self.dump.keep_each("audio", &audios);
        self.ends(Phase::AudioDecoder);
        Ok((audios, sample_rate))
    }

    /// Draws what the first pass drew, its steps included, so that noise continues after it.
    fn skip_noise(&mut self, first: &Request, shapes: &Shapes) -> Result<()> {
        let (order, sizes) = (DrawOrder::of(first, false, self.runner.build.dtype), &self.runner.model.sizes);
        self.noise.draw(&mut self.runner.executor, shapes, sizes, order)?;
        if first.sampler.continues_request() {
            let mut noise = CallNoise::of_pass(first, empty(), self.noise.of_steps(), shapes.step_tokens(sizes));
            let evaluations = first.sampler.evaluations(first.sigmas.len() - 1);
            (0..evaluations).step_by(first.sampler.noises()).for_each(|_| drop(noise.draw()));
        }
        Ok(())
    }

    /// Tells of a phase without steps; it is not begun where the answer is to stop.
    fn begins(&mut self, phase: Phase) -> Result<()> {
        let (first, _) = self.batch.shared().passes();
        match (self.watch)(phase, 0, 1) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(PipelineError::Interrupted(self.done, first.sigmas.len() - 1)),
        }
    }

    pub(super) fn ends(&mut self, phase: Phase) {
        self.clock.ends(phase, &self.runner.executor);
    }

    /// The text encoder's result, by way of the host: a layout may place the text of encoder and connectors differently.
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

    /// The first pass' tokens as the second starts from them, at its size; with `keyframes` those it generated, too.
    fn upsample(
        &mut self,
        from: &Shapes,
        to: &Shapes,
        made: Denoised,
        refine: &RefinePass,
        keyframes: bool,
    ) -> Result<Before> {
        let sound = made.tokens.audio.clone();
        let generated = if keyframes { Some(self.upsample_keyframes(from, to, &made.generated)?) } else { None };
        let (video, audio) = unpack(&self.runner.model, from, self.batch.size(), made.tokens)?;
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
        Ok(Before { tokens: Av { video, audio: sound }, generated, carried: None })
    }

    /// Normalised tokens of keyframes to those of the second pass' size.
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

    /// Latents to the frames of each video asked for. Bytes leave the device, but where the values themselves are
    /// dumped.
    fn decode_video(
        &mut self,
        latents: Array5<f32>,
        shapes: &Shapes,
        request: &Request,
        noise: Option<DecoderNoise>,
    ) -> Result<Vec<Decoded>> {
        let asked = self.batch.asked();
        let whole = |frames: Vec<Frames>| Ok(frames.into_iter().map(Decoded::from).collect());
        if let Some(tiling) = &request.tiling {
            if self.dump.is_wanted() {
                let mut pieces = Vec::new();
                self.decode_tiles(latents, tiling, |piece| {
                    pieces.push(piece);
                    Ok(())
                })?;
                return whole(self.frames_of(tiles::joined(&pieces))?);
            }
            // What is joined to other frames is encoded with them.
            let encode = self.options.encode.as_ref().filter(|_| request.assembly == Assembly::None);
            let mut pieces = Pieces::new(request.output_rate(), encode);
            self.decode_tiles(latents, tiling, |piece| {
                pieces.add(frames(&shown(piece, asked)?)?);
                Ok(())
            })?;
            return pieces.finish();
        }
        let pixels = if self.dump.is_wanted() { Pixels::Values } else { Pixels::Bytes };
        let call = match self.runner.model.diffusion {
            Some(_) => {
                let noise = self.decoder_noise(shapes, noise)?;
                self.runner.diffusion_decoder(latents, noise, pixels)?
            }
            None => self.runner.video_decoder(latents, pixels)?,
        };
        let decoded = call.run(&self.runner.executor)?;
        self.clock.wait(&decoded)?;
        let bytes = match decoded.tensor("video")? {
            Tensor::U8(bytes) => bytes,
            values => return whole(self.frames_of(fixed(values.into_f32())?)?),
        };
        finite(decoded.tensor("finite")?.to_i64().iter().all(|v| *v == 1), "frames")?;
        let videos = split(fixed::<_, Ix5>(bytes)?, asked).into_iter();
        let videos: Result<_> = videos.map(|one| Ok(Frames::new(one.index_axis_move(Dim(0), 0))?)).collect();
        whole(videos?)
    }

    /// Latents to a video of -1..1 in pieces of frames, tile by tile.
    fn decode_tiles(
        &mut self,
        latents: Array5<f32>,
        tiling: &Tiling,
        each: impl FnMut(Array5<f32>) -> Result<()>,
    ) -> Result<()> {
        match self.runner.model.diffusion {
            Some(_) => self.decode_diffusion_tiles(latents, tiling, each),
            None => tiles::decode(self.runner, &latents, tiling, &mut self.clock, each),
        }
    }

    /// Starts to draw the decoder's noise while the last pass runs. `None`: it is drawn after the pass, because the video is decoded
    /// in tiles, rounds follow, or the pass' steps draw from the same generator.
    fn begin_decoder_noise(&mut self, shapes: &Shapes, request: &Request, last: &Request) -> Option<DecoderNoise> {
        let c = self.runner.model.configs.diffusion_decoder().ok()?;
        let is_whole = self.runner.model.diffusion.is_some() && request.tiling.is_none() && request.dfr.is_none();
        let is_next = is_whole && !last.sampler.continues_request();
        is_next.then(|| self.noise.begin_decoder(&c, &shapes.video, self.runner.build.dtype)).flatten()
    }

    /// The noise that the videos are decoded from.
    fn decoder_noise(&mut self, shapes: &Shapes, begun: Option<DecoderNoise>) -> Result<Tensor> {
        let noise = match begun {
            Some(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic))?,
            None => {
                let (c, dtype) = (self.runner.model.configs.diffusion_decoder()?, self.runner.build.dtype);
                self.noise.draw_decoder(&mut self.runner.executor, &c, &shapes.video, dtype)?
            }
        };
        self.dump.keep_row("noise.decoder", &noise, 1, 0);
        Ok(noise.into())
    }

    /// Frames of a video `[b, 3, frames, height, width]` of -1..1, whose values are kept where they are dumped.
    fn frames_of(&mut self, video: Array5<f32>) -> Result<Vec<Frames>> {
        let videos = shown(video, self.batch.asked())?;
        self.dump.keep_each("video", &videos);
        frames(&videos)
    }

    /// The sound of each video, `[1, channels, samples]`, and its rate: the one that is given, or what latents decode to.
    fn sounds(&mut self, latents: Array4<f32>, request: &Request) -> Result<(Vec<Array3<f32>>, usize)> {
        let asked = self.batch.asked();
        Ok(match &self.sound {
            Some(given) => (vec![given.samples(); asked], given.rate()),
            None => (split(self.decode_audio(latents, request)?, asked), self.runner.model.sample_rate),
        })
    }

    /// Latents to samples `[b, channels, samples]`. No more videos at once than the layout makes: with others beside it, a sound has
    /// other bits on CPU.
    fn decode_audio(&mut self, latents: Array4<f32>, request: &Request) -> Result<Array3<f32>> {
        let at_once = videos_at_once(&self.runner.build.layout);
        if latents.dim().0 <= at_once {
            return self.decode_audio_at_once(latents, request);
        }
        let parts = latents.axis_chunks_iter(Dim(0), at_once);
        let sounds: Vec<_> =
            parts.map(|part| self.decode_audio_at_once(part.to_owned(), request)).collect::<Result<_>>()?;
        let views: Vec<_> = sounds.iter().map(|sound| sound.view()).collect();
        ndarray::concatenate(Dim(0), &views).map_err(|e| PipelineError::Bug(e.to_string()))
    }

    /// The same of one program's videos; sounds of a canvas are cut to the video's length.
    fn decode_audio_at_once(&mut self, latents: Array4<f32>, request: &Request) -> Result<Array3<f32>> {
        let decoded = self.runner.audio_decoder(latents)?.run(&self.runner.executor)?;
        let sounds = self.runner.vocoder(&decoded)?.run(&self.runner.executor)?;
        self.clock.wait(&sounds)?;
        let samples = sounds.tensor("audio")?.into_f32();
        finite(samples.iter().all(|v| v.is_finite()), "samples")?;
        let mut samples = fixed::<_, Ix3>(samples)?;
        if request.dfr.is_some() {
            let seconds = request.output_frames() as f64 / request.output_rate();
            let count = (seconds * self.runner.model.sample_rate as f64).round_ties_even() as usize;
            samples = samples.slice_axis(Dim(2), Slice::from(..count.min(samples.dim().2))).to_owned();
        }
        Ok(samples)
    }
}

/// Each of the first `asked` videos of `[b, 3, frames, height, width]`, -1..1, as `[1, frames, 3, height, width]`, 0..1.
fn shown(video: Array5<f32>, asked: usize) -> Result<Vec<Array5<f32>>> {
    finite(video.iter().all(|v| v.is_finite()), "frames")?;
    let shown = video.permuted_axes([0, 2, 1, 3, 4]).mapv(|v| (v * 0.5 + 0.5).clamp(0.0, 1.0));
    Ok(split(shown.as_standard_layout().into_owned(), asked))
}

fn frames(videos: &[Array5<f32>]) -> Result<Vec<Frames>> {
    videos.iter().map(|one| Ok(Frames::from_video(one.index_axis(Dim(0), 0))?)).collect()
}

fn finite(all: bool, what: &str) -> Result<()> {
    if all { Ok(()) } else { Err(PipelineError::NotFinite(format!("the decoded {what}"))) }
}
