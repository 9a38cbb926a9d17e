#!/usr/bin/env bash
# Times ltx2, then diffusers, on the same GPU: scripts/gpu/bench.sh LTX2 OUT [WIDTH HEIGHT FRAMES STEPS].
# Needs the CUDA plugin and a python3 with torch, transformers and diffusers.
set -euo pipefail
ltx2=$1 out=$2 width=${3:-768} height=${4:-512} frames=${5:-121} steps=${6:-40}
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader | tee "$out/card.txt"
size=(--width "$width" --height "$height" --num-frames "$frames")
"$ltx2" bench -c ltx2 --weights random --platform cuda "${size[@]}" --steps "$steps" --runs "${RUNS:-3}" \
    --json "$out/ltx2.json" --force
python3 "$(dirname "$0")/peer.py" "${size[@]}" > "$out/diffusers.json"
