#!/usr/bin/env bash
# Runs the core tests with the newest torch, accelerate, transformers and Lightning, and prints what breaks.
#   scripts/try_newest.sh                  the newest of each
#   scripts/try_newest.sh torch==2.14.1    the newest of each, except for the named versions
# It takes 6 GB and a quarter of an hour, so CI doesn't run it.  It creates a new environment each time.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh

CORE=(tests/runtime/test_hooks.py tests/runtime/test_training.py tests/runtime/test_scripts.py
  tests/scripts/test_libraries.py tests/kernels tests/ccl/test_torch.py tests/ccl/test_collectives.py
  tests/ccl/test_bindings.py tests/examples/test_digits.py)

venv=$CACHE/newest
said=$(mktemp -d)
trap 'rm -rf "$venv" "$said"' EXIT
rm -rf "$venv"
"$PYTHON" -m venv "$venv"
wanted=("$@")
for package in torch accelerate transformers lightning; do
  [[ " $*" == *" $package"[=\<\>~]* ]] || wanted+=("$package")
done
echo "installing ${wanted[*]}"
"$venv/bin/pip" install -q --upgrade "${wanted[@]}" 'setuptools>=77' wheel numpy pyyaml psutil rich questionary py-spy \
  'impi-rt<2021.19' pytorch-ignite scikit-learn einops pytest pytest-rerunfailures pytest-xdist hypothesis pexpect expecttest
install_checkout "$venv"
export PATH=$venv/bin:$PATH
versions=$(pip list --format=freeze | grep -E '^(torch|accelerate|transformers|lightning)==' | tr '\n' ' ')
echo "$("$venv/bin/python" -V), $versions"

if ! cpulaunch ccl build --oneccl >"$said/build" 2>&1; then
  tail -30 "$said/build"
  echo "BREAKS: the process group ccl can't be built, with $versions"
  exit 1
fi
status=0
pytest -q -n 2 --dist loadfile -m "not repeats" --tb=short -p no:cacheprovider "${CORE[@]}" 2>&1 | tee "$said/tests" ||
  status=$?
echo
if [ "$status" = 0 ]; then
  echo "nothing breaks with $versions"
else
  echo "BREAKS with $versions:"
  grep -E '^(FAILED|ERROR) ' "$said/tests" || tail -5 "$said/tests"
fi
exit "$status"
