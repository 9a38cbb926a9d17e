//! The programs of a request, each with its inputs on the devices: what a run executes in order, and a benchmark one at
//! a time.

use std::rc::Rc;

use ndarray::{Array2, Array4, Array5};

use super::error::{PipelineError, Result};
use super::models::Models;
use super::stages::{Inputs, Stages};
use super::text_to_video::{Request, Shapes};
use crate::models::Network;
use crate::models::connectors::Input;
use crate::models::transformer::tables;
use crate::models::video_vae::Pixels;
use crate::nn::Build;
use crate::runtime::{Distributed, Executable, Outputs};
use crate::sampling::denoise::{self, DenoiseShape, MAX_STEPS};
use crate::sampling::guidance::Scales;
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

/// What no step changes; `contexts` are video's and audio's `[videos, branches, tokens, channels]`.
///
/// # Errors
/// As [`text_encoder`].
pub fn prepare(
    models: &Models,
    stages: &mut Stages,
    request: &Request,
    shape: &DenoiseShape,
    contexts: [Tensor; 2],
    build: &Build,
) -> Result<Call<'static>> {
    let network = denoise::prepare(&models.sizes.transformer, shape, build)?;
    let [video, audio] = contexts;
    let given =
        [("sigmas".to_string(), levels(request)), ("text.video".to_string(), video), ("text.audio".to_string(), audio)];
    Call::new(stages, "prepare", &network, Inputs::default(), given)
}

/// A request's noise levels in the programs' table.
fn levels(request: &Request) -> Tensor {
    let mut sigmas = request.sigmas.clone();
    sigmas.resize(MAX_STEPS + 1, 0.0);
    Tensor::from(ndarray::Array1::from(sigmas))
}

/// The denoising loop with its tables and scales: what follows from the request's sizes alone.
pub struct Loop {
    call: Call<'static>,
}

impl Loop {
    /// The loop of a request.
    ///
    /// # Errors
    /// As [`text_encoder`].
    pub fn new(
        models: &Models,
        stages: &mut Stages,
        request: &Request,
        shape: &DenoiseShape,
        shapes: &Shapes,
        build: &Build,
    ) -> Result<Self> {
        let c = &models.sizes.transformer;
        let network = denoise::denoise(c, shape, build)?;
        let [video_coords, audio_coords] = models.coords(shapes, request.frame_rate);
        let tables = tables::tables(c, video_coords.view(), audio_coords.view());
        let row = |s: Scales| s.row().to_vec();
        let scales = Array2::from_shape_vec((2, 4), [row(request.scales[0]), row(request.scales[1])].concat())
            .map_err(|e| PipelineError::Input(e.to_string()))?;
        let mut given = tables::host_inputs(c, tables);
        given.push(("sigmas".into(), levels(request)));
        given.push(("scales".into(), scales.into()));
        Ok(Loop { call: Call::new(stages, "denoise", &network, Inputs::default(), given)? })
    }

    /// The compiled program.
    pub fn program(&self) -> &Executable {
        self.call.program()
    }

    /// Copies starting latents, video's and audio's tokens, to the devices.
    ///
    /// # Errors
    /// The plugin's message.
    pub fn start(&self, stages: &Stages, [video, audio]: &[Tensor; 2]) -> Result<[Distributed; 2]> {
        let upload = |name: &str, tensor: &Tensor| stages.upload(self.program(), name, tensor);
        Ok([upload("latents.video", video)?, upload("latents.audio", audio)?])
    }

    /// Copies a range of steps to the devices.
    ///
    /// # Errors
    /// The plugin's message.
    pub fn steps(&self, stages: &Stages, begin: usize, end: usize) -> Result<Inputs<'static>> {
        let range =
            [("begin", begin), ("end", end)].map(|(n, v)| (n.to_string(), Tensor::from(ndarray::arr0(v as i32))));
        stages.give_all(self.program(), Inputs::default(), range)
    }

    /// Runs the steps of a range on what [`prepare`] gave. The program takes over the memory of the latents.
    ///
    /// # Errors
    /// The plugin's message.
    pub fn run(
        &self,
        stages: &Stages,
        prepared: &Outputs,
        steps: &Inputs,
        latents: [Distributed; 2],
    ) -> Result<[Distributed; 2]> {
        let [video, audio] = &latents;
        let find = |name: &str| match name {
            "latents.video" => Some(video),
            "latents.audio" => Some(audio),
            _ => steps.get(name).or_else(|| self.call.inputs.get(name)).or_else(|| prepared.get(name)),
        };
        let mut outputs = stages.run_with(self.program(), find)?;
        let mut take = |name: &str| {
            outputs.take(name).ok_or_else(|| PipelineError::Input(format!("the loop returned no '{name}'")))
        };
        Ok([take("latents.video")?, take("latents.audio")?])
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
