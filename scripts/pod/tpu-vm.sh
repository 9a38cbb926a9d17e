#!/usr/bin/env bash
# Runs ltx2 on all workers of a Cloud TPU slice: scripts/pod/tpu-vm.sh NAME ZONE FOLDER ARGUMENTS…
# NAME is the TPU (gcloud compute tpus tpu-vm list), FOLDER a folder that every worker has under that path, from its home:
# a mounted bucket, or copied there with `gcloud … scp --worker=all`. In it are the binary `ltx2`, `plugins/tpu`, and the
# compile cache `cache`. ARGUMENTS are ltx2's. Each worker asks its metadata server which one it is; the first one's address
# is the coordinator's. The number of the process on each worker is in `ltx2.pid`, in its home.
#   scripts/pod/tpu-vm.sh my-v6e us-east5-b ltx2 generate -c tpu/v6e-16 --model models/LTX-2 -p "a red fox" -o out/fox.mp4
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,7p' "$0" >&2; exit 2; }
name=$1 zone=$2 folder=$3
shift 3
arguments=$(printf ' %q' "$@")
# What each worker runs. Nothing in it is expanded here but the folder and the arguments.
worker=$(cat << 'END'
set -euo pipefail
attribute() { curl -sf -H 'Metadata-Flavor: Google' "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"; }
# Entries are ID:PORT:ADDRESS, with commas between them, in the order of the workers.
hosts=$(attribute worker-network-endpoints)
LTX2_PROCESS_ID=$(attribute agent-worker-number)
LTX2_NUM_PROCESSES=$(echo "$hosts" | tr ',' '\n' | wc -l)
LTX2_COORDINATOR=$(echo "$hosts" | cut -d, -f1 | cut -d: -f3):8476
LTX2_COMPILE_CACHE=${LTX2_COMPILE_CACHE:-cache}
export LTX2_PROCESS_ID LTX2_NUM_PROCESSES LTX2_COORDINATOR LTX2_COMPILE_CACHE
# Large pages make copies to the chips faster.
sudo sh -c 'echo always > /sys/kernel/mm/transparent_hugepage/enabled' || true
echo $$ > ~/ltx2.pid
END
)
command="$worker
cd $(printf %q "$folder") && exec ./ltx2$arguments"
exec gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command "$command"
