#!/usr/bin/env bash
# How well steps are predicted where collectives run beside other work: scripts/gpu/contention.sh LTX2 OUT, on a host with two GPUs.
# Each layout of 12 blocks, 768x512x121: a profile of two steps with the chip's prediction, and the time of a step without the
# profiler. A line each on stdout, everything else below OUT. BLOCKS, LAYOUTS and LIMIT (seconds) change what runs.
set -euo pipefail
[ $# -eq 2 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
ltx2=$(realpath "$1") out=$2
mkdir -p "$out" && out=$(realpath "$out")
export NCCL_NVLS_ENABLE=0
began=$SECONDS limit=${LIMIT:-540}
common=(-c ltx2 --weights random --set "model.blocks=${BLOCKS:-12}" --platform cuda)
nvidia-smi --query-gpu=index,name,driver_version,power.limit --format=csv,noheader | tee "$out/cards.txt"
printf '%-20s %14s %11s %13s\n' layout predicted traced measured
for layout in ${LAYOUTS:-cfg sequence ulysses tensor fsdp-ulysses before-385}; do
    left=$((limit - SECONDS + began))
    [ "$left" -gt 60 ] || { echo "$layout: not measured, $left s are left" >&2; continue; }
    timeout -k 5 "$left" "$ltx2" profile "${common[@]}" --layout "$layout" -o "$out/$layout" --force > "$out/$layout.txt" 2> "$out/$layout.log" \
        || { echo "$layout: profile failed" >&2; tail -n 3 "$out/$layout.log" >&2; continue; }
    left=$((limit - SECONDS + began))
    timeout -k 5 "$((left > 5 ? left : 5))" "$ltx2" bench "${common[@]}" --layout "$layout" --programs denoise --steps 4 --runs 3 --json "$out/$layout.json" --force \
        > "$out/$layout.bench.txt" 2>> "$out/$layout.log" \
        || { echo "$layout: bench failed" >&2; tail -n 3 "$out/$layout.log" >&2; continue; }
    python3 - "$layout" "$out/$layout/summary.json" "$out/$layout.json" <<'PY'
import json, sys
name, profile, bench = sys.argv[1], *(json.load(open(path)) for path in sys.argv[2:])
step = (profile["comparison"] or {"step": {"predicted_ms": float("nan"), "measured_ms": float("nan")}})["step"]
measured = bench["programs"]["denoise_loop"]["median"] * 1e3
print(f"{name:<20} {step['predicted_ms']:>11.2f} ms {step['measured_ms']:>8.2f} ms {measured:>10.2f} ms")
PY
done
