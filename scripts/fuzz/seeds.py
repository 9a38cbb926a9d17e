#!/usr/bin/env python3
"""Writes fuzz/seeds/module: `make fuzz-seeds`, or scripts/fuzz/seeds.py [LTX2].

Needs the plugins of all three platforms. tests/it/fuzz_seeds.rs describes the modules."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts/tune"))
from fixture import field  # noqa: E402

SEEDS = ROOT / "fuzz/seeds"
ANALYSIS = ROOT / "crates/xla-analysis/src"

# Name, chip, program, target, layout and layers. Nested loops, and what each platform makes of a collective: TPUs spread a gather
# over fusions, permute during other work, and sum; CUDA wraps collectives in computations; the CPU waits for each.
MODULES = [
    ("tpu_v6e_gathers", "v6e", "text-encoder", "tpu:v6e:2x4", "fsdp-ulysses", 1),
    ("tpu_tpu7x_ring", "tpu7x", "text-encoder", "tpu:tpu7x:2x2x1", "ring", 1),
    ("tpu_v5p_steps", "v5p", "denoise", "tpu:v5p:2x2x1", "tensor", 2),
    ("cuda_h200_steps", "h200", "denoise", "cuda:h200:1x1x4", "hybrid", 1),
    ("cpu_steps", None, "denoise", "cpu:4", "tensor", 2),
]
TPU = {
    "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "LIBTPU_INIT_ARGS": "--default_thread_stack_size=1048576",
}
# The smallest published architecture at the smallest size, without guidance.
SMALLEST = [
    "request.width=64", "request.height=64", "request.num_frames=9", "request.max_sequence_length=128", "guidance.video.cfg=1",
    "guidance.audio.cfg=1",
]


def read_varint(data, at):
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def fields(data):
    """Yields number and value, an integer or bytes, of a message's fields; skips fields of fixed size."""
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at)
        number, wire = tag >> 3, tag & 7
        value, at = read_varint(data, at) if wire in (0, 2) else ({1: 8, 5: 4}[wire], at)
        if wire in (0, 2):
            yield number, data[at : at + value] if wire == 2 else value
        at += value if wire else 0


# The fields that crates/xla-analysis reads of each message, with the message type of each field.
MESSAGES = {}
for name, body in re.findall(r"struct (\w+) \{(.*?)\n    \}", (ANALYSIS / "proto.rs").read_text(), re.S):
    found = MESSAGES[name] = {}
    for type_, tag in re.findall(r"^ +\w+: (.*) = (\d+) \[", body, re.M):
        inner = re.search(r"\w+Proto", type_)
        found[int(tag)] = inner and inner.group()
        if type_.startswith("HashMap"):
            # A map entry is a message of key and value.
            found[int(tag)] = entry = f"{name}.{tag}"
            MESSAGES[entry] = {1: None, 2: inner.group()}


def trimmed(data, message="ModuleWithConfig"):
    """Keeps the fields that are read; backend configurations only of loops, library calls and started collectives."""
    read = dict(MESSAGES[message])
    if message == "InstructionProto" and not re.fullmatch(rb"while|custom-call|.*-start", dict(fields(data)).get(2, b"")):
        del read[43]
    known = ((number, value) for number, value in fields(data) if number in read)
    written = (field(n, trimmed(value, read[n]) if read[n] else value) for n, value in known)
    # Maps have no stable order.
    return b"".join(sorted(written) if message == "ScheduleProto" else written)


ltx2 = sys.argv[1] if sys.argv[1:] else "target/debug/ltx2"
for name, chip, program, target, layout, layers in MODULES:
    with tempfile.TemporaryDirectory() as dump:
        command = [ltx2, "-q", "compile", "-c", "nano_2_0", "-m", "nano", "--program", program, "--target", target]
        command += ["--layout", layout, "--layers", str(layers), "--dump-hlo", dump]
        settings = [part for setting in SMALLEST for part in ("--set", setting)]
        subprocess.run(command + settings, cwd=ROOT, env=os.environ | TPU, stdout=subprocess.DEVNULL, check=True)
        (optimized,) = pathlib.Path(dump).glob("*.optimized.pb")
    # A seed of fuzz/src/lib.rs begins with twice the chip's number, or 255 for a module without chip and configuration.
    data, chips = trimmed(optimized.read_bytes()), re.findall(r'"chips/(\w+)\.toml"', (ANALYSIS / "chip.rs").read_text())
    seed = bytes([2 * chips.index(chip)]) + data if chip else b"\xff" + dict(fields(data))[1]
    (SEEDS / "module" / f"{name}.pb").write_bytes(seed)
