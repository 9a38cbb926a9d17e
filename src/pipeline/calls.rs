//! The programs of a request, each with its inputs on the devices: what a run executes in order, and a benchmark one at
//! a time.

use std::rc::Rc;

use ndarray::{Array2, Array3, Array4, Array5};

use super::error::{PipelineError, Result};
use super::given::{GivenTokens, appended_coords};
use super::models::Models;
use super::stages::{Inputs, Stages};
use super::text_to_video::{Request, Shapes};
use crate::models::Network;
use crate::models::connectors::Input;
use crate::models::transformer::tables;
use crate::models::video_vae::Pixels;
use crate::nn::Build;
use crate::runtime::{Executable, Outputs, ShardedTensor};
use crate::sampling::denoise::{self, DenoiseShape, MAX_STEPS, Sampler};
use crate::sampling::guidance::Scales;
use crate::sampling::res2s;
use crate::tensor::Tensor;

/// A compiled program with everything it reads on the devices; it can be run any number of times.
pub struct Call<'a> {
    program: Rc<Executable>,
    inputs: Inputs<'a>,
}

impl<'a> Call<'a> {
    fn new(
        stages: &mut Stages,
        name: &str,
        network: &Network,
        inputs: Inputs<'a>,
        given: impl IntoIterator<Item = (String, Tensor)>,
    ) -> Result<Self> {
        let program = stages.prepare(name, network)?;
        let inputs = stages.give_all(&program, inputs, given)?;
        Ok(Call { program, inputs })
    }

    /// The compiled program.
    pub fn program(&self) -> &Executable {
        &self.program
    }

    /// Runs it; the results may still be computed when this returns.
    ///
    /// # Errors
    /// The plugin's message.
    pub fn run(&self, stages: &Stages) -> Result<Outputs> {
        stages.run(&self.program, &self.inputs)
    }
}

/// Prompts `ids`, `mask` `[prompts, tokens]` to `prompt_embeds`, all of them in one pass.
///
/// # Errors
/// What is wrong with program, parameters or device; as for the other programs.
pub fn text_encoder(
    models: &Models,
    stages: &mut Stages,
    ids: Tensor,
    mask: Tensor,
    build: &Build,
) -> Result<Call<'static>> {
    let network = models.parts.text_encoder_program(mask.shape()[0], mask.shape()[1], true, build)?;
    let given = [("input_ids".to_string(), ids), ("attention_mask".to_string(), mask)];
    Call::new(stages, "text_encoder", &network, Inputs::default(), given)
}

/// Embeddings `[prompts, tokens, channels]` to the transformer's contexts.
///
/// # Errors
/// As [`text_encoder`].
pub fn connectors(
    models: &Models,
    stages: &mut Stages,
    embeds: Tensor,
    mask: Tensor,
    build: &Build,
) -> Result<Call<'static>> {
    let (rows, tokens) = (mask.shape()[0], mask.shape()[1]);
    let network = models.parts.connectors_program(rows, tokens, Input::PromptEmbeds, build)?;
    let mut given = models.parts.connectors_inputs(tokens)?;
    given.push(("attention_mask".into(), mask));
    given.push(("prompt_embeds".into(), embeds));
    Call::new(stages, "connectors", &network, Inputs::default(), given)
}

/// A picture `[1, 3, 1, height, width]` of -1..1 to `latents`.
///
/// # Errors
/// As [`text_encoder`].
pub fn video_encoder(models: &Models, stages: &mut Stages, video: Array5<f32>, build: &Build) -> Result<Call<'static>> {
    let network = models.parts.video_encoder_program(video.dim().into(), build)?;
    Call::new(stages, "video_encoder", &network, Inputs::default(), [("video".to_string(), video.into())])
}

/// Un-normalised latents to `latents` of `size`, `[frames, rows, columns]`.
///
/// # Errors
/// As [`text_encoder`]; an upsampler that makes another size.
pub fn upsampler(
    models: &Models,
    stages: &mut Stages,
    latents: Array5<f32>,
    size: [usize; 3],
    build: &Build,
) -> Result<Call<'static>> {
    let (_, c, f, h, w) = latents.dim();
    models.parts.upsampler_between([c, f, h, w], [c, size[0], size[1], size[2]])?;
    let network = models.parts.upsampler_program(latents.dim().into(), build)?;
    Call::new(stages, "upsampler", &network, Inputs::default(), [("latents".to_string(), latents.into())])
}

/// A stage of a request: with what fixes its programs, its latents, and what it reads of given frames.
pub type OfStage<'a> = (&'a Request, &'a DenoiseShape, &'a Shapes, Option<&'a GivenTokens>);

