//! Tokenizes prompts for the text encoder, and orders the text contexts by guidance branch.

use std::path::Path;

use ndarray::{Array2, ArrayD, ArrayView1, Axis as Dim, concatenate};

use super::batch::Batch;
use crate::av::Av;
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::model::OpenModel;
use crate::request::ModelSizes;
use crate::runtime::Outputs;
use crate::sampling::denoise::DenoiseShape;
use crate::sampling::guidance::Branch;
use crate::tensor::Tensor;
use crate::weights::Checkpoint;

/// Tokenizes the prompts of a batch. `kinds`: number of prompts per video, 1 (prompt) or 2 (prompt and negative
/// prompt). Returns token ids and mask, both `[prompts, tokens]`, and the number of truncated tokens of each requested
/// video.
pub(crate) fn tokens(model: &OpenModel, batch: &Batch, kinds: usize) -> Result<(Tensor, Tensor, Vec<usize>)> {
    let tokens = batch.shared().max_sequence_length;
    let mut ids = Array2::<i32>::zeros((batch.size * kinds, tokens));
    let mut mask = ids.clone();
    let mut cut = vec![0; batch.asked.len()];
    for (video, request) in batch.rows().enumerate() {
        let prompts = [("prompt", &request.prompt), ("negative prompt", &request.negative_prompt)];
        for (kind, (name, prompt)) in prompts.into_iter().take(kinds).enumerate() {
            let encoded = model.tokenizer.encode(prompt, tokens)?;
            let row = video * kinds + kind;
            ids.row_mut(row).assign(&ArrayView1::from(&encoded.ids));
            mask.row_mut(row).assign(&ArrayView1::from(&encoded.mask));
            // Do not report rows that are padding.
            let Some(most) = cut.get_mut(video).filter(|_| encoded.cut > 0) else { continue };
            tracing::warn!("the {name} is longer than {tokens} tokens: the last {} are dropped", encoded.cut);
            *most = encoded.cut.max(*most);
        }
    }
    Ok((Tensor::from(ids), Tensor::from(mask), cut))
}

/// Text contexts of both streams, `[prompts, tokens, channels]` each.
pub(in crate::pipeline) type TextContexts = Av<ArrayD<f32>>;

/// Downloads the outputs of the connectors.
pub(in crate::pipeline) fn contexts_of(text: &Outputs) -> Result<TextContexts> {
    Av::NAMES.try_map(|name| Ok(text.tensor(name)?.into_f32()))
}

/// Reads the text contexts of a file, for a batch of `rows` videos: `video_context` and `audio_context`, `[tokens,
/// channels]` or `[1, tokens, channels]`.
///
/// # Errors
/// Returns an error if the file lacks a tensor, or if the tensor does not have `tokens` tokens and the channels of the
/// model.
pub(crate) fn read_contexts(path: &Path, sizes: &ModelSizes, tokens: usize, rows: usize) -> Result<TextContexts> {
    let file = Checkpoint::open(path)?;
    Av::NAMES.zip(sizes.text_channels).try_map(|(stream, channels)| {
        let name = format!("{stream}_context");
        let mut context = file.get(&name)?.to_tensor()?.into_f32();
        if context.ndim() == 2 {
            context = context.insert_axis(Dim(0));
        }
        if context.shape() != [1, tokens, channels] {
            let have = context.shape();
            let cure = match have {
                [1, other, own] if *own == channels => format!("; set request.max_sequence_length to {other}"),
                _ => "; use the file of a LoRA for this model".into(),
            };
            let reason = format!("{name} has shape {have:?}, but this request needs {:?}{cure}", [1, tokens, channels]);
            return Err(PipelineError::File { path: path.into(), reason });
        }
        let all = vec![context.view(); rows];
        concatenate(Dim(0), &all).map_err(|e| PipelineError::Bug(e.to_string()))
    })
}

/// Orders the text contexts `[prompts, tokens, channels]` of a stream by guidance branch, as `[videos, branches,
/// tokens, channels]`. `given`: whether the stream is an input (e.g. input audio) and is not guided; all of its
/// branches then get the positive prompt.
pub(in crate::pipeline) fn branch_text(text: &ArrayD<f32>, shape: &DenoiseShape, given: bool) -> Result<Tensor> {
    let kinds = text.shape()[0] / shape.batch;
    let kind = |branch: &Branch| usize::from(*branch == Branch::Negative && !given);
    let wanted: Vec<usize> =
        (0..shape.batch).flat_map(|video| shape.branches.iter().map(move |b| video * kinds + kind(b))).collect();
    let dims = [&[shape.batch, shape.branches.len()], &text.shape()[1..]].concat();
    let in_order = wanted.iter().copied().eq(0..text.shape()[0]);
    let rows = if in_order { text.clone() } else { text.select(Dim(0), &wanted) }.into_shape_with_order(dims);
    Ok(Tensor::F32(rows.map_err(|e| PipelineError::Input(e.to_string()))?))
}
