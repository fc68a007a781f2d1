#!/usr/bin/env bash
# Sets weft up in .venv, once, and trains the quick start's model. Arguments go to `weft train`:
#     ./quickstart.sh --layout tp2 --set train.steps=20
set -euo pipefail

# prepare REQUIREMENT: .venv with this package ("." or ".[test]"); does nothing where that is done already.
prepare() {
    local stamp=".venv/installed${1#.}" state python
    state="$(pwd && cat pyproject.toml)" # another place or other requirements: install again
    if [[ -f $stamp && $(<"$stamp") == "$state" ]]; then return; fi
    for python in python3.11 python3 ""; do
        if [[ -z $python ]]; then
            echo "weft needs Python 3.11 or newer; install it and call this again." >&2
            exit 2
        fi
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi
    done
    echo "Setting up .venv; this takes a few minutes the first time." >&2
    # The outer pip fills the environment: some distributions ship pip, but not the ensurepip that `venv` asks for.
    "$python" -m venv --without-pip .venv
    # One exact version of torch first: where pip is set up to find a CPU build, a range would still take the CUDA one.
    "$python" -m pip --python .venv/bin/python install -qq --no-input --no-warn-script-location pip torch==2.13.0
    .venv/bin/python -m pip install -qq --no-input --editable "$1"
    printf '%s\n' "$state" >"$stamp"
}

cd "$(dirname "${BASH_SOURCE[0]}")"
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then # test.sh sources this file for `prepare`
    prepare .
    # A run does not write over another: each quick start gets a folder of its own, unless one is named.
    case " $* " in *" --output"* | *" --help "*) ;; *) set -- --output "runs/quickstart-$(date +%Y%m%d-%H%M%S)" "$@" ;; esac
    exec .venv/bin/python -m weft train examples/quickstart.toml "$@"
fi
