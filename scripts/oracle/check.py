#!/usr/bin/env python3
"""Compares the `ltx2` binary with the reference on one random tiny model.

    check.py --ltx2 target/debug/ltx2 --seed 7 [--component transformer ...] [--published] [--generation 2.3] [--keep DIR]

Prints the relative L2 of every output; exit code 1 if one exceeds its tolerance or a command fails.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTX2Pipeline
from safetensors.torch import load_file
from transformers import AutoTokenizer

import random_models
from cases_pipeline import draw_noise, run_pipeline
from cases_text import encode
from cases_transformer import inputs_for, run, scalars_for
from common import fix_numerics, randn, relative_l2, write_safetensors
from models import COMPONENTS as PARTS
from models import build, build_text_encoder
from tokenizer import save_tokenizer

_WORDS = "slow pan over a quiet harbour at dawn gulls calling lighthouse woman red coat stone pier 東京 café".split()
TOLERANCE = {"pipeline": 1e-3}


class Model:
    """A random model, in memory and on disk."""

    def __init__(self, seed, published, generation, folder):
        self.config, self.seed, self.folder = random_models.whole(seed, published, generation), seed, folder
        self.parts = {name: build(name, self.config[name], seed) for name in PARTS}
        self.parts["text_encoder"] = build_text_encoder(self.config["text_encoder"], seed)
        save_tokenizer(folder / "tokenizer", self.config["vocabulary"])
        self.pipeline = LTX2Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**self.config["scheduler"]),
            tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"), **self.parts,
        )
        self.pipeline.set_progress_bar_config(disable=True)
        self.pipeline.save_pretrained(folder)
        save_tokenizer(folder / "tokenizer", self.config["vocabulary"])


def transformer(model, draw):
    """Random shapes, masks, per-token timesteps and flags of one forward."""
    config, batch = model.config["transformer"], draw.randint(1, 2)
    shape = dict(frames=draw.randint(1, 3), height=draw.randint(1, 4), width=draw.randint(1, 4), audio_frames=draw.randint(1, 9))
    values = inputs_for(
        config, seed=model.seed, batch=batch, text=draw.randint(1, 20), per_token=draw.random() < 0.4,
        masked=draw.random() < 0.4, **shape,
    )
    scalars = scalars_for(
        **shape, fps=draw.choice([24.0, 25.0, 12.5]), use_cross_timestep=draw.random() < 0.5,
        isolate_modalities=draw.random() < 0.2,
    )
    if config.get("perturbed_attn"):
        scalars["stg_blocks"] = [draw.randrange(config["num_layers"])]
    return values, scalars, run(model.parts["transformer"], values, scalars), None


def connectors(model, draw):
    """Left-padded rows of different lengths."""
    config, total, batch = model.config["connectors"], 16 * draw.randint(1, 3), draw.randint(1, 3)
    states = randn(model.seed, "states", batch, total, config["caption_channels"] * config["text_proj_in_factor"])
    mask = torch.zeros(batch, total, dtype=torch.int64)
    for row in range(batch):
        mask[row, total - draw.randint(1, total) :] = 1
    video, audio, _ = model.parts["connectors"](states, mask)
    return {"text_encoder_hidden_states": states, "attention_mask": mask}, {}, {"video": video, "audio": audio}, None


def text_encoder(model, draw):
    """Random ids; rows of pads are not compared. Both the raw stack and its projection are accepted."""
    total, batch = 16 * draw.randint(1, 3), 2
    mask = torch.zeros(batch, total, dtype=torch.int64)
    for row in range(batch):
        mask[row, total - draw.randint(1, total) :] = 1
    ids = torch.tensor([[draw.randrange(3, 380) for _ in range(total)] for _ in range(batch)]) * mask
    outputs = encode(model.parts["text_encoder"], model.parts["connectors"], ids, mask)
    return {"input_ids": ids, "attention_mask": mask}, {}, {"prompt_embeds": outputs}, mask.bool()


def video_decoder(model, draw):
    """Un-normalised latents; reflect padding needs two rows and two columns."""
    config = model.config["vae"]
    latents = randn(
        model.seed, "latents", draw.randint(1, 2), config["latent_channels"], draw.randint(1, 3), draw.randint(2, 4),
        draw.randint(2, 4),
    )
    return {"latents": latents}, {}, {"video": model.parts["vae"].decode(latents, return_dict=False)[0]}, None


def audio_decoder(model, draw):
    """Un-normalised latents of any length."""
    config = model.config["audio_vae"]
    latents = randn(
        model.seed, "latents", draw.randint(1, 2), config["latent_channels"], draw.randint(1, 9), config["mel_bins"] // 4
    )
    return {"latents": latents}, {}, {"mel": model.parts["audio_vae"].decode(latents, return_dict=False)[0]}, None


def vocoder(model, draw):
    """Log-mel of any length; the reference limits nothing between two stages unless told to."""
    mel = randn(model.seed, "mel", draw.randint(1, 2), 2, draw.randint(1, 9), model.config["audio_vae"]["mel_bins"])
    part = model.parts["vocoder"]
    if not hasattr(part, "bwe_generator"):
        return {"mel": mel}, {}, {"audio": part(mel)}, None
    clamp, own = draw.random() < 0.5, part.vocoder.final_act_fn
    part.vocoder.final_act_fn = own or ("clamp" if clamp else None)
    audio = part(mel)
    part.vocoder.final_act_fn = own
    return {"mel": mel}, {"clamp": clamp}, {"audio": audio}, None


COMPONENTS = {
    "transformer": transformer, "connectors": connectors, "text-encoder": text_encoder, "video-decoder": video_decoder,
    "audio-decoder": audio_decoder, "vocoder": vocoder,
}


def execute(command):
    """Runs the binary; a failure is reported with what it said, not raised."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        print(f"  exit {done.returncode}: {said}")
    return done.returncode == 0


