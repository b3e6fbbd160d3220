(
set -e
export MASTER_PORT=29500
directory=$(mktemp -d)
trap 'rm -r "$directory"' EXIT
cd "$directory"
cat > hosts <<'END OF FILE'
node1 4
node2 4
node3 4
node4 4
END OF FILE
export CCL_ATL_SHM=1
export CCL_ATL_TRANSPORT=ofi
export CCL_LOG_LEVEL=error
export CCL_PROCESS_LAUNCHER=torchrun
export CCL_WORKER_COUNT=1
export CCL_WORKER_OFFLOAD=0
export CPULAUNCH_BACKEND=ccl
export CPULAUNCH_PLACEMENT='{"version":3,"launcher":"ssh","identity":["CPULAUNCH_RANK","CPULAUNCH_SIZE","CPULAUNCH_LOCAL_RANK","CPULAUNCH_LOCAL_SIZE"],"agents_are_children":false,"daemon_outlives_link":false,"python":true,"directory":"/home/me","hosts":[["node1",0],["node2",0],["node3",0],["node4",0]],"host_specs":[{"assumed":true,"env":{},"ranks":[{"cores":"0-13","comm_cores":"","numa_nodes":"0","threads":14,"memory_policy":"prefer:0","env":{"OMP_PLACES":"{0:14},{1}:13"}},{"cores":"14-27","comm_cores":"","numa_nodes":"0","threads":14,"memory_policy":"prefer:0","env":{"OMP_PLACES":"{14:14},{15}:13"}},{"cores":"28-41","comm_cores":"","numa_nodes":"1","threads":14,"memory_policy":"prefer:1","env":{"OMP_PLACES":"{28:14},{29}:13"}},{"cores":"42-55","comm_cores":"","numa_nodes":"1","threads":14,"memory_policy":"prefer:1","env":{"OMP_PLACES":"{42:14},{43}:13"}}]}],"request":{"binding":{"worker_count":1,"dedicate_workers":false},"libraries":{"allocator":"auto","openmp":"auto"}},"env":{},"hidden":["SLURM_PROCID","SLURM_LOCALID","SLURM_NODEID","SLURM_NTASKS","SLURM_NPROCS","SLURM_GTIDS","SLURM_NTASKS_PER_NODE","SLURM_TASKS_PER_NODE","SLURM_STEP_NUM_TASKS","SLURM_STEP_TASKS_PER_NODE","PMI_RANK","PMI_SIZE","PMI_ID","PMI_LOCAL_RANK","PMI_LOCAL_SIZE","MPI_LOCALRANKID","MPI_LOCALNRANKS","OMPI_COMM_WORLD_RANK","OMPI_COMM_WORLD_SIZE","OMPI_COMM_WORLD_LOCAL_RANK","OMPI_COMM_WORLD_LOCAL_SIZE","OMPI_COMM_WORLD_NODE_RANK","PMIX_RANK","MV2_COMM_WORLD_RANK","MV2_COMM_WORLD_SIZE","MV2_COMM_WORLD_LOCAL_RANK","MV2_COMM_WORLD_LOCAL_SIZE","PALS_RANKID","PALS_NODEID","PALS_LOCAL_RANKID","ALPS_APP_PE","JSM_NAMESPACE_RANK","JSM_NAMESPACE_SIZE","JSM_NAMESPACE_LOCAL_RANK","JSM_NAMESPACE_LOCAL_SIZE","FLUX_TASK_RANK","FLUX_TASK_LOCAL_ID"],"heartbeat_timeout":30,"grace_period":10,"lenient":false,"telemetry":true,"stdin":0,"instances":0,"first_instance":0,"each":[]}'
export CPULAUNCH_PRECISION=fp32
export CPULAUNCH_RANK_CCL_TRANSPORT=shm+tcp
export CPULAUNCH_RANK_PRECISION_IS_PLANNED=1
export FI_PROVIDER=tcp
export MASTER_ADDR=node1
export OMP_NUM_THREADS=14
/venv/bin/python -I -S /venv/cpulaunch/agent/run_spawner.py /venv/cpulaunch/launchers/ssh.sh hosts 0 -- /venv/bin/python -I -S /venv/cpulaunch/agent/run_agent.py -- /venv/bin/python train.py --lr 0.1
)
