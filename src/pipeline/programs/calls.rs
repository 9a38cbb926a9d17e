//! Prepares the calls of a request: compiles each program, loads its parameters and uploads its inputs. A run executes
//! the calls in order; a benchmark executes a single one. Each method fails if the program cannot be compiled, a
//! parameter cannot be loaded, or the device fails.

use std::rc::Rc;
use std::time::Instant;

use half::bf16;
use ndarray::{Array4, Array5};

use super::call::Call;
use super::executor::Inputs;
use super::program_table::ProgramKind;
use crate::av::Av;
use crate::hlo::DType;
use crate::models::Network;
use crate::models::connectors::Input;
use crate::models::diffusion_decoder::FeatureTile;
use crate::models::pixels::Pixels;
use crate::models::transformer::tables;
use crate::nn::Build;
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::model::Model;
use crate::pipeline::runner::{NetworkKey, NetworkSizes, Runner, SharedLoop, Tables};
use crate::pipeline::stages::conditions::{ConditionTokens, appended_coords};
use crate::pipeline::stages::denoise_loop::{DenoiseLoop, evaluations};
use crate::request::{Request, Shapes, UpsamplingStep};
use crate::runtime::{Outputs, ShardedTensor};
use crate::sampling::denoise::{self, DenoiseShape};
use crate::tensor::Tensor;

/// A pass of a request, with the shapes and conditions that its programs depend on.
#[derive(Clone, Copy)]
pub(crate) struct PassSpec<'a> {
    /// The request with the sizes and steps of this pass.
    pub(crate) request: &'a Request,
    /// Shape of the denoising programs.
    pub(crate) shape: &'a DenoiseShape,
    /// Shapes of the latents and tokens.
    pub(crate) shapes: &'a Shapes,
    pub(crate) conditions: Option<&'a ConditionTokens>,
}

impl Runner {
    /// Returns the network of `program` for the devices of this runner. Networks are cached, because building a program
    /// with many blocks takes as long as one or two denoising steps. `sizes`: all values that the program depends on,
    /// except for the model and the build.
    fn network(
        &mut self,
        program: ProgramKind,
        sizes: impl Into<NetworkSizes>,
        write: impl Fn(&Model, &Build) -> Result<Network>,
    ) -> Result<Rc<Network>> {
        let (build, settings) = (self.build.clone(), self.model.configs.program_settings());
        let key = NetworkKey { program, build, settings, sizes: sizes.into() };
        if let Some(known) = self.written.get(&key) {
            return Ok(known.clone());
        }
        let since = Instant::now();
        let network = self.executor.accepted(program.name(), &self.build, |build| write(&self.model, build))?;
        tracing::debug!(program = program.name(), seconds = since.elapsed().as_secs_f64(), "built the program");
        Ok(self.written.entry(key).or_insert(Rc::new(network)).clone())
    }

