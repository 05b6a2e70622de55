#!/usr/bin/env bash
# What a GPU does to Draftsmith, as a table of pass, fail and figures. Part A needs torch alone, part B vLLM too.
#
#   scripts/gpu_check.sh               both parts, on the GPU
#   scripts/gpu_check.sh a             part A alone
#   scripts/gpu_check.sh a --list      the checks and what each is
#   scripts/gpu_check.sh b states      one check (some: several names)
#   scripts/gpu_check.sh a --cpu       the same code at a small size, on a CPU
#
# Takes the environment that `make install EXTRA=cuda` made, or else the Python named in PYTHON (python3), which need not have
# Draftsmith installed. Exit status 0: nothing failed; 1: something did; 3: nothing failed, but something could not run.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-}"
if [[ -z $python ]]; then
    python=python3
    [[ -x .venv/bin/python ]] && python="$PWD/.venv/bin/python"
fi
command -v "$python" >/dev/null || { echo "gpu_check: no '$python' here. Name a Python that has torch: PYTHON=python3.12 $0" >&2; exit 2; }

# The stages lie at the top of the repository and are subpackages of an installed draftsmith. Where it is not installed,
# links lay them out as an install would; Python must then not look into the current folder first, nor must its children.
export PYTHONSAFEPATH=1
installed=0
"$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("draftsmith") is None)' || installed=$?
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [[ $installed != 0 ]]; then
    layout=build/gpu-check
    rm -rf "$layout" && mkdir -p "$layout/draftsmith"
    for each in "$PWD"/draftsmith/* "$PWD"/{extract,train,convert,serve}; do ln -sfn "$each" "$layout/draftsmith/$(basename "$each")"; done  # links may not have come along
    export PYTHONPATH="$PWD/$layout:$PYTHONPATH"
fi
exec "$python" -m tests.gpu "$@"
