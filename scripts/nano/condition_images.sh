#!/bin/sh
# Makes the images of docs/guides/pipelines.md: scripts/nano/condition_images.sh [LTX2].
set -eu
cd "$(dirname "$0")/../.."
ltx2=${1:-target/release/ltx2}
out=out/condition_images
rm -rf $out
mkdir -p $out

# make IMAGE ROW ARGUMENT…: a clip, and its row of the image.
make() {
    image=$1 row=$2
    shift 2
    "$ltx2" generate -c configs/nano.yml --platform cpu --force -o $out/$row.mp4 \
        --save-frames $out/$image/frames/$row --save-audio $out/$image/sounds/$row.wav "$@"
}

# sheet IMAGE: the image of its rows, in order of their names.
sheet() {
    cargo run --locked --quiet ${PROFILE---release} --example contact_sheet $out/$1/frames $out/$1/sounds 2 > docs/images/$1.png
}

make audio_to_video 1-first --seed 3 -p "a large red circle bounces on blue, low beeps"
make audio_to_video 2-to-its-sound --seed 4 --pipeline audio_to_video --audio $out/audio_to_video/sounds/1-first.wav \
    -p "a large yellow circle bounces on black, low beeps"
sheet audio_to_video

make retake 1-first --seed 5 -p "a medium red circle moves right on black, a middle hum"
make retake 2-retaken --seed 6 --video $out/1-first.mp4 --retake 0.4 0.7 -p "a medium green square moves right on black, a middle hum"
sheet retake

make extend 1-extended --seed 7 --video $out/1-first.mp4 --extend 0.66 --set request.extend.overlap=9 \
    -p "a medium red circle moves left on black, a middle hum"
sheet extend

make references 1-first --seed 5 -p "a medium red circle moves right on black, a middle hum"
make references 2-with-it --seed 8 --pipeline text_to_video --reference-video $out/1-first.mp4 \
    --set conditioning.reference_downscale_factor=1 -p "a medium green circle on black, a middle hum"
make references 3-without --seed 8 -p "a medium green circle on black, a middle hum"
sheet references

make chain 1-chained --seed 9 --num-frames 57 --chain --set request.chain.clip=25 --set request.chain.overlap=9 \
    --set 'request.chain.prompts=["a medium red circle moves left on black, a middle hum", "a medium red circle fades away on black, a middle hum"]' \
    -p "a medium red circle moves right on black, a middle hum"
sheet chain
