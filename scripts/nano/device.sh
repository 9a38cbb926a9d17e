#!/bin/bash
# A slice on a machine without a network: device.sh STAGE SECONDS IN OUT, run in the repository's root. Diffusers comes
# as a wheel in .whl/; the model goes to OUT as model.tar.aa, ab ... of at most 14 MB. IN is a model folder, or one with
# such files, or - for none.
here=$(cd "$(dirname "$0")" && pwd)
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit
export PYTHONPATH=/tmp/site PYTHONWARNINGS=ignore
nvidia-smi --query-gpu=name,memory.used,driver_version --format=csv,noheader
in=-
if [ -d "$3/vae" ]; then
    in=$3
elif [ "$3" != - ]; then
    in=/tmp/nano-in
    rm -rf $in && mkdir $in && cat "$3"/model.tar.* | tar x -C $in
fi
rm -rf /tmp/nano-out
bash "$here/slice.sh" "$1" "$2" "$in" /tmp/nano-out
tar c -C /tmp/nano-out . | split -b 14000000 - "$4/model.tar."
ls -l "$4"
