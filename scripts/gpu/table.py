"""Medians of `ltx2 bench` beside those of peer_diffusers.py, and their ratio."""

import json
import sys

PAIRS = [
    ("one denoising step", "denoise_loop", "denoise_compiled"),
    ("one denoising step (eager)", "denoise_loop", "denoise_eager"),
    ("text encoder, both prompts", "text_encoder", "text_encoder"),
    ("video decoder", "video_decoder", "video_decoder"),
    ("connectors", "connectors", None),
    ("prepare", "prepare", None),
    ("audio decoder", "audio_decoder", None),
    ("vocoder", "vocoder", None),
    ("prompt to frames and samples", "end_to_end", None),
]


def main():
    ours, theirs = (json.load(open(path)) for path in sys.argv[1:3])
    print("| what | ltx2, s | diffusers, s | diffusers / ltx2 |")
    print("|---|---|---|---|")
    for what, name, peer in PAIRS:
        if name not in ours["programs"]:
            continue
        seconds = ours["programs"][name]["median"]
        other = theirs["seconds"].get(peer)
        print(f"| {what} | {seconds:.4f} | " + (f"{other:.4f} | {other / seconds:.2f} |" if other else "| |"))
    print(f"\nmatmul {ours['matmul']['flops_per_second'] / 1e12:.0f} TFLOP/s; compiled in {ours['compile_seconds']:.1f} s; "
          f"peak {ours['peak_memory_bytes'] / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
