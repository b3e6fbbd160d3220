#!/bin/sh
# ssh as cpulaunch and the MPIs' mpiexec call it: it never asks, gives up within seconds, notices a host
# that has died, and says what is wrong (Intel's mpiexec calls `ssh -q`, which hides that).
# The command is run by sh, whatever the user's shell there is: Open MPI writes it for the shell that the user
# has here, and fish understands neither.  What it writes for csh (setenv) stays as it is.
[ "$1" = -q ] && shift
# It is more patient than the launcher: Open MPI ends the job when ssh does, and the launcher can name the host.
# The launcher waits 4/3 of the patience for an agent.  ssh asks after 1/3, and ends after six such periods.
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
  -*) exec ssh $options $flags "$@" ;;  # an option that we don't know may take a value
esac
host=$1
shift
left="$*"
case $left in
  '' | *'setenv '*) exec ssh $options $flags "$host" "$@" ;;
esac
quote() {  # $quoted is $1 as one word of sh
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
      /*' '*) quote "$word"; word=$quoted ;;  # a path: Intel's mpiexec doesn't quote its own
    esac
    line="$line $word"
  done
fi
quote "$line"
exec ssh $options $flags "$host" "exec /bin/sh -c $quoted"
