#!/usr/bin/env bash
# Compares `layout: auto` with every shipped layout on two GPUs: scripts/gpu/hq_layouts.sh LTX2 OUT.
# Measures one denoising step of the LTX-2.3 HQ preset (12 blocks, random weights) with `auto` and with each shipped layout on each
# mesh of MESHES whose axes the layout uses, and prints one table with the ratio of auto to the best. Exit code 1 if the ratio is above
# 1.02 or if a layout was not measured. Layouts that compile to the same program are measured once.
# About eight minutes on two H100s; LIMIT (530) is the number of seconds after which nothing more is started.
# PRESET (ltx2_3_hq), BLOCKS (12), RUNS (2), STEPS (2) and MESHES ("cfg=2 context=2 tensor=2 fsdp=2") choose another case;
# all meshes must have the same number of devices. JOBS (a third of the cores) programs are compiled at a time.
# Needs the CUDA plugin (`ltx2 plugin install cuda`, or jax's in LTX2_PJRT_PLUGIN), python3 and this checkout's shardings/.
set -uo pipefail
[ $# -eq 2 ] || { sed -n '2,9s/^# //p' "$0" >&2; exit 2; }
[ -x "$1" ] || { echo "hq_layouts.sh: $1 is not an executable" >&2; exit 2; }
ltx2=$(realpath "$1") out=$2 here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out" && out=$(realpath "$out") || exit 1
# NVLink multicast needs rights on the switch; nothing here uses it.
export NCCL_NVLS_ENABLE=0 LTX2_COMPILE_CACHE="$out/cache"
began=$SECONDS limit=${LIMIT:-530}
read -ra meshes <<< "${MESHES:-cfg=2 context=2 tensor=2 fsdp=2}"
jobs=${JOBS:-$(($(nproc) / 3))}
[ "$jobs" -ge 1 ] || jobs=1
devices=$(python3 -c 'import math, sys; print(math.prod(int(a.split("=")[1]) for a in sys.argv[1].split(",")))' "${meshes[0]}")
gpus=$(nvidia-smi -L | wc -l)
date -u +%F
nvidia-smi --query-gpu=index,name,driver_version,power.limit --format=csv,noheader | tee "$out/cards.txt"
[ "$gpus" -ge "$devices" ] || { echo "not measured: $gpus of $devices GPUs"; exit 1; }
CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((devices - 1)))
export CUDA_VISIBLE_DEVICES
case $(head -n 1 "$out/cards.txt") in
    *H200*) kind=h200 ;;
    *H100*) kind=h100 ;;
    *) echo "hq_layouts.sh: the cost model has no chip of this card" >&2; exit 1 ;;
esac
common=(-c "${PRESET:-ltx2_3_hq}" --weights random --set "model.blocks=${BLOCKS:-12}" --set "sampler.steps=${STEPS:-2}")

