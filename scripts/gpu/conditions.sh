#!/usr/bin/env bash
# Conditioned requests with random weights, each beside the request without conditions: scripts/gpu/conditions.sh LTX2 OUT [ROW…].
# Appended tokens change the counts. A sound and a clip of PNG frames are made below OUT; python3 writes them. Rows for which there are
# too few GPUs say so. Six minutes on two GPUs.
set -euo pipefail
. "$(dirname "$0")/rows.sh"
sound=$out/beeps.wav clip=$out/clip
python3 - "$sound" "$clip" <<'P'
import math, os, struct, sys, wave, zlib

with wave.open(sys.argv[1], "wb") as file:
    file.setparams((2, 2, 48000, 0, "NONE", ""))
    beep = lambda n: int(9000 * math.sin(2 * math.pi * 440 * n / 48000)) if n % 24000 < 4800 else 0
    file.writeframes(b"".join(struct.pack("<hh", beep(n), beep(n)) for n in range(48000 * 6)))
os.makedirs(sys.argv[2], exist_ok=True)
chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
for frame in range(121):
    row = lambda y: b"\0" + b"".join(bytes(((x + 8 * frame) % 256, y % 256, 128)) for x in range(768))
    head = struct.pack(">IIBBBBB", 768, 512, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(map(row, range(512))), 1)
    with open(f"{sys.argv[2]}/{frame:05}.png", "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))
P
measure() {
    local name=$1
    shift
    timeout 200 "$ltx2" bench --weights random --platform cuda --runs "${RUNS:-3}" --steps "${STEPS:-8}" --json "$out/$name.json" --force "$@" \
        -p "a red fox in the snow" || echo "$name: not measured: ended with $?"
}
programs=(--programs end-to-end,denoise)
one=(--layout replicated --mesh data=1 "${programs[@]}")
size=(--width 768 --height 512 --num-frames 121)
row plain 1 -c ltx2 "${size[@]}" "${one[@]}"
row audio_to_video 1 -c ltx2 "${size[@]}" --pipeline audio_to_video --audio "$sound" "${one[@]}"
row retake 1 -c ltx2 --video "$clip" --retake 2 4 "${one[@]}"
row extend 1 -c ltx2 --video "$clip" --extend 3 "${one[@]}"
row image 1 -c ltx2 --pipeline keyframes "${size[@]}" --image "$clip/00000.png" 0 1 --image "$clip/00120.png" 60 0.8 "${one[@]}"
row plain_two 2 -c ltx2 "${size[@]}" --layout cfg --mesh cfg=2 "${programs[@]}"
row audio_to_video_two 2 -c ltx2 "${size[@]}" --pipeline audio_to_video --audio "$sound" --layout cfg --mesh cfg=2 "${programs[@]}"
row retake_two 2 -c ltx2 --video "$clip" --retake 2 4 --layout cfg --mesh cfg=2 "${programs[@]}"
row reference 1 -c ltx2 --pipeline text_to_video "${size[@]}" --reference-video "$clip" \
    --set conditioning.reference_downscale_factor=1 "${one[@]}"
# Clips of a chain go on from latents: no program is timed alone.
measure() {
    local name=$1 started=$SECONDS
    shift
    timeout 200 "$ltx2" generate --weights random --platform cuda "$@" -p "a red fox in the snow" --force -o "$out/$name.mp4" ||
        { echo "$name: not measured: ended with $?" && return; }
    echo "$name: $((SECONDS - started)) s from the command to the video"
}
row chain 1 -c ltx2 --width 768 --height 512 --seconds 10 --chain --set sampler.steps="${STEPS:-8}"
