"""Times diffusers' LTX-2 components at the published size with random bf16 weights on one GPU; prints JSON.

Uses the shapes of `ltx2 bench`: two prompts in one batch, or one prompt for the distilled LTX-2.5. Reports medians of
synchronised runs. With `--offload`, times the transformer with weights in host memory: `block_level` copies whole blocks,
`leaf_level` single layers, both on a stream of their own."""

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import Gemma3TextConfig, Gemma3TextModel

BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def preset(name):
    return json.loads((Path(__file__).resolve().parents[2] / f"crates/models/src/presets/{name}.json").read_text())


def on_device(build):
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
    """Returns the median seconds of a call, after one warm-up call that compiles."""
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


def text_encoder(runs):
    config = Gemma3TextConfig(**preset("ltx2")["text_encoder"]["text_config"])
    encoder, ids = on_device(lambda: Gemma3TextModel(config)), torch.randint(0, 262144, (2, 1024), device="cuda")
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "output_hidden_states": True}
    return median("text_encoder", lambda: encoder(**inputs), runs)


def video_decoder(frames, height, width, runs):
    from diffusers import AutoencoderKLLTX2Video

    vae = on_device(AutoencoderKLLTX2Video)
    latents = torch.randn(1, vae.config.latent_channels, frames, height, width, **BF16)
    return median("video_decoder", lambda: vae.decode(latents, None, return_dict=False), runs)


def transformer(config):
    # enhance_peer.py imports this file and does not need diffusers.
    from diffusers import LTX2VideoTransformer3DModel

    return on_device(lambda: LTX2VideoTransformer3DModel.from_config(config))


def offloaded(kind):
    network = transformer({"rope_type": "split"}).to("cpu")
    release()
    blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    devices = dict(onload_device=torch.device("cuda"), offload_device=torch.device("cpu"))
    network.enable_group_offload(**devices, offload_type=kind, use_stream=True, **blocks)
    return network


def forward(network, name, distilled, frames, height, width, sound, runs):
    """Times one forward pass of a transformer."""
    rows, tokens = 1 if distilled else 2, frames * height * width
    widths = (network.config.cross_attention_dim, network.config.audio_cross_attention_dim) if distilled else (3840, 3840)
    level = lambda *shape: torch.full(shape, 500.0, device="cuda")
    inputs = dict(
        hidden_states=torch.randn(rows, tokens, 128, **BF16), audio_hidden_states=torch.randn(rows, sound, 128, **BF16),
        encoder_hidden_states=torch.randn(rows, 1024, widths[0], **BF16), timestep=level(rows), num_frames=frames,
        audio_encoder_hidden_states=torch.randn(rows, 1024, widths[1], **BF16), height=height, width=width, fps=24.0,
        audio_num_frames=sound, return_dict=False,
    )
    if distilled:
        inputs |= dict(timestep=level(1, tokens), audio_timestep=level(1, sound), sigma=level(1), use_cross_timestep=True)
    return median(f"denoise_{name}", lambda: network(**inputs), runs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for size, default in ("width", 768), ("height", 512), ("num-frames", 121):
        parser.add_argument(f"--{size}", type=int, default=default)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--distilled-2-5", action="store_true", help="time the transformer of LTX-2.5, without guidance")
    parser.add_argument("--offload", nargs="+", default=[], metavar="KIND", help="block_level, leaf_level")
    a = parser.parse_args()
    torch.manual_seed(0)
    frames, height, width = (a.num_frames - 1) // 8 + 1, a.height // 32, a.width // 32
    sound, seconds = round(a.num_frames / 24 * 25), {}
    for kind in a.offload:
        network = offloaded(kind)
        torch.cuda.reset_peak_memory_stats()
        spent = forward(network, "eager", False, frames, height, width, sound, a.runs)
        peak = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        print(json.dumps({"torch": torch.__version__, "offload": kind, "seconds": spent, "peak_gib": peak}), flush=True)
        del network
        release()
    if a.offload:
        return
    if not a.distilled_2_5:
        seconds["text_encoder"] = text_encoder(a.runs)
        release()
        seconds["video_decoder"] = video_decoder(frames, height, width, a.runs)
        release()
    config = preset("ltx2_5")["transformer"] if a.distilled_2_5 else {"rope_type": "split"}
    network = transformer(config)
    size = a.distilled_2_5, frames, height, width, sound, a.runs
    seconds["denoise_eager"] = forward(network, "eager", *size)
    network.compile_repeated_blocks(fullgraph=False)
    seconds["denoise_compiled"] = forward(network, "compiled", *size)
    print(json.dumps({"torch": torch.__version__, "seconds": seconds}))


if __name__ == "__main__":
    main()
