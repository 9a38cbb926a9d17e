"""Compares `ltx2` with the reference on one model with the same noise, seed and settings.

    scripts/verify_real.sh MODEL [--text-encoder DIR] [--diffusers DIR] [--upsampler F] [--lora F] [-o DIR]

Runs every supported pipeline at three sizes; prints a line per case and writes one HTML report. Finished cases are not repeated.
Exit code 0: all agree; 1: some do not; 2: arguments, files or the reference's venv; 3: not enough disk or memory."""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts/oracle"))
import cases as plans  # noqa: E402
import found as finding  # noqa: E402
import report  # noqa: E402
from found import Refused  # noqa: E402

GIB = 1 << 30
VENV_DISK = {"cpu": 6 * GIB, "cuda": 12 * GIB}
# By whether Lightricks' package is the reference.
REFERENCES = {
    False: "diffusers 0.42.1; of all but text_to_video the loops of ltx-pipelines 1.0.0, as 1.2.0 has them, on its networks",
    True: "ltx-pipelines and ltx-core 1.0.0 on the file; of text_to_video diffusers 0.42.1",
}


def size(text):
    try:
        width, height, frames = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: give WIDTHxHEIGHTxFRAMES, e.g. 768x512x121") from None
    if width % 64 or height % 64 or frames % 8 != 1:
        raise argparse.ArgumentTypeError(f"{text}: width and height are multiples of 64, frames one more than a multiple of 8")
    return width, height, frames


def arguments():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="verify_real.sh", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("model", type=Path, help="a diffusers folder, or Lightricks' single file")
    add("--diffusers", type=Path, help="the diffusers folder of a single file's weights")
    add("--text-encoder", type=Path, help="Gemma-3 of a single file; left out, the diffusers folder's")
    add("--upsampler", type=Path, help="left out, what lies beside the model")
    add("--lora", type=Path, help="the distilled LoRA; left out, what lies beside the model")
    add("-o", "--output", type=Path, default=Path("out/verify"), help="folder of the report and of what is kept")
    add("--ltx2", type=Path, default=ROOT / "target/release/ltx2", help="the binary")
    add("--python", type=Path, help="a Python that has the pinned reference; left out, a venv is made")
    add("--pipelines", nargs="+", help="these alone")
    add("--sizes", nargs="+", type=size, default=[size("256x256x9"), size("512x320x25"), size("768x512x121")])
    add("--steps", type=int, help="denoising steps; left out, the published number")
    add("--seed", type=int, default=10)
    add("--max-sequence-length", type=int, default=1024)
    add("--device", choices=["cuda", "cpu"], help="left out, the GPU if there is one")
    add("--dtype", choices=["bf16", "f32"], help="left out, bf16 on a GPU, f32 on a CPU")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to ltx2")
    add("--list", action="store_true", help="say what is there and what would be run, and end")
    return parser.parse_args()


