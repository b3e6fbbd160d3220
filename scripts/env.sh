# Sourced by the other scripts: virtual environments, cached outside of the checkout.

TORCH=2.13.0
CACHE=${CPULAUNCH_DEV_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cpulaunch-dev}
PYTHON=${PYTHON:-python3}

# install_torch VENV: installs the CPU build of torch if the index has it, otherwise the default build.
install_torch() {
  "$1/bin/pip" install -q "torch==$TORCH+cpu" 2>/dev/null && return
  echo "Your package index has no CPU build of torch $TORCH (pip's --extra-index-url can add one that has)."
  echo "Installing the default build; on x86_64 this is the CUDA build of several GB."
  "$1/bin/pip" install -q "torch==$TORCH"
}

# cached_venv NAME PACKAGE...: prints the path of a venv with the packages; "torch" means version $TORCH.
# scripts/constraints/NAME-PYTHON.txt has the versions; without this file, they are the newest.
# A venv is reused until the list of packages, their versions, Python or torch changes.  An unfinished one is replaced.
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

# install_checkout VENV PACKAGE...: installs this checkout in editable mode, and packages without their dependencies.
# The lock keeps two installations from writing into the checkout at the same time.
install_checkout() {
  local venv=$1; shift
  flock "$CACHE/checkout.lock" "$venv/bin/pip" install -q --no-deps --no-build-isolation -e . "$@"
}
