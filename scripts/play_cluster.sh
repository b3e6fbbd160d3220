#!/bin/sh
# Four hosts (and a login host) on this machine to try cpulaunch with: network namespaces with a real sshd.
# Gives a shell with a `cluster` command; when the shell ends, nothing of them is left.  Needs root.
#   scripts/play_cluster.sh [--hosts N] [COMMAND …]
# What is to run on a host begins with `cluster HOST`: `cluster node0 cpulaunch run -f $HOSTFILE …`, and, as each
# host counts its own processes, `cluster node1 kill PID`.
exec "${PYTHON:-python3}" "$(dirname "$0")/../tests/support/play_cluster.py" "$@"
