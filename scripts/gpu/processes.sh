#!/usr/bin/env bash
# Checks runs of several processes on the GPUs of this host: scripts/gpu/processes.sh LTX2 OUT [two] [four] [kills].
# Two and four processes must give the bytes of one process on the same GPUs. If a process is killed, the others must exit within
# 30 s with exit code 1, name it, and leave no file. Needs two GPUs, `four` needs four. Prints a line per check; exit code 1 on failure.
set -uo pipefail
ltx2=$(realpath "$1") out=$2
shift 2
mkdir -p "$out" && out=$(realpath "$out")
gpus=$(nvidia-smi -L | wc -l)
failed=0
# NVLink multicast needs rights on the switch; nothing here uses it.
export LTX2_COMPILE_CACHE="$out/cache" NCCL_NVLS_ENABLE=0
port=$((20000 + RANDOM % 20000))
model=$out/model
[ -d "$model" ] || "$ltx2" init --preset nano --seed 1 "$model" > /dev/null || exit 1

report() {
    printf '%-72s %s\n' "$1" "$2"
    [ "$2" != FAILED ] || failed=1
}

# start NAME GPUS PROCESSES GPUS_EACH ARGUMENTS…: starts the processes, whose ids are in `pids`, with logs NAME.PROCESS.log.
start() {
    local name=$1 all=$2 processes=$3 each=$4 p
    shift 4
    rm -rf "${out:?}/$name" "$out/$name".*
    mkdir -p "$out/$name"
    port=$((port + 1)) pids=()
    for ((p = 0; p < processes; p++)); do
        local meet=(--num-processes 1)
        [ "$processes" -eq 1 ] ||
            meet=(--coordinator "127.0.0.1:$port" --process-id "$p" --num-processes "$processes" --devices-per-process "$each")
        CUDA_VISIBLE_DEVICES=$all "$ltx2" generate -c nano_2_0 --model "$model" --platform cuda --prompt "a lighthouse" --seed 3 \
            --guidance-scale 3 --set runtime.memory_fraction=0.15 "${meet[@]}" -o "$out/$name/video.mp4" "$@" \
            > "$out/$name.$p.out" 2> "$out/$name.$p.log" &
        pids+=($!)
    done
}
# run NAME GPUS PROCESSES GPUS_EACH ARGUMENTS…: one short request, to its end.
run() {
    local p
    start "$@" --width 256 --height 192 --num-frames 25 --steps 3 --dump "$out/$1.safetensors"
    for p in "${!pids[@]}"; do
        wait "${pids[$p]}" && continue
        report "$1: process $p" FAILED
        tail -15 "$out/$1.$p.log"
    done
}
hashes() { python3 -c "import json,sys; print(json.load(open(sys.argv[1]))['sha256'])" "$out/$1/video.json"; }
# same NAME OTHER: frames, samples and every dumped tensor are equal.
same() {
    if [ "$(hashes "$1")" = "$(hashes "$2")" ] && cmp -s "$out/$1.safetensors" "$out/$2.safetensors"; then
        report "$1 equals $2" ok
    else
        report "$1 equals $2" FAILED
        "$ltx2" compare "$out/$1.safetensors" "$out/$2.safetensors" | head -30
    fi
}
two() {
    run one_2 0,1 1 2 --layout cfg --mesh cfg=2 --dtype f32
    run two_2 0,1 2 1 --layout cfg --mesh cfg=2 --dtype f32
    same two_2 one_2
    [ -s "$out/two_2.1.out" ] && report "two_2: only process 0 prints" FAILED || report "two_2: only process 0 prints" ok
    run one_2s 0,1 1 2 --layout sequence --mesh context=2 --dtype bf16
    run two_2s 0,1 2 1 --layout sequence --mesh context=2 --dtype bf16
    same two_2s one_2s
}
four() {
    local sequence=(--layout sequence --mesh cfg=2,context=2 --dtype bf16)
    [ "$gpus" -ge 4 ] || { report "four processes" "not run: $gpus GPUs"; return; }
    run one_4 0,1,2,3 1 4 "${sequence[@]}"
    run four_4 0,1,2,3 4 1 "${sequence[@]}"
    same four_4 one_4
    run two_4 0,1,2,3 2 2 "${sequence[@]}"
    same two_4 one_4
}
# lost VICTIM PROCESSES GPUS: kills one process of a long run after its first steps.
lost() {
    local victim=$1 name=kill_$1_of_$2 p code killed ok=ok
    start "$name" "$3" "$2" 1 --width 768 --height 512 --num-frames 257 --steps 256 --layout sequence --mesh context="$2" --dtype f32 \
        --progress-every 2
    for ((p = 0; p < 480; p++)); do
        grep -qs steps "$out/$name.0.log" && break
        sleep 0.25
    done
    grep -qs steps "$out/$name.0.log" && kill -9 "${pids[$victim]}" || ok=FAILED
    killed=$SECONDS
    for p in "${!pids[@]}"; do
        [ "$p" -ne "$victim" ] || continue
        while kill -0 "${pids[$p]}" 2> /dev/null && [ $((SECONDS - killed)) -lt 45 ]; do sleep 0.25; done
        kill -9 "${pids[$p]}" 2> /dev/null
        wait "${pids[$p]}"
        code=$?
        [ $code -eq 1 ] && grep -q "error: process $victim (.*has not answered" "$out/$name.$p.log" || ok=FAILED
    done
    [ $((SECONDS - killed)) -le 30 ] && [ -z "$(find "$out/$name" -type f)" ] || ok=FAILED
    report "process $victim of $2 killed: the others exit after $((SECONDS - killed)) s" "$ok"
    grep -h "^error:" "$out/$name".*.log
}
kills() {
    lost 0 2 0,1
    lost 1 2 0,1
    [ "$gpus" -lt 4 ] || lost 2 4 0,1,2,3
}

for part in ${@:-two four kills}; do
    case $part in
        two | four | kills) "$part" ;;
        *) echo "processes.sh: no part '$part'" >&2; exit 2 ;;
    esac
done
exit "$failed"
