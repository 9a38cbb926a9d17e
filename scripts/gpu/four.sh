#!/usr/bin/env bash
# What four GPUs of one host do, meant for nine minutes: scripts/gpu/four.sh LTX2 OUT [PART…], parts in the order of worth:
#   ahead      compiles the programs of the next parts, many at a time, and beside that what no clock is kept of: the same bytes
#              from one, two and four processes, the ends of all when one of four is killed (processes.sh), and how far each layout's
#              latents in bf16 are from one GPU's (ring.sh)
#   steps      one step of LTX-2.0, 768x512x121 with guidance, on one GPU, then by five layouts on four
#   two_pass   LTX-2.3 in two passes of 30 and 3 steps, four guidance branches, over cfg and over tensor, from prompt to samples
#   decoder    the video decoder over four
#   kernels    the kernels of two passes over tensor, by group of names and the longest
#   profiles   six blocks of each layout: communication that work overlaps, and that it does not
#   permutes   `bench --micro` of what a ring passes on; only if it is named
# Prints everything; files are below OUT. A part that would begin after LIMIT seconds (540) says that it was not measured. Exit code 1
# where something failed or was not measured. SET=KEY=VALUE is an option for what is timed and traced.
set -uo pipefail
[ $# -ge 2 ] || { sed -n '2,15s/^# //p' "$0" >&2; exit 2; }
[ -x "$1" ] || { echo "four.sh: $1 is no program" >&2; exit 2; }
ltx2=$(realpath "$1") out=$2 here=$(cd "$(dirname "$0")" && pwd)
shift 2
mkdir -p "$out" && out=$(realpath "$out") || exit 1
parts=(${@:-ahead steps two_pass decoder kernels profiles})
for part in "${parts[@]}"; do
    case $part in
        ahead | steps | two_pass | permutes | profiles | decoder | kernels) ;;
        *) echo "four.sh: no part '$part'" >&2; exit 2 ;;
    esac
done
# Multicast over NVLink takes the switch's rights; nothing here needs it.
export NCCL_NVLS_ENABLE=0 LTX2_COMPILE_CACHE="$out/cache"
began=$SECONDS limit=${LIMIT:-540}
more=(${SET:+--set "$SET"})
# Parts run in shells of their own too; what fails in one is in a file.
failed=$out/failed
rm -f "$failed"
bad() { echo "$*" | tee -a "$failed"; }
gpus=$(nvidia-smi -L | wc -l)
date -u +%F
nvidia-smi --query-gpu=index,name,driver_version,power.limit --format=csv,noheader | tee "$out/cards.txt"
[ "$gpus" -ge 4 ] || { echo "not measured: $gpus of 4 GPUs"; exit 1; }
case $(head -n 1 "$out/cards.txt") in
    *H200*) kind=h200 cfg=cfg ;;
    # Its cards hold the text encoder's weights of LTX-2.3 beside the transformer's only if they are sharded.
    *H100*) kind=h100 cfg=$here/cfg-encoder.yml ;;
    *) echo "four.sh: the cost model has no chip of this card" >&2; exit 1 ;;
esac

# Seconds that are left; says so where there are none.
room() { left=$((limit - SECONDS + began)); [ "$left" -gt "${2:-20}" ] || { bad "$1: not measured, $left s are left"; return 1; }; }
# ended CODE NAME: what to say of a command that did not end well, whose log is NAME.log.
ended() {
    case $1 in
        0) ;;
        124 | 137) bad "$2: not measured, cut off" ;;
        *) bad "$2: failed"; tail -n 3 "$out/$2.log" ;;
    esac
    return "$1"
}
# bench NAME ARGUMENTS…: NAME.json, and its log; the error where it fails.
bench() {
    local name=$1
    shift
    rm -f "$out/$name".{json,txt,log}
    room "$name" || return 0
    timeout -k 5 "$left" "$ltx2" bench --weights random --platform cuda --runs "${RUNS:-3}" "${more[@]}" --json "$out/$name.json" --force "$@" \
        > "$out/$name.txt" 2> "$out/$name.log"
    ended $? "$name"
}

size=(--width 768 --height 512 --num-frames 121)
layouts=("ring cfg=2,context=2" "sequence cfg=2,context=2" "cfg-ulysses cfg=2,context=2" "hybrid context=4" "tensor cfg=2,tensor=2")
branches=(-c ltx2_3_two_stage --set guidance.video.stg=1 --set guidance.video.modality=3 --set guidance.audio.stg=1
    --set guidance.audio.modality=3 "${size[@]}" --steps 30)

