#!/bin/sh
# Opens a shell with four hosts and a login host on this machine: network namespaces with a real sshd each.
# They disappear when the shell exits.  Needs root.
#   scripts/play_cluster.sh [--hosts N] [COMMAND …]
# `cluster HOST COMMAND` runs a command on a host: `cluster node0 cpulaunch run -f $HOSTFILE …`.  Each host has its
# own process ids, so kill by `cluster node1 kill PID`.
exec "${PYTHON:-python3}" "$(dirname "$0")/../tests/support/play_cluster.py" "$@"
