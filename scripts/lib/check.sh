# Lints, type-checks and tests. Sourced, behind env.sh, by scripts/test and by CI.

_COMPILE_KERNELS='from atom.model_ops.kernels.native.build import native_build; native_build()'

# Sets up the environment, and checks all that is no test.
check() {
    cd "$ATOM_ROOT"
    # Tests start hundreds of processes: without bytecode each would compile all modules again.
    unset PYTHONDONTWRITEBYTECODE

    # Compiled once, by the processors that pip and mypy leave idle: without that each of the
    # processes that run tests would compile all C++ kernels for itself. Of all packages that takes
    # tqdm alone.
    [ -x "$ATOM_PYTHON" ] || _create_venv
    "$ATOM_PYTHON" -c 'import tqdm' 2>/dev/null || _pip tqdm
    nice "$ATOM_PYTHON" -c "$_COMPILE_KERNELS" &
    local kernels=$!
    ensure_env test
    "$ATOM_PYTHON" -m ruff check .
    "$ATOM_PYTHON" -m ruff format --check --quiet .
    "$ATOM_PYTHON" -m mypy
    wait "$kernels"
}

# Usage: run_tests [ARGUMENTS OF PYTEST]
run_tests() {
    # No work, unless what was installed meanwhile replaced the compiler.
    "$ATOM_PYTHON" -c "$_COMPILE_KERNELS"
    exec "$ATOM_PYTHON" -m pytest -q -rs -n auto --dist worksteal "$@"
}