def compare(component, expected, file, rows=None):
    """Prints one line an output; true if all are near enough."""
    actual, fine = load_file(file), True
    for name, reference in expected.items():
        if name not in actual:
            print(f"  {component}.{name}: missing, the file has {', '.join(sorted(actual))}")
            fine = False
            continue
        value = actual[name].float()
        if isinstance(reference, dict):
            # The encoder may return the raw stack or the projection: the last axis tells.
            reference = next((r for r in (reference["projected"], reference["prompt_embeds"]) if r.shape == value.shape), value * 0)
        if value.shape != reference.shape:
            print(f"  {component}.{name}: shape {list(value.shape)}, the reference has {list(reference.shape)}")
            fine = False
            continue
        if rows is not None:
            value, reference = value[rows], reference[rows]
        distance, limit = relative_l2(value, reference), TOLERANCE.get(component, 1e-4)
        verdict = "ok" if distance <= limit else f"ABOVE {limit:g}"
        print(f"  {component}.{name} {list(reference.shape)}: {distance:.3e} {verdict}")
        fine &= distance <= limit
    return fine


def check_component(binary, model, component, folder):
    """One `ltx2 run`."""
    values, scalars, expected, rows = COMPONENTS[component](model, random.Random(f"{model.seed}/{component}"))
    source, target = folder / f"{component}.in.safetensors", folder / f"{component}.out.safetensors"
    write_safetensors(source, values)
    command = [
        binary, "run", component, "--model", model.folder, "--inputs", source, "-o", target, "--platform", "cpu", "--dtype", "f32"
    ]
    for key, value in scalars.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    return execute(command) and compare(component, expected, target, rows)


def random_request(model):
    """Sizes, guidance and prompt of a whole run, legal for this model."""
    draw = random.Random(f"{model.seed}/pipeline")
    least = 64 if model.config["vae"]["spatial_compression_ratio"] == 32 else 32
    sizes = [least, least + 32, least + 64]
    neutral = dict(stg=0.0, modality=1.0, rescale=0.0)
    video, audio = draw.choice([(1.0, 1.0), (4.0, 4.0), (4.0, 2.5), (1.0, 3.0)])
    return dict(
        prompt=" ".join(draw.choices(_WORDS, k=draw.randint(1, 12))), negative_prompt=draw.choice(["", "static noise"]),
        width=draw.choice(sizes), height=draw.choice(sizes), num_frames=draw.choice([1, 9, 17]),
        frame_rate=draw.choice([12.0, 24.0, 25.0]), steps=draw.randint(2, 4), seed=draw.randrange(2**40),
        max_sequence_length=64, sigma_shift=draw.choice(["official", "diffusers"]),
        guidance={"video": dict(neutral, cfg=video), "audio": dict(neutral, cfg=audio)},
    )


def check_pipeline(binary, model, folder):
    """One `ltx2 generate --dump`."""
    request = random_request(model)
    noise_video, noise_audio = draw_noise(model.pipeline, request)
    expected = {"noise.video": noise_video, "noise.audio": noise_audio, **run_pipeline(model.pipeline, request)}
    del expected["sigmas"]
    target = folder / "pipeline.out.safetensors"
    command = [
        binary, "generate", "--model", model.folder, "--platform", "cpu", "--dtype", "f32", "--dump", target, "--force",
        "-o", folder / "pipeline.mp4", "--set", f"sampler.sigma_shift={request['sigma_shift']}",
        "--set", "vocoder.stage1_clamp=diffusers", "--set", "guidance.stg_blocks=[]",
    ]
    for key in ("prompt", "negative_prompt", "width", "height", "num_frames", "frame_rate", "steps", "seed", "max_sequence_length"):
        command += [f"--{key.replace('_', '-')}", request[key]]
    for stream, scales in request["guidance"].items():
        for key, value in scales.items():
            command += ["--set", f"guidance.{stream}.{key}={value}"]
    return execute(command) and compare("pipeline", expected, target)


def main():
    """Builds the model of the seed, then goes through the components."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ltx2", required=True, type=Path, help="path of the binary")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--component", nargs="+", choices=[*COMPONENTS, "pipeline"], default=[*COMPONENTS, "pipeline"])
    parser.add_argument("--published", action="store_true", help="vary sizes only, keep the flags of the generation")
    parser.add_argument("--generation", choices=["2.0", "2.3"], help="of the model; left out, the seed decides")
    parser.add_argument("--keep", type=Path, help="folder for the model and the files, kept afterwards")
    options = parser.parse_args()
    fix_numerics()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        model = Model(options.seed, options.published, options.generation, folder / "model")
        (folder / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
        print(f"seed {options.seed}")
        fine = True
        for component in options.component:
            if component == "pipeline":
                fine &= check_pipeline(options.ltx2, model, folder)
            else:
                fine &= check_component(options.ltx2, model, component, folder)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
