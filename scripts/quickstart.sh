#!/usr/bin/env bash
# From nothing to a trained model: a venv, cpulaunch in it, two ranks on this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh

if [ ! -e .venv/.ready ]; then
  echo "Making .venv: torch $TORCH, cpulaunch, and scikit-learn for its data. This takes a few minutes."
  "$PYTHON" -m venv .venv
  install_torch .venv
fi
.venv/bin/pip install -q . scikit-learn
touch .venv/.ready

echo
echo '$ cpulaunch run -n 2 --dry-run examples/digits.py'
.venv/bin/cpulaunch run -n 2 --dry-run examples/digits.py
echo
echo '$ cpulaunch run -n 2 examples/digits.py'
.venv/bin/cpulaunch run -n 2 examples/digits.py
echo
echo "That was .venv/bin/cpulaunch. Next: .venv/bin/cpulaunch run -n 2 your_script.py"
