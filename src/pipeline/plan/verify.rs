//! Verifies a model's components by reading configurations, headers and small tensors, before anything is compiled.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use crate::models::tokenizer::{Tokenizer, TokenizerError};
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::programs::configs::ModelConfigs;
use crate::pipeline::programs::parameters::compare;
use crate::sampling::latents::LatentStatistics;
use crate::sampling::sigmas::FlowMatch;
use crate::weights::{Component, ModelSource, TensorView, TokenizerFiles, ValidationReport, finite_tensor};

/// Verifies the components that a run reads. Fails for the first component that is missing or invalid; the error quotes
/// file, key or tensor.
pub(crate) fn components(configs: &ModelConfigs, source: &Arc<ModelSource>, parts: &BTreeSet<Component>) -> Result<()> {
    // The checks below require that the model's version is known.
    source.version()?;
    // Verify in the order of the program's phases, so that a missing text encoder is reported before the tokenizer,
    // which is often in the same folder.
    for part in Component::ALL.into_iter().filter(|part| parts.contains(part)) {
        if let Some(report) = component(configs, source, part)? {
            report.into_result(part, &source.checkpoint(part)?)?;
        }
    }
    Ok(source.refuse_unread()?)
}

/// Verifies one component, and returns a report that compares its tensors with the declared parameters. `None`: the
/// component has no weights.
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

/// Reads the latent statistics of the video VAE, the audio VAE or the diffusion decoder.
pub(in crate::pipeline) fn statistics(
    configs: &ModelConfigs,
    source: &ModelSource,
    part: Component,
) -> Result<LatentStatistics> {
    let no_statistics = || PipelineError::Bug(format!("the {part} has no latent statistics"));
    let length = configs.statistics_length(part)?.ok_or_else(no_statistics)?;
    let checkpoint = source.checkpoint(part)?;
    let read = |name: &str| -> Result<Vec<f32>> {
        let view = checkpoint.get_float(name)?.expect_shape(&[length])?;
        Ok(finite_tensor(&view)?.to_f32().into_iter().collect())
    };
    let scaling_factor = if part == Component::Vae { configs.video_vae()?.scaling_factor } else { 1.0 };
    Ok(LatentStatistics { mean: read("latents_mean")?, std: read("latents_std")?, scaling_factor })
}

/// Opens the model's tokenizer. Fails if the text encoder has no embedding for one of its token ids.
pub(in crate::pipeline) fn tokenizer(configs: &ModelConfigs, source: &ModelSource) -> Result<Tokenizer> {
    open_tokenizer(&source.tokenizer()?, configs)
}

/// Opens a tokenizer from files. Fails if the text encoder has no embedding for one of its token ids.
pub(in crate::pipeline) fn open_tokenizer(files: &TokenizerFiles, configs: &ModelConfigs) -> Result<Tokenizer> {
    let rules = &configs.tokenizer()?;
    let (tokenizer, place) = match files {
        TokenizerFiles::Folder(folder) => (Tokenizer::open(folder, rules)?, folder),
        TokenizerFiles::Packed { file, tokenizer, config } => {
            let config = config.as_ref().map(TensorView::read).transpose()?;
            (Tokenizer::packed(file, &tokenizer.read()?, config.as_deref(), rules)?, file)
        }
        TokenizerFiles::SentencePiece { file, model } => {
            (Tokenizer::sentence_piece(file, &model.read()?, rules)?, file)
        }
    };
    with_embeddings(tokenizer, &place.join("tokenizer.json"), configs)
}

/// Returns the byte tokenizer, which is used for models with random weights that have no tokenizer files.
pub(in crate::pipeline) fn placeholder_tokenizer(configs: &ModelConfigs) -> Result<Tokenizer> {
    with_embeddings(Tokenizer::bytes(&configs.tokenizer()?)?, Path::new("stand-in tokenizer (bytes)"), configs)
}

/// Returns the tokenizer if the text encoder has an embedding for each of its token ids, otherwise an error. Without
/// this check, a gather with an id beyond the embedding table would silently read another row.
fn with_embeddings(tokenizer: Tokenizer, file: &Path, configs: &ModelConfigs) -> Result<Tokenizer> {
    let (size, embeddings) = (tokenizer.vocab_size(), configs.text_encoder()?.vocab_size());
    if size <= embeddings {
        return Ok(tokenizer);
    }
    let encoder = configs.origin().config_place(Component::TextEncoder);
    let why = format!(
        "token ids reach {}, but the text encoder of {} has a vocab_size of {embeddings}; use the tokenizer and the text encoder of the same model",
        size - 1,
        encoder.display()
    );
    Err(TokenizerError::Content { file: file.to_path_buf(), why }.into())
}

/// Reads the noise schedule from the model's scheduler configuration.
pub(in crate::pipeline) fn schedule(configs: &ModelConfigs) -> Result<FlowMatch> {
    let json = configs.origin().json(Component::Scheduler)?.to_string();
    Ok(FlowMatch::from_json(&json, &configs.origin().config_place(Component::Scheduler))?)
}
