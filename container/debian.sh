#!/usr/bin/env bash
# Runs the steps of container/Dockerfile in a clean Debian system that is made for it, and the server there, as root:
# container/debian.sh cpu BINARY [MIRROR]. It needs debootstrap. Nothing is left behind.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:?cpu or cuda} binary=${2:?a built ltx2} mirror=${3:-http://deb.debian.org/debian}
release=$(sed -n 's/^FROM debian:\([a-z]*\)-slim AS base$/\1/p' container/Dockerfile)
root=$(mktemp -d "${TMPDIR:-/tmp}/ltx2-debian-XXXXXX")
# Other users than root must reach what is in it: apt's, and the image's.
chmod 755 "$root"
trap 'rm -rf --one-file-system "$root"' EXIT
debootstrap --variant=minbase "$release" "$root" "$mirror"
cp /etc/resolv.conf "$root/etc/resolv.conf"
# In a private mount namespace, so that its mounts end with the process.
unshare --mount --propagation private bash -ec \
    'mount -t proc proc "$1/proc"; exec python3 container/steps.py "$2" --binary "$3" --debian "$1"' _ "$root" "$target" "$binary"
