//! One component on given tensors, for parity checks: the reference's argument names in, its results out.

use std::collections::BTreeMap;

use ndarray::{Array1, Array2, Axis as Dim, Ix4};

use super::configs::ModelConfigs;
use super::error::{PipelineError, Result};
use super::executor::{Executor, Inputs};
use super::model::Component;
use crate::models::Network;
use crate::models::connectors::Input;
use crate::models::transformer::{self, CrossTimestep, ForwardShape, TransformerConfig, tables};
use crate::models::video_vae::Pixels;
use crate::nn::Build;
use crate::sampling::latents::VideoShape;
use crate::tensor::Tensor;

/// A component that can be run alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "kebab-case")]
pub enum RunComponent {
    /// `input_ids`, `attention_mask` to `prompt_embeds`.
    TextEncoder,
    /// `prompt_embeds` or `text_encoder_hidden_states`, `attention_mask` to `video`, `audio`.
    Connectors,
    /// `hidden_states`, `encoder_hidden_states`, `timestep` … to `video`, `audio`.
    Transformer,
    /// `video` to `latents`.
    VideoEncoder,
    /// `latents` to `video`.
    VideoDecoder,
    /// `latents` to `mel`.
    AudioDecoder,
    /// `mel` to `audio`.
    Vocoder,
    /// `latents` to larger `latents`, both un-normalised.
    Upsampler,
}

impl RunComponent {
    fn name(self) -> &'static str {
        match self {
            RunComponent::TextEncoder => "text_encoder",
            RunComponent::Connectors => "connectors",
            RunComponent::Transformer => "transformer",
            RunComponent::VideoEncoder => "video_encoder",
            RunComponent::VideoDecoder => "video_decoder",
            RunComponent::AudioDecoder => "audio_decoder",
            RunComponent::Vocoder => "vocoder",
            RunComponent::Upsampler => "upsampler",
        }
    }
}

/// Scalars beside the tensors: `num_frames`, `height`, `width`, `fps`, `audio_num_frames`, `use_cross_timestep`,
/// `isolate_modalities`, `stg_blocks`; of the vocoder `clamp`, whether LTX-2.3's limits the first of its stages.
pub type Scalars = BTreeMap<String, serde_json::Value>;

/// The tensors given, each taken once; what is left over is unknown.
struct Given {
    tensors: BTreeMap<String, Tensor>,
    known: Vec<&'static str>,
}

impl Given {
    fn optional(&mut self, name: &'static str) -> Option<Tensor> {
        self.known.push(name);
        self.tensors.remove(name)
    }

    fn required(&mut self, name: &'static str) -> Result<Tensor> {
        self.optional(name).ok_or_else(|| PipelineError::Input(format!("input '{name}' is missing")))
    }

    fn ranked(&mut self, name: &'static str, rank: usize) -> Result<Tensor> {
        let t = self.required(name)?;
        if t.shape().len() != rank {
            let message = format!("input '{name}' must have {rank} dimensions, has shape {:?}", t.shape());
            return Err(PipelineError::Input(message));
        }
        Ok(t)
    }

    fn finish(self) -> Result<()> {
        match self.tensors.keys().next() {
            None => Ok(()),
            Some(name) => Err(PipelineError::Input(format!(
                "input '{name}' is unknown to this component; it takes {}",
                self.known.join(", ")
            ))),
        }
    }
}

struct Switches<'a>(&'a Scalars);

impl Switches<'_> {
    fn get<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        self.0
            .get(name)
            .map(|v| serde_json::from_value(v.clone()))
            .transpose()
            .map_err(|e| PipelineError::Input(format!("--set {name}: {e}")))
    }

    fn check(&self, known: &[&str]) -> Result<()> {
        match self.0.keys().find(|k| !known.contains(&k.as_str())) {
            None => Ok(()),
            Some(k) if known.is_empty() => {
                Err(PipelineError::Input(format!("--set {k} is unknown to this component; it takes none")))
            }
            Some(k) => {
                let message = format!("--set {k} is unknown to this component; it takes {}", known.join(", "));
                Err(PipelineError::Input(message))
            }
        }
    }
}