# Layouts in the order in which they are measured: the fastest candidates first.
layouts=(ring sequence ulysses cfg tensor cfg-ulysses hybrid)
for file in "$here"/../../shardings/*.yml; do
    name=$(basename "$file" .yml)
    [[ " ${layouts[*]} " == *" $name "* ]] || layouts+=("$name")
done
# uses LAYOUT MESH: whether the layout's rules for the transformer use every axis of the mesh.
uses() {
    local axis
    for axis in ${2//,/ }; do
        grep -qE "^  (batch|branch|video_sequence|heads|embed): \[[^]]*\b${axis%=*}\b" "$here/../../shardings/$1.yml" || return 1
    done
}
# compiled LAYOUT MESH: compiles into the cache; the report is NAME.compiled.json.
compiled() {
    local name=$1-$2
    timeout -k 5 $((limit - 120)) "$ltx2" -q compile "${common[@]}" --target "cuda:$kind:1x1x$devices" --program denoise --layout "$1" \
        --mesh "$2" --save "$LTX2_COMPILE_CACHE" --json "$out/$name.compiled.json" --force > /dev/null 2> "$out/$name.compile.log"
}
# measured NAME ARGUMENTS…: NAME.json.
measured() {
    local name=$1 left=$((limit - SECONDS + began))
    shift
    [ "$left" -gt 15 ] || { echo "not measured: no time left" > "$out/$name.log"; return 1; }
    timeout -k 5 "$left" "$ltx2" bench "${common[@]}" --platform cuda --programs denoise --runs "${RUNS:-2}" "$@" --json "$out/$name.json" --force \
        > /dev/null 2> "$out/$name.log"
}

rm -f "$out"/*.json
cases=()
for layout in "${layouts[@]}"; do
    for mesh in "${meshes[@]}"; do
        uses "$layout" "$mesh" && cases+=("$layout $mesh")
    done
done
for each in "${cases[@]}"; do
    read -r layout mesh <<< "$each"
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
    compiled "$layout" "$mesh" &
done
wait
echo "compiled after $((SECONDS - began)) s"

# Beside the GPUs that are there and no others, `auto` ranks layouts for these devices.
measured auto-first --layout auto
declare -A seen
for each in "${cases[@]}"; do
    read -r layout mesh <<< "$each"
    report=$out/$layout-$mesh.compiled.json
    # A layout that the mesh does not fit has no report.
    [ -e "$report" ] || continue
    hash=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["hash"])' "$report")
    [ -z "${seen[$hash]:-}" ] || continue
    seen[$hash]=1
    measured "$layout-$mesh" --layout "$layout" --mesh "$mesh"
done
measured auto-again --layout auto

python3 - "$out" "${cases[@]}" <<'PY'
import json, os, sys
out, *cases = sys.argv[1:]
def read(name):
    path = f"{out}/{name}.json"
    return json.load(open(path)) if os.path.exists(path) else None
def step(done):
    # By itself where the loop is of two steps, else a part of it.
    return done["programs"].get("denoise_step") or done["programs"]["denoise_loop"]
def last(name):
    try:
        return open(f"{out}/{name}.log").read().strip().splitlines()[-1]
    except (OSError, IndexError):
        return "no output"
rows, missing = {}, []
for case in cases:
    layout, mesh = case.split()
    report = read(f"{layout}-{mesh}.compiled")
    if report is None:
        print(f"{case}: not compiled: {last(f'{layout}-{mesh}.compile')}")
        continue
    row = rows.setdefault(report["hash"], {"names": [], "predicted": (report["predicted_ms"] or {}).get("step"), "seconds": []})
    row["names"].append(case)
    done = read(f"{layout}-{mesh}")
    if done:
        row["seconds"] += step(done)["seconds"]
auto, chosen = [], None
for name in ("auto-first", "auto-again"):
    done = read(name)
    if not done:
        missing.append(f"{name}: {last(name)}")
        continue
    loop = step(done)
    chosen = loop["program"]["hash"]
    auto += loop["seconds"]
    row = rows.setdefault(chosen, {"names": [f"{done['config']['layout']} (auto)"], "predicted": None, "seconds": []})
    row["seconds"] += loop["seconds"]
print(f"{'ms a step':>10}{'slowest':>10}{'predicted':>11}  layouts of the same program")
for key, row in sorted(rows.items(), key=lambda r: min(r[1]["seconds"], default=9e9)):
    if not row["seconds"]:
        missing.append(f"{row['names'][0]}: {last(row['names'][0].replace(' ', '-'))}")
        continue
    predicted = "" if row["predicted"] is None else f"{row['predicted']:.1f}"
    mark = "  <- auto" if key == chosen else ""
    print(f"{min(row['seconds']) * 1e3:10.1f}{max(row['seconds']) * 1e3:10.1f}{predicted:>11}  {', '.join(row['names'])}{mark}")
for line in missing:
    print(f"not measured: {line}")
times = [min(row["seconds"]) for row in rows.values() if row["seconds"]]
if not auto or not times:
    sys.exit("auto was not measured")
# The row of auto's choice has all runs of its program.
ratio = min(rows[chosen]["seconds"]) / min(times)
print(f"auto / best = {ratio:.3f}, limit 1.02")
sys.exit(ratio > 1.02 or bool(missing))
PY
code=$?
echo "$((SECONDS - began)) s"
exit $code
