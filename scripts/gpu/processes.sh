#!/usr/bin/env bash
# Checks runs of several processes on the GPUs of this host: scripts/gpu/processes.sh LTX2 OUT.
# Two and four processes must give the bytes of one process, and 20 processes on one GPU equal bytes. If a process is killed, the
# others must exit. Needs two GPUs; with four, checks four too. Prints a line per check; exit code 1 on failure.
set -uo pipefail
ltx2=$(realpath "$1") out=$2
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
    [ "$2" = ok ] || failed=1
}
# start NAME GPUS PROCESSES ARGUMENTS…: starts processes, whose ids are in `pids`, with logs NAME.PROCESS.log, on that many GPUs.
start() {
    local name=$1 count=$2 processes=$3 p meet
    shift 3
    rm -rf "${out:?}/$name" "$out/$name".*
    mkdir -p "$out/$name"
    port=$((port + 1)) pids=()
    for ((p = 0; p < processes; p++)); do
        meet=(--num-processes 1)
        [ "$processes" -eq 1 ] || meet=(--coordinator "127.0.0.1:$port" --process-id "$p" --num-processes "$processes"
            --devices-per-process $((count / processes)))
        CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((count - 1))) "$ltx2" generate -c nano_2_0 --model "$model" --platform cuda --seed 3 \
            --prompt "a lighthouse" --guidance-scale 3 --set runtime.memory_fraction=0.15 "${meet[@]}" \
            -o "$out/$name/video.mp4" "$@" > "$out/$name.$p.out" 2> "$out/$name.$p.log" &
        pids+=($!)
    done
}
hashes() { python3 -c "import json,sys; print(json.load(open(sys.argv[1]))['sha256'])" "$out/$1/video.json"; }
short=(--width 256 --height 192 --num-frames 25 --steps 3)
# agree NAME GPUS "PROCESSES…" ARGUMENTS…: one short request by one process and by each of these numbers of processes. Frames,
# samples and every dumped tensor must be equal.
agree() {
    local name=$1 count=$2 numbers=$3 processes p this one=$1_1
    shift 3
    for processes in 1 $numbers; do
        this=${name}_$processes
        start "$this" "$count" "$processes" "${short[@]}" --dump "$out/$this.safetensors" "$@"
        for p in "${!pids[@]}"; do
            wait "${pids[$p]}" && continue
            report "$this: process $p" FAILED
            tail -15 "$out/$this.$p.log"
        done
        [ "$processes" -gt 1 ] || continue
        [ -s "$out/$this.1.out" ] && report "$this: only process 0 prints" FAILED || report "$this: only process 0 prints" ok
        if [ "$(hashes "$this")" = "$(hashes "$one")" ] && cmp -s "$out/$this.safetensors" "$out/$one.safetensors"; then
            report "$this equals $one" ok
        else
            report "$this equals $one" FAILED
            "$ltx2" compare "$out/$this.safetensors" "$out/$one.safetensors" | head -30
        fi
    done
}
# repeat: runs five processes at a time on the first GPU, half of them with empty compile caches.
repeat() {
    local n cache different
    rm -rf "$out"/cold*
    for n in {1..20}; do
        cache=$out/cache
        [ $((n % 2)) -eq 0 ] || cache=$out/cold$n
        LTX2_COMPILE_CACHE=$cache start "repeat_$n" 1 1 "${short[@]}" --dtype bf16
        [ $((n % 5)) -ne 0 ] || wait
    done
    different=$(for n in {1..20}; do hashes "repeat_$n" 2> /dev/null || echo "no video"; done | sort | uniq -c)
    report "20 processes on one GPU give equal hashes" "$([ "$(wc -l <<< "$different")" -eq 1 ] && echo ok || echo FAILED)"
    echo "$different"
}
# lost VICTIM PROCESSES: kills one process of a long run; within 30 s, the others must name it, leave no file and exit with code 1.
lost() {
    local victim=$1 name=kill_$1_of_$2 p code killed ok=ok
    start "$name" "$2" "$2" --width 768 --height 512 --num-frames 257 --steps 256 --layout sequence --mesh context="$2" \
        --dtype f32 --progress-every 2
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

agree cfg 2 2 --layout cfg --mesh cfg=2 --dtype f32
agree sequence 2 2 --layout sequence --mesh context=2 --dtype bf16
repeat
lost 0 2
lost 1 2
if [ "$gpus" -ge 4 ]; then
    agree four 4 "4 2" --layout sequence --mesh cfg=2,context=2 --dtype bf16
    lost 2 4
else
    echo "four processes: not run: $gpus GPUs"
fi
exit "$failed"
