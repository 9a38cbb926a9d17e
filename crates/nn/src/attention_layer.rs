//! The attention layer of LTX-2: RMS norm of queries and keys over all heads jointly, RoPE with separate tables for
//! queries and keys, and an optional gate per head. The transformer and the text connectors use this layer.

use super::attention::{Attention, Heads};
use super::context_parallel::ContextParallelKind;
use super::layout::Axis;
use super::linear::{affine_with_lora, project};
use super::lora::{LoraMatrices, full_names, refs};
use super::norm::rms_norm;
use super::param::Init;
use super::params::Params;
use super::rope::{Pairing, rotate};
use ltx2_stablehlo::{DType, Value};

/// Epsilon of the query and key norms; not configurable.
const QK_NORM_EPS: f64 = 1e-6;

/// Configuration of an attention layer.
#[derive(Clone, Copy, Debug)]
pub struct AttentionLayer {
    /// Attention heads; queries, keys and values have the same number and width.
    pub heads: Heads,
    /// Whether the query, key and value projections have biases.
    pub bias: bool,
    /// Whether the output projection has a bias.
    pub out_bias: bool,
    /// Whether the result of each head is multiplied by a gate: `2·sigmoid` of a projection of the layer's query-side
    /// input.
    pub gated: bool,
    /// Pairing of the features that RoPE rotates together.
    pub pairing: Pairing,
    /// Sequence axes of queries and keys.
    pub sequence: [Axis; 2],
}

/// Cosines and sines of RoPE, as values of a program.
#[derive(Clone)]
pub struct Rope {
    /// Cosines `[b or 1, tokens, heads, head_dim / 2]`, f32.
    pub cos: Value,
    /// Sines, in the shape of `cos`.
    pub sin: Value,
}

impl AttentionLayer {
    /// Returns queries, keys and values of self-attention, each `[b, n, heads, dim]`, from `x [b, n, embed]`. Queries
    /// and keys are normalized and rotated.
    pub fn qkv(&self, p: &Params, x: &Value, rope: Option<&Rope>) -> [Value; 3] {
        if self.gathers_keys(p) && !self.rotates_gathered(p) {
            // LoRAs multiply the input before its rotation.
            let (p, x) = &if p.lora_rank().is_some() { (p.clone(), x.clone()) } else { p.rotated(x) };
            // Compute keys and values first, so that they are gathered while the queries are computed.
            let [k, v] = self.keys_values(p, x, rope);
            // Without the barriers, the compiler would merge the projections into one dot, and the rotations into one.
            let rope = rope.map(|r| Rope { cos: r.cos.optimization_barrier(), sin: r.sin.optimization_barrier() });
            return [self.queries(p, &x.optimization_barrier(), rope.as_ref()), k, v];
        }
        let parts = self.fused(p, &["to_q", "to_k", "to_v"], x, self.sequence[0]);
        let [q, k, v] = [0, 1, 2].map(|i| parts.at(2, i));
        let q = self.normed(p, "norm_q", &q, rope);
        if !self.rotates_gathered(p) {
            return [q, self.normed(p, "norm_k", &k, rope), v];
        }
        // Gather the keys before they are rotated, and also their RoPE tables and the values.
        let everywhere = [Axis::CfgBatch, Axis::Replicated, Axis::Heads, Axis::HeadDim];
        let rope = rope.map(|r| {
            let table = |name: &str, x: &Value| {
                p.place(name, x, &[Axis::Replicated, Axis::Replicated, Axis::Heads, Axis::Replicated])
            };
            Rope { cos: table("keys_cos", &r.cos), sin: table("keys_sin", &r.sin) }
        });
        let own = [Axis::CfgBatch, self.sequence[1], Axis::Heads, Axis::HeadDim];
        let k = p.place("keys", &self.normed(p, "norm_k", &k, None), &own);
        let k = rope.map_or_else(|| k.clone(), |r| self.rotated(p, &k, &r));
        [q, k, p.place("values", &v, &everywhere)]
    }

    /// Returns whether the keys of this layer are sharded and each device gathers all of them (`gather_kv`).
    fn gathers_keys(&self, p: &Params) -> bool {
        let split = p.layout().parts(&p.activation("attention"), self.sequence[1]) > 1;
        split && p.layout().context_parallel.kind == ContextParallelKind::GatherKv
    }

    /// Returns whether keys are gathered before RoPE rotates them. A layout override for the activation `keys` selects
    /// this.
    fn rotates_gathered(&self, p: &Params) -> bool {
        self.gathers_keys(p) && p.layout().parts(&p.activation("keys"), self.sequence[1]) == 1
    }

    /// Returns queries `[b, n, heads, dim]`, normalized and rotated.
    pub fn queries(&self, p: &Params, x: &Value, rope: Option<&Rope>) -> Value {
        let dims = [self.heads.count, self.heads.dim];
        let q = project(&p.pp("to_q"), x, &dims, self.bias, &[Axis::Heads, Axis::HeadDim], Axis::Embed);
        let q = p.place("q", &q, &[Axis::CfgBatch, self.sequence[0], Axis::Heads, Axis::HeadDim]);
        self.normed(p, "norm_q", &q, rope)
    }

    /// Returns keys (normalized and rotated) and values of a context `[b, m, width]`.
    pub fn keys_values(&self, p: &Params, context: &Value, rope: Option<&Rope>) -> [Value; 2] {
        let parts = self.fused(p, &["to_k", "to_v"], context, self.sequence[1]);
        [self.normed(p, "norm_k", &parts.at(2, 0), rope), parts.at(2, 1)]
    }

