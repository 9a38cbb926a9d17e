#!/usr/bin/env bash
# ltx2 and diffusers on the same GPU, one after the other: scripts/gpu/bench.sh LTX2 OUT [WIDTH HEIGHT FRAMES STEPS].
# Needs python3 with torch, transformers and diffusers, and the CUDA plugin (`ltx2 plugin install cuda`, or jax's).
set -euo pipefail
ltx2=$1 out=$2 width=${3:-768} height=${4:-512} frames=${5:-121} steps=${6:-40}
here=$(dirname "$0")
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader | tee "$out/card.txt"
size=(--width "$width" --height "$height" --num-frames "$frames")
"$ltx2" bench -c ltx2 --weights random --platform cuda "${size[@]}" --steps "$steps" --runs "${RUNS:-3}" --json "$out/ltx2.json" --force
python3 "$here/peer_diffusers.py" "${size[@]}" > "$out/diffusers.json"
python3 "$here/table.py" "$out/ltx2.json" "$out/diffusers.json"
