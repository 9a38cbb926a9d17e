#!/usr/bin/env bash
# Creates the venv of the pinned reference, if missing or outdated: scripts/oracle/venv.sh FOLDER.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
wanted=$(cat "$here"/requirements*.txt | sha256sum)
[ "$(cat "$1/ready" 2>/dev/null)" != "$wanted" ] || exit 0
python3 -m venv "$1"
"$1/bin/pip" install -q -r "$here/requirements.txt"
"$1/bin/pip" install -q --no-deps -r "$here/requirements-official.txt"
rm -rf "$1"/lib/python3*/site-packages/torchaudio/lib
echo "$wanted" > "$1/ready"
