#!/bin/sh
# Four hosts (and a login host) on this machine to try cpulaunch with: network namespaces with a real sshd.
# Gives a shell with a `cluster` command; when the shell ends, nothing of them is left.  Needs root.
#   scripts/play_cluster.sh [--hosts N] [COMMAND …]
exec "${PYTHON:-python3}" "$(dirname "$0")/../tests/support/play_cluster.py" "$@"
