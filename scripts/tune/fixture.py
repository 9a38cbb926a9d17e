#!/usr/bin/env python3
"""Writes tests/fixtures/trace/two_devices.xplane.pb (GPUs) and one_tpu.xplane.pb (asynchronous work) by hand.

tests/cli/profile.rs and tests/it/fuzz_seeds.rs know their sums. Encodes protobuf independently of the reader under test.
"""

import pathlib

OUT = pathlib.Path(__file__).resolve().parents[2] / "tests/fixtures/trace"

# Like the clock of a host.
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

# bf16 elements that an instruction writes, for predicted times; others have no shape.
ELEMENTS = {"custom-call.1": 25_000_000, "custom-call.4": 6_000_000, "loop_add_fusion": 6_000_000, "copy.3": 1_000_000}
BF16 = 16

# A TPU program: a gather in a wrapping computation, a gather spread over fusions, and an operation
# that only its event describes.
TPU_PROGRAM = {
    "fusion.1": ("fusion", "blocks/ff/proj/dot_general", "", "fusion.1"),
    "async-start.2": ("async-start", "", "", "async-start.2"),
    "async-done.2": ("async-done", "", "", "async-done.2"),
    "fusion.3": ("fusion", "blocks/attn1/to_q/all_gather", "", "fusion.3"),
    "copy-start.4": ("copy-start", "", "", "copy-start.4"),
}
# Operands and called computations.
TPU_OPERANDS = {"async-done.2": "async-start.2"}
TPU_CALLS = {"fusion.1": 2, "async-start.2": 3, "fusion.3": 4}
TPU_CALLED = {
    2: [("dot.5", "dot", "blocks/ff/proj/dot_general", "")],
    3: [("all-gather.6", "all-gather", "blocks/ff/proj/all_gather", "")],
    4: [
        ("custom-call.7", "custom-call", "", "AsyncCollectiveStart"),
        ("all-gather.8", "all-gather", "blocks/attn1/to_q/all_gather", ""),
    ],
}
# Category and scope from the event.
TPU_FACTS = {"reduce.9": ("reduce", "blocks/norm1/reduce")}

TPU_TIMES = {
    "XLA Ops": [
        ("async-start.2", 0, 1),
        ("fusion.1", 1, 61),
        ("async-done.2", 61, 71),
        ("fusion.3", 71, 91),
        ("reduce.9", 91, 100),
    ],
    "Async XLA Ops": [("async-start.2", 0, 71), ("copy-start.4", 10, 90)],
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
    """Encodes a field: a number, text, bytes or an encoded message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def message(*fields):
    return b"".join(field(number, value) for number, value in fields if value not in ("", None))


def table(number, entries):
    """Encodes a map field."""
    return [(number, message((1, key), (2, value))) for key, value in entries.items()]


def instruction(number, name, opcode, scope, target, operands=(), calls=()):
    lists = [(36, operand) for operand in operands] + [(38, called) for called in calls]
    shape = [(3, message((2, BF16), (3, ELEMENTS[name])))] if name in ELEMENTS else []
    return message((1, name), (2, opcode), *shape, (7, message((2, scope))), (28, target), (35, number), *lists)


def program():
    instructions = [
        (2, instruction(10 + at, name, opcode, scope, target))
        for at, (name, (opcode, scope, target, _)) in enumerate(PROGRAM.items())
    ]
    entry = message((1, "main"), *instructions, (5, 1), (6, 10))
    return message((1, message((1, "denoise"), (3, entry), (6, 1))))


def tpu_program():
    number = {name: 10 + at for at, name in enumerate(TPU_PROGRAM)}
    computations = []
    for own, called in TPU_CALLED.items():
        inside = [(2, instruction(100 * own + at, *one)) for at, one in enumerate(called)]
        computations.append((3, message((1, f"called.{own}"), *inside, (5, own), (6, 100 * own + len(called) - 1))))
    instructions = []
    for name, (opcode, scope, target, _) in TPU_PROGRAM.items():
        operands = [number[TPU_OPERANDS[name]]] if name in TPU_OPERANDS else []
        calls = [TPU_CALLS[name]] if name in TPU_CALLS else []
        instructions.append((2, instruction(number[name], name, opcode, scope, target, operands, calls)))
    entry = message((1, "main"), *instructions, (5, 1), (6, 10))
    return message((1, message((1, "denoise"), *computations, (3, entry), (6, 1))))


FACTS = ["hlo_op", "hlo_module", "program_id", "Hlo Proto", "denoise", "hlo_category", "tf_op"]
FACT = {name: at for at, name in enumerate(FACTS, 1)}


def facts(names):
    return table(5, {at: message((1, at), (2, name)) for name, at in FACT.items() if name in names})


def plane(number, device, streams, kernel_of, events_facts, names):
    kernels = {name: at for at, name in enumerate(kernel_of, 1)}
    metadata = {at: message((1, at), (2, kernel_of[name])) for name, at in kernels.items()}
    lines = []
    for at, (stream, events) in enumerate(streams.items()):
        each = [
            (
                4,
                message(
                    (1, kernels[name]),
                    (2, start * 1_000_000),
                    (3, (end - start) * 1_000_000),
                    *((4, fact) for fact in events_facts(name)),
                ),
            )
            for name, start, end in events
        ]
        lines.append((3, message((1, 13 + at), (2, stream), (3, EPOCH_NS), *each)))
    return message((1, number), (2, f"/device:{device}:{number}"), *lines, *table(4, metadata), *facts(names))


def of_program(name):
    return [
        message((1, FACT["hlo_op"]), (5, name)),
        message((1, FACT["hlo_module"]), (7, FACT["denoise"])),
        message((1, FACT["program_id"]), (3, 42)),
    ]


def of_tpu(name):
    if name not in TPU_FACTS:
        return of_program(name)
    category, scope = TPU_FACTS[name]
    return [message((1, FACT["hlo_category"]), (5, category)), message((1, FACT["tf_op"]), (5, scope))]


def metadata(program, names):
    proto = message((1, FACT["Hlo Proto"]), (6, program))
    entry = message((1, 42), (2, "denoise(42)"), (5, proto))
    return message((2, "/host:metadata"), *table(4, {42: entry}), *facts(names))


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    names, kernels = FACTS[:5], {name: kernel for name, (_, _, _, kernel) in PROGRAM.items()}
    planes = [(1, plane(n, "GPU", streams, kernels, of_program, names)) for n, streams in enumerate(TIMES)]
    written = message(*planes, (1, metadata(program(), names)), (4, "host"))
    (OUT / "two_devices.xplane.pb").write_bytes(written)
    kernels = {name: name for name in [*TPU_PROGRAM, *TPU_FACTS]}
    planes = [(1, plane(0, "TPU", TPU_TIMES, kernels, of_tpu, FACTS))]
    written = message(*planes, (1, metadata(tpu_program(), FACTS)), (4, "host"))
    (OUT / "one_tpu.xplane.pb").write_bytes(written)


if __name__ == "__main__":
    main()
