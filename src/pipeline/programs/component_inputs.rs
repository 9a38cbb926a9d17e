//! Converts the arguments of a component of the reference implementation to the inputs of its program.

use std::collections::BTreeMap;

use ndarray::Array2;
use serde::de::DeserializeOwned;

use super::configs::ModelConfigs;
use crate::av::Av;
use crate::models::Network;
use crate::models::connectors::Input;
use crate::models::pixels::Pixels;
use crate::nn::Build;
use crate::pipeline::error::{PipelineError, Result};
use crate::tensor::Tensor;
use crate::weights::Component;

/// Scalar arguments of a component of the reference implementation, by name. The program table lists the names for each
/// component. The vocoder's `clamp`: whether the output of the first stage is clamped (LTX-2.3).
pub(crate) type Scalars = BTreeMap<String, serde_json::Value>;

/// Inputs of a program, by name.
pub(in crate::pipeline) type Named = Vec<(String, Tensor)>;

/// A program with its inputs.
pub(in crate::pipeline) type Ready = (Network, Named);

/// Arguments of a component: tensors, each of which can be taken once, and scalars.
pub(in crate::pipeline) struct ReferenceArguments<'a> {
    pub(crate) configs: &'a ModelConfigs,
    pub(crate) build: &'a Build,
    tensors: BTreeMap<String, Tensor>,
    scalars: &'a Scalars,
    known: Vec<&'static str>,
}

impl<'a> ReferenceArguments<'a> {
    /// Collects the arguments. Fails if a scalar's name is not in `known`.
    pub(crate) fn new(
        configs: &'a ModelConfigs,
        build: &'a Build,
        tensors: BTreeMap<String, Tensor>,
        scalars: &'a Scalars,
        known: &[&str],
    ) -> Result<Self> {
        if let Some(k) = scalars.keys().find(|k| !known.contains(&k.as_str())) {
            let all = if known.is_empty() { "none".into() } else { known.join(", ") };
            return Err(PipelineError::Input(format!("--set {k}: unknown argument; this component takes {all}")));
        }
        Ok(ReferenceArguments { configs, build, tensors, scalars, known: Vec::new() })
    }

    pub(crate) fn optional(&mut self, name: &'static str) -> Option<Tensor> {
        self.known.push(name);
        self.tensors.remove(name)
    }

    pub(crate) fn required(&mut self, name: &'static str) -> Result<Tensor> {
        self.optional(name).ok_or_else(|| PipelineError::Input(format!("input '{name}' is missing")))
    }

    pub(crate) fn ranked(&mut self, name: &'static str, rank: usize) -> Result<Tensor> {
        let t = self.required(name)?;
        if t.shape().len() != rank {
            let message = format!("input '{name}' must have {rank} dimensions, but has shape {:?}", t.shape());
            return Err(PipelineError::Input(message));
        }
        Ok(t)
    }

    pub(crate) fn scalar<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let value = self.scalars.get(name).map(|v| serde_json::from_value(v.clone())).transpose();
        value.map_err(|e| PipelineError::Input(format!("--set {name}: {e}")))
    }

    /// Fails if a tensor was not taken, because the component does not use it.
    pub(crate) fn finish(self) -> Result<()> {
        match self.tensors.keys().next() {
            None => Ok(()),
            Some(name) => Err(PipelineError::Input(format!(
                "input '{name}' is unknown; this component takes {}",
                self.known.join(", ")
            ))),
        }
    }

    /// Returns the program and the input of a component whose only argument is a tensor of rank `N`.
    fn only<const N: usize>(
        &mut self,
        name: &'static str,
        program: impl FnOnce(&ModelConfigs, [usize; N], &Build) -> Result<Network>,
    ) -> Result<Ready> {
        let tensor = self.ranked(name, N)?;
        Ok((program(self.configs, dims(&tensor), self.build)?, vec![(name.into(), tensor)]))
    }
}

/// Returns the shape of a tensor; the caller must have checked that its rank is `N`.
fn dims<const N: usize>(t: &Tensor) -> [usize; N] {
    std::array::from_fn(|i| t.shape()[i])
}