    fn call(
        &mut self,
        program: ProgramKind,
        network: &Network,
        given: impl IntoIterator<Item = (String, Tensor)>,
    ) -> Result<Call<'static>> {
        Call::new(&mut self.executor, program.name(), network, Inputs::default(), given)
    }

    /// Prepares the text encoder, which maps all prompts at once (`ids` and `mask`, `[prompts, tokens]`) to
    /// `prompt_embeds`.
    pub(crate) fn text_encoder(&mut self, ids: Tensor, mask: Tensor) -> Result<Call<'static>> {
        let [rows, tokens] = [mask.shape()[0], mask.shape()[1]];
        let network = self.network(ProgramKind::TextEncoder, [rows, tokens], |model, build| {
            model.configs.text_encoder_program(rows, tokens, true, build)
        })?;
        self.call(ProgramKind::TextEncoder, &network, [("input_ids".into(), ids), ("attention_mask".into(), mask)])
    }

    /// Prepares the connectors, which map embeddings `[prompts, tokens, channels]` to the text contexts of both
    /// streams.
    pub(crate) fn connectors(&mut self, embeds: Tensor, mask: Tensor) -> Result<Call<'static>> {
        let [rows, tokens] = [mask.shape()[0], mask.shape()[1]];
        let network = self.network(ProgramKind::Connectors, [rows, tokens], |model, build| {
            model.configs.connectors_program(rows, tokens, Input::PromptEmbeds, build)
        })?;
        let tables = self.connector_tables(&network, tokens)?;
        let inputs = tables.iter().fold(Inputs::default(), |inputs, (name, table)| inputs.give(name, table.clone()));
        let given = [("attention_mask".into(), mask), ("prompt_embeds".into(), embeds)];
        Call::new(&mut self.executor, ProgramKind::Connectors.name(), &network, inputs, given)
    }

    /// Returns the connectors' tables on the devices. They are cached if all parameters stay on the devices, because
    /// computing and uploading the tables takes longer than the program itself.
    fn connector_tables(&mut self, network: &Network, tokens: usize) -> Result<Rc<Tables>> {
        let program = self.executor.prepare(ProgramKind::Connectors.name(), network)?;
        let made_for = (program.hash().to_string(), tokens);
        if let Some(tables) = self.tables.get(&made_for) {
            return Ok(tables.clone());
        }
        let upload = |(name, table): (String, Tensor)| {
            let table = self.executor.upload(&program, &name, &table)?;
            Ok((name, Rc::new(table)))
        };
        let is_read = |(name, _): &(String, Tensor)| program.arguments().iter().any(|a| a.name == *name);
        let tables = self.model.configs.connectors_inputs(tokens)?.into_iter().filter(is_read).map(upload);
        let tables = Rc::new(tables.collect::<Result<Tables>>()?);
        if self.executor.keeps_all() {
            tables.iter().try_for_each(|(_, table)| table.wait())?;
            self.tables.insert(made_for, tables.clone());
        }
        Ok(tables)
    }

    /// Prepares the duration head, which maps text contexts `[prompts, tokens, channels]` to `seconds`, `[prompts]`.
    pub(crate) fn duration_head(&mut self, text: Av<Tensor>) -> Result<Call<'static>> {
        let (rows, tokens) = (text.video.shape()[0], text.as_ref().map(|context| context.shape()[1]));
        let network = self.network(ProgramKind::DurationHead, [rows, tokens.video, tokens.audio], |model, build| {
            model.configs.duration_head_program(rows, tokens, build)
        })?;
        let given = Av::NAMES.zip(text).map(|(name, context)| (format!("{name}_tokens"), context));
        self.call(ProgramKind::DurationHead, &network, given)
    }

    /// Prepares the video encoder, which maps frames `[1, 3, frames, height, width]` in -1..1 to `latents`.
    pub(crate) fn video_encoder(&mut self, video: Array5<f32>) -> Result<Call<'static>> {
        let dims: [usize; 5] = video.dim().into();
        let network = self.network(ProgramKind::VideoEncoder, dims, |model, build| {
            model.configs.video_encoder_program(dims, build)
        })?;
        self.call(ProgramKind::VideoEncoder, &network, [("video".into(), video.into())])
    }

    /// Prepares an upsampling step, which maps un-normalised latents to upsampled `latents`. `program`: the spatial,
    /// temporal or keyframe upsampler. Fails if the model's upsampler does not perform the kind of upsampling (axes and
    /// factor) that `step` requires.
    pub(crate) fn upsampler(
        &mut self,
        program: ProgramKind,
        latents: Array5<f32>,
        step: &UpsamplingStep,
    ) -> Result<Call<'static>> {
        let (b, c, ..) = latents.dim();
        let network = self.network(program, NetworkSizes::Upsampling(*step, [b, c]), |model, build| {
            model.configs.upsampling_program(step, [b, c], build)
        })?;
        self.call(program, &network, [("latents".into(), latents.into())])
    }

    /// Prepares the temporal upsampler, which maps un-normalised latents of `f` frames to `latents` of `2·f - 1`
    /// frames.
    pub(crate) fn temporal_upsampler(&mut self, latents: Array5<f32>) -> Result<Call<'static>> {
        let dims: [usize; 5] = latents.dim().into();
        let network = self.network(ProgramKind::TemporalUpsampler, dims, |model, build| {
            model.configs.temporal_upsampler_program(dims, build)
        })?;
        self.call(ProgramKind::TemporalUpsampler, &network, [("latents".into(), latents.into())])
    }

    /// Prepares the program that computes the step-invariant inputs of a pass. `text_contexts`: `[videos, branches,
    /// tokens, channels]` for each stream.
    pub(crate) fn prepare(
        &mut self,
        program: ProgramKind,
        pass: PassSpec,
        text_contexts: Av<Tensor>,
    ) -> Result<Call<'static>> {
        let network = self.network(program, NetworkSizes::Denoise(pass.shape.clone().into()), |model, build| {
            Ok(denoise::prepare(&model.sizes.transformer, pass.shape, build)?)
        })?;
        let mut given = Vec::from_iter(Av::NAMES.zip(text_contexts).map(|(name, text)| (format!("text.{name}"), text)));
        given.extend(evaluations(pass.request)?);
        given.extend(pass.conditions.into_iter().flat_map(|tokens| tokens.inputs(pass.shape.batch)));
        self.call(program, &network, given)
    }

    /// Prepares the denoising loop of a pass, and uploads its tables and guidance scales.
    pub(crate) fn new_loop(&mut self, program: ProgramKind, pass: PassSpec) -> Result<DenoiseLoop> {
        let PassSpec { request, shape, shapes, conditions } = pass;
        let network = self.network(program, NetworkSizes::Denoise(shape.clone().into()), |model, build| {
            Ok(denoise::denoise(&model.sizes.transformer, shape, build)?)
        })?;
        let c = &self.model.sizes.transformer;
        let mut coords = shapes.coords(&self.model.sizes, request.position_rate());
        let mut dtype = request.positions;
        if shapes.appended > 0 {
            // Appended tokens have f32 positions. For bf16, the bounds of the video's own tokens are rounded to bf16;
            // then the tables of all tokens are computed in f32.
            if dtype == DType::BF16 {
                coords.video.mapv_inplace(|x| bf16::from_f32(x).to_f32());
            }
            dtype = DType::F32;
            let behind = appended_coords(c, shapes, &request.conditions.video, request.position_rate());
            coords.video = ndarray::concatenate(ndarray::Axis(2), &[coords.video.view(), behind.view()])
                .map_err(|e| PipelineError::Input(e.to_string()))?;
        }
        let tables = tables::tables(c, &coords, dtype);
        let mut given = tables::host_inputs(c, tables);
        given.extend(evaluations(request)?);
        given.extend(conditions.into_iter().flat_map(|tokens| tokens.inputs(shape.batch)));
        if shape.keyframes {
            given.push((
                "keyframes.video".into(),
                shapes.single_frames(&request.conditions.video, request.first_frame_marker).into(),
            ));
        }
        let guidance = request.guidance_tables();
        given.push(("scales".into(), guidance.scales.into()));
        given.extend(guidance.sets.map(|sets| ("branch_sets".into(), sets.into())));
        let call = self.call(program, &network, given)?;
        let carried = shape.carried().flat_map(|kind| Av::NAMES.map(|stream| format!("{kind}.{stream}")));
        Ok(DenoiseLoop { network, call, carried: carried.collect() })
    }

    /// Returns the denoising loop of a pass. Reuses the loop of an earlier request if the two requests differ only in
    /// prompts and seed, the pass has no conditions, and all parameters stay on the devices.
    pub(crate) fn denoise_loop(&mut self, program: ProgramKind, pass: PassSpec) -> Result<Rc<DenoiseLoop>> {
        // A loop with conditions is not reused: the files of the conditions may have changed.
        let reusable = pass.conditions.is_none() && self.executor.keeps_all();
        let negative = |r: &Request| Request { negative_prompt: String::new(), ..r.clone() };
        let alike = |known: &SharedLoop| {
            known.shape == *pass.shape && negative(&known.request).can_batch_with(&negative(pass.request))
        };
        let known = self.loops.get(&program).filter(|known| reusable && alike(known));
        if let Some(steps_loop) = known.map(|known| known.steps_loop.clone()) {
            steps_loop.load(&mut self.executor, program.name())?;
            return Ok(steps_loop);
        }
        let steps_loop = Rc::new(self.new_loop(program, pass)?);
        if reusable {
            let (request, shape) = (pass.request.clone(), pass.shape.clone());
            self.loops.insert(program, SharedLoop { request, shape, steps_loop: steps_loop.clone() });
        }
        Ok(steps_loop)
    }

    /// Prepares the video decoder, which maps latents to `video` in the format `pixels`.
    pub fn video_decoder(&mut self, latents: Array5<f32>, pixels: Pixels) -> Result<Call<'static>> {
        let dims: [usize; 5] = latents.dim().into();
        let network = self.network(ProgramKind::VideoDecoder, NetworkSizes::Frames(dims, pixels), |model, build| {
            model.configs.video_decoder_program(dims, pixels, build)
        })?;
        self.call(ProgramKind::VideoDecoder, &network, [("latents".into(), latents.into())])
    }

    /// Prepares the diffusion decoder, which maps latents and noise to `video` in the format `pixels`.
    pub(crate) fn diffusion_decoder(
        &mut self,
        latents: Array5<f32>,
        noise: Tensor,
        pixels: Pixels,
    ) -> Result<Call<'static>> {
        let dims: [usize; 5] = latents.dim().into();
        let network =
            self.network(ProgramKind::DiffusionDecoder, NetworkSizes::Frames(dims, pixels), |model, build| {
                model.configs.diffusion_decoder_program(dims, pixels, build)
            })?;
        let given = [("latents".into(), latents.into()), ("noise".into(), noise)];
        self.call(ProgramKind::DiffusionDecoder, &network, given)
    }

    /// Prepares the first part of the diffusion decoder, which maps latents to `features`; the second part decodes the
    /// features tile by tile.
    pub(crate) fn diffusion_features(&mut self, latents: Array5<f32>) -> Result<Call<'static>> {
        let dims: [usize; 5] = latents.dim().into();
        let network = self.network(ProgramKind::DiffusionFeatures, dims, |model, build| {
            model.configs.diffusion_features_program(dims, build)
        })?;
        self.call(ProgramKind::DiffusionFeatures, &network, [("latents".into(), latents.into())])
    }

    /// Prepares the second part of the diffusion decoder for one tile. It maps noise and the part of `features` that
    /// begins at feature `start` (frame, row, column) to `video`. `shape`: shape of the latents, `[b, f, h, w]`.
    /// `features` are already on the devices and are not copied.
    pub(crate) fn diffusion_tile<'a>(
        &mut self,
        shape: [usize; 4],
        tile: &FeatureTile,
        features: &'a ShardedTensor,
        start: Tensor,
        noise: Tensor,
    ) -> Result<Call<'a>> {
        let network =
            self.network(ProgramKind::DiffusionDecoder, NetworkSizes::Tile(shape, *tile), |model, build| {
                model.configs.diffusion_tile_program(shape, tile, build)
            })?;
        let inputs = Inputs::default().share("features", features);
        let given = [("start".into(), start), ("noise".into(), noise)];
        Call::new(&mut self.executor, ProgramKind::DiffusionDecoder.name(), &network, inputs, given)
    }

    /// Prepares the audio encoder, which maps a log-mel spectrogram to `latents`.
    pub(crate) fn audio_encoder(&mut self, mel: Array4<f32>) -> Result<Call<'static>> {
        let dims: [usize; 4] = mel.dim().into();
        let network = self.network(ProgramKind::AudioEncoder, dims, |model, build| {
            model.configs.audio_encoder_program(dims, build)
        })?;
        self.call(ProgramKind::AudioEncoder, &network, [("mel".into(), mel.into())])
    }

    /// Prepares the audio decoder, which maps latents to `mel`, a log-mel spectrogram.
    pub(crate) fn audio_decoder(&mut self, latents: Array4<f32>) -> Result<Call<'static>> {
        let dims: [usize; 4] = latents.dim().into();
        let network = self.network(ProgramKind::AudioDecoder, dims, |model, build| {
            model.configs.audio_decoder_program(dims, build)
        })?;
        self.call(ProgramKind::AudioDecoder, &network, [("latents".into(), latents.into())])
    }

    /// Prepares the vocoder, which maps the audio decoder's output `mel` to `audio`. `mel` is not copied.
    pub(crate) fn vocoder<'a>(&mut self, decoded: &'a Outputs) -> Result<Call<'a>> {
        let mel = decoded.get("mel").ok_or_else(|| PipelineError::Input("the audio decoder returned no mel".into()))?;
        let dims = <[usize; 4]>::try_from(mel.dims().to_vec()).map_err(|d| {
            PipelineError::Input(format!(
                "the audio decoder returned a mel of shape {d:?}; the vocoder needs 4 dimensions"
            ))
        })?;
        let network =
            self.network(ProgramKind::Vocoder, dims, |model, build| model.configs.vocoder_program(dims, build))?;
        Call::new(&mut self.executor, ProgramKind::Vocoder.name(), &network, Inputs::default().share("mel", mel), [])
    }
}