    /// Computes attention, gate and output projection from queries, keys and values `[b, n, heads, dim]`. Returns `[b,
    /// n, out]`. `gate_input` is the query-side input of the layer. `stg_mask` (`[b, 1, 1, 1]`, f32; self-attention
    /// only) implements spatiotemporal guidance: batch entries with 1 attend normally; in those with 0, the attention
    /// result of each token is the token's own value.
    pub fn attend(
        &self,
        p: &Params,
        qkv: [&Value; 3],
        gate_input: &Value,
        out: usize,
        mask: Option<&Value>,
        stg_mask: Option<&Value>,
    ) -> Value {
        let [q, k, v] = qkv;
        let scale = (self.heads.dim as f64).sqrt().recip();
        // Keys that are gathered before their rotation are replicated.
        let sequence = match self.sequence {
            [own, other] if own == other && self.rotates_gathered(p) => [own, Axis::Replicated],
            both => both,
        };
        let mut o = Attention { q, k, v, bias: mask, scale, sequence }.run(p);
        if let Some(mask) = stg_mask {
            let own = v.to(mask.dtype());
            o = (&own + (o.to(mask.dtype()) - &own) * mask).to(v.dtype());
        }
        if self.gated {
            let gate = p.pp("to_gate_logits").plain();
            let logits = project(&gate, gate_input, &[self.heads.count], true, &[Axis::Heads], Axis::Embed);
            let logits = p.place("gate", &logits, &[Axis::CfgBatch, self.sequence[0], Axis::Heads]);
            let gate = logits.to(DType::F32).logistic() * 2.0;
            o = (o.to(gate.dtype()) * gate.unsqueeze(3)).to(o.dtype());
        }
        let (rows, tokens) = (o.dim(0), o.dim(1));
        let joined = o.reshape(vec![rows, tokens, self.heads.width()]);
        // The input axis of the output projection is the head axis.
        let joined = p.place("joined", &joined, &[Axis::CfgBatch, self.sequence[0], Axis::Heads]);
        let y = project(&p.pp("to_out.0"), &joined, &[out], self.out_bias, &[Axis::Embed], Axis::Heads);
        p.place("out", &y, &[Axis::CfgBatch, self.sequence[0], Axis::Replicated])
    }

    /// Computes several projections of one input with a single dot. Returns `[b, n, projections, heads, dim]`.
    fn fused(&self, p: &Params, names: &[&str], x: &Value, sequence: Axis) -> Value {
        let _scope = p.builder().scope(names.join("+"));
        let (count, dim, inner) = (self.heads.count, self.heads.dim, x.dim(-1));
        let (weights, biases) = (full_names(names, "weight"), full_names(names, "bias"));
        let axes = [Axis::Heads, Axis::HeadDim, Axis::Embed];
        let weight = p.weight(&refs(&weights), &[count, dim, inner], &axes);
        let bias = || p.fused(&refs(&biases), &[count, dim], &[count * dim], &axes[..2], Init::normal(0.02));
        let out_axes = [Axis::Replicated, Axis::Heads, Axis::HeadDim];
        let bias = self.bias.then(bias);
        let lora = LoraMatrices::new(p, names, inner, &[count, dim], &axes[..2], axes[2]);
        let y = affine_with_lora(p, x, &weight, bias.as_ref(), lora.as_ref(), &out_axes);
        p.place("qkv", &y, &[Axis::CfgBatch, sequence, Axis::Replicated, Axis::Heads, Axis::HeadDim])
    }

    fn normed(&self, p: &Params, name: &str, x: &Value, rope: Option<&Rope>) -> Value {
        let _scope = p.builder().scope(name.to_string());
        let dims = [self.heads.count, self.heads.dim];
        let axes = [Axis::Heads, Axis::HeadDim];
        let weight = p.pp(name).get_as("weight", &[self.heads.width()], &dims, &axes, Init { mean: 1.0, std: 0.02 });
        let y = rms_norm(x, Some(&weight), 2, QK_NORM_EPS);
        match rope {
            Some(r) => self.rotated(p, &y, r),
            None => y,
        }
    }

    fn rotated(&self, p: &Params, y: &Value, r: &Rope) -> Value {
        // The table may have a different number of heads than the layer; features are paired within the heads of the
        // table.
        let heads = r.cos.dim(2);
        let split = vec![y.dim(0), y.dim(1), heads, self.heads.width() / heads];
        rotate(p, &y.reshape(split), &r.cos, &r.sin, self.pairing, p.numerics()).reshape(y.dims().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Build;
    use ltx2_stablehlo::Type;

    #[test]
    fn self_attention_program_matches_snapshot() {
        let p = Params::new("attention", "transformer", &Build::new(DType::BF16));
        let heads = Heads { count: 2, dim: 4 };
        let layer = AttentionLayer {
            heads,
            bias: true,
            out_bias: true,
            gated: false,
            pairing: Pairing::Split,
            sequence: [Axis::VideoSequence; 2],
        };
        let x = p.builder().argument("x", Type::new(DType::BF16, [1, 3, 8]));
        let table = |name: &str| p.builder().argument(name, Type::new(DType::F32, [1, 3, 2, 2]));
        let rope = Rope { cos: table("cos"), sin: table("sin") };
        let at = p.pp("attn1");
        let [q, k, v] = layer.qkv(&at, &x, Some(&rope));
        let y = layer.attend(&at, [&q, &k, &v], &x, 8, None, None);
        let results = vec![p.output("y", &y, &[Axis::Replicated; 3], y.dims())];
        let text = p.builder().finish_with(results).expect("builds").text;
        // Locations are removed: they would make the lines long, and other tests cover them.
        let bare: Vec<&str> = text.lines().map(|l| l.split(" loc(").next().unwrap_or(l)).collect();
        insta::assert_snapshot!(bare.join("\n"));
    }
}
