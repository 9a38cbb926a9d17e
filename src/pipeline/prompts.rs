//! Prompts as the text encoder reads them, and its result as the branches of guidance do.

use ndarray::{Array2, ArrayView1, Axis as Dim};

use super::batch::Batch;
use super::error::{PipelineError, Result};
use super::model::Model;
use crate::runtime::Outputs;
use crate::sampling::denoise::DenoiseShape;
use crate::sampling::guidance::Branch;
use crate::tensor::Tensor;

/// The prompts of a batch, `kinds` a video, as ids and mask `[prompts, tokens]`, and for each video asked for the number
/// of tokens that did not fit.
pub(crate) fn tokens(model: &Model, batch: &Batch, kinds: usize) -> Result<(Tensor, Tensor, Vec<usize>)> {
    let tokens = batch.shared().max_sequence_length;
    let mut ids = Array2::<i32>::zeros((batch.size() * kinds, tokens));
    let mut mask = ids.clone();
    let mut cut = vec![0; batch.asked()];
    for (video, request) in batch.rows().enumerate() {
        let prompts = [("prompt", &request.prompt), ("negative prompt", &request.negative_prompt)];
        for (kind, (name, prompt)) in prompts.into_iter().take(kinds).enumerate() {
            let encoded = model.tokenizer.encode(prompt, tokens)?;
            let row = video * kinds + kind;
            ids.row_mut(row).assign(&ArrayView1::from(&encoded.ids));
            mask.row_mut(row).assign(&ArrayView1::from(&encoded.mask));
            // The filling says nothing.
            let Some(most) = cut.get_mut(video).filter(|_| encoded.cut > 0) else { continue };
            tracing::warn!("the {name} is longer than {tokens} tokens: {} were cut from its end", encoded.cut);
            *most = encoded.cut.max(*most);
        }
    }
    Ok((Tensor::from(ids), Tensor::from(mask), cut))
}

/// A stream's text contexts `[prompts, t, channels]` as the branches read them, `[videos, branches, t, channels]`. One that is
/// does not read the `negative` one has the prompt's in all of them.
pub(super) fn branch_text(text: &Outputs, name: &str, negative: bool, shape: &DenoiseShape) -> Result<Tensor> {
    let text = text.tensor(name)?.into_f32();
    let kinds = text.shape()[0] / shape.batch;
    let kind = |branch: &Branch| usize::from(negative && *branch == Branch::Negative);
    let wanted: Vec<usize> =
        (0..shape.batch).flat_map(|video| shape.branches.iter().map(move |b| video * kinds + kind(b))).collect();
    let dims = [&[shape.batch, shape.branches.len()], &text.shape()[1..]].concat();
    let in_order = wanted.iter().copied().eq(0..text.shape()[0]);
    let rows = if in_order { text } else { text.select(Dim(0), &wanted) }.into_shape_with_order(dims);
    Ok(Tensor::F32(rows.map_err(|e| PipelineError::Input(e.to_string()))?))
}
