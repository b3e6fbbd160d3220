(
set -e
export MASTER_PORT=29500
directory=$(mktemp -d)
trap 'rm -r "$directory"' EXIT
cd "$directory"
cat > hostfile <<'END OF FILE'
node1 slots=4
node2 slots=4
node3 slots=4
node4 slots=4
END OF FILE
export CPULAUNCH_PLACEMENT='{"version":3,"launcher":"openmpi","identity":["OMPI_COMM_WORLD_RANK","OMPI_COMM_WORLD_SIZE","OMPI_COMM_WORLD_LOCAL_RANK","OMPI_COMM_WORLD_LOCAL_SIZE"],"agents_are_children":false,"daemon_outlives_link":true,"python":true,"directory":"/home/me","hosts":[["node1",0],["node2",0],["node3",0],["node4",0]],"host_specs":[{"assumed":true,"env":{},"ranks":[{"cores":"0-13","comm_cores":"","numa_nodes":"0","threads":14,"memory_policy":"prefer:0","env":{"OMP_PLACES":"{0:14},{1}:13"}},{"cores":"14-27","comm_cores":"","numa_nodes":"0","threads":14,"memory_policy":"prefer:0","env":{"OMP_PLACES":"{14:14},{15}:13"}},{"cores":"28-41","comm_cores":"","numa_nodes":"1","threads":14,"memory_policy":"prefer:1","env":{"OMP_PLACES":"{28:14},{29}:13"}},{"cores":"42-55","comm_cores":"","numa_nodes":"1","threads":14,"memory_policy":"prefer:1","env":{"OMP_PLACES":"{42:14},{43}:13"}}]}],"request":{"binding":{"worker_count":1,"dedicate_workers":false},"libraries":{"allocator":"auto","openmp":"auto"}},"env":{},"hidden":["SLURM_PROCID","SLURM_LOCALID","SLURM_NODEID","SLURM_NTASKS","SLURM_NPROCS","SLURM_GTIDS","SLURM_NTASKS_PER_NODE","SLURM_TASKS_PER_NODE","SLURM_STEP_NUM_TASKS","SLURM_STEP_TASKS_PER_NODE","PMI_RANK","PMI_SIZE","PMI_ID","PMI_LOCAL_RANK","PMI_LOCAL_SIZE","MPI_LOCALRANKID","MPI_LOCALNRANKS","MV2_COMM_WORLD_RANK","MV2_COMM_WORLD_SIZE","MV2_COMM_WORLD_LOCAL_RANK","MV2_COMM_WORLD_LOCAL_SIZE","PALS_RANKID","PALS_NODEID","PALS_LOCAL_RANKID","ALPS_APP_PE","JSM_NAMESPACE_RANK","JSM_NAMESPACE_SIZE","JSM_NAMESPACE_LOCAL_RANK","JSM_NAMESPACE_LOCAL_SIZE","FLUX_TASK_RANK","FLUX_TASK_LOCAL_ID"],"heartbeat_timeout":30,"grace_period":10,"lenient":false,"telemetry":true,"stdin":0,"instances":0,"first_instance":0,"each":[]}'
export PRTE_MCA_plm_ssh_agent=/venv/cpulaunch/launchers/ssh.sh
mpiexec --allow-run-as-root --bind-to none --hostfile hostfile -n 16 --map-by ppr:4:node --wdir /home/me -x CCL_ATL_SHM=1 -x CCL_ATL_TRANSPORT=ofi -x CCL_LOG_LEVEL=error -x CCL_PROCESS_LAUNCHER=torchrun -x CCL_WORKER_COUNT=1 -x CCL_WORKER_OFFLOAD=0 -x CPULAUNCH_BACKEND=ccl -x CPULAUNCH_PRECISION=fp32 -x CPULAUNCH_RANK_CCL_TRANSPORT=shm+tcp -x CPULAUNCH_RANK_PRECISION_IS_PLANNED=1 -x FI_PROVIDER=tcp -x MASTER_ADDR=node1 -x OMP_NUM_THREADS=14 -x CPULAUNCH_CONTROL -x CPULAUNCH_JOB_ID -x CPULAUNCH_RESTART_COUNT -x CPULAUNCH_MAX_RESTARTS -x CPULAUNCH_TOKEN -x CPULAUNCH_GROUPS_KEY -x MASTER_PORT -x CPULAUNCH_PLACEMENT -x HF_TOKEN -x LC_ALL /venv/bin/python -I -S /venv/cpulaunch/agent/run_agent.py -- /venv/bin/python train.py --lr 0.1
)
