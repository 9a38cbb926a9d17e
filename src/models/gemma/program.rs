//! The program of a text encoder: prompts to hidden states, projected as they appear or stacked.

use super::{COMPONENT, ROOT};
use crate::hlo::{DType, Result, Type, Value};
use crate::models::Network;
use crate::models::connectors::{self, ConnectorsConfig};
use crate::nn::{Axis, Build, Init, Params};

/// Takes a hidden state, its index first, and the values that are carried along; gives the new ones.
pub(crate) type Visit<'a> = &'a dyn Fn(&Value, &Value, &[Value]) -> Vec<Value>;

/// Sizes of a text stack.
pub(crate) struct Stack {
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) layers: usize,
}

impl Stack {
    /// Hidden states: the embeddings and every layer's.
    fn hidden_states(&self) -> usize {
        self.layers + 1
    }

    /// The program, see `TextEncoder::program`. `run(p, mask, state, visit)` runs the layers: `state` is the stream
    /// followed by what is carried along, and each layer has its input visited before. `norm` is the one behind the last.
    ///
    /// # Errors
    /// The first mistake made while building, with op, scope and shapes.
    pub(crate) fn program(
        &self,
        connectors: Option<&ConnectorsConfig>,
        [batch, tokens]: [usize; 2],
        build: &Build,
        run: impl Fn(&Params, &Value, &[Value], Visit) -> Vec<Value>,
        norm: impl Fn(&Params, &Value) -> Value,
    ) -> Result<Network> {
        let p = Params::new("text_encoder", COMPONENT, build);
        let ty = Type::new(DType::I32, vec![batch, tokens]);
        let axes = [Axis::CfgBatch, Axis::TextSequence];
        let ids = p.input("input_ids", ty.clone(), &axes);
        // Every device needs to know which tokens are none.
        let mask = p.filled_input("attention_mask", ids.ty().clone(), &ty.dims, &[Axis::CfgBatch, Axis::Replicated]);
        let encode = |carried: &[Value], visit: Visit| {
            let h = self.embed(&p, &ids);
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

    /// The embeddings of token ids, scaled: `[b, t, hidden]`.
    fn embed(&self, p: &Params, ids: &Value) -> Value {
        let init = Init::normal((self.hidden_size as f32).sqrt().recip());
        let (shape, axes) = ([self.vocab_size, self.hidden_size], [Axis::Vocab, Axis::Embed]);
        let h = p.pp(ROOT).pp("embed_tokens").lookup("weight", &shape, &axes, init, ids);
        let h = p.place("embeddings", &h, &[Axis::CfgBatch, Axis::TextSequence, Axis::Replicated]);
        // The factor is rounded to the weights' type before it multiplies, as the reference keeps it.
        h * (self.hidden_size as f64).sqrt()
    }
}
