"""Writes tests/fixtures/noise/randn.json and randn_bf16.json: draws of torch's CPU generator.

Each case has the sha256 of consecutive draws and the bits of their first and last values. Needs x86-64 with AVX2 or AVX-512.
"""

import torch

from common import FIXTURES, float_bits, write_json

CAPABILITY = torch.backends.cpu.get_cpu_capability()


def case(seed, shapes, dtype=torch.float32):
    generator, draws = torch.Generator("cpu").manual_seed(seed), []
    for shape in shapes:
        bits, sha256 = float_bits(torch.randn(shape, generator=generator, dtype=dtype))
        draws.append({"shape": shape, "sha256": sha256, "first": bits[:2].tolist(), "last": bits[-2:].tolist()})
    return {"seed": seed, "draws": draws}


def write(name, cases):
    meta = {"script": "scripts/oracle/noise.py", "versions": {"torch": torch.__version__, "cpu_capability": CAPABILITY}}
    write_json(FIXTURES / "noise" / name, {**meta, "cases": cases}, ('{"shape"',))


def randn():
    assert CAPABILITY in ("AVX2", "AVX512"), f"{CAPABILITY}: torch's generic kernels draw other bits"
    cases = [
        case(0, [[n] for n in range(1, 101)]),  # one stream: the short path's waiting value crosses the long draws
        case(10, [[127], [1000], [12345], [3], [5]]),
        case(42, [[(1 << 20) + 3]]),
        case(10, [[1, 128, 16, 16, 24], [1, 8, 126, 16]]),  # the default request: video, then audio
        case(1234, [[1, 4, 3, 5, 7], [1, 2, 5, 2], [1, 2, 3, 1]]),
        *(case(seed, [[33], [7]]) for seed in ((1 << 32) - 1, (1 << 32) + 12345)),
        case((1 << 64) - 1, [[16], [15]]),
        case(0xDEAD_BEEF_CAFE_F00D, [[64], [1]]),
    ]
    write("randn.json", cases)
    narrow = {10_010: [[1, 6144, 8], [1, 126, 8], [40], [9], [17]], 3: [[20]]}
    write("randn_bf16.json", [case(seed, shapes, torch.bfloat16) for seed, shapes in narrow.items()])
