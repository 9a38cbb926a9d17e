#!/usr/bin/env bash
# Times the step cache on one GPU, with published weights: scripts/gpu/cache.sh LTX2 OUT [ROW…].
# THRESHOLDS, MODEL (default: of the preset ltx2) and PROMPTS (a file, one per line) replace the defaults. Rows:
# condition: the denoising loop without a cache, and with threshold 0, which skips no step: the cost of the condition.
# bf16, fp8: distance to, and time relative to, the run without a cache.
set -euo pipefail
source "$(dirname "$0")/rows.sh"
nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader | tee "$out/card.txt"
size=(-c ltx2 --platform cuda --width 768 --height 512 --num-frames 121 --steps 40)
[ -z "${MODEL:-}" ] || size+=(--model "$MODEL")
measure() {
    local name=$1
    shift
    "$ltx2" "$@" --json "$out/$name.json" --force
}
adaptive=(--set sampler.cache.kind=adaptive --set sampler.cache.threshold=0)
for run in off_1 0_1 off_2 0_2 off_3 0_3; do
    row condition 1 bench "${size[@]}" --weights random --programs denoise --runs 3 $([[ $run == off* ]] || echo "${adaptive[@]}")
    [ ! -f "$out/condition.json" ] || mv "$out/condition.json" "$out/condition_$run.json"
done
prompts=${PROMPTS:-$out/prompts.txt}
[ -n "${PROMPTS:-}" ] || cat > "$prompts" <<'END'
a red fox trots through deep snow at dawn, soft crunching steps
waves break on black rocks under a lighthouse, wind and gulls
a potter shapes a bowl on a spinning wheel, close-up, a quiet hum
rain runs down a tram window at night, neon reflections, a distant bell
END
quality=(quality "${size[@]}" --prompts "$prompts" --cache "0,${THRESHOLDS:-0.02,0.05,0.1,0.2}")
row bf16 1 "${quality[@]}"
row fp8 1 "${quality[@]}" --set runtime.weights=fp8
