#!/usr/bin/env bash
# What four GPUs of one host do, within nine minutes: scripts/gpu/four.sh LTX2 OUT [PART…], parts in the order of worth:
#   steps      one step of LTX-2.0, 768x512x121 with guidance, on one GPU, then by four layouts on four and by `layout: auto`
#   profiles   twelve blocks of each layout: communication that work overlaps, and that it does not
#   two_pass   LTX-2.3 in two passes of 30 and 3 steps, four guidance branches, over cfg and over tensor; kernels of the latter
#   bits       the same bytes from several processes, in f32 and bf16, and the ends of all when one is killed (processes.sh)
#   decoder    the video decoder over four
# Prints everything; files are below OUT. A part that would begin after LIMIT seconds (500) says that it was not measured.
set -uo pipefail
[ $# -ge 2 ] || { sed -n '2,8s/^# //p' "$0" >&2; exit 2; }
ltx2=$(realpath "$1") out=$2 here=$(cd "$(dirname "$0")" && pwd)
shift 2
mkdir -p "$out" && out=$(realpath "$out")
# Multicast over NVLink takes the switch's rights; nothing here needs it.
export NCCL_NVLS_ENABLE=0 LTX2_COMPILE_CACHE="$out/cache"
began=$SECONDS limit=${LIMIT:-500}
gpus=$(nvidia-smi -L | wc -l)
nvidia-smi --query-gpu=index,name,driver_version,power.limit --format=csv,noheader | tee "$out/cards.txt"
[ "$gpus" -ge 4 ] || { echo "not measured: $gpus of 4 GPUs"; exit 1; }

# Seconds that are left; says so where there are none.
room() { left=$((limit - SECONDS + began)); [ "$left" -gt 20 ] || { echo "$1: not measured, $left s are left"; return 1; }; }
# bench NAME ARGUMENTS…: NAME.json, and its log; the error where it fails.
bench() {
    local name=$1
    shift
    room "$name" || return 0
    timeout -k 5 "$left" "$ltx2" bench --weights random --platform cuda --runs 3 --json "$out/$name.json" "$@" \
        > "$out/$name.txt" 2> "$out/$name.log" || { echo "$name: failed"; tail -n 3 "$out/$name.log"; }
}
# Median and prediction of a program.
row() {
    [ -f "$out/$1.json" ] && python3 - "$out/$1.json" "$2" "$1" <<'PY'
import json, sys
path, program, name = sys.argv[1:]
timed = json.load(open(path))["programs"].get(program)
if timed:
    predicted = (timed["program"] or {}).get("predicted")
    guess = f"predicted {predicted * 1e3:8.2f} ms" if predicted else ""
    print(f"{name:<24}{program:<16}{timed['median'] * 1e3:9.2f} ms  {guess}")
PY
}

layouts=("cfg-ulysses cfg=2,context=2" "sequence cfg=2,context=2" "hybrid context=4" "tensor cfg=2,tensor=2")
case $(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1) in
    *H200*) kind=h200 ;;
    *H100*) kind=h100 ;;
    *) echo "four.sh: the cost model has no chip of this card" >&2; exit 1 ;;
esac
steps() {
    room steps || return 0
    {
        echo "{title: Four GPUs of one host, config: ltx2, set: [model.weights=random, sampler.steps=4], layers: 3, timeout: 240,"
        echo "shapes: [768x512x121], include: [{target: 'cuda:$kind:1x1x1', layout: replicated}, {target: 'cuda:$kind:1x1x4', layout: auto}"
        for each in "${layouts[@]}"; do
            read -r layout mesh <<< "$each"
            echo ", {target: 'cuda:$kind:1x1x4', layout: $layout, mesh: '$mesh'}"
        done
        echo "]}"
    } > "$out/four.yml"
    timeout -k 5 "$left" "$ltx2" experiment "$out/four.yml" --measure -o "$out/steps" > "$out/steps.txt" 2> "$out/steps.log" \
        || tail -n 3 "$out/steps.log"
    cat "$out/steps.txt"
    grep -h -m 1 "layout auto" "$out/steps.log"
    python3 - "$out/steps.txt" <<'PY'
import sys
measured, four = {}, False
printed = open(sys.argv[1]).read()
for line in printed.splitlines() if "measured ms" in printed else []:
    cells = line.split()
    four = "1x1x4" in line if line.startswith("cuda:") else four
    # Name, perhaps a mesh, how far behind, predicted, compute, memory, links, measured.
    if "%" in cells or cells[:1] == ["replicated"]:
        numbers = [float(c) for c in cells if c.replace(".", "", 1).isdigit()]
        at = 5 if "%" in cells else 4
        if len(numbers) > at + 2:
            measured[("four" if four else "one", " ".join(c for c in cells[:2] if c[0].isalpha()))] = numbers[at]
one = next((ms for (count, _), ms in measured.items() if count == "one"), None)
for (count, name), ms in sorted(measured.items(), key=lambda item: item[1]):
    if one and count == "four":
        print(f"{name:<36}{ms:9.2f} ms a step, {one / 4 / ms * 100:6.1f} % of a quarter of one GPU's {one:.2f} ms")
PY
}

