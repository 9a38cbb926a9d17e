#!/usr/bin/env bash
# Runs verify_real.sh on tiny random models of each generation, as folders and (except LTX-2.5) as files:
# scripts/verify/rehearse.sh LTX2 OUT [OPTION…].
set -euo pipefail
ltx2=$(realpath "$1") out=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:?a Python that has the pinned reference; scripts/oracle/venv.sh makes one}
"$python" "$here/rehearsal_models.py" "$out/models"
status=0
shopt -s nullglob
for model in "$out"/models/*/diffusers "$out"/models/*/ltx-*-{dev,distilled}.safetensors; do
    name=$(basename "$(dirname "$model")")-$([ -d "$model" ] && echo folder || echo file)
    folder=$(dirname "$model")/diffusers
    python3 "$here/main.py" "$model" --diffusers "$folder" --ltx2 "$ltx2" --python "$python" -o "$out/$name" \
        --sizes 128x64x1 128x128x9 192x128x17 --steps 3 --max-sequence-length 64 \
        --set runtime.xla_flags.xla_backend_optimization_level=0 "$@" || status=$?
done
exit "$status"