def check_needs(found, options, gpu):
    # Files are bf16; f32 needs twice the memory.
    held = found.bytes() * (2 if options.dtype == "f32" else 1)
    # f32 frames and latents of both sides and of the reference's second run.
    dumps = sum(3 * 4 * 3 * w * h * f * 2 for w, h, f in options.sizes) * len(plans.pipelines(found)[0])
    venv_disk = 0 if options.python else VENV_DISK[options.device]
    disk = next(folder for folder in (options.output, *options.output.parents) if folder.exists())
    rows = [("disk", dumps + venv_disk + GIB // 4, shutil.disk_usage(disk).free, options.output)]
    if options.device == "cuda":
        rows.append(("GPU memory", held + 4 * GIB if held > GIB else GIB, gpu[1], gpu[0]))
        held = min(held, 32 * GIB)
    available = re.search(r"^MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text(), re.M)[1]
    rows.append(("host memory", held + 2 * GIB, int(available) << 10, "free"))
    for name, need, there, where in rows:
        print(f"{name}: {need / GIB:.1f} GiB needed, {there / GIB:.1f} GiB there ({where})", flush=True)
    short = [name for name, need, there, _ in rows if need > there]
    if short:
        raise Refused(f"not enough {' and '.join(short)}; fewer or smaller --sizes, --dtype bf16 or another machine help", 3)


def venv(options):
    """Returns the reference's Python; creates a venv on first use."""
    if options.python:
        if not shutil.which(options.python):
            raise Refused(f"{options.python}: no such program")
        return options.python
    folder = options.output / "venv"
    # The CPU build of torch is a tenth of the download.
    index = {"PIP_EXTRA_INDEX_URL": "https://download.pytorch.org/whl/cpu"} if options.device == "cpu" else {}
    script = ROOT / "scripts" / "oracle" / "venv.sh"
    if subprocess.run([script, folder], env=os.environ | index).returncode != 0:
        raise Refused(f"{script} {folder} failed; --python takes a Python that has the reference")
    return folder / "bin" / "python"


def keys_of(found, case, options):
    """Returns the cache keys of the reference's outputs and of the verdict, which also depends on the binary and its options."""
    weights = [*found.weights(), *([found.given] if found.is_file() else [])]
    configs = {file.with_name("config.json") for file in weights}
    read = [*weights, *sorted(file for file in configs if file.exists()), options.ltx2.resolve()]
    *files, binary = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in read]
    facts = [case.request, files, options.device]
    both = facts, [*facts, options.set, binary]
    return tuple(hashlib.sha256(json.dumps(each, sort_keys=True).encode()).hexdigest() for each in both)


def finished(folder, dtype):
    # The reference writes spread.json last.
    return (folder / ("spread.json" if dtype == "bf16" else "reference.safetensors")).exists()


def run_reference(found, options, pending, image):
    """Runs the reference for all pending cases in one process, which loads the model once."""
    todo = [dict(folder=folder, request=case.request) for case, folder in pending if not finished(folder, options.dtype)]
    if not todo:
        return
    plan = dict(
        folder=found.folder, file=found.given if found.is_file() else None, text_encoder=found.text_encoder,
        upsampler=found.upsampler, lora=found.lora, device=options.device, dtype=options.dtype, image=image,
        threads=os.cpu_count() or 1, cases=todo,
    )
    file = options.output / "plan.json"
    file.write_text(json.dumps(plan, indent=1, default=str) + "\n")
    print(f"the reference, {len(todo)} cases", flush=True)
    done = subprocess.run([venv(options), Path(__file__).with_name("reference.py"), file])
    if done.returncode != 0:
        print(f"the reference ended with exit code {done.returncode}; what it finished is kept", flush=True)


def run_ltx2(found, options, case, folder, image):
    files = ("reference.safetensors", "ours.safetensors", "request.yml", "scores.json")
    reference, ours, config, scores = (folder / name for name in files)
    if not finished(folder, options.dtype):
        return report.failed(case, "the reference did not finish")
    plans.configure(config, found, case, image, options.device)
    sets, begun = [part for value in options.set for part in ("--set", value)], time.time()
    run = lambda *command: subprocess.run([options.ltx2, *command, "--force"], capture_output=True, text=True)
    done = run("generate", "-c", config, "--dump", ours, "-o", folder / "ours.mp4", *sets)
    (folder / "ltx2.log").write_text(done.stderr)
    if done.returncode != 0:
        said = (done.stderr.strip() or "nothing").splitlines()[-1]
        return report.failed(case, f"ltx2, exit code {done.returncode}: {said}")
    done = run("compare", ours, reference, "--json", scores, "--report", folder / "report.html")
    if done.returncode != 0:
        return report.failed(case, f"ltx2 compare, exit code {done.returncode}: {done.stderr.strip()}")
    spread = json.loads((folder / "spread.json").read_text()) if options.dtype == "bf16" else None
    return report.verdict(case, json.loads(scores.read_text()), spread) | {"seconds": round(time.time() - begun, 1)}


def verify(options):
    found = finding.find(options.model, options.diffusers, options.text_encoder, options.upsampler, options.lora)
    gpu = finding.gpu()
    options.device = options.device or ("cuda" if gpu else "cpu")
    if options.device == "cuda" and not gpu:
        raise Refused("--device cuda: nvidia-smi finds no GPU")
    options.dtype = options.dtype or ("bf16" if options.device == "cuda" else "f32")
    config = json.loads((found.folder / "transformer" / "config.json").read_text())
    options.layers, options.output = config["num_layers"], options.output.resolve()
    kind = "single file" if found.is_file() else "diffusers folder"
    title = f"LTX-{found.generation}{' distilled' if found.distilled else ''}, {kind}"
    print(f"{found.given}: {title}, {found.bytes() / GIB:.2f} GiB", end="; ")
    print(f"upsampler {found.upsampler or 'none'}; LoRA {found.lora or 'none'}")
    cases, not_run = plans.plan(found, options)
    print(f"{options.device}, {options.dtype}; {len(cases)} cases: {', '.join(case.name for case in cases) or 'none'}")
    print(f"reference: {REFERENCES[plans.package(found, options)]}")
    for reason in not_run:
        print(f"not run: {reason}")
    check_needs(found, options, gpu)
    if options.list:
        return 0
    if not cases:
        raise Refused("no case to run")
    if not os.access(options.ltx2, os.X_OK):
        raise Refused(f"{options.ltx2}: no such program; build it with `cargo build --release --locked`, or give --ltx2")
    options.output.mkdir(parents=True, exist_ok=True)
    image, verdicts, pending, keys = options.output / "image.png", {}, [], {}
    for case in cases:
        folder = options.output / "cases" / case.name
        key, keys[case.name] = keys_of(found, case, options)
        if kept := report.load(folder, keys[case.name]):
            verdicts[case.name] = kept
            continue
        marked = folder / "key"
        if not marked.exists() or marked.read_text() != key:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            marked.write_text(key)
        pending.append((case, folder))
    if verdicts:
        print(f"done before: {len(verdicts)}")
    run_reference(found, options, pending, image)
    for case, folder in pending:
        verdicts[case.name] = v = run_ltx2(found, options, case, folder, image)
        if v["verdict"] != "failed":
            report.save(folder, v, keys[case.name])
    return finish(options, found, title, [verdicts[case.name] for case in cases], not_run)


def finish(options, found, title, verdicts, not_run):
    pages = {v["case"]: options.output / "cases" / v["case"] / "report.html" for v in verdicts}
    pages = {name: page.read_text() for name, page in pages.items() if page.exists()}
    version = subprocess.run([options.ltx2, "--version"], capture_output=True, text=True).stdout.strip()
    limits = {"bf16": "1.5 times the distance of two runs of the reference", "f32": f"relative L2 {report.F32_LIMIT:g}"}
    facts = {
        "model": found.given.name, "upsampler": found.upsampler.name if found.upsampler else "none",
        "LoRA": found.lora.name if found.lora else "none", "program": version,
        "reference": REFERENCES[plans.package(found, options)], "device": options.device, "type": options.dtype,
        "limit": limits[options.dtype], "date": time.strftime("%Y-%m-%d"),
    }
    page = options.output / "report.html"
    report.write(page, f"ltx2 beside the reference: {title}", facts, verdicts, not_run, pages)
    for v in verdicts:
        print(f"{v['verdict']:8}{v['case']}: {v['words']}")
    agreed = sum(v["verdict"] == "agrees" for v in verdicts)
    print(f"{agreed} of {len(verdicts)} cases agree; {page}")
    return 0 if agreed == len(verdicts) else 1


if __name__ == "__main__":
    try:
        sys.exit(verify(arguments()))
    except Refused as e:
        print(f"verify_real.sh: {e}", file=sys.stderr)
        sys.exit(e.code)
