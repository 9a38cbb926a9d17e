//! Timestep conditioning: AdaLN-single, and the modulation rows that blocks select from it.

use super::config::{Stream, TransformerConfig};
use crate::av::Av;
use crate::timestep::timestep_embedding;
use ltx2_nn::{Axis, Init, Params, linear, rms, silu};
use ltx2_stablehlo::{Comparison, DType, Value};

/// Noise level that modulates cross-modal attention (`conditioning.cross_timestep`). The variants are equivalent if all
/// tokens of both streams have the same noise level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CrossModalTimestep {
    /// Scale, shift and gate depend on the noise levels of the stream's own tokens.
    Own,
    /// Scale, shift and gate depend on the scalar noise level of the other stream.
    Cross,
    /// Scale and shift depend on the noise levels of the stream's own tokens, the gate on the scalar noise level of the
    /// other stream.
    GateOnly,
}

/// Modulation of one stream, computed from the timestep. `b` is the CFG batch or 1. `s` is the number of tokens, 1, or
/// the number of noise levels that tokens select from
/// ([`StreamInputs::noise_level_index`](super::StreamInputs::noise_level_index)).
#[derive(Clone)]
pub struct StreamModulation {
    /// `[b, s, 6 or 9, width]`: shift, scale and gate of self-attention, then of the feed-forward layer and, in
    /// LTX-2.3, of text attention.
    pub ada_params: Value,
    /// `[b, s, width]`: the embedded timestep, for the output layer.
    pub embedded: Value,
    /// `[b, s, 4, width]`: scale and shift for each cross-modal attention.
    pub cross: Value,
    /// `[b, s, 1, width]`: gate of the cross-modal attention in which this stream provides the queries.
    pub gate: Value,
    /// `[b, s, 2, width]`: shift and scale of the text context (LTX-2.3).
    pub prompt: Option<Value>,
}

impl StreamModulation {
    /// Creates each part by calling `f` with its name and its shape for a single noise level.
    pub fn new(c: &TransformerConfig, s: &Stream, f: impl Fn(&'static str, &[usize]) -> Value) -> Self {
        let w = s.width();
        StreamModulation {
            ada_params: f("main", &[s.modulation_rows(), w]),
            embedded: f("embedded", &[w]),
            cross: f("cross", &[4, w]),
            gate: f("gate", &[1, w]),
            prompt: c.has_prompt_adaln().then(|| f("prompt", &[2, w])),
        }
    }

    /// Applies `f` to each part.
    pub fn map(&self, f: impl Fn(&Value) -> Value) -> Self {
        StreamModulation {
            ada_params: f(&self.ada_params),
            embedded: f(&self.embedded),
            cross: f(&self.cross),
            gate: f(&self.gate),
            prompt: self.prompt.as_ref().map(f),
        }
    }

    /// Returns each part with the name that [`StreamModulation::new`] passes to its callback.
    pub fn parts(&self) -> impl Iterator<Item = (&'static str, &Value)> {
        let parts =
            [("main", &self.ada_params), ("embedded", &self.embedded), ("cross", &self.cross), ("gate", &self.gate)];
        parts.into_iter().chain(self.prompt.as_ref().map(|prompt| ("prompt", prompt)))
    }
}

/// Shift and scale before a sub-layer `f` and gate after it, each f32 `[b, s, width]`: `x + gate · f(norm(x)·(1 +
/// scale) + shift)`.
pub(crate) struct Ada {
    pub(crate) shift: Value,
    pub(crate) scale: Value,
    pub(crate) gate: Value,
}

impl Ada {
    /// Returns the `i`-th triple of modulation rows.
    pub(super) fn nth(rows: &[Value], i: usize) -> Self {
        Ada { shift: rows[3 * i].clone(), scale: rows[3 * i + 1].clone(), gate: rows[3 * i + 2].clone() }
    }

    /// Returns the sub-layer's input for the normalized `x`.
    pub(super) fn modulate(&self, x: &Value, dtype: DType) -> Value {
        modulate(x, &self.scale, &self.shift, dtype)
    }

