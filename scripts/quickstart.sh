#!/usr/bin/env bash
# Creates an environment, installs cpulaunch into it, and trains on two ranks of this machine.
#   scripts/quickstart.sh           installs this checkout
#   scripts/quickstart.sh FILE...   installs these wheels, or an sdist, instead
# The environment is .venv, or $VENV.  After an interruption, run the script again: it replaces an unfinished environment.
set -euo pipefail
files=()
for file; do files+=("$(realpath "$file")"); done
cd "$(dirname "$0")/.."
. scripts/env.sh
VENV=${VENV:-.venv}
unfinished=$VENV.unfinished
export PIP_NO_COMPILE=1  # compiling all of scikit-learn would take half of the time

# pip handles Ctrl-C itself; without this trap, bash would then continue.
trap 'echo "Interrupted. Run the same command again to continue." >&2; exit 130' INT TERM

step() { printf '\n[%d s] %s\n' "$SECONDS" "$*"; }

if [ -e "$unfinished" ]; then
  step "Removing $VENV, which an earlier run left unfinished."
  rm -rf "$VENV" "$unfinished"
elif [ -e "$VENV" ] && [ ! -e "$VENV/.ready" ]; then
  echo "$VENV exists, and was not created by this script: remove it, or set VENV=DIR." >&2
  exit 1
fi
if [ ! -e "$VENV" ]; then
  step "Making the environment $VENV, with torch $TORCH: a download of 200 MB, or of several GB with CUDA."
  touch "$unfinished"
  "$PYTHON" -m venv "$VENV"
  install_torch "$VENV"
  touch "$VENV/.ready"
  rm "$unfinished"
fi
step "Installing cpulaunch, and scikit-learn for the example's data."
"$VENV/bin/pip" install -q "${files[@]:-.}" scikit-learn

step '$ cpulaunch run -n 2 --dry-run examples/digits.py'
"$VENV/bin/cpulaunch" run -n 2 --dry-run examples/digits.py
step '$ cpulaunch run -n 2 examples/digits.py'
"$VENV/bin/cpulaunch" run -n 2 examples/digits.py

step "Done. That was $VENV/bin/cpulaunch. Next: $VENV/bin/cpulaunch run -n 2 your_script.py"
