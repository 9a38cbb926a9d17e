#!/usr/bin/env bash
# Runs ltx2 on all workers of a Cloud TPU slice: scripts/pod/tpu-vm.sh NAME ZONE FOLDER ARGUMENTS…
#
# NAME is the TPU (gcloud compute tpus tpu-vm list), FOLDER a folder that every worker has under that path, with the
# binary `ltx2` and its `plugins/tpu` in it: a mounted bucket, or copied there with `gcloud … scp --worker=all`. ARGUMENTS
# are ltx2's. Each worker asks its metadata server which one it is; the first one's address is the meeting place.
#
#   scripts/pod/tpu-vm.sh my-v6e us-east5-b /mnt/ltx2 generate -c ltx2 --layout tensor --mesh cfg=2,context=2,tensor=2 \
#       -p "a red fox" -o /mnt/ltx2/fox.mp4
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,9p' "$0" >&2; exit 2; }
name=$1 zone=$2 folder=$3
shift 3
arguments=$(printf ' %q' "$@")
# What each worker runs. Nothing in it is expanded here but the folder and the arguments.
worker=$(cat << 'END'
attribute() { curl -sf -H 'Metadata-Flavor: Google' "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"; }
# Entries are ID:PORT:ADDRESS, with commas between them, in the order of the workers.
hosts=$(attribute worker-network-endpoints)
export LTX2_PROCESS_ID=$(attribute agent-worker-number)
export LTX2_NUM_PROCESSES=$(echo "$hosts" | tr ',' '\n' | wc -l)
export LTX2_COORDINATOR=$(echo "$hosts" | cut -d, -f1 | cut -d: -f3):8476
# Large pages make copies to the chips faster.
sudo sh -c 'echo always > /sys/kernel/mm/transparent_hugepage/enabled' || true
END
)
command="$worker
cd $(printf %q "$folder") && exec ./ltx2$arguments"
exec gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command "$command"
