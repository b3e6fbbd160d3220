#!/bin/sh
#PBS -N train
#PBS -j oe
#PBS -l select=4:ncpus=28:mpiprocs=2
#PBS -l walltime=2:00:00
#PBS -q batch
cd "$PBS_O_WORKDIR"
exec /venv/bin/python -m cpulaunch run train.py --lr 0.1
