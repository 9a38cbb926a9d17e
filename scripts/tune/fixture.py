"""Writes tests/fixtures/trace/two_devices.xplane.pb (GPUs) and one_tpu.xplane.pb (asynchronous work) by hand.

tests/cli/profile.rs and tests/it/fuzz_seeds.rs know their sums. Encodes protobuf independently of the reader under test: a
message is a list of fields, a field a pair of number and value."""

import pathlib

OUT = pathlib.Path(__file__).resolve().parents[2] / "tests/fixtures/trace"
EPOCH_NS = 1_790_000_000_000_000_000
# Instruction: opcode, name scope with the operation's name, custom call target.
GPU_PROGRAM = {
    "custom-call.1": ("custom-call", "blocks/attn1/to_q/dot_general", "__cublas$lt$matmul"),
    "custom-call.2": ("custom-call", "blocks/attn1/sdpa/custom_call", "__cudnn$fmhaSoftmax"),
    "loop_add_fusion": ("add", "blocks/norm1/add", ""),
    "copy.3": ("copy", "blocks/attn1/transpose", ""),
    "custom-call.4": ("custom-call", "blocks/ff/proj/dot_general", "__cublas$lt$matmul"),
    "all-gather-start": ("all-gather-start", "blocks/attn1/sdpa/all_gather", ""),
    "all-reduce-start": ("all-reduce-start", "blocks/ff/proj/add", ""),
}
GPU_KERNELS = [
    "nvjet_tst_128x256", "cudnn_flash_fprop", "loop_add_fusion", "wrapped_copy", "nvjet_tst_64x64",
    "ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_AllReduce_Sum_bf16",
]
# bf16 elements that an instruction writes, for predicted times; others have no shape.
ELEMENTS = {"custom-call.1": 25_000_000, "custom-call.4": 6_000_000, "loop_add_fusion": 6_000_000, "copy.3": 1_000_000}
BF16 = 16
# A gather in a wrapping computation, a gather spread over fusions, and an operation that only its event describes.
TPU_PROGRAM = {
    "fusion.1": ("fusion", "blocks/ff/proj/dot_general", ""), "async-start.2": ("async-start", "", ""),
    "async-done.2": ("async-done", "", ""), "fusion.3": ("fusion", "blocks/attn1/to_q/all_gather", ""),
    "copy-start.4": ("copy-start", "", ""),
}
TPU_OPERANDS = {"async-done.2": "async-start.2"}
TPU_CALLS = {"fusion.1": 2, "async-start.2": 3, "fusion.3": 4}
TPU_CALLED = {
    2: {"dot.5": ("dot", "blocks/ff/proj/dot_general", "")}, 3: {"all-gather.6": ("all-gather", "blocks/ff/proj/all_gather", "")},
    4: {
        "custom-call.7": ("custom-call", "", "AsyncCollectiveStart"),
        "all-gather.8": ("all-gather", "blocks/attn1/to_q/all_gather", ""),
    },
}
# Category and scope from the event.
TPU_FACTS = {"reduce.9": ("reduce", "blocks/norm1/reduce")}
# Of each device, by stream: instruction, start and end in microseconds.
TPU_TIMES = [{
    "XLA Ops": [
        ("async-start.2", 0, 1), ("fusion.1", 1, 61), ("async-done.2", 61, 71), ("fusion.3", 71, 91), ("reduce.9", 91, 100),
    ],
    "Async XLA Ops": [("async-start.2", 0, 71), ("copy-start.4", 10, 90)],
}]
GPU_TIMES = [{
    "Stream #13(Compute)": [
        ("custom-call.1", 0, 40), ("custom-call.2", 40, 70), ("loop_add_fusion", 70, 80), ("copy.3", 80, 85),
        ("custom-call.4", 100, 130),
    ],
    "Stream #20(Compute)": [("all-gather-start", 60, 95), ("all-reduce-start", 130, 140)],
}, {
    "Stream #13(Compute)": [("custom-call.1", 0, 60), ("custom-call.2", 60, 90)],
    "Stream #20(Compute)": [("all-gather-start", 90, 100)],
}]
FACTS = ["hlo_op", "hlo_module", "program_id", "Hlo Proto", "denoise", "hlo_category", "tf_op"]
FACT = {name: at for at, name in enumerate(FACTS, 1)}


def varint(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out + bytes([value]))


def field(number, value):
    """Encodes a field: a number, text, bytes or a message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, list):
        value = b"".join(field(*each) for each in value if each[1] not in ("", None))
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def table(number, entries):
    return [(number, [(1, key), (2, value)]) for key, value in entries.items()]


def computation(own, name, instructions, first, root):
    number, fields = {name: first + at for at, name in enumerate(instructions)}, [(1, name)]
    for name, (opcode, scope, target) in instructions.items():
        shape = [(3, [(2, BF16), (3, ELEMENTS[name])])] if name in ELEMENTS else []
        links = [(36, number.get(TPU_OPERANDS.get(name))), (38, TPU_CALLS.get(name))]
        fields.append((2, [(1, name), (2, opcode), *shape, (7, [(2, scope)]), (28, target), (35, number[name]), *links]))
    return 3, [*fields, (5, own), (6, root)]


def program(entry, called):
    inner = [computation(own, f"called.{own}", each, 100 * own, 100 * own + len(each) - 1) for own, each in called.items()]
    return [(1, [(1, "denoise"), *inner, computation(1, "main", entry, 10, 10), (6, 1)])]


def facts_of(name):
    if name in TPU_FACTS:
        category, scope = TPU_FACTS[name]
        return [(4, [(1, FACT["hlo_category"]), (5, category)]), (4, [(1, FACT["tf_op"]), (5, scope)])]
    values = {"hlo_op": (5, name), "hlo_module": (7, FACT["denoise"]), "program_id": (3, 42)}
    return [(4, [(1, FACT[fact]), value]) for fact, value in values.items()]


def plane(number, device, streams, kernels):
    at = {name: n for n, name in enumerate(kernels, 1)}
    fields = [(1, number), (2, f"/device:{device}:{number}")]
    for n, (stream, events) in enumerate(streams.items()):
        times = [(at[name], start * 1_000_000, (end - start) * 1_000_000, facts_of(name)) for name, start, end in events]
        events = [(4, [(1, name), (2, start), (3, length), *facts]) for name, start, length, facts in times]
        fields.append((3, [(1, 13 + n), (2, stream), (3, EPOCH_NS), *events]))
    return fields + table(4, {n: [(1, n), (2, kernels[name])] for name, n in at.items()})


def write(file, device, times, program, kernels, facts):
    names = table(5, {FACT[name]: [(1, FACT[name]), (2, name)] for name in facts})
    planes = [plane(n, device, streams, kernels) for n, streams in enumerate(times)]
    entry = [(1, 42), (2, "denoise(42)"), (5, [(1, FACT["Hlo Proto"]), (6, program)])]
    planes.append([(2, "/host:metadata"), *table(4, {42: entry})])
    encoded = [field(1, plane + names) for plane in planes] + [field(4, "host")]
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / file).write_bytes(b"".join(encoded))


def main():
    gpu, tpu = program(GPU_PROGRAM, {}), program(TPU_PROGRAM, TPU_CALLED)
    write("two_devices.xplane.pb", "GPU", GPU_TIMES, gpu, dict(zip(GPU_PROGRAM, GPU_KERNELS)), FACTS[:5])
    write("one_tpu.xplane.pb", "TPU", TPU_TIMES, tpu, {name: name for name in [*TPU_PROGRAM, *TPU_FACTS]}, FACTS)


if __name__ == "__main__":
    main()