/// What no step changes; `contexts` are video's and audio's `[videos, branches, tokens, channels]`.
///
/// # Errors
/// As [`text_encoder`].
pub fn prepare(
    models: &Models,
    stages: &mut Stages,
    name: &str,
    (request, shape, _, frames): OfStage,
    contexts: [Tensor; 2],
    build: &Build,
) -> Result<Call<'static>> {
    let network = denoise::prepare(&models.sizes.transformer, shape, build)?;
    let [video, audio] = contexts;
    let mut given = vec![("text.video".to_string(), video), ("text.audio".to_string(), audio)];
    given.extend(evaluations(request));
    given.extend(frames.into_iter().flat_map(|frames| frames.inputs(shape.batch)));
    Call::new(stages, name, &network, Inputs::default(), given)
}

/// The noise level of each evaluation in the programs' table, and the sampler's coefficients.
fn evaluations(request: &Request) -> Vec<(String, Tensor)> {
    let table = |levels: &[f32]| {
        let mut levels = levels.to_vec();
        levels.resize(MAX_STEPS + 1, 0.0);
        ("sigmas".to_string(), Tensor::from(ndarray::Array1::from(levels)))
    };
    match request.sampler {
        Sampler::Euler => vec![table(&request.sigmas)],
        Sampler::Res2s => {
            let (levels, rows) = res2s::schedule(&request.sigmas);
            let at = |(i, k): (usize, usize)| rows.get(i).map_or(0.0, |row| row[k]);
            let coefficients = Array2::from_shape_fn((MAX_STEPS + 1, res2s::COEFFICIENTS), at);
            vec![table(&levels), ("coefficients".into(), coefficients.into())]
        }
    }
}

/// The denoising loop with its tables and scales: what follows from the request's sizes alone.
pub struct Loop {
    network: Network,
    call: Call<'static>,
    sampler: Sampler,
}

impl Loop {
    /// The loop of a stage.
    ///
    /// # Errors
    /// As [`text_encoder`].
    pub fn new(
        models: &Models,
        stages: &mut Stages,
        name: &str,
        (request, shape, shapes, frames): OfStage,
        build: &Build,
    ) -> Result<Self> {
        let c = &models.sizes.transformer;
        let network = denoise::denoise(c, shape, build)?;
        let [mut video_coords, audio_coords] = models.coords(shapes, request.frame_rate);
        if shapes.appended > 0 {
            let behind = appended_coords(c, shapes, &request.given, request.frame_rate);
            video_coords = ndarray::concatenate(ndarray::Axis(2), &[video_coords.view(), behind.view()])
                .map_err(|e| PipelineError::Input(e.to_string()))?;
        }
        let tables = tables::tables(c, video_coords.view(), audio_coords.view());
        let row = |s: Scales| s.row().to_vec();
        let scales = Array2::from_shape_vec((2, 4), [row(request.scales[0]), row(request.scales[1])].concat())
            .map_err(|e| PipelineError::Input(e.to_string()))?;
        let mut given = tables::host_inputs(c, tables);
        given.extend(evaluations(request));
        given.extend(frames.into_iter().flat_map(|frames| frames.inputs(shape.batch)));
        given.push(("scales".into(), scales.into()));
        let call = Call::new(stages, name, &network, Inputs::default(), given)?;
        Ok(Loop { network, call, sampler: shape.sampler })
    }

    /// Loads what has left the devices of its parameters since it was made.
    ///
    /// # Errors
    /// What is wrong with the files or the device.
    pub fn load(&self, stages: &mut Stages, name: &str) -> Result<()> {
        stages.prepare(name, &self.network).map(drop)
    }

    /// The compiled program.
    pub fn program(&self) -> &Executable {
        self.call.program()
    }

    /// Copies starting latents, video's and audio's tokens, to the devices, with zeros for what the sampler carries beside
    /// them: what the loop carries, in its order.
    ///
    /// # Errors
    /// The plugin's message.
    pub fn start(&self, stages: &Stages, latents: &[Tensor; 2]) -> Result<Vec<ShardedTensor>> {
        let zero = latents.each_ref().map(|t| Tensor::F32(ndarray::ArrayD::zeros(t.shape())));
        let beside = self.sampler.carried().len() - 1;
        let all: Vec<Tensor> = latents.iter().chain(zero.iter().cycle().take(2 * beside)).cloned().collect();
        self.go_on(stages, &all)
    }

