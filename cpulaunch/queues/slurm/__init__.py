"""The queue Slurm: sbatch submits a batch script that calls ``cpulaunch run``."""
