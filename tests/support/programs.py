"""Small programs for ranks."""

SHOW = """
import json, os, sys
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
         "CPULAUNCH_JOB_ID", "CPULAUNCH_RESTART_COUNT", "OMP_NUM_THREADS", "CPULAUNCH_TOKEN", "CPULAUNCH_PLACEMENT",
         "CPULAUNCH_GROUPS_KEY", "GIVEN", "FORWARDED", "INHERITED", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"]
print(json.dumps({"argv": sys.argv, "cpus": sorted(os.sched_getaffinity(0)), "cwd": os.getcwd(), "path0": sys.path[0],
                  "name": __name__, "env": {n: os.environ.get(n) for n in names}}))
"""

# Rank 1 fails in the way that the first argument names, while rank 0 sleeps.
FAIL = """
import ctypes, os, signal, sys, time
print("started", flush=True)
if os.environ["RANK"] == "1":
    how = sys.argv[1]
    if how == "raise":
        raise ValueError("no such luck\\nand more")
    if how == "exit":
        sys.exit(3)
    if how == "_exit":
        os._exit(4)
    if how == "message":
        sys.exit("words")
    if how == "abort":
        os.abort()
    os.kill(os.getpid(), int(how))
time.sleep(300)
"""

# A program with a child and a grandchild in its own session, which ignores SIGTERM.
FAMILY = """
import os, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
subprocess.Popen(["sleep", "300"])
subprocess.Popen([sys.executable, "-c", "import subprocess, time; subprocess.Popen(['sleep', '300'], start_new_session=True); time.sleep(300)"],
                 start_new_session=True)
print("ready", flush=True)
time.sleep(300)
"""

# Prints "ready", and ends when a file "go" exists.
UNTIL_TOLD = """
import pathlib, time
print("ready")
while not pathlib.Path("go").exists(): time.sleep(0.02)
"""
