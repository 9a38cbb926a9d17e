//! Verification of a model's components from configurations, headers and small tensors, before anything is compiled.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use super::configs::ModelConfigs;
use super::error::{PipelineError, Result};
use super::parameters::compare;
use crate::models::tokenizer::{Tokenizer, TokenizerError};
use crate::sampling::latents::Statistics;
use crate::sampling::sigmas::FlowMatch;
use crate::weights::{Component, ModelSource, TensorView, TokenizerFiles, ValidationReport, finite_tensor};

/// Verifies components as a run reads them.
///
/// # Errors
/// The first that is absent or unusable, naming file, key or tensor.
pub(crate) fn components(configs: &ModelConfigs, source: &Arc<ModelSource>, parts: &BTreeSet<Component>) -> Result<()> {
    // A transformer of no known generation is not compared with one.
    source.version()?;
    // The order of a request: the text encoder's folder often holds the tokenizer.
    for part in Component::ALL.into_iter().filter(|part| parts.contains(part)) {
        if let Some(report) = component(configs, source, part)? {
            report.into_result(part, &source.checkpoint(part)?)?;
        }
    }
    Ok(source.refuse_unread()?)
}

/// Verifies one component. The report compares its tensors with the declared ones; `None` if it has no weights.
///
/// # Errors
/// It is absent; a configuration, header, tokenizer or schedule that cannot be used; latent statistics that are not finite.
pub(crate) fn component(
    configs: &ModelConfigs,
    source: &Arc<ModelSource>,
    part: Component,
) -> Result<Option<ValidationReport>> {
    source.require([part])?;
    match part {
        Component::Tokenizer => return tokenizer(configs, source).map(|_| None),
        Component::Scheduler => return schedule(configs).map(|_| None),
        _ => {}
    }
    let report = compare(configs, part, &source.checkpoint(part)?)?;
    if report.is_ok() && configs.statistics_length(part)?.is_some() {
        statistics(configs, source, part)?;
    }
    Ok(Some(report))
}

/// Reads the latent statistics of an autoencoder or of the diffusion decoder.
///
/// # Errors
/// Tensors that are missing, of another shape, or not finite.
pub(super) fn statistics(configs: &ModelConfigs, source: &ModelSource, part: Component) -> Result<Statistics> {
    let no_statistics = || PipelineError::Bug(format!("the {part} has no latent statistics"));
    let length = configs.statistics_length(part)?.ok_or_else(no_statistics)?;
    let checkpoint = source.checkpoint(part)?;
    let read = |name: &str| -> Result<Vec<f32>> {
        let view = checkpoint.get_float(name)?.expect_shape(&[length])?;
        Ok(finite_tensor(&view)?.to_f32().into_iter().collect())
    };
    let scaling_factor = if part == Component::Vae { configs.video_vae()?.scaling_factor } else { 1.0 };
    Ok(Statistics { mean: read("latents_mean")?, std: read("latents_std")?, scaling_factor })
}

/// Opens a model's tokenizer.
///
/// # Errors
/// Files that are absent or cannot be used; token ids that the text encoder has no embeddings of.
pub(super) fn tokenizer(configs: &ModelConfigs, source: &ModelSource) -> Result<Tokenizer> {
    open_tokenizer(&source.tokenizer()?, configs)
}

/// Opens the tokenizer of a model from its files.
///
/// # Errors
/// Files that cannot be used; token ids that the text encoder has no embeddings of.
pub(super) fn open_tokenizer(files: &TokenizerFiles, configs: &ModelConfigs) -> Result<Tokenizer> {
    let rules = &configs.tokenizer()?;
    let (tokenizer, place) = match files {
        TokenizerFiles::Folder(folder) => (Tokenizer::open(folder, rules)?, folder),
        TokenizerFiles::Packed { file, tokenizer, config } => {
            let config = config.as_ref().map(TensorView::read).transpose()?;
            (Tokenizer::packed(file, &tokenizer.read()?, config.as_deref(), rules)?, file)
        }
    };
    with_embeddings(tokenizer, &place.join("tokenizer.json"), configs)
}

/// The byte tokenizer, for a model of random weights without tokenizer files.
///
/// # Errors
/// Token ids that the text encoder has no embeddings of.
pub(super) fn stand_in_tokenizer(configs: &ModelConfigs) -> Result<Tokenizer> {
    with_embeddings(Tokenizer::bytes(&configs.tokenizer()?)?, Path::new("stand-in tokenizer (bytes)"), configs)
}

/// A tokenizer, unless the text encoder lacks embeddings of some of its ids: a gather would take other rows for them.
fn with_embeddings(tokenizer: Tokenizer, file: &Path, configs: &ModelConfigs) -> Result<Tokenizer> {
    let (size, embeddings) = (tokenizer.vocab_size(), configs.text_encoder()?.vocab_size());
    if size <= embeddings {
        return Ok(tokenizer);
    }
    let encoder = configs.origin().config_place(Component::TextEncoder);
    let why = format!(
        "token ids reach {}, the text encoder of {} has a vocab_size of {embeddings}; take both from one model",
        size - 1,
        encoder.display()
    );
    Err(TokenizerError::Content { file: file.to_path_buf(), why }.into())
}

/// Reads the model's own noise schedule.
///
/// # Errors
/// A configuration that is absent or cannot be used.
pub(super) fn schedule(configs: &ModelConfigs) -> Result<FlowMatch> {
    let json = configs.origin().json(Component::Scheduler)?.to_string();
    Ok(FlowMatch::from_json(&json, &configs.origin().config_place(Component::Scheduler))?)
}
