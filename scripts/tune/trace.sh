#!/usr/bin/env bash
# Records traces of denoising steps on the GPUs of this machine: scripts/tune/trace.sh LTX2 OUT [ROW…].
# Rows that need more GPUs are skipped. OUT gets a folder per row with tables and compressed traces. Needs the CUDA plugin.
set -euo pipefail
. "$(dirname "$0")/../gpu/rows.sh"
measure() {
    local name=$1
    shift
    "$ltx2" profile -c ltx2 --weights random --platform cuda --steps "${STEPS:-2}" -o "$out/$name" --force "$@" | tee "$out/$name.txt"
    # A trace holds the whole program; it shrinks to a tenth.
    find "$out/$name" -name '*.xplane.pb' -exec gzip -9 -f {} +
    gzip -9 -f -k "$out/$name/summary.json"
}
small=(--width 384 --height 256 --num-frames 25)
row one 1 "${small[@]}" --layout replicated --mesh data=1
row one_full 1 --layout replicated --mesh data=1
row two_sequence 2 "${small[@]}" --layout sequence --mesh context=2
row two_tensor 2 "${small[@]}" --layout tensor --mesh tensor=2
row two_sequence_full 2 --layout sequence --mesh context=2
row four_sequence 4 "${small[@]}" --layout sequence --mesh cfg=2,context=2
row four_sequence_full 4 --layout sequence --mesh cfg=2,context=2
