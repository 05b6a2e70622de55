#!/usr/bin/env bash
# Make .venv and install Draftsmith into it, editable. Usage: scripts/bootstrap.sh cpu,demo[,dev]
# Does nothing when .venv already holds this pyproject.toml's requirements with these extras (or more).
set -euo pipefail
cd "$(dirname "$0")/.."

extras="${1:?usage: scripts/bootstrap.sh EXTRA[,EXTRA...]}"
python="${PYTHON:-python3}"
stamp=.venv/draftsmith-install
cpu_index=https://download.pytorch.org/whl/cpu

say() { echo "draftsmith setup: $*" >&2; }
fail() { say "$*"; exit 2; }

# ---- is it there already? The stamp's first line is the requirements, its second the extras. ----
requirements="$(cksum <pyproject.toml)"
if [[ -f $stamp && -x .venv/bin/python ]]; then
    { read -r installed_requirements && read -r installed_extras; } <"$stamp" || true
    if [[ "${installed_requirements:-}" == "$requirements" ]]; then
        missing=""
        for extra in ${extras//,/ }; do
            [[ ",${installed_extras:-}," == *",$extra,"* ]] || missing+=" $extra"
        done
        [[ -z $missing ]] && exit 0
    fi
    # cpu and cuda install the same package name: the one replaces the other only in a new environment.
    for pair in cpu:cuda cuda:cpu; do
        if [[ ",$extras," == *",${pair%:*},"* && ",${installed_extras:-}," == *",${pair#*:},"* ]]; then
            fail "this checkout's .venv holds the ${pair#*:} build and ${pair%:*} was asked for. Remove .venv (rm -r .venv) and run this again, or pass EXTRA=${pair#*:}."
        fi
    done
fi

# ---- the environment ----
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    command -v "$python" >/dev/null || fail "no '$python' here. Install Python 3.11 or later, or name one: make demo PYTHON=python3.12"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$("$python" --version) is too old. Install Python 3.11 or later, or name one: make demo PYTHON=python3.12"
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv || fail "could not make .venv. On Debian and Ubuntu the package python3-venv is needed."
fi
rm -f "$stamp"

# ---- the packages ----
say "installing .[$extras]; about 3 minutes and 3.5 GB the first time"
log=.venv/draftsmith-install.log
install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[$extras]" "$@" >"$log" 2>&1; }
give_up() { cat "$log" >&2; fail "the install failed; pip's message is above."; }
if ! install; then
    if [[ ",$extras," == *",cpu,"* ]] && grep -q 'torch' "$log"; then
        say "the CPU build of torch was not found where pip looks by default; trying PyTorch's own index, $cpu_index"
        install --extra-index-url "$cpu_index" || give_up
    else
        give_up
    fi
fi

# ---- the torchvision trap ----
# vLLM's CPU build asks for torchvision, torchaudio and torchcodec, and PyPI serves their CUDA builds. Those do not
# load beside the CPU torch, and transformers then cannot import its models. Nothing here needs any of the three.
if .venv/bin/python -m pip show --quiet torchvision 2>/dev/null && ! .venv/bin/python -c 'import torchvision' 2>/dev/null; then
    say "removing torchvision, torchaudio and torchcodec: they are built for another torch, would break transformers, and are not needed"
    .venv/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
fi

printf '%s\n%s\n' "$requirements" "$extras" >"$stamp"
say "ready: .venv/bin/draftsmith"
