#!/bin/sh
# ssh as cpulaunch and the MPIs' mpiexec call it: it never asks, gives up within seconds, notices a host
# that has died, and says what is wrong (Intel's mpiexec calls `ssh -q`, which hides that).
[ "$1" = -q ] && shift
exec ssh -o BatchMode=yes -o ConnectTimeout=5 -o ServerAliveInterval=5 -o ServerAliveCountMax=2 "$@"
