#!/usr/bin/env bash
# diffusers 0.42.1 (torch 2.15.0): LTX-2's weight of the attention to a reference video, documented as a strength from 0 to 1,
# is a switch. The transformer adds -10000 (1 - weight) to the scores, so in bf16 0.99 gives the same bits as 0, and 0.999 the
# same bits as 1. Lightricks' own ltx-core 1.0.0 adds log(weight): the softmax's terms of the reference are multiplied by weight.
# Seen on 2026-11-29, with a model of one block and half of the tokens as a reference:
#   ltx-core: 0.5 leaves 50.0%; 0.99 leaves 99.0%; 0.999 leaves 99.9%
#   diffusers: 0.5 equals 0; 0.99 equals 0; 0.999 equals 1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'diffusers==0.42.1' 'torch==2.15.0' 'numpy==2.4.6' 'einops==0.8.2'
"$folder/venv/bin/pip" install --quiet --no-deps 'ltx-core==1.0.0'
seen=$("$folder/venv/bin/python" - 2> "$folder/log" <<'PYTHON'
import torch
from diffusers import LTX2VideoTransformer3DModel
from ltx_core.model.transformer.transformer_args import TransformerArgsPreprocessor

WEIGHTS = (0.5, 0.99, 0.999)


def factor(weight):
    mask = torch.full((1, 1, 1), weight)
    return TransformerArgsPreprocessor._prepare_self_attention_mask(None, mask, torch.float32).exp().item()


print("ltx-core:", "; ".join(f"{weight} leaves {factor(weight):.1%}" for weight in WEIGHTS))

torch.manual_seed(0)
sizes = dict(in_channels=4, out_channels=4, num_layers=1, caption_channels=8)
video = dict(num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32)
audio = dict(num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16, in_channels=4, out_channels=4)
model = LTX2VideoTransformer3DModel(**sizes, **video, **{f"audio_{key}": value for key, value in audio.items()})
model = model.eval().to(torch.bfloat16)
tokens, own = 8, 4
draw = lambda *shape: torch.randn(shape, dtype=torch.bfloat16)
streams = dict(
    hidden_states=draw(1, tokens, 4), encoder_hidden_states=draw(1, 2, 8), timestep=torch.full((1, tokens), 500.0),
    audio_hidden_states=draw(1, 3, 4), audio_encoder_hidden_states=draw(1, 2, 8), audio_timestep=torch.full((1,), 500.0),
    num_frames=2, height=2, width=2, audio_num_frames=3,
)


@torch.no_grad()
def prediction(weight):
    mask = torch.ones(1, tokens, tokens)
    mask[:, :own, own:] = mask[:, own:, :own] = weight
    return model(**streams, video_self_attention_mask=mask)[0][:, :own]


off, on = prediction(0.0), prediction(1.0)
assert not torch.equal(off, on)


def same(weight):
    result = prediction(weight)
    return "0" if torch.equal(result, off) else "1" if torch.equal(result, on) else "neither"


print("diffusers:", "; ".join(f"{w} equals {same(w)}" for w in WEIGHTS))
PYTHON
) || { cat "$folder/log"; exit 1; }
echo "$seen"
[ "$seen" = "ltx-core: 0.5 leaves 50.0%; 0.99 leaves 99.0%; 0.999 leaves 99.9%
diffusers: 0.5 equals 0; 0.99 equals 0; 0.999 equals 1" ]
