#!/usr/bin/env bash
# Set-up, then the kernel suite on every adapter of this machine, and a report for an issue.
#   tools/check_adapter.sh [OPTIONS]      the options are those of tools/check_adapter.py
set -euo pipefail
cd "$(dirname "$0")/.."
tools/setup.sh dev
exec .venv/bin/python -m tools.check_adapter "$@"
