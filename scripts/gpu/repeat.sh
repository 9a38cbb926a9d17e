#!/usr/bin/env bash
# The same request in COUNT (20) processes on one GPU, half of them with the programs of the first, half with an empty cache, AT_ONCE
# (5) of them beside each other in MEMORY (0.8) of the card's: one hash of frames and of samples, or the numbers of each, and the
# outputs of programs (`--dump`) in their order by which the cold ones differ from the first, so that the first names the program.
#
#     scripts/gpu/repeat.sh LTX2 OUT [CONFIG…]     by default the toy model in bf16
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,6s/^# //p' "$0" >&2; exit 2; }
ltx2=$1 out=$2 count=${COUNT:-20} at_once=${AT_ONCE:-5}
shift 2
config=("$@")
[ $# -gt 0 ] || config=(-c configs/nano.yml --dtype bf16)
fraction=$(python3 -c "print(${MEMORY:-0.8} / $at_once)")
mkdir -p "$out"
rm -rf "$out"/warm "$out"/cold* "$out"/*.mp4 "$out"/*.json "$out"/*.safetensors
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
generate() {
    local n=$1 cache=$out/warm
    [ $((n % 2)) = 0 ] || cache=$out/cold$n
    LTX2_COMPILE_CACHE=$cache "$ltx2" -q generate "${config[@]}" --platform cuda --set "runtime.memory_fraction=$fraction" \
        --prompt "waves" --force -o "$out/$n.mp4" --dump "$out/$n.safetensors" > /dev/null
    [ "$cache" = "$out/warm" ] || rm -rf "$cache"
}
generate 0
for n in $(seq 1 $((count - 1))); do
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do wait -n || true; done
    generate "$n" &
done
while [ -n "$(jobs -rp)" ]; do wait -n || true; done
python3 - "$out" "$count" <<'PYTHON'
import collections, json, pathlib, sys
hashes, count = collections.defaultdict(list), int(sys.argv[2])
for n in range(count):
    path = pathlib.Path(sys.argv[1], f"{n}.json")
    sha = json.loads(path.read_text())["sha256"] if path.exists() else {"frames": "no video", "samples": ""}
    hashes[sha["frames"], sha["samples"]].append(f"{n} {'cold' if n % 2 else 'warm'}")
for (frames, samples), runs in hashes.items():
    print(f"frames {frames[:16]} samples {samples[:16]}: {', '.join(runs)}")
print(f"{len(hashes)} different of {count}")


def outputs(n):
    """The dumped tensors' bytes by name."""
    data = pathlib.Path(sys.argv[1], f"{n}.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {name: data[slice(*(start + at for at in entry["data_offsets"]))] for name, entry in header.items()}


if len(hashes) > 1:
    first = outputs(0)
    for n in (n for n in range(1, count, 2) if pathlib.Path(sys.argv[1], f"{n}.safetensors").exists()):
        other = outputs(n)
        print(f"{n} cold: " + ", ".join(f"{name} {'same' if other.get(name) == data else 'DIFFERS'}" for name, data in first.items()))
sys.exit(len(hashes) > 1)
PYTHON
