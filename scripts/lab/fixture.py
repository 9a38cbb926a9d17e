#!/usr/bin/env python3
"""Writes tests/fixtures/trace/two_devices.xplane.pb: a recording made up by hand, whose sums tests/cli/profile.rs knows.

    scripts/lab/fixture.py          # needs nothing but Python

The protobuf bytes are written here, field by field, so that the reader is tested against another hand than its own.
"""

import pathlib

OUT = pathlib.Path(__file__).resolve().parents[2] / "tests/fixtures/trace/two_devices.xplane.pb"

# Far from 0, as clocks of hosts are.
EPOCH_NS = 1_790_000_000_000_000_000

# Instruction: opcode, name scope with the operation's name, custom call target, kernel.
PROGRAM = {
    "custom-call.1": ("custom-call", "blocks/attn1/to_q/dot_general", "__cublas$lt$matmul", "nvjet_tst_128x256"),
    "custom-call.2": ("custom-call", "blocks/attn1/sdpa/custom_call", "__cudnn$fmhaSoftmax", "cudnn_flash_fprop"),
    "loop_add_fusion": ("add", "blocks/norm1/add", "", "loop_add_fusion"),
    "copy.3": ("copy", "blocks/attn1/transpose", "", "wrapped_copy"),
    "custom-call.4": ("custom-call", "blocks/ff/proj/dot_general", "__cublas$lt$matmul", "nvjet_tst_64x64"),
    "all-gather-start": ("all-gather-start", "blocks/attn1/sdpa/all_gather", "", "ncclDevKernel_AllGather_RING_LL"),
    "all-reduce-start": ("all-reduce-start", "blocks/ff/proj/add", "", "ncclDevKernel_AllReduce_Sum_bf16"),
}

# Device: stream: instruction, start and end in microseconds.
TIMES = [
    {
        "Stream #13(Compute)": [
            ("custom-call.1", 0, 40),
            ("custom-call.2", 40, 70),
            ("loop_add_fusion", 70, 80),
            ("copy.3", 80, 85),
            ("custom-call.4", 100, 130),
        ],
        "Stream #20(Compute)": [("all-gather-start", 60, 95), ("all-reduce-start", 130, 140)],
    },
    {
        "Stream #13(Compute)": [("custom-call.1", 0, 60), ("custom-call.2", 60, 90)],
        "Stream #20(Compute)": [("all-gather-start", 90, 100)],
    },
]


def varint(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out + bytes([value]))


def field(number, value):
    """A field of a message: a number, or text, bytes or a message already written."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def message(*fields):
    return b"".join(field(number, value) for number, value in fields if value not in ("", None))


def table(number, entries):
    """A map field: messages of key and value."""
    return [(number, message((1, key), (2, value))) for key, value in entries.items()]


def program():
    instructions = [
        (2, message((1, name), (2, opcode), (7, message((2, scope))), (28, target), (35, 10 + at)))
        for at, (name, (opcode, scope, target, _)) in enumerate(PROGRAM.items())
    ]
    entry = message((1, "main"), *instructions, (5, 1), (6, 10))
    return message((1, message((1, "denoise"), (3, entry), (6, 1))))


FACTS = ["hlo_op", "hlo_module", "program_id", "Hlo Proto", "denoise"]
FACT = {name: at for at, name in enumerate(FACTS, 1)}


def facts():
    return table(5, {at: message((1, at), (2, name)) for name, at in FACT.items()})


def plane(number, streams):
    kernels = {name: at for at, name in enumerate(PROGRAM, 1)}
    metadata = {at: message((1, at), (2, PROGRAM[name][3])) for name, at in kernels.items()}
    lines = []
    for at, (stream, events) in enumerate(streams.items()):
        each = [
            (
                4,
                message(
                    (1, kernels[name]),
                    (2, start * 1_000_000),
                    (3, (end - start) * 1_000_000),
                    (4, message((1, FACT["hlo_op"]), (5, name))),
                    (4, message((1, FACT["hlo_module"]), (7, FACT["denoise"]))),
                    (4, message((1, FACT["program_id"]), (3, 42))),
                ),
            )
            for name, start, end in events
        ]
        lines.append((3, message((1, 13 + at), (2, stream), (3, EPOCH_NS), *each)))
    return message((1, number), (2, f"/device:GPU:{number}"), *lines, *table(4, metadata), *facts())


def metadata():
    proto = message((1, FACT["Hlo Proto"]), (6, program()))
    return message((2, "/host:metadata"), *table(4, {42: message((1, 42), (2, "denoise(42)"), (5, proto))}), *facts())


def main():
    planes = [(1, plane(number, streams)) for number, streams in enumerate(TIMES)]
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_bytes(message(*planes, (1, metadata()), (4, "host")))


if __name__ == "__main__":
    main()
