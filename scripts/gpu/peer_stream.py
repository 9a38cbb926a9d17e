"""Times diffusers' LTX-2 transformer with weights offloaded to host memory, at 768x512x121 with two prompts; prints JSON.

`block_level` copies whole blocks, `leaf_level` single layers, both on a stream of their own."""

import argparse
import json

import peer
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel


def offloaded(kind):
    network = peer.on_device(lambda: LTX2VideoTransformer3DModel.from_config({"rope_type": "split"})).to("cpu")
    peer.release()
    blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    network.enable_group_offload(
        onload_device=torch.device("cuda"), offload_device=torch.device("cpu"), offload_type=kind, use_stream=True, **blocks
    )
    return network


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--runs", type=int, default=3)
parser.add_argument("kinds", nargs="*", default=["block_level", "leaf_level"])
a = parser.parse_args()
for kind in a.kinds:
    network = offloaded(kind)
    torch.cuda.reset_peak_memory_stats()
    seconds = peer.forward(network, "eager", distilled=False, frames=16, height=16, width=24, sound=126, runs=a.runs)
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps({"torch": torch.__version__, "offload": kind, "seconds": seconds, "peak_gib": round(peak, 2)}), flush=True)
    del network
    peer.release()
