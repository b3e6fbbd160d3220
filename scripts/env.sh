# Sourced by the other scripts: virtual environments, cached outside of the checkout.

TORCH=2.13.0
CACHE=${CPULAUNCH_DEV_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cpulaunch-dev}
PYTHON=${PYTHON:-python3}

# install_torch VENV: the CPU build of torch where an index has it, else the plain one, which runs, too.
install_torch() {
  "$1/bin/pip" install -q "torch==$TORCH+cpu" 2>/dev/null && return
  echo "Your package index has no CPU build of torch $TORCH (pip's --extra-index-url may name one that has):"
  echo "taking the plain one, which for x86_64 is the CUDA build, several GB."
  "$1/bin/pip" install -q "torch==$TORCH"
}

# cached_venv NAME PACKAGE...: prints the path of a venv that holds the packages; "torch" means ours.
# Versions are those of scripts/constraints/NAME-PYTHON.txt, where there is such a file, else the newest.
# Made once for each list of packages, versions, Python and torch; a half-made one is made anew.
cached_venv() {
  local name=$1; shift
  local constraints; constraints=scripts/constraints/$name-$("$PYTHON" -c \
    'import sys; print("%d.%d" % sys.version_info[:2])').txt
  [ -e "$constraints" ] || constraints=/dev/null
  local key; key=$( (echo "$@" "$TORCH"; cat "$constraints"; "$PYTHON" -VV) | sha256sum | cut -c1-12)
  local venv=$CACHE/$name-$key
  mkdir -p "$CACHE"
  (
    flock 9
    [ -e "$venv/.ready" ] && exit
    echo "making the environment $name: $*" >&2
    rm -rf "$venv"; "$PYTHON" -m venv "$venv"
    local packages=()
    for package; do
      if [ "$package" = torch ]; then install_torch "$venv" >&2 || exit; else packages+=("$package"); fi
    done
    "$venv/bin/pip" install -q -c "$constraints" "${packages[@]}" >&2 && touch "$venv/.ready"
  ) 9>"$CACHE/$name.lock" || return
  echo "$venv"
}

# install_checkout VENV PACKAGE...: cpulaunch as it is here, and packages without what they ask for.  One at a
# time, as each writes into the checkout.
install_checkout() {
  local venv=$1; shift
  flock "$CACHE/checkout.lock" "$venv/bin/pip" install -q --no-deps --no-build-isolation -e . "$@"
}