profiles() {
    for each in "${layouts[@]}"; do
        read -r layout mesh <<< "$each"
        room "profile of $layout" || return 0
        timeout -k 5 "$left" "$ltx2" profile -c ltx2 --weights random --set model.blocks=12 --platform cuda --layout "$layout" \
            --mesh "$mesh" -o "$out/profile-$layout" > "$out/profile-$layout.txt" 2> "$out/profile-$layout.log" \
            || { echo "profile of $layout: failed"; tail -n 3 "$out/profile-$layout.log"; continue; }
        find "$out/profile-$layout" -name '*.xplane.pb' -delete
        echo "$layout ($mesh), 12 blocks:"
        sed -n '/exposed/,/^$/p' "$out/profile-$layout.txt" | grep -E 'exposed|all-|reduce|permute|idle' | sed 's/^/    /'
    done
}

two_pass() {
    local branches=(-c ltx2_3_two_stage --set guidance.video.stg=1 --set guidance.video.modality=3 --set guidance.audio.stg=1
        --set guidance.audio.modality=3 --width 768 --height 512 --num-frames 121 --steps 30)
    # Both compile at a time, each measuring kernels on cards of its own.
    for each in "cfg cfg=4 0,1,2,3" "tensor tensor=4 2,3,0,1"; do
        read -r layout mesh cards <<< "$each"
        room "two_pass-$layout" || return 0
        CUDA_VISIBLE_DEVICES=$cards timeout -k 5 "$left" "$ltx2" warm "${branches[@]}" --weights random --platform cuda \
            --layout "$layout" --mesh "$mesh" > "$out/warm-$layout.log" 2>&1 &
    done
    wait
    for each in "cfg cfg=4" "tensor tensor=4"; do
        read -r layout mesh <<< "$each"
        bench "two_pass-$layout" "${branches[@]}" --programs denoise,refine --layout "$layout" --mesh "$mesh"
        row "two_pass-$layout" denoise_loop
        row "two_pass-$layout" refine_loop
    done
    python3 - "$out" <<'PY'
import json, os, sys
for layout in ("cfg", "tensor"):
    path = f"{sys.argv[1]}/two_pass-{layout}.json"
    if os.path.exists(path):
        programs = json.load(open(path))["programs"]
        first, second = (programs[name]["median"] for name in ("denoise_loop", "refine_loop"))
        print(f"two passes, {layout}: 30 x {first:.4f} + 3 x {second:.4f} = {30 * first + 3 * second:.3f} s")
PY
    room "kernels of tensor" || return 0
    "$here/kernels.sh" "$out/kernels.tsv" timeout -k 5 "$left" "$ltx2" bench --weights random --platform cuda --runs 1 \
        "${branches[@]}" --programs denoise,refine --layout tensor --mesh tensor=4 > "$out/kernels.txt" 2> "$out/kernels.log" \
        && sort -rn "$out/kernels.tsv" | head -n 15
}

bits() {
    room "processes" && timeout -k 5 "$left" "$here/processes.sh" "$ltx2" "$out/processes"
}

decoder() {
    CUDA_VISIBLE_DEVICES=0 bench decoder-one -c ltx2 --programs video-decoder --layout replicated
    bench decoder-four -c ltx2 --programs video-decoder --layout sequence --mesh cfg=2,context=2
    row decoder-one video_decoder
    row decoder-four video_decoder
}

for part in "${@:-steps profiles two_pass bits decoder}"; do
    for one in $part; do
        echo "== $one, $((SECONDS - began)) s"
        "$one"
    done
done
echo "== $((SECONDS - began)) s"
