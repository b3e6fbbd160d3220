#!/bin/sh
#BSUB -J train
#BSUB -n 7
#BSUB -R 'span[ptile=2]'
#BSUB -W 2:00
#BSUB -x
exec /venv/bin/python -m cpulaunch run train.py --lr 0.1
