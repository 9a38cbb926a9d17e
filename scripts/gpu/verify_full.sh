#!/usr/bin/env bash
# The full-size rehearsal of scripts/verify_real.sh on one GPU: scripts/gpu/verify_full.sh LTX2 [2.0|2.3|2.5] [OPTION…]
#
# Writes a random model of the published size by diffusers' own save_pretrained, filled on the GPU, then compares ltx2 with the
# reference on it in bf16; the limit is 1.5 times the distance of two runs of the reference with different attention kernels.
# It says nothing about published weights. PYTHON (default python3) has torch and transformers; what it lacks of diffusers,
# accelerate, ltx-core, ltx-pipelines, einops and scipy is taken from the wheels in WHEELS, without the network. WHERE is the
# folder of the model (63 to 67 GiB), which is taken as a distilled one where its path says `distilled`; left out, the first of /dev/shm, the working folder and /tmp that holds it. Exit code 4:
# none does.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
ltx2=$(realpath "$1")
generation=${2:-2.0}
shift $(($# < 2 ? $# : 2))
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
out=${OUT:-out/verify-full}
if [ -n "${WHEELS:-}" ]; then
    # Not a venv: one made by the Python of another does not see that one's packages.
    "$python" -m pip install -q --no-deps --no-index --upgrade --target "$out/site" "$WHEELS"/*.whl
    PYTHONPATH=$(realpath "$out/site")${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
fi
model=$("$python" "$here/full_model.py" "$generation" ${WHERE:+"$WHERE"})
trap 'rm -rf "$model"' EXIT
"$here/../verify_real.sh" "$model" --ltx2 "$ltx2" --python "$(command -v "$python")" -o "$out/$generation" \
    --device cuda --dtype bf16 --steps "${STEPS:-4}" "$@"