/// Runs one component.
///
/// # Errors
/// A missing, unknown or wrongly shaped input, by name; what is wrong with model or device.
pub fn run_component(
    component: RunComponent,
    parts: &ModelConfigs,
    executor: &mut Executor,
    tensors: BTreeMap<String, Tensor>,
    scalars: &Scalars,
    build: &Build,
) -> Result<Vec<(String, Tensor)>> {
    let mut given = Given { tensors, known: Vec::new() };
    let switches = Switches(scalars);
    let (network, inputs) = match component {
        RunComponent::TextEncoder => {
            switches.check(&["output_hidden_states"])?;
            text_encoder(parts, &mut given, &switches, build)?
        }
        RunComponent::Connectors => {
            switches.check(&[])?;
            connectors(parts, &mut given, build)?
        }
        RunComponent::Transformer => {
            switches.check(&[
                "num_frames",
                "height",
                "width",
                "fps",
                "audio_num_frames",
                "use_cross_timestep",
                "cross_timestep",
                "isolate_modalities",
                "stg_blocks",
            ])?;
            transformer(&parts.transformer()?, &mut given, &switches, build)?
        }
        RunComponent::VideoDecoder => {
            switches.check(&[])?;
            video_decoder(parts, &mut given, build)?
        }
        RunComponent::VideoEncoder => {
            switches.check(&[])?;
            let video = given.ranked("video", 5)?;
            (parts.video_encoder_program(dims(&video), build)?, vec![("video".into(), video)])
        }
        RunComponent::AudioDecoder => {
            switches.check(&[])?;
            let latents = given.ranked("latents", 4)?;
            (parts.audio_decoder_program(dims(&latents), build)?, vec![("latents".into(), latents)])
        }
        RunComponent::Vocoder => {
            switches.check(&["clamp"])?;
            let parts = parts.clone().with_vocoder_clamp(switches.get("clamp")?.unwrap_or(true));
            let mel = given.ranked("mel", 4)?;
            (parts.vocoder_program(dims(&mel), build)?, vec![("mel".into(), mel)])
        }
        RunComponent::Upsampler => {
            switches.check(&[])?;
            let latents = given.ranked("latents", 5)?;
            (parts.upsampler_program(dims(&latents), build)?, vec![("latents".into(), latents)])
        }
    };
    given.finish()?;
    check_shapes(&network, &inputs)?;
    let program = executor.prepare(component.name(), &network)?;
    let inputs = executor.give_all(&program, Inputs::default(), inputs)?;
    let outputs = executor.run(&program, &inputs)?;
    network.program.results.iter().map(|r| Ok((r.name.clone(), outputs.tensor(&r.name)?))).collect()
}

/// The shape of a tensor whose rank has been checked.
fn dims<const N: usize>(t: &Tensor) -> [usize; N] {
    std::array::from_fn(|i| t.shape().get(i).copied().unwrap_or(1))
}

/// Inputs whose shapes the program does not take, before anything is compiled.
fn check_shapes(network: &Network, inputs: &[(String, Tensor)]) -> Result<()> {
    for (name, tensor) in inputs {
        if let Some(a) = network.program.arguments.iter().find(|a| a.name == *name)
            && a.logical_dims != tensor.shape()
        {
            let message =
                format!("input '{name}' has shape {:?}, the model takes {:?}", tensor.shape(), a.logical_dims);
            return Err(PipelineError::Input(message));
        }
    }
    Ok(())
}

type Ready = (Network, Vec<(String, Tensor)>);

fn text_encoder(parts: &ModelConfigs, given: &mut Given, switches: &Switches, build: &Build) -> Result<Ready> {
    let ids = given.ranked("input_ids", 2)?;
    let mask = match given.optional("attention_mask") {
        Some(mask) => mask,
        None => Tensor::from(ids.to_i64().mapv(|v| i32::from(v != 0))),
    };
    // A model of a text encoder alone has nothing to project with: its result is the stack of hidden states.
    let raw =
        switches.get::<bool>("output_hidden_states")?.unwrap_or(false) || !parts.origin().has(Component::Connectors);
    let network = parts.text_encoder_program(ids.shape()[0], ids.shape()[1], !raw, build)?;
    Ok((network, vec![("input_ids".into(), ids), ("attention_mask".into(), mask)]))
}

