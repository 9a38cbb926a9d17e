//! Computes the transformer's four RoPE tables on the host.

use ndarray::{Array4, ArrayView4, s};

use super::config::TransformerConfig;
use crate::av::Av;
use ltx2_nn::rope::{Table, grid, table};
use ltx2_nn::{Axis, Heads, Params, Rope};
use ltx2_stablehlo::{DType, Type, Value};
use ltx2_weights::tensor::Tensor;

/// Returns the program input name, the heads and the sequence axis of each table.
fn heads(c: &TransformerConfig) -> [(&'static str, Heads, Axis); 4] {
    // Each cross-modal table uses its stream's number of heads, not that of the cross-modal attention.
    let cross = |count: usize| Heads { count, dim: c.audio_cross_attention_dim / count };
    [
        ("rope.video", c.video_heads(), Axis::VideoSequence),
        ("rope.audio", c.audio_heads(), Axis::AudioSequence),
        ("rope.cross_video", cross(c.num_attention_heads), Axis::VideoSequence),
        ("rope.cross_audio", cross(c.audio_num_attention_heads), Axis::AudioSequence),
    ]
}

/// Computes the tables for video self-attention, audio self-attention, cross-modal video and cross-modal audio.
/// `coords` are the start and end coordinates of the tokens: video `[b, 3, n, 2]` (seconds, pixels, pixels) and audio
/// `[b, 1, m, 2]` (seconds). Video positions are computed in `dtype`.
pub fn tables(c: &TransformerConfig, coords: &Av<Array4<f32>>, dtype: DType) -> [Table; 4] {
    let cross_max = c.pos_embed_max_pos.max(c.audio_pos_embed_max_pos) as f32;
    let video_max = [c.pos_embed_max_pos as f32, c.base_height as f32, c.base_width as f32];
    let time = |b: ArrayView4<f32>, largest, dtype| grid(b.slice(s![.., 0..1, .., ..]), &[largest], dtype);
    let Av { video, audio } = coords.as_ref().map(|bounds| bounds.view());
    let positions = [
        grid(video, &video_max, dtype),
        time(audio, c.audio_pos_embed_max_pos as f32, DType::F32),
        time(video, cross_max, dtype),
        time(audio, cross_max, DType::F32),
    ];
    let heads = heads(c);
    [0, 1, 2, 3].map(|i| table(positions[i].view(), heads[i].1, c.rope_theta, c.rope_double_precision))
}

/// Returns the tables as named program inputs.
pub fn host_inputs(c: &TransformerConfig, tables: [Table; 4]) -> Vec<(String, Tensor)> {
    let named = heads(c).into_iter().zip(tables);
    named
        .flat_map(|((name, ..), t)| [(format!("{name}.cos"), t.cos.into()), (format!("{name}.sin"), t.sin.into())])
        .collect()
}

/// Declares the self-attention and cross-modal tables as program inputs for the streams that have tokens. `batch` may
/// be 1 to share one table among all batch entries.
pub fn inputs(p: &Params, c: &TransformerConfig, batch: usize, tokens: Av<Option<usize>>) -> [Av<Option<Rope>>; 2] {
    let [video, audio, cross_video, cross_audio] = heads(c).map(|(name, h, axis)| {
        let n = (if axis == Axis::VideoSequence { tokens.video } else { tokens.audio })?;
        let ty = Type::new(DType::F32, vec![batch, n, h.count, h.dim / 2]);
        let part = |what: &str| -> Value {
            let each = if batch == 1 { Axis::Replicated } else { Axis::CfgBatch };
            p.input(&format!("{name}.{what}"), ty.clone(), &[each, axis, Axis::Heads, Axis::Replicated])
        };
        Some(Rope { cos: part("cos"), sin: part("sin") })
    });
    [Av { video, audio }, Av { video: cross_video, audio: cross_audio }]
}
