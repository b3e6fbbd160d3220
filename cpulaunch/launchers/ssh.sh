#!/bin/sh
# cpulaunch and the MPIs' mpiexec call this script instead of ssh.  It never asks questions, gives up within
# seconds, detects a dead host, and prints errors, which `ssh -q` (used by Intel's mpiexec) would hide.
# On the other host, sh runs the command, as the user's shell there may be fish.  Commands with setenv, which
# Open MPI writes if the user's shell here is csh, are left unchanged.
[ "$1" = -q ] && shift
# The launcher reports a silent host after 4/3 of the heartbeat timeout.  ssh must end later, after 6/3: Open MPI
# ends the job with ssh, and its message doesn't name the host.
patience=${CPULAUNCH_HEARTBEAT_TIMEOUT:-30}
alive=$(((${patience%%.*} + 2) / 3))
options="-o BatchMode=yes -o ConnectTimeout=5 -o ServerAliveInterval=$alive -o ServerAliveCountMax=5"
flags=
while [ $# -gt 0 ]; do
  case $1 in
    -[46ACNTXYaknqstvx]*) flags="$flags $1"; shift ;;
    *) break ;;
  esac
done
case $1 in
  -*) exec ssh $options $flags "$@" ;;  # an unknown option, which may have a value
esac
host=$1
shift
left="$*"
case $left in
  '' | *'setenv '*) exec ssh $options $flags "$host" "$@" ;;
esac
quote() {  # set $quoted to $1 as one word of sh
  left=$1 quoted=
  while :; do
    case $left in
      *\'*) quoted="$quoted${left%%\'*}'\"'\"'"; left=${left#*\'} ;;
      *) break ;;
    esac
  done
  quoted="'$quoted$left'"
}
line=$1
if [ $# -gt 1 ]; then
  line=
  for word; do
    case $word in
      /*' '*) quote "$word"; word=$quoted ;;  # Intel's mpiexec doesn't quote its own path
    esac
    line="$line $word"
  done
fi
quote "$line"
exec ssh $options $flags "$host" "exec /bin/sh -c $quoted"
