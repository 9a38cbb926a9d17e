"""How far a run of `ltx2 generate --reference diffusers --dump FILE` is from diffusers' own classes on the same weights and noise.

    python parity.py MODEL FILE PROMPT --steps 20 --guidance 3
"""

import argparse

import torch
from diffusers import LTX2Pipeline
from safetensors.torch import load_file

import world


def psnr(a, b):
    return -10 * (a.double() - b.double()).square().mean().clamp(min=1e-20).log10().item()


def main():
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("model"), ask.add_argument("file"), ask.add_argument("prompt")
    ask.add_argument("--steps", type=int, default=20)
    ask.add_argument("--guidance", type=float, default=3.0)
    args = ask.parse_args()
    dump = load_file(args.file)
    pipe = LTX2Pipeline.from_pretrained(args.model, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    vae, audio = pipe.vae, pipe.audio_vae
    wide = (1, -1, 1, 1, 1)
    # The pipeline takes noise as latents that it normalises first.
    video_noise = dump["noise.video"] * vae.latents_std.view(wide) + vae.latents_mean.view(wide)
    packed = dump["noise.audio"].permute(0, 2, 1, 3).flatten(2) * audio.latents_std + audio.latents_mean
    audio_noise = packed.unflatten(2, dump["noise.audio"].shape[1::2]).permute(0, 2, 1, 3)
    frames, sound = pipe(
        prompt=[args.prompt], height=world.HEIGHT, width=world.WIDTH, num_frames=world.FRAMES, frame_rate=float(world.FPS),
        num_inference_steps=args.steps, guidance_scale=args.guidance, audio_guidance_scale=args.guidance, stg_scale=0.0,
        audio_stg_scale=0.0, modality_scale=1.0, audio_modality_scale=1.0, guidance_rescale=0.0, audio_guidance_rescale=0.0,
        spatio_temporal_guidance_blocks=None, latents=video_noise, audio_latents=audio_noise,
        max_sequence_length=dump["prompt_embeds"].shape[1], output_type="pt", return_dict=False,
    )
    print(f"frames {psnr(frames, dump['video']):.1f} dB, samples {psnr(sound, dump['audio']):.1f} dB")


if __name__ == "__main__":
    main()
