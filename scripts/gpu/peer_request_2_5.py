#!/usr/bin/env python3
"""Seconds of a whole distilled LTX-2.5 request by diffusers on one GPU: peer_request_2_5.py MODEL [SIZE]; 768x512x121 by default.

MODEL is a folder of full_model.py. Eight steps at half size, the upsampler, three at full size; no step draws noise anew, which takes
diffusers more time; the transformer's blocks are compiled. Video by the convolutional decoder, as the other has no kernel at this size without NATTEN.
From prompt to frames and samples on the host; the median of three behind one that compiles.
"""

import sys
from pathlib import Path

import torch
from diffusers import LTX2LatentUpsamplePipeline, LTX2Pipeline
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "oracle"))
from cases_pipeline import verbatim_scheduler  # noqa: E402
from peer_diffusers import median  # noqa: E402

FIRST = [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875]
SECOND = [0.909375, 0.725, 0.421875]
PROMPT = "A lighthouse over a quiet sea at dawn, gulls calling"


def main():
    folder, text = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) == 3 else "768x512x121"
    width, height, frames = map(int, text.split("x"))
    pipeline = LTX2Pipeline.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda")
    pipeline.set_progress_bar_config(disable=True)
    # Both passes' shapes, with and without what the second is given.
    torch._dynamo.config.recompile_limit = 64
    pipeline.transformer.compile_repeated_blocks(fullgraph=False)
    network = LTX2LatentUpsamplerModel.from_pretrained(folder / "latent_upsampler", dtype=torch.bfloat16).to("cuda")
    upsample = LTX2LatentUpsamplePipeline(pipeline.vae, network)
    upsample.set_progress_bar_config(disable=True)
    pipeline.scheduler = verbatim_scheduler()
    same = dict(prompt=PROMPT, num_frames=frames, frame_rate=24.0, guidance_scale=1.0, return_dict=False)

    def request():
        source = torch.Generator("cpu").manual_seed(10)
        half = dict(width=width // 2, height=height // 2)
        video, audio = pipeline(generator=source, output_type="latent", sigmas=FIRST, **half, **same)
        larger = upsample(latents=video, output_type="latent", return_dict=False)[0]
        made = pipeline(
            generator=source, output_type="pt", width=width, height=height, sigmas=SECOND, latents=larger, audio_latents=audio,
            noise_scale=SECOND[0], **same,
        )
        return [x.cpu() for x in made]

    median(f"request {text}", request, 3)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
