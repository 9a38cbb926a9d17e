"""Times of diffusers' LTX-2.5 transformer and diffusion decoder at full size with random bf16 weights on one GPU, as JSON on stdout.

Called by ltx2_5.sh beside `ltx2 bench`: one row, as a distilled model has. The decoder attends by torch's flex attention, compiled:
NATTEN's kernels are fetched from the network at run time, where there is one. SIZE is WIDTHxHEIGHTxFRAMES; the decoder is tried at
each, in the order given, until one does not fit. What diffusers leaves to its caller is done: the attention and the making of its masks
are compiled, and masks are kept, so that a run that is timed makes none.
"""

import argparse
import functools
import json
import sys
from pathlib import Path

import torch
from diffusers import LTX2VideoDiffusionDecoderModel
from diffusers.models.autoencoders import ltx2_diffusion_decoder
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel
from torch.nn.attention import flex_attention

from peer_diffusers import BF16, median, on_device, release

PRESET = Path(__file__).resolve().parents[2] / "src/models/presets/ltx2_5.json"


def size(text):
    """Latent frames, rows and columns, and pixels' frames."""
    width, height, frames = map(int, text.split("x"))
    return (frames - 1) // 8 + 1, height // 32, width // 32, frames


def transformer(text, runs):
    """One step, its blocks compiled."""
    frames, height, width, pixels = size(text)
    sound = round(pixels / 24 * 25)
    config = json.loads(PRESET.read_text())["transformer"]
    network = on_device(lambda: LTX2VideoTransformer3DModel.from_config(config))
    tokens = frames * height * width
    inputs = {
        "hidden_states": torch.randn(1, tokens, 128, **BF16), "audio_hidden_states": torch.randn(1, sound, 128, **BF16),
        "encoder_hidden_states": torch.randn(1, 1024, 4096, **BF16),
        "audio_encoder_hidden_states": torch.randn(1, 1024, 2048, **BF16),
        "timestep": torch.full((1, tokens), 725.0, device="cuda"), "audio_timestep": torch.full((1, sound), 725.0, device="cuda"),
        "sigma": torch.full((1,), 725.0, device="cuda"), "num_frames": frames, "height": height, "width": width, "fps": 24.0,
        "audio_num_frames": sound, "use_cross_timestep": True, "return_dict": False,
    }
    network.compile_repeated_blocks(fullgraph=False)
    return median(f"transformer {text}", lambda: network(**inputs), runs)


def decoder(sizes, runs):
    """The diffusion decoder at every size that fits, flex attention compiled by its own backend."""
    # A program for each shape and type; beyond the limit torch would attend without a kernel, all scores in memory.
    torch._dynamo.config.recompile_limit = 64
    for name in ("create_block_mask", "flex_attention"):
        setattr(flex_attention, name, torch.compile(getattr(flex_attention, name), dynamic=False))
    ltx2_diffusion_decoder._neighborhood_block_mask = functools.cache(ltx2_diffusion_decoder._neighborhood_block_mask)
    network = on_device(LTX2VideoDiffusionDecoderModel)
    seconds = {}
    for text in sizes:
        frames, height, width, _ = size(text)
        latents = torch.randn(1, 128, frames, height, width, **BF16)
        try:
            seconds[text] = median(f"decoder {text}", lambda: network.decode(latents, return_dict=False), runs)
        except (torch.OutOfMemoryError, RuntimeError) as e:
            print(f"decoder {text}: {str(e).splitlines()[0][:200]}", file=sys.stderr, flush=True)
            break
        finally:
            ltx2_diffusion_decoder._neighborhood_block_mask.cache_clear()
            release()
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformer", metavar="SIZE", nargs="*", default=["768x512x121"])
    parser.add_argument("--decoder", metavar="SIZE", nargs="*", default=["256x256x17", "512x512x25", "768x512x49"])
    parser.add_argument("--runs", type=int, default=3)
    a = parser.parse_args()
    torch.manual_seed(0)
    result = {"decoder": decoder(a.decoder, a.runs), "transformer": {}}
    release()
    for text in a.transformer:
        result["transformer"][text] = transformer(text, a.runs)
        release()
    print(json.dumps({"torch": torch.__version__, "seconds": result}))


if __name__ == "__main__":
    main()
