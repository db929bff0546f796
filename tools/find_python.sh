#!/usr/bin/env bash
# Prints the path of a Python >= 3.12 that runs and can make virtual environments.
#
# A name on PATH proves nothing: a pyenv shim called python3.12 exists even where pyenv has not
# selected that version, and then only fails. So every candidate is run.
set -euo pipefail

works() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

if [[ -n "${PYTHON:-}" ]]; then
    if ! works "$PYTHON"; then
        echo "PYTHON=$PYTHON is not a Python >= 3.12 with its venv module: name another one" >&2
        exit 1
    fi
    printf '%s\n' "$PYTHON"
    exit 0
fi

pyenv="${PYENV_ROOT:-$HOME/.pyenv}"
candidates=(python3.12 "$pyenv"/versions/3.12*/bin/python python3 python3.13)
for candidate in "${candidates[@]}"; do
    path="$(command -v "$candidate" || true)"
    if [[ -n "$path" ]] && works "$path"; then
        printf '%s\n' "$path"
        exit 0
    fi
done

cat >&2 <<MESSAGE
No Python >= 3.12 with its venv module was found (tried: ${candidates[*]}).
Install one, for example with 'apt-get install python3.12-venv' or 'pyenv install 3.12',
or name one: make install PYTHON=/path/to/python3.12
MESSAGE
exit 1