# ahead_of TARGET PROGRAM LAYOUT MESH ARGUMENTS…: a program into the cache. It has to see as many cards as the program is for.
ahead_of() {
    local target=$1 program=$2 layout=$3 mesh=$4 name=ahead-$2-$3-$4-$#
    shift 4
    timeout -k 5 200 "$ltx2" -q compile --weights random --target "cuda:$kind:$target" --program "$program" --layout "$layout" \
        --mesh "$mesh" --save "$LTX2_COMPILE_CACHE" "${more[@]}" "$@" > /dev/null 2> "$out/$name.log"
    ended $? "$name"
    took "$name"
}
# At once and with all their processes, which would go on to the end of a step and hold the cards.
within() {
    local name=$1
    timeout -s KILL "${@:2}" > "$out/$name.txt" 2>&1
    case $? in
        0) ;;
        124 | 137) bad "$name: not measured to its end, cut off after $2 s" ;;
        *) bad "$name: failed" ;;
    esac
    took "$name"
}
took() { echo "$((SECONDS - began)) s: $1" >> "$out/ahead.txt"; }
ahead() {
    local each layout mesh
    rm -f "$out/ahead.txt"
    MEMORY=0.08 within four 270 "$here/processes.sh" "$ltx2" "$out/processes" four &
    MEMORY=0.1 within kills 270 "$here/processes.sh" "$ltx2" "$out/kills" four_kills &
    MEMORY=0.06 within distances 200 "$here/ring.sh" "$ltx2" "$out/distances" "${layouts[@]}" &
    local steps=(-c ltx2 --set request.width=768 --set request.height=512 --set request.num_frames=121 --set sampler.steps=4)
    # As `profile` compiles them: six blocks, all steps, no graphs.
    local traced=("${steps[@]:0:8}" --set model.blocks=6 --set runtime.xla_flags.xla_gpu_graph_min_graph_size=2147483647)
    # The mesh of `replicated`.
    local alone=data=1,cfg=1,fsdp=1,context=1,tensor=1
    ahead_of 1x1x1 denoise replicated "$alone" "${steps[@]}" &
    ahead_of 1x1x1 video-decoder replicated "$alone" "${steps[@]}" &
    ahead_of 1x1x4 video-decoder sequence cfg=2,context=2 "${steps[@]}" &
    for each in "${layouts[@]}"; do
        read -r layout mesh <<< "$each"
        ahead_of 1x1x4 denoise "$layout" "$mesh" "${steps[@]}" &
        ahead_of 1x1x4 denoise "$layout" "$mesh" "${traced[@]}" &
    done
    for each in "$cfg cfg=4" "tensor tensor=4"; do
        read -r layout mesh <<< "$each"
        (
            name=warm-$mesh
            timeout -k 5 200 "$ltx2" -q warm "${branches[@]}" "${more[@]}" --weights random --platform cuda --layout "$layout" \
                --mesh "$mesh" --set runtime.memory_fraction=0.12 > /dev/null 2> "$out/$name.log"
            ended $? "$name"
            took "$name"
        ) &
    done
    wait
    cat "$out/four.txt" "$out/kills.txt" "$out/distances.txt"
    echo "the last of these:"
    tail -n 4 "$out/ahead.txt" | sed 's/^/    /'
}

steps() {
    local each layout mesh
    CUDA_VISIBLE_DEVICES=0 bench step-one -c ltx2 --programs denoise "${size[@]}" --steps 4 --layout replicated &
    # Beside it, on another card.
    decoder_one
    wait
    for each in "${layouts[@]}"; do
        read -r layout mesh <<< "$each"
        bench "step-$layout" -c ltx2 --programs denoise "${size[@]}" --steps 4 --layout "$layout" --mesh "$mesh"
    done
    python3 - "$out" "${layouts[@]}" <<'PY'
import json, os, sys
out, *layouts = sys.argv[1:]
def timed(name):
    path = f"{out}/step-{name}.json"
    return json.load(open(path))["programs"]["denoise_loop"] if os.path.exists(path) else None
def line(name, step):
    predicted = (step["program"] or {}).get("predicted")
    return f"{name:<32}{step['median'] * 1e3:9.2f} ms a step" + (f", predicted {predicted * 1e3:8.2f}" if predicted else "")
one = timed("one")
if one:
    print(line("one GPU", one))
for layout, mesh in (each.split() for each in layouts):
    four = timed(layout)
    if four:
        part = f", {one['median'] / 4 / four['median'] * 100:6.1f} % of a quarter of one GPU's" if one else ""
        print(line(f"{layout} {mesh}", four) + part)
PY
}

