#!/bin/sh
#BSUB -J bert
#BSUB -n 4
#BSUB -R 'span[ptile=1]'
#BSUB -x
exec /venv/bin/python -m cpulaunch run --nnodes=4 train.py --lr 0.1
