"""Compares `ltx2 profile` with xprof: the share of each kind of work in the devices' time.

    python scripts/tune/agree.py LTX2 FILE.xplane.pb[.gz]…     # needs scripts/tune/requirements.txt

Kinds are derived independently from xprof's categories, texts and name scopes, which cannot tell elementwise work, copies and
loop overhead apart. A difference of more than TOLERANCE percentage points is an error."""

import collections
import gzip
import json
import pathlib
import re
import subprocess
import sys
import tempfile

TOLERANCE = 2.0
COLLECTIVES = ["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast"]
MOVES = ["copy", "transpose", "slice", "dynamic", "update", "concatenate", "pad", "broadcast", "bitcast", "reshape"]
REST = "elementwise, copy, other"
IDLE = "what these leave"


def table(tool, path):
    from xprof.convert import raw_to_tool_data

    data, _ = raw_to_tool_data.xspace_to_tool_data([str(path)], tool, {"use_saved_result": False})
    if not data:
        sys.exit(f"{path}: xprof makes no {tool} of it")
    found = json.loads(data)
    found = found[0] if isinstance(found, list) else found
    names = [column["id"] for column in found["cols"]]
    return [dict(zip(names, (cell["v"] for cell in row["c"]))) for row in found["rows"]]


def kind(row):
    category, name = row["category"], row["hlo_op_name"]
    # Fusions and asynchronous pairs around a collective are named after it.
    for text in (category, name.replace("_", "-")):
        if found := [collective for collective in COLLECTIVES if text.startswith(collective)]:
            return found[0]
    scope, _, operation = row["tf_op_name"].rstrip(":").rpartition("/")
    computes = "fusion" in category or category == "custom-call"
    # Like `loop_transpose_fusion.3`.
    moves = set(re.findall("[a-z]+", name)) <= {"loop", "wrapped", "fusion", *MOVES}
    if "sdpa" in scope.split("/") and computes and not moves:
        return "attention"
    library = category == "custom-call" and (operation == "dot_general" or "cublas" in name)
    fused = category == "custom fusion" and "gemm" in name
    return "matmul" if category.startswith(("convolution", "dot")) or library or fused else REST


def parts(times, whole):
    """Converts times to percent; the rest of `whole` is idle."""
    shares = {name: 100 * time / (whole or sum(times.values())) for name, time in times.items()}
    return {**shares, IDLE: 100 - sum(shares.values())} if whole else shares


def compare(ltx2, path):
    times = collections.Counter()
    for row in table("hlo_stats", path):
        times[kind(row)] += row["total_self_time"]
    rows = [row for row in table("framework_op_stats", path) if row["type"] == "IDLE"]
    idle, share = sum(row["total_self_time"] for row in rows), rows[0]["device_total_self_time_percent"]
    # Idle time and its share give the total. Without idle time, the operations are the total.
    theirs = parts(times, idle / share if idle else None)
    trace = json.loads(subprocess.check_output([ltx2, "profile", "--read", path, "--json", "-"]))["trace"]
    times = collections.Counter()
    for row in trace["activities"]:
        name = row["activity"]
        times[name if name in ("matmul", "attention", *COLLECTIVES) else REST] += row["ms"]
    # Without idle time, shares are of the operations' time.
    own = parts(times, trace["window_ms"] if IDLE in theirs else None)
    print(f"{'share of the time, %':<28}{'ltx2':>8}{'xprof':>8}{'apart':>8}")
    rows = [(name, own.get(name, 0.0), theirs.get(name, 0.0)) for name in sorted({*theirs, *own}, key=lambda n: -own.get(n, 0.0))]
    for name, a, b in rows:
        print(f"{name:<28}{a:>8.2f}{b:>8.2f}{abs(a - b):>8.2f}")
    return max((abs(a - b) for _, a, b in rows), default=0.0)


if len(sys.argv) < 3:
    sys.exit(__doc__)
ltx2, *paths = sys.argv[1:]
failed = []
for path in map(pathlib.Path, paths):
    print(f"== {path}")
    with tempfile.TemporaryDirectory() as folder:
        # xprof writes its results next to the file.
        copy, read = pathlib.Path(folder) / "host.xplane.pb", gzip.open if path.suffix == ".gz" else open
        copy.write_bytes(read(path, "rb").read())
        if compare(ltx2, copy) > TOLERANCE:
            failed.append(str(path))
if failed:
    sys.exit(f"more than {TOLERANCE} points apart: {', '.join(failed)}")
