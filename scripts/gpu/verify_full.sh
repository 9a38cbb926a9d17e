#!/usr/bin/env bash
# Runs scripts/verify_real.sh in bf16 on a random model of the published size on one GPU:
# scripts/gpu/verify_full.sh LTX2 [2.0|2.3|2.5] [OPTION…]
# PYTHON (default: python3) must have torch and transformers. The other packages of the reference are installed from the wheels
# in WHEELS, if it is set. WHERE is the folder for the model (63 to 67 GiB); default: the first of /dev/shm, the working folder
# and /tmp with enough space, else exit code 4. A path with `distilled` makes a distilled model.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
ltx2=$(realpath "$1")
generation=${2:-2.0}
shift $(($# < 2 ? $# : 2))
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
out=${OUT:-out/verify-full}
if [ -n "${WHEELS:-}" ]; then
    # Not a venv: it would not see the packages of a Python that is itself in a venv.
    "$python" -m pip install -q --no-deps --no-index --upgrade --target "$out/site" "$WHEELS"/*.whl
    PYTHONPATH=$(realpath "$out/site")${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
fi
model=$("$python" "$here/full_model.py" "$generation" ${WHERE:+"$WHERE"})
trap 'rm -rf "$model"' EXIT
"$here/../verify_real.sh" "$model" --ltx2 "$ltx2" --python "$(command -v "$python")" -o "$out/$generation" \
    --device cuda --dtype bf16 --steps "${STEPS:-4}" "$@"
