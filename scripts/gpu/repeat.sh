#!/usr/bin/env bash
# Runs one request in COUNT (20) processes on one GPU, AT_ONCE (5) at a time, every other one with an empty compile cache, and prints
# how many processes gave each hash of frames and samples: scripts/gpu/repeat.sh LTX2 OUT [CONFIG…]; default: the toy model in bf16.
# Exit code 1 if the hashes differ.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
ltx2=$1 out=$2 count=${COUNT:-20} at_once=${AT_ONCE:-5}
shift 2
config=("$@")
[ $# -gt 0 ] || config=(-c configs/nano.yml --dtype bf16)
rm -rf "$out"
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
generate() {
    local cache=$out/warm
    [ $(($1 % 2)) = 0 ] || cache=$out/cold$1
    LTX2_COMPILE_CACHE=$cache "$ltx2" -q generate "${config[@]}" --platform cuda --prompt waves --force -o "$out/$1.mp4" \
        --set "runtime.memory_fraction=$(python3 -c "print(0.8 / $at_once)")" > /dev/null
}
generate 0
for n in $(seq 1 $((count - 1))); do
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do wait -n || true; done
    generate "$n" &
done
wait
python3 - "$out" "$count" <<'PYTHON'
import collections, json, pathlib, sys
files = [pathlib.Path(sys.argv[1], f"{n}.json") for n in range(int(sys.argv[2]))]
hashes = collections.Counter(str(json.loads(f.read_text())["sha256"]) if f.exists() else "no video" for f in files)
print("\n".join(f"{runs} processes: {sha}" for sha, runs in hashes.items()))
sys.exit(len(hashes) > 1)
PYTHON
