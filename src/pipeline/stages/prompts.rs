//! Tokenizes prompts for the text encoder, and orders the text contexts by guidance branch.

use ndarray::{Array2, ArrayView1, Axis as Dim};

use super::batch::Batch;
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::model::OpenModel;
use crate::runtime::Outputs;
use crate::sampling::denoise::DenoiseShape;
use crate::sampling::guidance::Branch;
use crate::tensor::Tensor;

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

/// Orders the text contexts `[prompts, tokens, channels]` of a stream by guidance branch, as `[videos, branches,
/// tokens, channels]`. `given`: whether the stream is an input (e.g. input audio) and is not guided; all of its
/// branches then get the positive prompt.
pub(in crate::pipeline) fn branch_text(
    text: &Outputs,
    name: &str,
    shape: &DenoiseShape,
    given: bool,
) -> Result<Tensor> {
    let text = text.tensor(name)?.into_f32();
    let kinds = text.shape()[0] / shape.batch;
    let kind = |branch: &Branch| usize::from(*branch == Branch::Negative && !given);
    let wanted: Vec<usize> =
        (0..shape.batch).flat_map(|video| shape.branches.iter().map(move |b| video * kinds + kind(b))).collect();
    let dims = [&[shape.batch, shape.branches.len()], &text.shape()[1..]].concat();
    let in_order = wanted.iter().copied().eq(0..text.shape()[0]);
    let rows = if in_order { text } else { text.select(Dim(0), &wanted) }.into_shape_with_order(dims);
    Ok(Tensor::F32(rows.map_err(|e| PipelineError::Input(e.to_string()))?))
}
