"""Times of diffusers' LTX-2 components at full size with random bf16 weights on one GPU, as JSON on stdout.

Called by bench.sh beside `ltx2 bench`: the same sizes, prompts as two rows of one batch, medians of synchronised runs.
"""

import argparse
import gc
import json
import statistics
import sys
import time

import torch
from diffusers import AutoencoderKLLTX2Video
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel
from transformers import Gemma3TextConfig, Gemma3TextModel

BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def on_device(build):
    """A network with normal weights, made on the device."""
    with torch.device("meta"):
        network = build()
    network = network.to(torch.bfloat16).to_empty(device="cuda").eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(0, 0.02)
        for buffer in network.buffers():
            if buffer.is_floating_point():
                buffer.normal_(0, 1).abs_()
    return network


def median(name, call, runs):
    """Seconds of a call after one to warm up; the warm-up holds compiling."""
    with torch.no_grad():
        call()
        torch.cuda.synchronize()
        seconds = []
        for _ in range(runs):
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    print(f"{name}: {statistics.median(seconds):.4f} s", file=sys.stderr, flush=True)
    return statistics.median(seconds)


def release():
    gc.collect()
    torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--height", type=int, default=512)
    parser.add_argument("--num-frames", type=int, default=121)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--only-transformer", action="store_true")
    a = parser.parse_args()
    torch.manual_seed(0)
    frames, height, width = (a.num_frames - 1) // 8 + 1, a.height // 32, a.width // 32
    sound = round(a.num_frames / 24 * 25)
    result = {}

    if not a.only_transformer:
        config = Gemma3TextConfig(
            hidden_size=3840, intermediate_size=15360, num_hidden_layers=48, num_attention_heads=16,
            num_key_value_heads=8, head_dim=256, sliding_window=1024, query_pre_attn_scalar=256, vocab_size=262208,
        )
        encoder = on_device(lambda: Gemma3TextModel(config))
        ids = torch.randint(0, 262144, (2, 1024), device="cuda")
        mask = torch.ones_like(ids)
        call = lambda: encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        result["text_encoder"] = median("text_encoder", call, a.runs)
        del encoder, call
        release()
        vae = on_device(AutoencoderKLLTX2Video)
        latents = torch.randn(1, vae.config.latent_channels, frames, height, width, **BF16)
        result["video_decoder"] = median("video_decoder", lambda: vae.decode(latents, None, return_dict=False), a.runs)
        del vae, latents
        release()

    network = on_device(lambda: LTX2VideoTransformer3DModel(rope_type="split"))
    inputs = {
        "hidden_states": torch.randn(2, frames * height * width, 128, **BF16),
        "audio_hidden_states": torch.randn(2, sound, 128, **BF16),
        "encoder_hidden_states": torch.randn(2, 1024, 3840, **BF16),
        "audio_encoder_hidden_states": torch.randn(2, 1024, 3840, **BF16),
        "timestep": torch.full((2,), 500.0, device="cuda"),
        "num_frames": frames, "height": height, "width": width, "fps": 24.0, "audio_num_frames": sound,
        "return_dict": False,
    }
    result["denoise_eager"] = median("denoise_eager", lambda: network(**inputs), a.runs)
    network.compile_repeated_blocks(fullgraph=False)
    result["denoise_compiled"] = median("denoise_compiled", lambda: network(**inputs), a.runs)
    print(json.dumps({"torch": torch.__version__, "seconds": result}))


if __name__ == "__main__":
    main()
