"""Compares held-out clips by ltx2 and by diffusers from the same weights and noise, and scores both.

    python parity.py assets/nano target/release/ltx2 --count 24 [--dtype bf16]

`--reference FILE` writes diffusers' frames and samples of the first prompt for tests/cli/nano_quality.rs.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile

from safetensors.torch import load_file, save_file

from score import generate, judge, load_pipeline, table

PROMPTS = "tests/fixtures/nano/prompts.json"


def reference(pipe, prompt, noise, audio_noise):
    """Returns diffusers' clip for unpacked noise, which the pipeline takes as latents and normalises."""
    vae, audio, wide = pipe.vae, pipe.audio_vae, (1, -1, 1, 1, 1)
    video = noise * vae.latents_std.view(wide) + vae.latents_mean.view(wide)
    packed = audio_noise.permute(0, 2, 1, 3).flatten(2) * audio.latents_std + audio.latents_mean
    sound = packed.unflatten(2, audio_noise.shape[1::2]).permute(0, 2, 1, 3)
    return generate(pipe, [prompt], 3.0, latents=video, audio_latents=sound)


def dump_clips(program, model, prompts, dtype, folder):
    lines = folder / "prompts.txt"
    lines.write_text("".join(f"{p['prompt']}\n" for p in prompts))
    command = [program, "generate", "-c", "configs/nano.yml", "-m", model, "--platform", "cpu", "--dtype", dtype]
    command += ["--prompts", lines, "--dump", folder / "dump.safetensors", "-o", folder / "clips"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return sorted(folder.glob("dump*.safetensors"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("program")
    parser.add_argument("--count", type=int, default=10**9)
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--reference")
    args = parser.parse_args()
    prompts = json.loads(pathlib.Path(PROMPTS).read_text())[: args.count]
    pipe = load_pipeline(args.model)
    marks, far = {"ltx2": [], "diffusers": []}, {"frames": [], "samples": []}
    with tempfile.TemporaryDirectory() as folder:
        dumps = dump_clips(args.program, args.model, prompts, args.dtype, pathlib.Path(folder))
        for prompt, file in zip(prompts, dumps, strict=True):
            dump = load_file(file)
            frames, sound = reference(pipe, prompt["prompt"], dump["noise.video"], dump["noise.audio"])
            if args.reference:
                save_file({"video": frames[:, ::6].half().contiguous(), "audio": sound.half().contiguous()}, args.reference)
                args.reference = None
            for kind, a, b in (("frames", frames, dump["video"]), ("samples", sound, dump["audio"])):
                far[kind].append(-10 * (a.double() - b.double()).square().mean().clamp(min=1e-20).log10().item())
            for name, video, audio in (("ltx2", dump["video"], dump["audio"]), ("diffusers", frames, sound)):
                marks[name].append(judge(prompt, video[0].permute(0, 2, 3, 1).numpy(), audio[0].numpy(), 48_000))
    for name, values in far.items():
        print(f"{name}: PSNR {min(values):.1f} dB at least, {sum(values) / len(values):.1f} on average")
    for name, values in marks.items():
        print(json.dumps({"score": name, "dtype": args.dtype, **table(values)}))


main()
