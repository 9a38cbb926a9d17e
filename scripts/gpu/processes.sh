#!/usr/bin/env bash
# Several processes of one run on the GPUs of this host: scripts/gpu/processes.sh LTX2 OUT [two] [four] [kills] [four_kills], by default
# the first three; `four_kills` are those of `kills` that need four GPUs.
# Two and four processes have to give the bytes of one process with as many GPUs; killing any one has to end the others within
# 30 s, with exit code 1, its name, and no file. Needs two GPUs, for all of it four; three to five minutes. Prints a line for
# each check; exit code 1 if one fails.
set -uo pipefail
ltx2=$(realpath "$1") out=$2
shift 2
mkdir -p "$out" && out=$(realpath "$out")
gpus=$(nvidia-smi -L | wc -l)
failed=0
# One folder for all: what was compiled for one run holds for the next.
export LTX2_COMPILE_CACHE="$out/cache"
# Multicast over NVLink takes the switch's rights; nothing here needs it.
export NCCL_NVLS_ENABLE=0
port=$((20000 + RANDOM % 20000))
# The part of a card's memory for each process: those of four kills share the cards.
memory=(--set "runtime.memory_fraction=${MEMORY:-0.15}")

say() { printf '%-64s %s\n' "$1" "$2"; }
check() {
    local what=$1
    shift
    if "$@"; then say "$what" ok; else say "$what" FAILED; failed=1; fi
}
now() { date +%s.%N; }
since() { python3 -c "print(f'{$(now) - $1:.1f} s')"; }

model=$out/model
[ -d "$model" ] || "$ltx2" init --preset nano --seed 1 "$model" > /dev/null || exit 1

# run NAME GPUS PROCESSES GPUS_EACH ARGUMENTS…: NAME.PROCESS.log, NAME.mp4, NAME.json, NAME.safetensors.
request=(generate -c nano_2_0 --model "$model" --platform cuda --prompt "a lighthouse over a quiet sea" --seed 3
    --width 256 --height 192 --num-frames 25 --steps 3 --guidance-scale 3 --force "${memory[@]}")
run() {
    local name=$1 all=$2 processes=$3 each=$4 started
    shift 4
    started=$(now)
    rm -f "$out/$name".*
    port=$((port + 1))
    local pids=() codes=()
    for ((p = 0; p < processes; p++)); do
        local meet=(--num-processes 1)
        [ "$processes" -gt 1 ] && meet=(--coordinator "127.0.0.1:$port" --process-id "$p" --num-processes "$processes" --devices-per-process "$each")
        CUDA_VISIBLE_DEVICES=$all "$ltx2" "${request[@]}" "${meet[@]}" --dump "$out/$name.safetensors" \
            -o "$out/$name.mp4" "$@" > "$out/$name.$p.out" 2> "$out/$name.$p.log" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid"; codes+=($?); done
    say "$name: $processes process(es), GPUs $all" "$(since "$started"), exit codes ${codes[*]}"
    for ((p = 0; p < processes; p++)); do
        [ "${codes[$p]}" -eq 0 ] && continue
        failed=1
        sed "s/^/    process $p: /" "$out/$name.$p.log" | tail -15
    done
}

hashes() { python3 -c "import json,sys; print(json.load(open(sys.argv[1]))['sha256'])" "$out/$1.json" 2> /dev/null || echo "no $1.json"; }
same() {
    local a b
    a=$(hashes "$1") b=$(hashes "$2")
    [ "$a" = "$b" ] && [[ $a != no* ]] && cmp -s "$out/$1.safetensors" "$out/$2.safetensors"
}
# Where the bytes differ, how far apart they are.
compare() {
    if same "$1" "$2"; then
        say "$1 is $2: frames, samples, every dumped tensor" ok
    else
        say "$1 is $2: frames, samples, every dumped tensor" FAILED
        failed=1
        hashes "$1"; hashes "$2"
        "$ltx2" compare "$out/$1.safetensors" "$out/$2.safetensors" 2>&1 | sed 's/^/    /' | head -30
    fi
}
others_are_silent() {
    local name=$1 processes=$2
    for ((p = 1; p < processes; p++)); do
        [ -s "$out/$name.$p.out" ] && return 1
        [ -s "$out/$name.0.log" ] || return 1
        # One line says which process it is; what the first warns of too is the program's; what plugins write of their own accord
        # is not ours.
        if grep -vxFf <(grep '^ WARN' "$out/$name.0.log") "$out/$name.$p.log" \
            | grep -v -e 'process [0-9]* of' -e '^$' -e '^[EWI][0-9]\{4\} ' -e '^=== Source' -e '^external/'; then
            return 1
        fi
    done
}

nvidia-smi --query-gpu=index,name,driver_version --format=csv,noheader
two() {
    local cfg=(--layout cfg --mesh cfg=2 --dtype f32)
    run one_2 0,1 1 2 "${cfg[@]}"
    run two_2 0,1 2 1 "${cfg[@]}"
    compare two_2 one_2
    check "two_2: the second process is silent" others_are_silent two_2 2
    grep -h "process . of" "$out"/two_2.*.log
    local sequence=(--layout sequence --mesh context=2 --dtype bf16)
    run one_2s 0,1 1 2 "${sequence[@]}"
    run two_2s 0,1 2 1 "${sequence[@]}"
    compare two_2s one_2s
}
four() {
    [ "$gpus" -ge 4 ] || { say "four processes" "not run: $gpus GPUs"; return; }
    local sequence=(--layout sequence --mesh cfg=2,context=2 --dtype bf16)
    run one_4 0,1,2,3 1 4 "${sequence[@]}"
    run four_4 0,1,2,3 4 1 "${sequence[@]}"
    compare four_4 one_4
    run two_4 0,1,2,3 2 2 "${sequence[@]}"
    compare two_4 one_4
    # Everything is compiled by now: all take it from the cache.
    run four_again 0,1,2,3 4 1 "${sequence[@]}"
    compare four_again one_4
    grep -h "cache hits" "$out/four_again.0.log" | sed 's/^/    /'
}

