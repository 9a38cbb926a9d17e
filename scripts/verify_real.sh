#!/usr/bin/env bash
# Compares ltx2 with the reference on published weights: scripts/verify_real.sh MODEL [OPTION…]; docs/guides/verify.md.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/verify/main.py" "$@"
