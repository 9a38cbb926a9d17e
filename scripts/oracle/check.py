"""Compares the `ltx2` binary with the reference on random tiny models and requests.

    check.py --ltx2 target/debug/ltx2 --seed 7                 one seed
    check.py --ltx2 target/debug/ltx2 --seeds 0 100            a hundred seeds
    check.py --fixture --seed 7                                writes tests/fixtures/seeds/7.tar.gz

References: diffusers for its own pipelines and single networks, else ltx-pipelines' loops on diffusers' networks. In f32 the
limit is a relative L2. In bf16 it is 1.5 times the largest distance of twelve differently rounded bf16 runs of the reference from
its f32 run, and the median of at least 40 outputs may not exceed their mean. Exit code 1: a limit is exceeded or a command fails."""

import argparse
import gzip
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections import defaultdict
from itertools import chain
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import cases_dfr  # noqa: E402
import diffusers_run  # noqa: E402
import official_run  # noqa: E402
import random_models  # noqa: E402
from cases_pipeline import rounded_otherwise  # noqa: E402
from common import FIXTURES, REPOSITORY, fix_numerics, relative_l2, thin, write_safetensors  # noqa: E402
from drawn_model import Model  # noqa: E402
from drawn_request import NEUTRAL, TWO_PASSES, adapt, row, whole  # noqa: E402

LIMIT, SPREADS = 1e-4, 1.5
# Number of bf16 runs of the reference per seed.
ROUNDINGS = 12
# Reduces compile time to a fifth.
QUICK = ["--set", "runtime.xla_flags.xla_backend_optimization_level=0"]
ENVIRONMENT = {"XLA_FLAGS": "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters", "LTX2_COMPILE_CACHE": "off"}
# Distances of all bf16 outputs, relative to the mean of the reference.
IN_SPREADS = []


def execute(command):
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT)
    if done.returncode != 0:
        print(f"  exit {done.returncode}: {(done.stderr.strip() or done.stdout.strip() or 'nothing').splitlines()[-1]}")
    return done.returncode == 0


def compare(actual, expected, distances, rows=...):
    """Prints a line per output; returns whether all are within their limits."""
    verdicts = []
    for name, reference in expected.items():
        if name not in actual:
            print(f"  {name}: missing, the file has {', '.join(sorted(actual))}")
            verdicts.append(False)
            continue
        if isinstance(reference, dict):
            # The encoder may return the stack or the projection, which differ in the last axis.
            reference = reference["projected" if reference["projected"].shape == actual[name].shape else "prompt_embeds"]
        shape, own = list(actual[name].shape), distances.get(name)
        verdicts.append(shape == list(reference.shape))
        if not verdicts[-1]:
            print(f"  {name}: shape {shape}, the reference has {list(reference.shape)}")
            continue
        distance = relative_l2(actual[name].float()[rows], reference[rows])
        limit = SPREADS * max(own) if own else LIMIT
        verdicts[-1] = distance <= limit
        print(f"  {name} {shape}: {distance:.2e} of {limit:.2g} {'ok' if verdicts[-1] else 'ABOVE'}")
        if own:
            IN_SPREADS.append(distance / statistics.mean(own))
    return all(verdicts)


def check_component(binary, model, component, folder):
    run = getattr(diffusers_run, component.replace("-", "_"))
    values, expected, more = run(model, random.Random(f"{model.seed}/{component}"))
    source, target = folder / f"{component}.in.safetensors", folder / f"{component}.out.safetensors"
    write_safetensors(source, values)
    command = [binary, "run", component, "--model", model.folder, "--inputs", source, "-o", target]
    scalars = (("--set", f"{key}={json.dumps(value)}") for key, value in more.pop("scalars", {}).items())
    command += ["--platform", "cpu", "--dtype", "f32", *chain(*scalars)]
    print(f"  {component}:")
    return execute(command) and compare(load_file(target), expected, {}, **more)


def reference_runs(model):
    """Returns the reference's float32 outputs, and the distances of its differently rounded bfloat16 runs."""
    def run(dtype):
        if model.request["pipeline"] == "dfr":
            return cases_dfr.run(model.request, model.pipeline, model.upsampler, model.temporal)
        return official_run.run(model, dtype)

    expected = run(torch.float32)
    if model.request["dtype"] == "f32":
        return expected, {}
    model.load(torch.bfloat16)
    distances, runs = defaultdict(list), []
    for turn in range(ROUNDINGS):
        with rounded_otherwise(turn):
            runs.append(half := run(torch.bfloat16))
        for name in expected:
            if name in half and name != "audio" and "noise" not in name:
                distances[name].append(relative_l2(half[name], expected[name]))
    model.load(torch.float32)
    distances["audio"] = [relative_l2(half["audio"], sound_of(model, half["latents.audio"])) for half in runs]
    return expected, distances


