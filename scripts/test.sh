#!/usr/bin/env bash
# The tests: bash scripts/test.sh [options of pytest]; "-m slow" runs the slow ones. COVERAGE=1 also measures coverage.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_env.sh

echo "Runs the tests${*:+ with $*} on this machine's CPU, without the slow ones unless asked for."
setup_env dev,examples
setup_megatron
if [ -z "${COVERAGE:-}" ]; then
    exec "$python" -m pytest -m "not slow" "$@"
fi
"$python" -m coverage erase
"$python" -m coverage run -m pytest -m "not slow" "$@"
"$python" -m coverage combine --quiet
"$python" -m coverage report