two_pass() {
    bench two_pass-cfg "${branches[@]}" --programs end-to-end --layout "$cfg" --mesh cfg=4
    RUNS=1 bench two_pass-tensor "${branches[@]}" --programs end-to-end --layout tensor --mesh tensor=4
    python3 - "$out" <<'PY'
import json, os, sys
for axis in ("cfg", "tensor"):
    path = f"{sys.argv[1]}/two_pass-{axis}.json"
    if os.path.exists(path):
        whole = json.load(open(path))["programs"]["end_to_end"]
        parts = {name: part["device"] for name, part in whole["parts"].items()}
        print(f"two passes over {axis}: {whole['median']:.4f} s, {whole['min']:.4f} the fastest of {len(whole['seconds'])}; on the devices", end="")
        print(f" a step {parts['denoise'] / 30:.4f}, of the second pass {parts['refine'] / 3:.4f} s")
PY
}

permutes() {
    room permutes || return 0
    timeout -k 5 "$left" "$ltx2" bench --micro --platform cuda --runs 4 --collectives collective-permute \
        --json "$out/permutes.json" --force 2> "$out/permutes.log"
    ended $? permutes
}

profiles() {
    local each layout mesh
    for each in "${layouts[@]}"; do
        read -r layout mesh <<< "$each"
        room "profile of $layout" || return 0
        timeout -k 5 "$left" "$ltx2" profile -c ltx2 --weights random --set model.blocks=6 --platform cuda --layout "$layout" \
            --mesh "$mesh" "${size[@]}" "${more[@]}" -o "$out/profile-$layout" --force > "$out/profile-$layout.txt" 2> "$out/profile-$layout.log"
        ended $? "profile-$layout" || continue
        find "$out/profile-$layout" -name '*.xplane.pb' -delete
        echo "$layout ($mesh), 6 blocks, ms a step:"
        grep 'step(s)' "$out/profile-$layout.txt" | sed 's/^/    all: /'
        sed -n '/exposed/,/^$/p' "$out/profile-$layout.txt" | grep -E 'exposed|all-|reduce|permute|idle' | sed 's/^/    /'
    done
}

decoder_one() { CUDA_VISIBLE_DEVICES=1 bench decoder-one -c ltx2 --programs video-decoder "${size[@]}" --layout replicated; }
decoder() {
    [[ " ${parts[*]} " == *" steps "* ]] || decoder_one
    bench decoder-four -c ltx2 --programs video-decoder "${size[@]}" --layout sequence --mesh cfg=2,context=2
    grep -h video_decoder "$out"/decoder-*.txt
}

kernels() {
    room kernels 40 || return 0
    timeout -k 5 "$left" "$here/kernels.sh" "$out/kernels.tsv" "$ltx2" bench --weights random --platform cuda --runs 1 \
        "${branches[@]}" "${more[@]}" --programs denoise,refine --layout tensor --mesh tensor=4 > "$out/kernels.txt" 2> "$out/kernels.log"
    ended $? kernels || return
    awk -F'\t' '
        { group = "passes" } /nvjet|gemm/ { group = "matmuls" } /sdpa/ { group = "attention" } /nccl/ { group = "collectives" }
        $3 ~ /^copy/ { group = "copies" }
        { of[group] += $1; launches[group] += $2; all += $1 }
        END { for (group in of) printf "%-12s %6.2f s %5.1f %% %9d launches\n", group, of[group] / 1e9, of[group] / all * 100, launches[group] }
    ' "$out/kernels.tsv" | sort -k2 -rn
    sort -rn "$out/kernels.tsv" | head -n 12 | cut -c1-150
}

for part in "${parts[@]}"; do
    echo "== $part, $((SECONDS - began)) s"
    "$part"
done
echo "== $((SECONDS - began)) s"
[ ! -e "$failed" ] || { echo "failed or not measured:"; sed 's/^/    /' "$failed"; exit 1; }
