#!/usr/bin/env bash
# Set-up, then the whole test suite, a process a core. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/setup.sh dev
exec .venv/bin/python -m pytest -q -n auto --dist worksteal "$@"
