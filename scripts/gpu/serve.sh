#!/usr/bin/env bash
# `ltx2 serve` on one GPU: scripts/gpu/serve.sh LTX2 OUT [PRESET [WIDTH HEIGHT FRAMES]]. Random weights, two passes. Prints a table:
# what `generate` takes from command to video, what the server takes to be ready, its first and its tenth request (of several
# servers: the writing of a video takes as long as the host's other work lets it), how long the device waits between queued jobs, and
# whether a video is written while the next one is denoised. Seven minutes at the published size. Needs the CUDA plugin (`ltx2 plugin
# install cuda`, or jax's in LTX2_PJRT_PLUGIN) and python3.
set -euo pipefail
ltx2=$1 out=$2 preset=${3:-ltx2_distilled}
shift $(($# < 3 ? $# : 3))
width=${1:-768} height=${2:-512} frames=${3:-121}
here=$(dirname "$0")
mkdir -p "$out"
command -v nvidia-smi > /dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
export LTX2_COMPILE_CACHE=$out/cache
python3 "$here/serve.py" --ltx2 "$ltx2" --out "$out" --preset "$preset" --size "${width}x$height" --frames "$frames" \
	--platform "${PLATFORM:-cuda}" --weights "${WEIGHTS:-random}" --servers "${SERVERS:-5}" --requests "${REQUESTS:-10}" --queued "${QUEUED:-5}"
