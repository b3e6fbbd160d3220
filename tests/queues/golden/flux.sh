#!/bin/sh
# flux: --job-name=train
# flux: --exclusive
# flux: --nodes=4
# flux: --time-limit=2h
# flux: --setattr=system.x=1
exec /venv/bin/python -m cpulaunch run --hosts="$(flux getattr hostlist)" -ppn 2 train.py --lr 0.1
