#!/bin/sh
# Makes .venv in the folder above this one, if need be, and installs omlx into it with the
# extras given, for example: sh scripts/install.sh cpu,dev
# PYTHON names another interpreter to make it with.
set -eu
cd "$(dirname "$0")/.."
extras=$1

usable() {
    # Debian ships Python without ensurepip; a version manager's shim may stand for no Python at all.
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    for candidate in ${PYTHON:+"$PYTHON"} python3.13 python3.12 python3.11 python3; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "omlx needs Python 3.11 or newer with its venv module (Debian, Ubuntu: apt install python3-venv);" \
        "PYTHON=/path/to/python make ... uses one that is not on the PATH" >&2
    return 1
}

if ! .venv/bin/python -c 'import pip' >/dev/null 2>&1; then
    python=$(find_python)
    echo "==> Creating .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi
echo "==> Installing omlx[$extras] into .venv (the first time this downloads packages)"
.venv/bin/python -m pip --disable-pip-version-check install --editable ".[$extras]"
