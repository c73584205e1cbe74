#!/usr/bin/env bash
# Makes ready what demo.sh and test.sh need: a Vulkan driver where no adapter is found, and a
# virtual environment in .venv with this package in it; for the tests Chromium too, unless
# WGSL_TRAIN_SKIP_CHROMIUM is 1. Safe to run again. Debian and Ubuntu.
#
#   tools/setup.sh [EXTRA]      EXTRA: which optional dependencies, "dev" for the tests
set -euo pipefail
cd "$(dirname "$0")/.."
extra="${1:-}"

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }
apt_install() {
    command -v apt-get >/dev/null || { say "please install: $*"; exit 1; }
    say "installing $*"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    { say "Python 3.11 or later is needed (set PYTHON to choose one)"; exit 1; }
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then # absent, or left half-made
    "$python" -c 'import venv, ensurepip' 2>/dev/null || apt_install "$(basename "$python")-venv"
    say "making .venv"
    "$python" -m venv --clear .venv
fi
# Installing again costs seconds, so it is done only when the list of dependencies changed.
stamp=".venv/.installed-${extra:-base}"
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
    say "installing the package and its dependencies"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".${extra:+[$extra]}"
    touch "$stamp"
fi
if ! .venv/bin/python -m wgsl_train devices >/dev/null 2>&1; then
    apt_install libvulkan1 mesa-vulkan-drivers
fi
if [ "$extra" = dev ] && [ "${WGSL_TRAIN_SKIP_CHROMIUM:-}" != 1 ] &&
    ! .venv/bin/python -m tools.check_chromium --browser >/dev/null 2>&1; then
    apt_install chromium || {
        say "install Chrome or Chromium, or set WGSL_TRAIN_SKIP_CHROMIUM=1 to leave its tests out"
        exit 1
    }
fi
.venv/bin/python -m wgsl_train devices >&2
