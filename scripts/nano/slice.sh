#!/bin/bash
# Trains for a while: slice.sh STAGE SECONDS IN OUT
#   STAGE  codec (autoencoders and vocoder), decoders (the same with fixed latents), flow (the generator), finish (flow, the video
#          decoder and the upsampler), all (codec for SPLIT of the time, then flow), or score
#   IN     the model folder to start from, or -; OUT gets a complete model folder and the logs as JSON lines
# Environment: SPLIT (0.55), STEPS (limit per stage), COUNT (clips to score), EXTRA_FLOW, EXTRA_CODEC, EXTRA_UPSAMPLER (options).
set -u
here=$(cd "$(dirname "$0")" && pwd)
stage=$1 seconds=$2 in=$3 out=$4
began=$(date +%s)
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=true
steps=${STEPS:+--steps $STEPS}
[ "$in" = - ] && in=""
mkdir -p "$out"
[ -n "$in" ] && cp -rn "$in/." "$out/"
rm -f "$out"/*.done

codec() { # SECONDS [OPTION]: the two run side by side
    python3 "$here/train_video.py" "$in" "$out" --seconds "$1" $steps ${2:-} ${EXTRA_CODEC:-} &
    local video=$!
    python3 "$here/train_audio.py" "$in" "$out" --seconds "$(($1 * 2 / 3))" --batch 16 $steps ${2:-} ${EXTRA_CODEC:-} &
    wait $! || echo "audio failed"
    wait $video || echo "video failed"
}

case $stage in
codec) codec "$seconds" ;;
decoders) codec "$seconds" --decoder-only ;;
flow) python3 "$here/train_flow.py" "$in" "$out" --until $((began + seconds)) $steps ${EXTRA_FLOW:-} || echo "flow failed" ;;
finish)
    python3 "$here/train_video.py" "$in" "$out" --seconds "$((seconds / 2))" --decoder-only $steps ${EXTRA_CODEC:-} &
    video=$!
    python3 "$here/train_upsampler.py" "$in" "$out" --seconds "$((seconds / 16))" $steps ${EXTRA_UPSAMPLER:-} &
    upsampler=$!
    python3 "$here/train_flow.py" "$in" "$out" --until $((began + seconds)) $steps ${EXTRA_FLOW:-} || echo "flow failed"
    wait $upsampler || echo "upsampler failed"
    wait $video || echo "video failed"
    ;;
all)
    first=$(python3 -c "print(int($seconds * ${SPLIT:-0.55}))")
    python3 "$here/train_flow.py" "$in" "$out" --wait "$out" --until $((began + seconds)) $steps ${EXTRA_FLOW:-} &
    flow=$!
    codec "$first"
    wait $flow || echo "flow failed"
    ;;
esac
case $stage in
codec | decoders | all) python3 "$here/score.py" "$out" --truth --count ${COUNT:-96} --out "$out/seen" ;;
esac
case $stage in
flow | finish | all | score) python3 "$here/score.py" "$out" --count ${COUNT:-96} --guidance 1 3 --out "$out/seen" ;;
esac
echo "slice took $(($(date +%s) - began)) s"
