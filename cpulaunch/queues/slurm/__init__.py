"""The queue Slurm: sbatch submits a batch script that runs ``cpulaunch run``."""