# lost VICTIM PROCESSES GPUS [TIMEOUT]: a long run, one process of which is killed as its steps go by.
lost() {
    local victim=$1 processes=$2 all=$3 timeout=${4:-default} name=kill_$1_of_$2 killed pids=() codes=() limit=()
    [ "$timeout" = default ] || limit=(--set runtime.distributed.timeout="$timeout")
    rm -rf "${out:?}/$name" && mkdir -p "$out/$name"
    local at=$((port + 100 + victim + 10 * processes))
    for ((p = 0; p < processes; p++)); do
        CUDA_VISIBLE_DEVICES=$all "$ltx2" generate -c nano_2_0 --model "$model" --platform cuda --dtype f32 --seed 3 \
            --prompt "a lighthouse" --width 768 --height 512 --num-frames 257 --steps 256 --guidance-scale 3 \
            --layout sequence --mesh context="$processes" --progress-every 2 \
            --coordinator "127.0.0.1:$at" --process-id "$p" --num-processes "$processes" --devices-per-process 1 \
            "${limit[@]}" "${memory[@]}" -o "$out/$name/video.mp4" > /dev/null 2> "$out/$name.$p.log" &
        pids+=($!)
    done
    for ((i = 0; i < 480; i++)); do
        grep -qs "steps" "$out/$name.0.log" && break
        kill -0 "${pids[0]}" 2> /dev/null || break
        sleep 0.25
    done
    local ok=1 names=""
    # What had ended before, or had not come so far, shows nothing.
    grep -qs "steps" "$out/$name.0.log" || { ok=0; names+=" no step was made;"; }
    # The shell's own word about it is no news.
    { kill -9 "${pids[$victim]}" || { ok=0; names+=" it had ended before;"; }; wait "${pids[$victim]}"; } 2> /dev/null
    killed=$(now)
    for ((p = 0; p < processes; p++)); do
        [ "$p" -eq "$victim" ] && continue
        # A process that does not end by itself must not hold the script.
        for ((i = 0; i < 180; i++)); do kill -0 "${pids[$p]}" 2> /dev/null || break; sleep 0.25; done
        kill -0 "${pids[$p]}" 2> /dev/null && { names+=" process $p hangs;"; kill -9 "${pids[$p]}"; }
        wait "${pids[$p]}" 2> /dev/null
        codes+=($?)
        [ "${codes[-1]}" -eq 1 ] || ok=0
        grep -q "error: process $victim (.*has not answered" "$out/$name.$p.log" || { ok=0; names+=" process $p does not name it;"; }
    done
    local took left
    took=$(python3 -c "print(f'{$(now) - $killed:.1f}')")
    left=$(find "$out/$name" -type f | wc -l)
    python3 -c "exit(not $took <= 30)" || ok=0
    [ "$left" -eq 0 ] || ok=0
    say "process $victim of $processes killed (time-out: $timeout): all ended" "after $took s, exit codes ${codes[*]}, $left files left$names"
    grep -h "steps" "$out/$name.0.log" | tail -1 | sed 's/^/    at: /'
    grep -h "^error:" "$out/$name".*.log | sed 's/^/    /'
    [ "$ok" -eq 1 ] || { say "    that" FAILED; tail -n 5 "$out/$name".*.log; return 1; }
}
# By the default time-out, all at once: a program takes what it takes, the ends are what is timed.
four_kills() {
    local victim each=()
    [ "$gpus" -ge 4 ] || { say "kills of four" "not run: $gpus GPUs"; return; }
    for victim in 0 1 2 3; do lost "$victim" 4 0,1,2,3 > "$out/lost_$victim.of_4.txt" 2>&1 & each+=($!); done
    for victim in 0 1 2 3; do
        wait "${each[$victim]}" || failed=1
        cat "$out/lost_$victim.of_4.txt"
    done
}
kills() {
    if [ "$gpus" -ge 4 ]; then
        lost 0 2 0,1 20 > "$out/lost_0.txt" 2>&1 & a=$!
        lost 1 2 2,3 20 > "$out/lost_1.txt" 2>&1 & b=$!
        wait "$a" || failed=1
        wait "$b" || failed=1
        cat "$out/lost_0.txt" "$out/lost_1.txt"
        four_kills
    else
        lost 0 2 0,1 20 || failed=1
        lost 1 2 0,1 20 || failed=1
    fi
}

for part in "${@:-two four kills}"; do
    for one in $part; do
        echo "== $one"
        case $one in
            two | four | kills | four_kills) "$one" ;;
            *) echo "$(basename "$0"): no part '$one'" >&2; exit 2 ;;
        esac
    done
done
[ "$failed" -eq 0 ] && echo "all checks hold" || echo "FAILED"
exit "$failed"
