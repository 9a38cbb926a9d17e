//! The text encoder program: computes the hidden states of prompts, and either projects each of them or stacks all of
//! them.

use super::{COMPONENT, ROOT};
use crate::Network;
use crate::connectors::{self, ConnectorsConfig};
use ltx2_nn::{Axis, Build, Init, Params};
use ltx2_stablehlo::{DType, Result, Type, Value};

/// Callback for each hidden state. It receives the index of the hidden state, the hidden state and the loop-carried
/// values, and returns the updated loop-carried values.
pub(crate) type LayerVisitor<'a> = &'a dyn Fn(&Value, &Value, &[Value]) -> Vec<Value>;

/// Sizes of the Gemma language model.
pub(crate) struct Stack {
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) layers: usize,
}

impl Stack {
    /// Returns the number of hidden states: the embeddings and the output of every layer.
    fn hidden_states(&self) -> usize {
        self.layers + 1
    }

    /// Builds the program that `TextEncoder::program` describes. `run(p, mask, state, visit)` runs the layers: `state`
    /// is the residual stream followed by the loop-carried values, and every layer calls `visit` on its input. `norm`
    /// is applied after the last layer.
    pub(crate) fn program(
        &self,
        connectors: Option<&ConnectorsConfig>,
        [batch, tokens]: [usize; 2],
        build: &Build,
        run: impl Fn(&Params, &Value, &[Value], LayerVisitor) -> Vec<Value>,
        norm: impl Fn(&Params, &Value) -> Value,
    ) -> Result<Network> {
        let p = Params::new("text_encoder", COMPONENT, build);
        let ty = Type::new(DType::I32, vec![batch, tokens]);
        let axes = [Axis::CfgBatch, Axis::TextSequence];
        let ids = p.input("input_ids", ty.clone(), &axes);
        // Not sharded along the tokens: every device needs the full padding mask.
        let mask = p.filled_input("attention_mask", ids.ty().clone(), &ty.dims, &[Axis::CfgBatch, Axis::Replicated]);
        let encode = |carried: &[Value], visit: LayerVisitor| {
            let h = self.embed(&p, &ids, Axis::TextSequence);
            let done = run(&p, &mask, &[&[h], carried].concat(), visit);
            let last = norm(&p.pp(ROOT).pp("norm"), &done[0]);
            visit(&p.builder().scalar(self.layers as f64, DType::I32), &last, &done[1..])
        };
        let embeds = match connectors {
            Some(connectors) => {
                let states = self.hidden_states();
                let projection = connectors::Projection::new(&p, connectors, &mask, states, self.hidden_size);
                let sums = projection.start(ids.dim(0), ids.dim(1));
                projection.finish(&encode(&sums, &|i, h, sums| projection.add(sums, i, h)))
            }
            None => {
                let [rows, tokens] = [ids.dim(0), ids.dim(1)];
                let stack = Type::new(build.dtype, vec![self.hidden_states(), rows, tokens, self.hidden_size]);
                let empty = p.builder().full(0.0, stack);
                let stack = encode(&[empty], &|i, h, stack| vec![stack[0].dynamic_update(0, i, &h.unsqueeze(0))]);
                let width = self.hidden_size * self.hidden_states();
                stack[0].transpose(&[1, 2, 3, 0]).reshape(vec![rows, tokens, width])
            }
        };
        let content = [batch, tokens, embeds.dim(-1)];
        let axes = [Axis::CfgBatch, Axis::TextSequence, Axis::Replicated];
        Network::finish(&p, vec![p.output("prompt_embeds", &embeds.to(DType::F32), &axes, &content)])
    }

    /// Looks up the scaled token embeddings: `[b, t, hidden]`. `tokens`: logical axis of the tokens.
    pub(super) fn embed(&self, p: &Params, ids: &Value, tokens: Axis) -> Value {
        let init = Init::normal((self.hidden_size as f32).sqrt().recip());
        let (shape, axes) = ([self.vocab_size, self.hidden_size], [Axis::Vocab, Axis::Embed]);
        let h = p.pp(ROOT).pp("embed_tokens").lookup("weight", &shape, &axes, init, ids);
        let h = p.place("embeddings", &h, &[Axis::CfgBatch, tokens, Axis::Replicated]);
        // The scale is rounded to the weights' element type before the multiplication, as in the reference.
        h * (self.hidden_size as f64).sqrt()
    }
}
