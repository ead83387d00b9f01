# Sourced by the other scripts: setup_env EXTRAS makes or reuses a virtual environment with the package in it and
# leaves its interpreter in $python.
#
#   PYTHON  interpreter to make the environment with; by default the first of Python 3.10 or later on the PATH
#   VENV    where the environment is; by default .venv
#   TORCH   what pip installs as PyTorch, options included; by default what the environment has, else torch==2.13.0
#   PIP_RETRIES  how often pip tries again to connect; by default once
#
# PyTorch comes before the package and then holds as a constraint: a resolver left free may fetch another build of
# several gigabytes.

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

recent_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON cannot be run."
        recent_enough "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" -V 2>&1), but Python 3.10 or later is needed."
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python3.14 python; do
        if command -v "$candidate" >/dev/null && recent_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.10 or later on the PATH; install one, or name it: PYTHON=/path/to/python bash $0"
}

make_venv() {
    local base
    base=$(find_python) || exit 1
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$base lacks the venv module; on Debian and Ubuntu: apt-get install python3-venv"
    echo "Making the virtual environment $1 with $("$base" -V) ..."
    "$base" -m venv --clear "$1" || fail "cannot make the virtual environment $1; the reason stands above."
}

install() {
    local what=$1 # $venv and $python come from setup_env
    shift
    echo "Installing $what ..."
    "$python" -m pip install --disable-pip-version-check --quiet --log "$venv/pip.log" "$@" ||
        fail "cannot install $what with $("$python" -V); pip's reason stands above, and at length in $venv/pip.log." \
            "It needs PyPI (https://pypi.org), or a mirror named by PIP_INDEX_URL."
}

setup_env() {
    local extras=$1 venv=${VENV:-.venv} key
    export PIP_RETRIES=${PIP_RETRIES:-1}
    python=$venv/bin/python
    if ! "$python" -c '' 2>/dev/null; then
        [ -z "${VENV:-}" ] || [ ! -e "$venv" ] || fail "VENV=$venv is there, but is no virtual environment."
        make_venv "$venv"
    fi
    recent_enough "$python" || fail "$venv has $("$python" -V), but Python 3.10 or later is needed: remove it."
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null || fail "$venv has no pip."

    key="${TORCH:-} $(cksum <pyproject.toml) $PWD"
    [ "$(head -n 1 "$venv/installed.txt" 2>/dev/null)" = "$key" ] || echo "$key" >"$venv/installed.txt"
    if grep -qxF "$extras" "$venv/installed.txt"; then
        return
    fi
    if [ -n "${TORCH:-}" ] || ! torch_pin "$venv"; then
        # shellcheck disable=SC2086  # TORCH may hold options such as --index-url
        install "${TORCH:-torch==2.13.0} (a large download)" ${TORCH:-torch==2.13.0}
        torch_pin "$venv" || fail "TORCH=${TORCH:-torch==2.13.0} did not install PyTorch."
    fi
    install "the package with [$extras]" --constraint "$venv/constraint.txt" --editable ".[$extras]"
    echo "$extras" >>"$venv/installed.txt"
}

# Installs megatron-core without its GPU dependencies: 0.19.2 into the environment, 0.16.1 beside it, and leaves the
# second's folder in $MEGATRON_CORE_0_16. Where that cannot be had, the tests that need it are skipped.
setup_megatron() {
    local venv=${VENV:-.venv}
    export MEGATRON_CORE_0_16=$PWD/$venv/megatron-core-0.16.1
    case $venv in /*) MEGATRON_CORE_0_16=$venv/megatron-core-0.16.1 ;; esac
    if ! grep -qxF megatron-core "$venv/installed.txt"; then
        echo "Installing megatron-core 0.19.2 and 0.16.1 without dependencies ..."
        local pip=("$python" -m pip install --disable-pip-version-check --quiet --log "$venv/pip.log")
        if "${pip[@]}" --constraint "$venv/constraint.txt" absl-py packaging &&
            "${pip[@]}" --no-deps --ignore-requires-python megatron-core==0.19.2 &&
            "${pip[@]}" --no-deps --ignore-requires-python --upgrade --target "$MEGATRON_CORE_0_16" megatron-core==0.16.1
        then
            echo megatron-core >>"$venv/installed.txt"
        else
            echo "megatron-core could not be installed with $("$python" -V): the tests that need it are skipped."
        fi
    fi
    [ -d "$MEGATRON_CORE_0_16/megatron" ] || unset MEGATRON_CORE_0_16
}

# Writes the installed PyTorch as a constraint; fails where there is none.
torch_pin() {
    "$python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
        >"$1/constraint.txt" 2>/dev/null
}