    /// Adds the gated output `y` of the sub-layer to the residual stream `x`.
    pub(super) fn add(&self, x: &Value, y: &Value) -> Value {
        gated_add(x, &self.gate, y)
    }
}

/// Noise levels of one stream, expressed as the reference's timesteps (1000 · sigma).
#[derive(Clone, Copy)]
pub struct Levels<'a> {
    /// Level of each token, or one level for all tokens; f32 `[b, 1 or tokens]`.
    pub timestep: &'a Value,
    /// Scalar level, f32 `[b, 1]`.
    pub sigma: &'a Value,
}

/// Applies AdaLN-single with the weights at `p`: maps timesteps `[b, s]` to modulation vectors `[b, s, rows, width]`
/// and to the embedded timestep `[b, s, width]`.
pub fn adaln(p: &Params, timestep: &Value, rows: usize, width: usize) -> (Value, Value) {
    let _scope = p.scope();
    let embedded = timestep_embedding(&p.pp("emb.timestep_embedder"), timestep, width);
    let all = linear(&p.pp("linear"), &silu(&embedded), rows * width, true, [Axis::Replicated, Axis::Embed]);
    (all.reshape(vec![timestep.dim(0), timestep.dim(1), rows, width]), embedded)
}

/// Computes the modulation of the `present` streams from their noise levels.
pub fn modulation(
    p: &Params,
    c: &TransformerConfig,
    levels: Av<Levels>,
    cross: CrossModalTimestep,
    present: Av<bool>,
) -> Av<Option<StreamModulation>> {
    let factor = c.cross_attn_timestep_scale_multiplier / c.timestep_scale_multiplier;
    let names = Av {
        video: ("av_cross_attn_video_scale_shift", "av_cross_attn_video_a2v_gate"),
        audio: ("av_cross_attn_audio_scale_shift", "av_cross_attn_audio_v2a_gate"),
    };
    let streams = c.streams().zip(names).zip(levels.zip(levels.swap()).zip(present));
    streams.map(|((s, (scale_shift, gate)), ((own, other), present))| {
        if !present {
            return None;
        }
        let width = s.width();
        let (ada_params, embedded) = adaln(&p.pp(s.name("time_embed")), own.timestep, s.modulation_rows(), width);
        let for_scale = if cross == CrossModalTimestep::Cross { other.sigma } else { own.timestep };
        let for_gate = if cross == CrossModalTimestep::Own { own.timestep } else { other.sigma };
        let prompt = c.has_prompt_adaln().then(|| adaln(&p.pp(s.name("prompt_adaln")), own.sigma, 2, width).0);
        Some(StreamModulation {
            ada_params,
            embedded,
            cross: adaln(&p.pp(scale_shift), for_scale, 4, width).0,
            gate: adaln(&p.pp(gate), &(for_gate * factor), 1, width).0,
            prompt,
        })
    })
}

/// Loads a modulation table `[rows, width]` from the checkpoint.
pub(super) fn table(p: &Params, name: &str, rows: usize, width: usize) -> Value {
    // The parameter is a vector: for stacked tables with few rows, compilers choose a memory layout that differs from
    // the order in which the loop reads them.
    let init = Init::normal((width as f32).sqrt().recip());
    p.get_as(name, &[rows, width], &[rows * width], &[Axis::Replicated], init).reshape(vec![rows, width])
}

/// Returns the rows of the sum of the table and the timestep's modulation in f32, each `[b, s, width]`.
pub(super) fn rows(table: &Value, timestep: &Value) -> Vec<Value> {
    let sum = table.to(DType::F32) + timestep.to(DType::F32);
    (0..sum.dim(2)).map(|i| sum.at(2, i)).collect()
}

