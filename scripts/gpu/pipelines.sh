#!/usr/bin/env bash
# Whole requests of several pipelines at full size with random weights, each with its parts: scripts/gpu/pipelines.sh LTX2 OUT [ROW…].
# Rows for which there are too few GPUs say so.
set -euo pipefail
. "$(dirname "$0")/rows.sh"
measure() {
    local name=$1
    shift
    "$ltx2" bench --weights random --platform cuda --runs "${RUNS:-3}" --json "$out/$name.json" --force "$@"
}
size=(--width 768 --height 512)
end=(--programs end-to-end,text-encoder,prepare,denoise,upsampler,refine,video-decoder)
# LTX-2.0, 40 + 3 steps with a negative prompt, 768x512: beside SGLang's own 6.9 s on two H200s.
row two_stage_cfg 2 -c ltx2_two_stage "${size[@]}" --layout cfg --mesh cfg=2 "${end[@]}"
row two_stage_sequence 2 -c ltx2_two_stage "${size[@]}" --layout sequence --mesh context=2 "${end[@]}"
# LTX-2.3, 30 + 3 steps with four branches, 768x512: beside its published 8.2 s on four H200s.
row ltx2_3_cfg 4 -c ltx2_3_two_stage "${size[@]}" --layout cfg --mesh cfg=4 "${end[@]}"
row ltx2_3_sequence 4 -c ltx2_3_two_stage "${size[@]}" --layout sequence --mesh cfg=2,context=2 "${end[@]}"
row ltx2_3_tensor 4 -c ltx2_3_two_stage "${size[@]}" --layout tensor --mesh tensor=4 "${end[@]}"
# The same on two, and its two loops alone, for kernels.sh.
row ltx2_3_tensor_two 2 -c ltx2_3_two_stage "${size[@]}" --layout tensor --mesh tensor=2 "${end[@]}"
row ltx2_3_tensor_loops 2 -c ltx2_3_two_stage "${size[@]}" --layout tensor --mesh tensor="$gpus" --steps 4 --programs denoise,refine
# The same at the preset's 1536x1024.
row ltx2_3_sequence_large 4 -c ltx2_3_two_stage --layout sequence --mesh cfg=2,context=2 "${end[@]}"
row ltx2_3_decoder 1 -c ltx2_3 --layout replicated --mesh data=1 --programs video-decoder,vocoder
