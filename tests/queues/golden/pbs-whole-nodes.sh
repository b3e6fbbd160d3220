#!/bin/sh
#PBS -j oe
#PBS -N bert
#PBS -l select=4
#PBS -l place=scatter:excl
cd "$PBS_O_WORKDIR"
exec /venv/bin/python -m cpulaunch run --nnodes=4 train.py --lr 0.1
