"""Compares held-out clips by ltx2 and by diffusers from the same weights and noise.

    python parity.py assets/nano target/release/ltx2 --count 24 [--dtype bf16]

`--reference FILE` writes diffusers' frames and samples of the first prompt for tests/cli/nano_quality.rs."""

import argparse
import json
import pathlib
import subprocess
import tempfile

import torch
from diffusers import LTX2Pipeline
from safetensors.torch import load_file, save_file

import world
from words import TOKENS

PROMPTS = "tests/fixtures/nano/prompts.json"


def reference(pipe, prompt, noise, audio_noise):
    """Returns diffusers' clip for unpacked noise, which the pipeline takes as latents and normalises."""
    vae, audio, wide = pipe.vae, pipe.audio_vae, (1, -1, 1, 1, 1)
    video = noise * vae.latents_std.view(wide) + vae.latents_mean.view(wide)
    packed = audio_noise.permute(0, 2, 1, 3).flatten(2) * audio.latents_std + audio.latents_mean
    sound = packed.unflatten(2, audio_noise.shape[1::2]).permute(0, 2, 1, 3)
    scales = dict(guidance_scale=3.0, stg_scale=0.0, modality_scale=1.0, guidance_rescale=0.0)
    return pipe(
        prompt=[prompt], height=world.HEIGHT, width=world.WIDTH, num_frames=world.FRAMES, frame_rate=float(world.FPS),
        num_inference_steps=20, **scales, **{f"audio_{name}": scale for name, scale in scales.items()},
        spatio_temporal_guidance_blocks=None, max_sequence_length=TOKENS, latents=video, audio_latents=sound, output_type="pt",
        return_dict=False,
    )


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("program")
parser.add_argument("--count", type=int, default=10**9)
parser.add_argument("--dtype", default="f32")
parser.add_argument("--reference")
args = parser.parse_args()
prompts = json.loads(pathlib.Path(PROMPTS).read_text())[: args.count]
pipe, far = LTX2Pipeline.from_pretrained(args.model, torch_dtype=torch.float32), {"frames": [], "samples": []}
pipe.set_progress_bar_config(disable=True)
with tempfile.TemporaryDirectory() as folder:
    lines = pathlib.Path(folder, "prompts.txt")
    lines.write_text("".join(f"{p['prompt']}\n" for p in prompts))
    command = [args.program, "generate", "-c", "configs/nano.yml", "-m", args.model, "--platform", "cpu", "--dtype", args.dtype]
    command += ["--prompts", lines, "--dump", f"{folder}/dump.safetensors", "-o", f"{folder}/clips"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for prompt, file in zip(prompts, sorted(lines.parent.glob("dump*.safetensors")), strict=True):
        dump = load_file(file)
        frames, sound = reference(pipe, prompt["prompt"], dump["noise.video"], dump["noise.audio"])
        if args.reference:
            save_file({"video": frames[:, ::6].half().contiguous(), "audio": sound.half().contiguous()}, args.reference)
            args.reference = None
        for kind, a, b in (("frames", frames, dump["video"]), ("samples", sound, dump["audio"])):
            far[kind].append(-10 * (a.double() - b.double()).square().mean().clamp(min=1e-20).log10().item())
for name, values in far.items():
    print(f"{name}: PSNR {min(values):.1f} dB at least, {sum(values) / len(values):.1f} on average")