def sound_of(model, latents):
    """Returns float32 samples of a run's own audio latents, as random vocoders amplify differences tenfold."""
    with diffusers_run.limited(model.parts["vocoder"], model.request["clamp"]):
        return model.sound(latents.float())


def check_request(binary, model, folder):
    expected, distances = reference_runs(model)
    config, target = folder / "request.yml", folder / "request.out.safetensors"
    model.yaml(config)
    command = [binary, "generate", "-c", config, "--dump", target, "--force", "-o", folder / "request.mp4", *QUICK]
    if not execute(command):
        return False
    actual = load_file(target)
    expected["audio"] = sound_of(model, actual["latents.audio"])[..., : expected["audio"].shape[-1]]
    return compare(actual, expected, distances)


def write_fixture(model, folder):
    """Writes tests/fixtures/seeds/SEED.tar.gz: model, request, images, LoRAs, and thinned expected outputs; returns True."""
    expected, distances = reference_runs(model)
    model.yaml(folder / "request.yml")
    # Noise is tested bit for bit by `it noise`.
    kept, extra = thin({name: tensor for name, tensor in expected.items() if "noise" not in name})
    extra |= {f"bf16_spread.{name}": f"{statistics.mean(own):.6f}" for name, own in distances.items()}
    extra |= {"model": f"seed {model.seed}", "scalars": json.dumps(model.request, sort_keys=True)}
    write_safetensors(folder / "expected.safetensors", {f"out.{name}": tensor for name, tensor in kept.items()}, extra)
    target = FIXTURES / "seeds" / f"{model.seed}.tar.gz"
    unread = () if model.request["pipeline"] in TWO_PASSES else ("latent_upsampler",)

    def anonymous(entry):
        entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname, entry.mode = 0, 0, 0, "", "", 0o644
        return entry

    with open(target, "wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.parent.name not in unread):
                archive.add(path, path.relative_to(folder), filter=anonymous)
    print(f"{target}: {target.stat().st_size} bytes")
    return True


def as_dfr(request):
    """Returns the request for the pipeline dfr, whose reference is diffusers."""
    draw = random.Random(f"{request['seed']}/dfr")
    return request | dict(
        pipeline="dfr", reference="diffusers", num_frames=draw.choice([9, 17, 33]), temporal_rounds=draw.randint(0, 2), layout=None,
        mesh=None, dtype="f32", images=[], loras=[], sampler="euler", guidance=dict(video=NEUTRAL, audio=NEUTRAL), clamp=False,
        width=128, height=64, cross_timestep=None, sigma_shift="official", negative_prompt="",
    )


def check_seed(options, seed, folder):
    of = row(seed) | (dict(published=True, upsampler="plain", networks=()) if options.dfr else {})
    generation = "2.5" if options.dfr else options.generation or of["generation"]
    config = random_models.whole(seed, of["published"], generation, of["upsampler"])
    request = as_dfr(whole(seed, config)) if options.dfr else whole(seed, config)
    adapt(config, request["reference"])
    print(f"seed {seed}: LTX-{generation}, {', '.join(f'{key} {value}' for key, value in of.items() if value)}", flush=True)
    model = Model(seed, config, request, folder / "model", coarse=options.fixture)
    if options.fixture:
        return write_fixture(model, folder)
    fine = [check_component(options.ltx2, model, name, folder) for name in of["networks"]]
    return all([*fine, check_request(options.ltx2, model, folder)])


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ltx2", type=Path, default=REPOSITORY / "target/debug/ltx2", help="path of the binary")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "COUNT"), help="a range of seeds")
parser.add_argument("--generation", choices=["2.0", "2.3", "2.5"], help="default: chosen by the seed")
parser.add_argument("--dfr", action="store_true", help="LTX-2.5 with the pipeline dfr")
parser.add_argument("--keep", type=Path, help="folder in which to keep the model and the files")
parser.add_argument("--fixture", action="store_true", help="write tests/fixtures/seeds/SEED.tar.gz")
options = parser.parse_args()
if options.keep and options.seeds:
    parser.error("--keep is for one seed")
fix_numerics()
first, count = options.seeds or (options.seed, 1)
failed, begun = [], time.time()
for seed in range(first, first + count):
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            fine = check_seed(options, seed, folder)
        except Exception:  # A reference that refuses what was drawn fails its seed, not the following ones.
            traceback.print_exc()
            fine = False
    failed += [] if fine else [seed]
for seed in failed:
    print(f"FAILED: seed {seed}; again: {sys.argv[0]} --ltx2 {options.ltx2} --seed {seed} --keep DIR")
middle = statistics.median(IN_SPREADS or [0.0])
if IN_SPREADS:
    print(f"bf16: {len(IN_SPREADS)} outputs, median {middle:.2f} spreads from the reference, largest {max(IN_SPREADS):.2f}")
print(f"{(time.time() - begun) / 60:.1f} min, {len(failed)} failed")
sys.exit(bool(failed or (middle > 1 and len(IN_SPREADS) >= 40)))
