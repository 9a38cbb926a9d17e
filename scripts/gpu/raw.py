#!/usr/bin/env python3
"""What the machine itself can do, for the table of start.sh: raw.py read FOLDER … | raw.py copy; prints GB/s.

`read` reads the safetensors files of folders with as many threads as there are cores, 32 MiB at a time; `copy` sends 4 GB of
pinned memory to the GPU (needs torch).
"""

import os
import sys
import threading
import time
from pathlib import Path

BLOCK = 32 << 20


def read(folders):
    files = [path for folder in folders for path in sorted(Path(folder).rglob("*.safetensors"))]
    jobs = [(path, at) for path in files for at in range(0, path.stat().st_size, BLOCK)]
    opened = {path: os.open(path, os.O_RDONLY) for path in files}
    lock, done = threading.Lock(), [0]

    def work():
        buffer = memoryview(bytearray(BLOCK))
        while True:
            with lock:
                if not jobs:
                    return
                path, at = jobs.pop(0)
            count = os.preadv(opened[path], [buffer], at)
            with lock:
                done[0] += count

    threads = [threading.Thread(target=work) for _ in range(min(16, os.cpu_count() or 1))]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    print(f"{done[0] / 1e9:.2f} GB in {seconds:.2f} s, {done[0] / 1e9 / seconds:.2f} GB/s")


def copy():
    import torch

    host = torch.empty(4_000_000_000, dtype=torch.uint8).pin_memory()
    device = torch.empty_like(host, device="cuda")
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    print(f"4.00 GB in {seconds:.3f} s, {4 / seconds:.2f} GB/s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["read"] and len(sys.argv) > 2:
        read(sys.argv[2:])
    elif sys.argv[1:] == ["copy"]:
        copy()
    else:
        sys.exit(__doc__)