pub(in crate::pipeline) fn text_encoder(given: &mut ReferenceArguments) -> Result<Ready> {
    let ids = given.ranked("input_ids", 2)?;
    let mask = match given.optional("attention_mask") {
        Some(mask) => mask,
        None => Tensor::from(ids.to_i64().mapv(|v| i32::from(v != 0))),
    };
    // A model without connectors has no projection; the result is then the hidden states of all layers.
    let raw = given.scalar::<bool>("output_hidden_states")?.unwrap_or(false)
        || !given.configs.origin().has(Component::Connectors);
    let network = given.configs.text_encoder_program(ids.shape()[0], ids.shape()[1], !raw, given.build)?;
    Ok((network, vec![("input_ids".into(), ids), ("attention_mask".into(), mask)]))
}

pub(in crate::pipeline) fn connectors(given: &mut ReferenceArguments) -> Result<Ready> {
    let configs = given.configs;
    let (embeds, projected) = match given.optional("prompt_embeds") {
        // The reference implementation also passes the hidden states of all layers under this name.
        Some(t) => {
            let projected = t.shape().last() == Some(&configs.connectors()?.text_width());
            (t, projected)
        }
        None => (given.required("text_encoder_hidden_states")?, false),
    };
    // The reference implementation also accepts the hidden states as [b, t, channels, layers].
    let embeds = match embeds.shape() {
        [_, _, _] => embeds,
        &[b, t, c, l] => Tensor::from(
            embeds
                .to_f32()
                .into_shape_with_order((b, t, c * l))
                .map_err(|e| PipelineError::Input(format!("input 'text_encoder_hidden_states': {e}")))?,
        ),
        other => {
            let message = format!("input 'prompt_embeds' must have 3 dimensions, but has shape {other:?}");
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
    let network = configs.connectors_program(rows, tokens, input, given.build)?;
    let mut inputs = configs.connectors_inputs(tokens)?;
    inputs.extend([(name.into(), embeds), ("attention_mask".into(), mask)]);
    Ok((network, inputs))
}

pub(in crate::pipeline) fn duration_head(given: &mut ReferenceArguments) -> Result<Ready> {
    let [video, audio] = [given.ranked("video_tokens", 3)?, given.ranked("audio_tokens", 3)?];
    let tokens = Av { video: video.shape()[1], audio: audio.shape()[1] };
    let network = given.configs.duration_head_program(video.shape()[0], tokens, given.build)?;
    Ok((network, vec![("video_tokens".into(), video), ("audio_tokens".into(), audio)]))
}

pub(in crate::pipeline) fn video_encoder(given: &mut ReferenceArguments) -> Result<Ready> {
    given.only("video", ModelConfigs::video_encoder_program)
}

pub(in crate::pipeline) fn video_decoder(given: &mut ReferenceArguments) -> Result<Ready> {
    let (network, mut inputs) = given.only("latents", |configs, dims: [usize; 5], build| {
        configs.video_decoder_program(dims, Pixels::Values, build)
    })?;
    if network.program.argument("temb").is_some() {
        inputs.push(("temb".into(), given.required("temb")?));
    }
    Ok((network, inputs))
}

pub(in crate::pipeline) fn diffusion_decoder(given: &mut ReferenceArguments) -> Result<Ready> {
    let noise = given.ranked("noise", 5)?;
    let (network, mut inputs) = given.only("latents", |configs, dims: [usize; 5], build| {
        configs.diffusion_decoder_program(dims, Pixels::Values, build)
    })?;
    inputs.push(("noise".into(), noise));
    Ok((network, inputs))
}

pub(in crate::pipeline) fn audio_encoder(given: &mut ReferenceArguments) -> Result<Ready> {
    given.only("mel", ModelConfigs::audio_encoder_program)
}

pub(in crate::pipeline) fn audio_decoder(given: &mut ReferenceArguments) -> Result<Ready> {
    given.only("latents", ModelConfigs::audio_decoder_program)
}

pub(in crate::pipeline) fn vocoder(given: &mut ReferenceArguments) -> Result<Ready> {
    let clamp = given.scalar("clamp")?.unwrap_or(true);
    given.only("mel", |configs, dims: [usize; 4], build| {
        configs.clone().with_vocoder_clamp(clamp).vocoder_program(dims, build)
    })
}

pub(in crate::pipeline) fn upsampler(given: &mut ReferenceArguments) -> Result<Ready> {
    given.only("latents", ModelConfigs::upsampler_program)
}

pub(in crate::pipeline) fn temporal_upsampler(given: &mut ReferenceArguments) -> Result<Ready> {
    given.only("latents", ModelConfigs::temporal_upsampler_program)
}
