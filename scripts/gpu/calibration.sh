#!/usr/bin/env bash
# What the GPUs of this host reach, and how well predictions agree: scripts/gpu/calibration.sh LTX2 OUT PART.
# PART micro times small programs on all GPUs, into OUT/micro-N.json, and prints the constants that follow (a few minutes).
# PARTs first and second compile the cases of experiments/calibration-N.yml and run them, into OUT/cases-N: each goes on where
# the one before ended, and exits after SECONDS_EACH (480); exit code 3 says that cases are left: call second again.
# N is the number of GPUs: 1 (micro alone), 2 or 4. `ltx2 bench --micro --from … --fit FILE.toml`
# keeps the constants; build again before the cases, so that they are predicted with them.
set -euo pipefail
[ $# -eq 3 ] || { sed -n '2,8s/^# //p' "$0" >&2; exit 2; }
ltx2=$(realpath "$1") out=$2 part=$3
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out" && out=$(realpath "$out")
gpus=$(nvidia-smi -L | wc -l)
# What is compiled for one case holds for the next; programs are large, and stay out of OUT.
export LTX2_COMPILE_CACHE=${LTX2_COMPILE_CACHE:-${TMPDIR:-/tmp}/ltx2-calibration}
# Multicast over NVLink takes the switch's rights; nothing here needs it.
export NCCL_NVLS_ENABLE=0
nvidia-smi --query-gpu=index,name,driver_version,power.limit,clocks.max.sm --format=csv,noheader | tee "$out/cards-$gpus.txt"
case $part in
micro)
    "$ltx2" bench --micro --platform cuda --runs "${RUNS:-4}" --json "$out/micro-$gpus.json" --force 2>&1 | tee "$out/micro-$gpus.txt"
    ;;
first | second)
    cases=$root/experiments/calibration-$gpus.yml
    [ -f "$cases" ] || { echo "calibration.sh: no $cases: $gpus GPUs have no cases, take 2 or 4" >&2; exit 2; }
    ended=0
    # The limit ends a case that runs along with the experiment; the next call does it again.
    timeout -k 10 "${SECONDS_EACH:-480}" "$ltx2" experiment "$cases" --measure -o "$out/cases-$gpus" \
        > "$out/cases-$gpus.txt" 2> >(tee -a "$out/cases-$gpus.log" >&2) || ended=$?
    cat "$out/cases-$gpus.txt"
    if [ "$ended" -eq 124 ] || [ "$ended" -eq 137 ]; then
        echo "calibration.sh: cases are left: call '$0 $1 $2 second' again" >&2
        exit 3
    fi
    exit "$ended"
    ;;
*)
    echo "calibration.sh: part '$part' is none of micro, first, second" >&2
    exit 2
    ;;
esac
