#!/bin/sh
# flux: --job-name=train
# flux: --exclusive
# flux: --nodes=4
exec /venv/bin/python -m cpulaunch run --hosts="$(flux getattr hostlist)" --nnodes=4 train.py --lr 0.1