fn connectors(parts: &ModelConfigs, given: &mut Given, build: &Build) -> Result<Ready> {
    let (embeds, projected) = match given.optional("prompt_embeds") {
        // The reference calls the stack of hidden states so too.
        Some(t) => {
            let projected = t.shape().last() == Some(&parts.connectors()?.text_width());
            (t, projected)
        }
        None => (given.required("text_encoder_hidden_states")?, false),
    };
    // The reference also takes the stack as [b, t, channels, layers].
    let embeds = match embeds.shape() {
        [_, _, _] => embeds,
        &[b, t, c, l] => Tensor::from(
            embeds
                .to_f32()
                .into_shape_with_order((b, t, c * l))
                .map_err(|e| PipelineError::Input(format!("input 'text_encoder_hidden_states': {e}")))?,
        ),
        other => {
            let message = format!("input 'prompt_embeds' must have 3 dimensions, has shape {other:?}");
            return Err(PipelineError::Input(message));
        }
    };
    let (rows, tokens) = (embeds.shape()[0], embeds.shape()[1]);
    let mask = match given.optional("attention_mask") {
        Some(mask) => mask,
        None => Tensor::from(Array2::<i32>::ones((rows, tokens))),
    };
    let (input, name) = match projected {
        true => (Input::PromptEmbeds, "prompt_embeds"),
        false => (Input::HiddenStates, "text_encoder_hidden_states"),
    };
    let network = parts.connectors_program(rows, tokens, input, build)?;
    let mut inputs = parts.connectors_inputs(tokens)?;
    inputs.push((name.into(), embeds));
    inputs.push(("attention_mask".into(), mask));
    Ok((network, inputs))
}

fn video_decoder(parts: &ModelConfigs, given: &mut Given, build: &Build) -> Result<Ready> {
    let latents = given.ranked("latents", 5)?;
    let network = parts.video_decoder_program(dims(&latents), Pixels::Values, build)?;
    let mut inputs = vec![("latents".to_string(), latents)];
    if network.program.argument("temb").is_some() {
        inputs.push(("temb".into(), given.required("temb")?));
    }
    Ok((network, inputs))
}

fn transformer(c: &TransformerConfig, given: &mut Given, switches: &Switches, build: &Build) -> Result<Ready> {
    let mut inputs: Vec<(String, Tensor)> = Vec::new();
    let tokens = [given.ranked("hidden_states", 3)?, given.ranked("audio_hidden_states", 3)?];
    let text = [given.ranked("encoder_hidden_states", 3)?, given.ranked("audio_encoder_hidden_states", 3)?];
    let batch = tokens[0].shape()[0];
    let counts = [tokens[0].shape()[1], tokens[1].shape()[1]];

    let (timestep, video_per_token) = timesteps(given.required("timestep")?, batch, counts[0], "timestep")?;
    let (audio_timestep, audio_per_token) = match given.optional("audio_timestep") {
        Some(t) => timesteps(t, batch, counts[1], "audio_timestep")?,
        None if video_per_token && counts[0] != counts[1] => {
            let message = "a timestep per video token needs an input 'audio_timestep' too";
            return Err(PipelineError::Input(message.into()));
        }
        None => (timestep.clone(), video_per_token),
    };
    // The scalar level of a stream: the largest of its tokens' where nothing else is said.
    let sigma = match given.optional("sigma") {
        Some(t) => per_sample(&t, batch, "sigma")?,
        None => largest(&timestep),
    };
    let audio_sigma = match given.optional("audio_sigma") {
        Some(t) => per_sample(&t, batch, "audio_sigma")?,
        None => sigma.clone(),
    };
    let masks = [given.optional("encoder_attention_mask"), given.optional("audio_encoder_attention_mask")];
    let self_mask = given.optional("video_self_attention_mask");
    let perturbation = given.optional("perturbation_mask");
    let (video_coords, audio_coords) = coords(c, given, switches, counts)?;

    let stg: Vec<usize> = switches.get("stg_blocks")?.unwrap_or_default();
    // Without `perturbed_attn` the reference's attention does not know the mask.
    let stg = if c.perturbed_attn { stg } else { Vec::new() };
    let cross = match switches.get::<String>("cross_timestep")?.as_deref() {
        Some("own") => CrossTimestep::Own,
        Some("cross") => CrossTimestep::Cross,
        Some("gate_only") => CrossTimestep::GateOnly,
        Some(other) => {
            return Err(PipelineError::Input(format!("--set cross_timestep={other}: use own, cross or gate_only")));
        }
        None if switches.get("use_cross_timestep")?.unwrap_or(false) => CrossTimestep::Cross,
        None => CrossTimestep::Own,
    };
    let shape = ForwardShape {
        batch,
        tokens: counts.into(),
        text: [text[0].shape()[1], text[1].shape()[1]].into(),
        text_channels: [text[0].shape()[2], text[1].shape()[2]].into(),
        per_token: [video_per_token, audio_per_token].into(),
        rope_rows: video_coords.shape()[0].max(audio_coords.shape()[0]),
        text_mask: [masks[0].is_some(), masks[1].is_some()].into(),
        self_mask: self_mask.is_some(),
        cross,
        isolate: switches.get("isolate_modalities")?.unwrap_or(false),
        stg_blocks: stg,
    };
    let [hidden, audio_hidden] = tokens;
    let [context, audio_context] = text;
    let named = [
        ("hidden_states", hidden),
        ("audio_hidden_states", audio_hidden),
        ("encoder_hidden_states", context),
        ("audio_encoder_hidden_states", audio_context),
        ("timestep", timestep),
        ("audio_timestep", audio_timestep),
        ("sigma", sigma),
        ("audio_sigma", audio_sigma),
    ];
    inputs.extend(named.map(|(n, t)| (n.to_string(), t)));
    let [mask, audio_mask] = masks;
    let optional = [
        ("encoder_attention_mask", mask),
        ("audio_encoder_attention_mask", audio_mask),
        ("video_self_attention_mask", self_mask),
        // Perturbs every sample unless told otherwise.
        ("perturbation_mask", Some(perturbation.unwrap_or_else(|| Array1::<f32>::zeros(batch).into()))),
    ];
    inputs.extend(optional.into_iter().filter_map(|(n, t)| t.map(|t| (n.to_string(), t))));
    let tables = tables::tables(c, video_coords.view(), audio_coords.view());
    inputs.extend(tables::host_inputs(c, tables));
    let network = transformer::program(c, &shape, build)?;
    Ok((network, inputs))
}