/// Selects for each token the row of `x [b, levels, width]` given by `index`, i32 `[b, tokens]`; returns `[b, tokens,
/// width]`. Without `index`, or if there is only one level, returns `x`. Uses selects instead of a gather, because the
/// compiler fuses selects with the operations that read them: the result is never written to memory.
pub fn at_noise_level(x: &Value, index: Option<&Value>) -> Value {
    let Some(index) = index.filter(|_| x.dim(1) > 1) else { return x.clone() };
    let (tokens, width) = (index.dim(1), x.dim(2));
    let all = [index.dim(0), tokens, width];
    let row = |k: usize| x.slice(1, k, k + 1).broadcast_to(&all);
    (1..x.dim(1)).fold(row(0), |chosen, k| {
        let here = index.compare(Comparison::Eq, &index.like(k as f64)).unsqueeze(2).broadcast_to(&all);
        here.select(&row(k), &chosen)
    })
}

/// Returns `x·(1 + scale) + shift` of an f32 `x`, rounded once to `dtype`.
pub(super) fn modulate(x: &Value, scale: &Value, shift: &Value, dtype: DType) -> Value {
    (x * (scale + 1.0) + shift).to(dtype)
}

/// Applies an RMS norm in f32, with the weight `name` if `norm_elementwise_affine` is set.
pub(super) fn block_norm(p: &Params, c: &TransformerConfig, name: &str, x: &Value) -> Value {
    let y = rms(x, c.norm_eps);
    if !c.norm_elementwise_affine {
        return y;
    }
    y * p.pp(name).get("weight", &[x.dim(-1)], &[Axis::Embed], Init { mean: 1.0, std: 0.02 }).to(DType::F32)
}

/// Adds the learned keyframe embedding to the tokens of `x` whose `mask [b or 1, n]` is 1 (LTX-2.5).
pub(super) fn marked(p: &Params, x: &Value, mask: &Value) -> Value {
    let marker = table(p, "keyframes_abs_pos_embedding", 1, x.dim(-1)).to(DType::F32);
    (x.to(DType::F32) + mask.unsqueeze(2) * marker).to(x.dtype())
}

/// Returns `x + gate · y`, computed in f32 and rounded once.
pub(super) fn gated_add(x: &Value, gate: &Value, y: &Value) -> Value {
    (x.to(DType::F32) + gate * y.to(DType::F32)).to(x.dtype())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ltx2_stablehlo::{Builder, Type};

    /// Returns the names of a program's operations, with ` bf16` appended to those with a bf16 operand or result.
    fn operations(f: impl FnOnce(&Builder) -> Value) -> Vec<String> {
        let b = Builder::new("f");
        let y = f(&b);
        let text = b.finish(&[("y", &y)]).expect("builds").text;
        let word = |line: &str| Some(line.split_once("stablehlo.")?.1.split([' ', '(']).next()?.to_string());
        let named = text.lines().filter_map(|line| Some((word(line)?, line.contains("bf16"))));
        named.map(|(word, narrow)| if narrow { format!("{word} bf16") } else { word }).collect()
    }

    /// Only operands and results are bf16; the arithmetic in between is f32.
    #[test]
    fn modulation_rounds_once() {
        let argument = |b: &Builder, name: &str, dtype| b.argument(name, Type::new(dtype, [2, 3]));
        let modulated = operations(|b| {
            let [x, scale, shift] = ["x", "scale", "shift"].map(|name| argument(b, name, DType::F32));
            modulate(&x, &scale, &shift, DType::BF16)
        });
        let arithmetic: Vec<&str> = modulated.iter().map(String::as_str).filter(|o| *o != "constant").collect();
        assert_eq!(arithmetic, ["broadcast_in_dim", "add", "multiply", "add", "convert bf16"]);
        let gated = operations(|b| {
            let [x, y] = ["x", "y"].map(|name| argument(b, name, DType::BF16));
            gated_add(&x, &argument(b, "gate", DType::F32), &y)
        });
        let mut narrow: Vec<&str> = gated.iter().map(String::as_str).filter(|o| o.ends_with("bf16")).collect();
        narrow.dedup();
        assert_eq!(narrow, ["convert bf16"], "{gated:?}");
        assert_eq!(gated.iter().filter(|o| *o == "convert bf16").count(), 3, "two operands and the result: {gated:?}");
    }
}
