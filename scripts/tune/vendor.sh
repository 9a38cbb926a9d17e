#!/usr/bin/env bash
# Writes src/tune/html/vendor/*.js from the npm packages that packages.sha256 there pins: scripts/tune/vendor.sh. Needs npm.
# For another version, change it here and in the three files there.
set -euo pipefail
vendor=$(cd "$(dirname "$0")/../../src/tune/html/vendor" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm pack --silent @observablehq/plot@0.6.17 d3@7.9.2 > /dev/null
sha256sum --quiet -c "$vendor/packages.sha256"
tar -xOzf observablehq-plot-0.6.17.tgz package/dist/plot.umd.min.js > "$vendor/plot.umd.min.js"
tar -xOzf d3-7.9.2.tgz package/dist/d3.min.js > "$vendor/d3.min.js"
cd "$vendor"
sha256sum -c files.sha256