/// A timestep `[b]`, `[b, 1]`, `[b, n]` or `[b, n, 1]`: whether it has one value a token.
fn timesteps(t: Tensor, batch: usize, tokens: usize, name: &str) -> Result<(Tensor, bool)> {
    let values = t.to_f32();
    let per_token = values.len() == batch * tokens && values.ndim() > 1;
    let shaped = if per_token {
        values.into_shape_with_order((batch, tokens)).map(Tensor::from)
    } else {
        values.into_shape_with_order(batch).map(Tensor::from)
    };
    let shape = t.shape().to_vec();
    let message = format!("input '{name}' has shape {shape:?}, it must be [{batch}] or [{batch}, {tokens}]");
    Ok((shaped.map_err(|_| PipelineError::Input(message))?, per_token))
}

fn per_sample(t: &Tensor, batch: usize, name: &str) -> Result<Tensor> {
    let message = format!("input '{name}' has shape {:?}, it must be [{batch}]", t.shape());
    t.to_f32().into_shape_with_order(batch).map(Tensor::from).map_err(|_| PipelineError::Input(message))
}

fn largest(t: &Tensor) -> Tensor {
    let values = t.to_f32();
    match values.ndim() {
        1 => Tensor::from(values),
        _ => Tensor::from(values.fold_axis(Dim(1), f32::NEG_INFINITY, |a, b| a.max(*b))),
    }
}

type Coords = ndarray::Array4<f32>;

/// Token bounds as given, or derived from the latent sizes.
fn coords(
    c: &TransformerConfig,
    given: &mut Given,
    switches: &Switches,
    tokens: [usize; 2],
) -> Result<(Coords, Coords)> {
    let grid = |t: Tensor, name: &str| -> Result<Coords> {
        let message = format!("input '{name}' must be [b, axes, tokens, 2], has shape {:?}", t.shape());
        t.to_f32().into_dimensionality::<Ix4>().map_err(|_| PipelineError::Input(message))
    };
    let need = |name: &str| -> Result<usize> {
        switches
            .get(name)?
            .ok_or_else(|| PipelineError::Input(format!("give input 'video_coords', or --set {name} in latent units")))
    };
    let (video_grid, audio_grid) = crate::request::coordinate_grids(c);
    let video = match given.optional("video_coords") {
        Some(t) => grid(t, "video_coords")?,
        None => {
            let shape = VideoShape {
                batch: 1,
                channels: c.in_channels,
                frames: need("num_frames")?,
                height: need("height")?,
                width: need("width")?,
            };
            let fps = switches.get("fps")?.unwrap_or(24.0);
            video_grid.coords(&shape, c.vae_scale_factors, c.causal_offset as i64, fps)
        }
    };
    let audio = match given.optional("audio_coords") {
        Some(t) => grid(t, "audio_coords")?,
        None => {
            let length = switches.get("audio_num_frames")?.unwrap_or(tokens[1]);
            audio_grid.coords(1, length, c.audio_scale_factor, c.audio_patch_size_t, c.causal_offset as i64)
        }
    };
    // One table serves the batch unless the samples differ.
    let rows = video.shape()[0].max(audio.shape()[0]);
    let spread = |a: Coords| -> Coords {
        if a.shape()[0] == rows {
            return a;
        }
        let copies = vec![a.view(); rows];
        ndarray::concatenate(Dim(0), &copies).unwrap_or(a)
    };
    Ok((spread(video), spread(audio)))
}
