#!/usr/bin/env bash
# Sets weft up in .venv with all that its tests need, once; then lint, types, spelling and tests.
#     ./test.sh                            a sample of every kind of test
#     ./test.sh --slow                     what CI runs: slow tests, too
#     ./test.sh --all                      every case of every test
#     ./test.sh tests/core/test_layout.py -x    arguments go to pytest
#     ./test.sh --all --cov                coverage, of worker processes too
#     ./test.sh --all -n 8                 tests in eight processes instead of two
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/quickstart.sh"
prepare '.[test]'

export OMP_NUM_THREADS=1 # the tests run several processes on the same cores
unset PYTHONDONTWRITEBYTECODE # they start hundreds: each would compile weft anew
.venv/bin/python -m ruff check
.venv/bin/python -m ruff format --check
.venv/bin/python -m mypy
.venv/bin/codespell
exec .venv/bin/python -m pytest -n 2 --dist worksteal "$@"