    /// Copies what the loop carried before to the devices, in its order.
    ///
    /// # Errors
    /// Tensors that are not what this loop carries; the plugin's message.
    pub fn go_on(&self, stages: &Stages, carried: &[Tensor]) -> Result<Vec<ShardedTensor>> {
        let names = self.carried();
        if names.len() != carried.len() {
            return Err(PipelineError::Input(format!("{} tensors, the loop carries {}", carried.len(), names.len())));
        }
        names.iter().zip(carried).map(|(name, tensor)| stages.upload(self.program(), name, tensor)).collect()
    }

    /// What the loop carries, by the names of the program's inputs.
    fn carried(&self) -> Vec<String> {
        let kinds = self.sampler.carried().iter();
        kinds.flat_map(|kind| ["video", "audio"].map(|stream| format!("{kind}.{stream}"))).collect()
    }

    /// Copies a range of evaluations to the devices, and their noise `[evaluations, n, c]` where the sampler takes such: the
    /// same for each of `batch` videos.
    ///
    /// # Errors
    /// The plugin's message.
    pub fn steps(
        &self,
        stages: &Stages,
        begin: usize,
        end: usize,
        noise: Option<[Array3<f32>; 2]>,
        batch: usize,
    ) -> Result<Inputs<'static>> {
        let range =
            [("begin", begin), ("end", end)].map(|(n, v)| (n.to_string(), Tensor::from(ndarray::arr0(v as i32))));
        let noise = noise.into_iter().flat_map(|both| {
            ["video", "audio"].into_iter().zip(both).map(|(stream, each)| {
                let (evaluations, n, c) = each.dim();
                let rows = each.insert_axis(ndarray::Axis(1));
                let all = rows.broadcast((evaluations, batch, n, c)).map(|a| a.into_owned()).unwrap_or_default();
                (format!("noise.{stream}"), Tensor::from(all))
            })
        });
        stages.give_all(self.program(), Inputs::default(), range.into_iter().chain(noise))
    }

    /// Runs the evaluations of a range on what [`prepare`] gave. The program takes over the memory of what is carried.
    ///
    /// # Errors
    /// The plugin's message.
    pub fn run(
        &self,
        stages: &Stages,
        prepared: &Outputs,
        steps: &Inputs,
        carried: Vec<ShardedTensor>,
    ) -> Result<Vec<ShardedTensor>> {
        let names = self.carried();
        let find = |name: &str| match names.iter().position(|n| n == name) {
            Some(at) => carried.get(at),
            None => steps.get(name).or_else(|| self.call.inputs.get(name)).or_else(|| prepared.get(name)),
        };
        let mut outputs = stages.run_with(self.program(), find)?;
        let take = |name: &String| {
            outputs.take(name).ok_or_else(|| PipelineError::Input(format!("the loop returned no '{name}'")))
        };
        names.iter().map(take).collect()
    }
}

/// Latents to `video`, as `pixels` says.
///
/// # Errors
/// As [`text_encoder`].
pub fn video_decoder(
    models: &Models,
    stages: &mut Stages,
    latents: Array5<f32>,
    pixels: Pixels,
    build: &Build,
) -> Result<Call<'static>> {
    let network = models.parts.video_decoder_program(latents.dim().into(), pixels, build)?;
    Call::new(stages, "video_decoder", &network, Inputs::default(), [("latents".to_string(), latents.into())])
}

/// Latents to `mel`.
///
/// # Errors
/// As [`text_encoder`].
pub fn audio_decoder(
    models: &Models,
    stages: &mut Stages,
    latents: Array4<f32>,
    build: &Build,
) -> Result<Call<'static>> {
    let network = models.parts.audio_decoder_program(latents.dim().into(), build)?;
    Call::new(stages, "audio_decoder", &network, Inputs::default(), [("latents".to_string(), latents.into())])
}

/// The audio decoder's result, where it lies, to `audio`.
///
/// # Errors
/// As [`text_encoder`]; a decoder without a mel spectrogram.
pub fn vocoder<'a>(models: &Models, stages: &mut Stages, decoded: &'a Outputs, build: &Build) -> Result<Call<'a>> {
    let mel = decoded.get("mel").ok_or_else(|| PipelineError::Input("the audio decoder returned no mel".into()))?;
    let dims = <[usize; 4]>::try_from(mel.dims().to_vec())
        .map_err(|d| PipelineError::Input(format!("mel has shape {d:?}")))?;
    let network = models.parts.vocoder_program(dims, build)?;
    Call::new(stages, "vocoder", &network, Inputs::default().share("mel", mel), [])
}
