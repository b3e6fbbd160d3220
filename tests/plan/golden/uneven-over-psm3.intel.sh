(
set -e
export MASTER_PORT=29500
directory=$(mktemp -d)
trap 'rm -r "$directory"' EXIT
cd "$directory"
cat > hostfile <<'END OF FILE'
a:3
b:1
END OF FILE
export CPULAUNCH_PLACEMENT='{"version":3,"launcher":"intel","identity":["PMI_RANK","PMI_SIZE","MPI_LOCALRANKID","MPI_LOCALNRANKS"],"agents_are_children":false,"daemon_outlives_link":false,"python":true,"directory":"/home/me","hosts":[["a",0],["b",1]],"host_specs":[{"assumed":true,"env":{},"ranks":[{"cores":"0-17","comm_cores":"","numa_nodes":"0","threads":18,"memory_policy":"prefer:0","env":{"OMP_NUM_THREADS":"18","OMP_PLACES":"{0:18},{1}:17"}},{"cores":"18-35","comm_cores":"","numa_nodes":"0-1","threads":18,"memory_policy":"","env":{"OMP_NUM_THREADS":"18","OMP_PLACES":"{18:18},{19}:17"}},{"cores":"36-53","comm_cores":"","numa_nodes":"1","threads":18,"memory_policy":"prefer:1","env":{"OMP_NUM_THREADS":"18","OMP_PLACES":"{36:18},{37}:17"}}]},{"assumed":true,"env":{},"ranks":[{"cores":"0-55","comm_cores":"","numa_nodes":"0-1","threads":56,"memory_policy":"","env":{"OMP_NUM_THREADS":"56","OMP_PLACES":"{0:56},{1}:55"}}]}],"request":{"binding":{"worker_count":1,"dedicate_workers":false},"libraries":{"allocator":"auto","openmp":"auto"}},"env":{},"hidden":["SLURM_PROCID","SLURM_LOCALID","SLURM_NODEID","SLURM_NTASKS","SLURM_NPROCS","SLURM_GTIDS","SLURM_NTASKS_PER_NODE","SLURM_TASKS_PER_NODE","SLURM_STEP_NUM_TASKS","SLURM_STEP_TASKS_PER_NODE","OMPI_COMM_WORLD_RANK","OMPI_COMM_WORLD_SIZE","OMPI_COMM_WORLD_LOCAL_RANK","OMPI_COMM_WORLD_LOCAL_SIZE","OMPI_COMM_WORLD_NODE_RANK","PMIX_RANK","MV2_COMM_WORLD_RANK","MV2_COMM_WORLD_SIZE","MV2_COMM_WORLD_LOCAL_RANK","MV2_COMM_WORLD_LOCAL_SIZE","PALS_RANKID","PALS_NODEID","PALS_LOCAL_RANKID","ALPS_APP_PE","JSM_NAMESPACE_RANK","JSM_NAMESPACE_SIZE","JSM_NAMESPACE_LOCAL_RANK","JSM_NAMESPACE_LOCAL_SIZE","FLUX_TASK_RANK","FLUX_TASK_LOCAL_ID"],"heartbeat_timeout":30,"grace_period":10,"lenient":false,"telemetry":true,"stdin":0,"instances":0,"first_instance":0,"each":[]}'
export I_MPI_HYDRA_BOOTSTRAP=ssh
export I_MPI_HYDRA_BOOTSTRAP_EXEC=/venv/cpulaunch/launchers/ssh.sh
export I_MPI_HYDRA_RMK=user
export I_MPI_PIN=off
unset I_MPI_PERHOST
mpiexec.hydra -f hostfile -n 4 -wdir /home/me -genv CCL_ATL_SHM 1 -genv CCL_ATL_TRANSPORT ofi -genv CCL_LOG_LEVEL error -genv CCL_PROCESS_LAUNCHER torchrun -genv CCL_WORKER_COUNT 1 -genv CCL_WORKER_OFFLOAD 0 -genv CPULAUNCH_BACKEND ccl -genv CPULAUNCH_PRECISION fp32 -genv CPULAUNCH_RANK_CCL_TRANSPORT shm+ofi -genv CPULAUNCH_RANK_PRECISION_IS_PLANNED 1 -genv FI_PROVIDER psm3 -genv MASTER_ADDR a -genv RDMAV_FORK_SAFE 1 /venv/bin/python -I -S /venv/cpulaunch/agent/run_agent.py -- /venv/bin/python train.py --lr 0.1
)
