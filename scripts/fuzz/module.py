#!/usr/bin/env python3
"""Writes a fuzzing seed from an optimized module: scripts/fuzz/module.py IN.pb OUT.pb CHIP.

Keeps only the fields that crates/xla-analysis/src/proto.rs declares, and backend configurations only where they are read: on
loops, library calls and started collectives. The first byte is for fuzz/src/lib.rs: the chip's number in
crates/xla-analysis/src/chip.rs, doubled, or 127 for none, plus 1 if the module has no configuration (CHIP `-`).
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/tune"))

from fixture import field  # noqa: E402
from trim import fields, get  # noqa: E402

OPCODE, NOTES = 2, 43
NOTED = re.compile(rb"while|custom-call|.*-start")


def declared():
    """Returns the fields that are read of each message, with the message type of each field."""
    messages = {}
    text = (ROOT / "crates/xla-analysis/src/proto.rs").read_text()
    for name, body in re.findall(r"struct (\w+) \{(.*?)\n\}", text, re.S):
        found = messages[name] = {}
        for kind, tag, type_ in re.findall(r'#\[prost\((\w+).*?tag = "(\d+)"\)\]\s+pub \w+: (.*),', body):
            inner = re.search(r"\w+Proto", type_)
            found[int(tag)] = inner and inner.group()
            if kind == "map":
                # A map entry is a message of key and value.
                found[int(tag)] = entry = f"{name}.{tag}"
                messages[entry] = {1: None, 2: inner.group()}
    return messages


MESSAGES = declared()


def kept(data, message):
    read = MESSAGES[message]
    if message == "InstructionProto" and not NOTED.fullmatch(get(data, OPCODE, b"")):
        read = {number: inner for number, inner in read.items() if number != NOTES}
    known = ((number, value) for number, value in fields(data) if number in read)
    written = (field(n, kept(value, read[n]) if read[n] else value) for n, value in known)
    # Maps have no stable order.
    return b"".join(sorted(written) if message == "ScheduleProto" else written)


def main():
    source, out, chip = sys.argv[1:]
    names = re.findall(r'include_str!\("chips/(\w+)\.toml"\)', (ROOT / "crates/xla-analysis/src/chip.rs").read_text())
    module = kept(pathlib.Path(source).read_bytes(), "ModuleWithConfig")
    if chip == "-":
        ahead, module = 2 * 127 + 1, get(module, 1)
    else:
        ahead = 2 * names.index(chip)
    pathlib.Path(out).write_bytes(bytes([ahead]) + module)


if __name__ == "__main__":
    main()
