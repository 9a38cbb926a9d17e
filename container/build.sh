#!/usr/bin/env bash
# Builds the image of container/Dockerfile: container/build.sh cpu|cuda [IMAGE]. Where docker does not work, its steps are run in a
# clean folder instead, and the server is started there.
set -euo pipefail
cd "$(dirname "$0")/.."
accelerator=${1:-cpu} image=${2:-ltx2}
if docker info > /dev/null 2>&1; then
    exec docker build -f container/Dockerfile --target "$accelerator" -t "$image" .
fi
echo "build.sh: no docker here (no daemon answers): NO IMAGE IS BUILT; its steps are run in a folder instead"
exec python3 container/steps.py "$accelerator"
