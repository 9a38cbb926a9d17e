//! Decodes latents to frames and audio samples.

use std::thread::JoinHandle;

use ndarray::{Array3, Array4, Array5, ArrayD, Axis as Dim, Ix3, Ix5, Slice};

use super::batch::{split, videos_at_once};
use super::run::Run;
use super::tiles;
use crate::catch_panic::panic_message;
use crate::failpoint;
use crate::media::{Frames, HdrFrames, HdrTransform, Mp4Options};
use crate::models::pixels::Pixels;
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::output::frame_collector::{DecodedFrames, Pieces};
use crate::pipeline::output::tensors::fixed;
use crate::pipeline::phase::Phase;
use crate::pipeline::plan::options::RunOptions;
use crate::request::{OutputComposition, Request, Shapes, TileSizes};
use crate::runtime::Outputs;
use crate::tensor::Tensor;

/// Thread that draws the diffusion decoder's noise.
pub(in crate::pipeline) type DecoderNoise = JoinHandle<Result<ArrayD<f32>>>;

impl Run<'_> {
    /// Decodes the latents of both streams. Stores the frames in `videos`, even if decoding the audio then fails.
    /// Returns the audio samples of each video and the sample rate (Hz).
    pub(in crate::pipeline) fn decode_streams(
        &mut self,
        video: Array5<f32>,
        audio: Array4<f32>,
        shapes: &Shapes,
        decoder_noise: Option<DecoderNoise>,
        videos: &mut Vec<DecodedFrames>,
    ) -> Result<(Vec<Array3<f32>>, usize)> {
        let request = self.batch.shared();
        let is_asked = !self.options.is_warm_up;
        let fail = |stream| {
            if !is_asked {
                return Ok(());
            }
            failpoint::reach("decode", stream);
            failpoint::fail("decode", stream).map_err(|e| PipelineError::Input(e.to_string()))
        };
        *videos = match request.decodes_video() {
            false => (0..self.batch.asked.len()).map(|_| DecodedFrames::from(Frames::none())).collect(),
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
        if audios.iter().any(|audio| !audio.is_empty()) {
            self.dump.keep_each("audio", &audios);
        }
        self.ends(Phase::AudioDecoder);
        Ok((audios, sample_rate))
    }

    /// Decodes latents to the frames of each requested video. The device returns bytes, or floats if the frames are
    /// dumped.
    fn decode_video(
        &mut self,
        latents: Array5<f32>,
        shapes: &Shapes,
        request: &Request,
        noise: Option<DecoderNoise>,
    ) -> Result<Vec<DecodedFrames>> {
        let asked = self.batch.asked.len();
        if let Some(transform) = request.hdr {
            return self.decode_hdr(latents, shapes, request, noise, transform);
        }
        let whole = |frames: Vec<Frames>| Ok(frames.into_iter().map(DecodedFrames::from).collect());
        if let Some(tiling) = &request.tiling {
            if self.dump.is_wanted() {
                let mut pieces = Vec::new();
                self.decode_tiles(latents, tiling, |piece| {
                    pieces.push(piece);
                    Ok(())
                })?;
                return whole(self.frames_of(tiles::joined(&pieces))?);
            }
            let mut pieces = Pieces::new(request.output_rate(), encoder(self.options, request));
            self.decode_tiles(latents, tiling, |piece| {
                pieces.add(frames(&shown(piece, asked)?)?);
                Ok(())
            })?;
            return pieces.finish();
        }
        let pixels = if self.dump.is_wanted() { Pixels::Values } else { Pixels::Bytes };
        let decoded = self.decode_whole(latents, shapes, noise, pixels)?;
        match pixels {
            Pixels::Values => whole(self.frames_of(fixed(decoded.tensor("video")?.into_f32())?)?),
            Pixels::Bytes => {
                let rate = request.output_rate();
                // Other videos are encoded when their files are written, so each gets all cores.
                let mut encode = encoder(self.options, request);
                let videos = decoded_frames(&decoded, asked)?.into_iter();
                Ok(videos.map(|frames| DecodedFrames::encoding(frames, rate, encode.take())).collect())
            }
        }
    }

    /// Decodes the latents of complete videos in one call.
    fn decode_whole(
        &mut self,
        latents: Array5<f32>,
        shapes: &Shapes,
        noise: Option<DecoderNoise>,
        pixels: Pixels,
    ) -> Result<Outputs> {
        let call = match self.runner.model.diffusion {
            Some(_) => {
                let noise = self.decoder_noise(shapes, noise)?;
                self.runner.diffusion_decoder(latents, noise, pixels)?
            }
            None => self.runner.video_decoder(latents, pixels)?,
        };
        let decoded = call.run(&self.runner.executor)?;
        self.clock.wait(&decoded)?;
        Ok(decoded)
    }

    /// Decodes latents to scene-linear frames and SDR previews of each requested video. A dump contains the decoded
    /// values before they are decompressed.
    fn decode_hdr(
        &mut self,
        latents: Array5<f32>,
        shapes: &Shapes,
        request: &Request,
        noise: Option<DecoderNoise>,
        transform: HdrTransform,
    ) -> Result<Vec<DecodedFrames>> {
        let asked = self.batch.asked.len();
        let is_dumped = self.dump.is_wanted();
        let (mut parts, mut pieces) = (vec![Vec::new(); asked], Vec::new());
        let mut add = |piece: Array5<f32>| {
            let codes = shown(piece, asked)?;
            if is_dumped {
                pieces.push(codes.clone());
            }
            for (parts, codes) in parts.iter_mut().zip(codes) {
                parts.push(HdrFrames::decompress(codes.index_axis_move(Dim(0), 0), transform)?);
            }
            Ok(())
        };
        match &request.tiling {
            Some(tiling) => self.decode_tiles(latents, tiling, add)?,
            None => {
                let decoded = self.decode_whole(latents, shapes, noise, Pixels::Values)?;
                add(fixed(decoded.tensor("video")?.into_f32())?)?;
            }
        }
        if is_dumped {
            let of_video = |video: usize| {
                let views: Vec<_> = pieces.iter().map(|piece| piece[video].view()).collect();
                ndarray::concatenate(Dim(1), &views).expect("pieces differ only in their number of frames")
            };
            self.dump.keep_each("video", &(0..asked).map(of_video).collect::<Vec<_>>());
        }
        let videos = parts.iter().map(|parts| HdrFrames::joined(parts));
        Ok(videos.map(|hdr| DecodedFrames { frames: hdr.preview(), stream: None, hdr: Some(hdr) }).collect())
    }

    /// Decodes latents tile by tile to frames in -1..1. Passes consecutive pieces of the video to `each`.
    fn decode_tiles(
        &mut self,
        latents: Array5<f32>,
        tiling: &TileSizes,
        each: impl FnMut(Array5<f32>) -> Result<()>,
    ) -> Result<()> {
        match self.runner.model.diffusion {
            Some(_) => self.decode_diffusion_tiles(latents, tiling, each),
            None => tiles::decode(self.runner, &latents, tiling, &mut self.clock, each),
        }
    }

    /// Starts a thread that draws the diffusion decoder's noise while the last pass runs. `None`: there is no diffusion
    /// decoder, or the noise must be drawn later, because the video is decoded in tiles, temporal rounds (pipeline
    /// `dfr`) follow the pass, or the steps of the pass draw from the same generator.
    pub(in crate::pipeline) fn begin_decoder_noise(
        &mut self,
        shapes: &Shapes,
        request: &Request,
        last: &Request,
    ) -> Option<DecoderNoise> {
        let c = self.runner.model.configs.diffusion_decoder().ok()?;
        let is_whole = self.runner.model.diffusion.is_some() && request.tiling.is_none() && request.dfr.is_none();
        let is_next = is_whole && !last.sampler.continues_request();
        is_next.then(|| self.noise.draw_decoder_in_background(&c, &shapes.video, self.runner.build.dtype)).flatten()
    }

    /// Returns the diffusion decoder's noise: the result of the thread `begun` or, if there is none, newly drawn noise.
    fn decoder_noise(&mut self, shapes: &Shapes, begun: Option<DecoderNoise>) -> Result<Tensor> {
        let noise = match begun {
            Some(thread) => thread.join().unwrap_or_else(|panic| Err(PipelineError::Bug(panic_message(&*panic))))?,
            None => {
                let (c, dtype) = (self.runner.model.configs.diffusion_decoder()?, self.runner.build.dtype);
                self.noise.draw_decoder(&mut self.runner.executor, &c, &shapes.video, dtype)?
            }
        };
        self.dump.keep_row("noise.decoder", &noise, 1, 0);
        Ok(noise.into())
    }

    /// Converts a video `[b, 3, frames, height, width]` in -1..1 to frames, and dumps the float values if a dump is
    /// requested.
    fn frames_of(&mut self, video: Array5<f32>) -> Result<Vec<Frames>> {
        let videos = shown(video, self.batch.asked.len())?;
        self.dump.keep_each("video", &videos);
        frames(&videos)
    }

    /// Returns the audio of each video, `[1, channels, samples]`, and the sample rate (Hz). The audio is the input
    /// audio, if the request has any, or else decoded from the latents.
    fn sounds(&mut self, latents: Array4<f32>, request: &Request) -> Result<(Vec<Array3<f32>>, usize)> {
        let asked = self.batch.asked.len();
        Ok(match &self.sound {
            // A pipeline without audio stream.
            None if !request.decodes_audio() => (vec![Array3::zeros((1, 2, 0)); asked], self.runner.model.sample_rate),
            Some(given) => (vec![given.samples(); asked], given.rate()),
            None => (split(self.decode_audio(latents, request)?, asked), self.runner.model.sample_rate),
        })
    }

    /// Decodes audio latents to samples `[b, channels, samples]`, in batches of at most [`videos_at_once`] videos,
    /// because on a CPU the results depend on the batch size.
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

    /// Decodes one batch of audio latents. In the pipeline `dfr`, whose latents are generated for a canvas longer than
    /// the video, trims the audio to the length of the video.
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

/// Returns the options with which frames are encoded before the run ends. `None`: frames are encoded when the file is
/// written, because the run is a warm-up, or because frames that are joined to other frames can only be encoded after
/// they are joined.
fn encoder<'a>(options: &'a RunOptions, request: &Request) -> Option<&'a Mp4Options> {
    let is_final = request.composition == OutputComposition::None && !options.is_warm_up;
    options.encode.as_ref().filter(|_| is_final)
}

/// Returns the frames of the first `asked` videos that a decoder's program returned, in either format.
pub(super) fn decoded_frames(decoded: &Outputs, asked: usize) -> Result<Vec<Frames>> {
    let bytes = match decoded.tensor("video")? {
        Tensor::U8(bytes) => bytes,
        values => return frames(&shown(fixed(values.into_f32())?, asked)?),
    };
    finite(decoded.tensor("finite")?.to_i64().iter().all(|v| *v == 1), "frames")?;
    let videos = split(fixed::<_, Ix5>(bytes)?, asked).into_iter();
    videos.map(|one| Ok(Frames::new(one.index_axis_move(Dim(0), 0))?)).collect()
}

/// Converts the first `asked` videos of `[b, 3, frames, height, width]` in -1..1 to one array `[1, frames, 3, height,
/// width]` in 0..1 for each video. Fails if a value is not finite.
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
