(
set -e
export MASTER_PORT=29500
directory=$(mktemp -d)
trap 'rm -r "$directory"' EXIT
cd "$directory"
cat > hosts <<'END OF FILE'
a
a
a
b
END OF FILE
export CCL_ATL_SHM=1
export CCL_ATL_TRANSPORT=ofi
export CCL_LOG_LEVEL=error
export CCL_PROCESS_LAUNCHER=torchrun
export CCL_WORKER_COUNT=1
export CCL_WORKER_OFFLOAD=0
export CPULAUNCH_BACKEND=ccl
export CPULAUNCH_PLACEMENT='{"version":3,"launcher":"slurm","identity":["SLURM_PROCID","SLURM_STEP_NUM_TASKS","SLURM_LOCALID",""],"agents_are_children":false,"daemon_outlives_link":false,"python":true,"directory":"/home/me","hosts":[["a",0],["b",1]],"host_specs":[{"assumed":true,"env":{},"ranks":[{"cores":"0-17","comm_cores":"","numa_nodes":"0","threads":18,"memory_policy":"prefer:0","env":{"OMP_NUM_THREADS":"18","OMP_PLACES":"{0:18},{1}:17"}},{"cores":"18-35","comm_cores":"","numa_nodes":"0-1","threads":18,"memory_policy":"","env":{"OMP_NUM_THREADS":"18","OMP_PLACES":"{18:18},{19}:17"}},{"cores":"36-53","comm_cores":"","numa_nodes":"1","threads":18,"memory_policy":"prefer:1","env":{"OMP_NUM_THREADS":"18","OMP_PLACES":"{36:18},{37}:17"}}]},{"assumed":true,"env":{},"ranks":[{"cores":"0-55","comm_cores":"","numa_nodes":"0-1","threads":56,"memory_policy":"","env":{"OMP_NUM_THREADS":"56","OMP_PLACES":"{0:56},{1}:55"}}]}],"request":{"binding":{"worker_count":1,"dedicate_workers":false},"libraries":{"allocator":"auto","openmp":"auto"}},"env":{"SECRET":"s"},"hidden":["PMI_RANK","PMI_SIZE","PMI_ID","PMI_LOCAL_RANK","PMI_LOCAL_SIZE","MPI_LOCALRANKID","MPI_LOCALNRANKS","OMPI_COMM_WORLD_RANK","OMPI_COMM_WORLD_SIZE","OMPI_COMM_WORLD_LOCAL_RANK","OMPI_COMM_WORLD_LOCAL_SIZE","OMPI_COMM_WORLD_NODE_RANK","PMIX_RANK","MV2_COMM_WORLD_RANK","MV2_COMM_WORLD_SIZE","MV2_COMM_WORLD_LOCAL_RANK","MV2_COMM_WORLD_LOCAL_SIZE","PALS_RANKID","PALS_NODEID","PALS_LOCAL_RANKID","ALPS_APP_PE","JSM_NAMESPACE_RANK","JSM_NAMESPACE_SIZE","JSM_NAMESPACE_LOCAL_RANK","JSM_NAMESPACE_LOCAL_SIZE","FLUX_TASK_RANK","FLUX_TASK_LOCAL_ID"],"heartbeat_timeout":30,"grace_period":10,"lenient":false,"telemetry":true,"stdin":0,"instances":0,"first_instance":0,"each":[]}'
export CPULAUNCH_PRECISION=fp32
export CPULAUNCH_RANK_CCL_TRANSPORT=shm+tcp
export CPULAUNCH_RANK_PRECISION_IS_PLANNED=1
export FI_PROVIDER=tcp
export MASTER_ADDR=a
unset SLURM_CONSTRAINT SLURM_CORE_SPEC SLURM_CPUS_PER_GPU SLURM_CPUS_PER_TASK SLURM_CPU_BIND SLURM_DISTRIBUTION SLURM_DIST_PLANESIZE SLURM_EXACT SLURM_EXCLUSIVE SLURM_EXPORT_ENV SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_GRES SLURM_HINT SLURM_HOSTFILE SLURM_KILL_BAD_EXIT SLURM_LABELIO SLURM_MEM_BIND SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE SLURM_MPI_TYPE SLURM_NNODES SLURM_NPROCS SLURM_NTASKS SLURM_NTASKS_PER_CORE SLURM_NTASKS_PER_GPU SLURM_NTASKS_PER_NODE SLURM_NTASKS_PER_SOCKET SLURM_OPEN_MODE SLURM_REMOTE_CWD SLURM_RESV_PORTS SLURM_SPREAD_JOB SLURM_STDERRMODE SLURM_STDINMODE SLURM_STDOUTMODE SLURM_STEP_GRES SLURM_THREADS SLURM_THREADS_PER_CORE SLURM_THREAD_SPEC SLURM_TRES_PER_TASK SLURM_UNBUFFEREDIO SLURM_USE_MIN_NODES SLURM_WAIT SLURM_WORKING_DIR SRUN_CPUS_PER_TASK SRUN_EXPORT_ENV
srun --overlap --overcommit --cpu-bind=none --mpi=none --export=ALL --kill-on-bad-exit=0 --wait=0 --input=0 --chdir=/home/me --ntasks=4 --distribution=arbitrary --nodelist=./hosts /venv/bin/python -I -S /venv/cpulaunch/agent/run_agent.py -- /venv/bin/python train.py --lr 0.1
)
