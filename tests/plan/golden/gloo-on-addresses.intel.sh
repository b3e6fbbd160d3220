(
set -e
export MASTER_PORT=29500
directory=$(mktemp -d)
trap 'rm -r "$directory"' EXIT
cd "$directory"
cat > hostfile <<'END OF FILE'
10.0.0.1:2
10.0.0.2:2
END OF FILE
export CPULAUNCH_PLACEMENT='{"version":3,"launcher":"intel","identity":["PMI_RANK","PMI_SIZE","MPI_LOCALRANKID","MPI_LOCALNRANKS"],"agents_are_children":false,"daemon_outlives_link":false,"python":true,"directory":"/home/me","hosts":[["10.0.0.1",0],["10.0.0.2",0]],"host_specs":[{"assumed":true,"env":{},"ranks":[{"cores":"0-27","comm_cores":"","numa_nodes":"0","threads":28,"memory_policy":"prefer:0","env":{"OMP_PLACES":"{0:28},{1}:27"}},{"cores":"28-55","comm_cores":"","numa_nodes":"1","threads":28,"memory_policy":"prefer:1","env":{"OMP_PLACES":"{28:28},{29}:27"}}]}],"request":{"binding":{"worker_count":1,"dedicate_workers":false},"libraries":{"allocator":"auto","openmp":"auto"}},"env":{},"hidden":["SLURM_PROCID","SLURM_LOCALID","SLURM_NODEID","SLURM_NTASKS","SLURM_NPROCS","SLURM_GTIDS","SLURM_NTASKS_PER_NODE","SLURM_TASKS_PER_NODE","SLURM_STEP_NUM_TASKS","SLURM_STEP_TASKS_PER_NODE","OMPI_COMM_WORLD_RANK","OMPI_COMM_WORLD_SIZE","OMPI_COMM_WORLD_LOCAL_RANK","OMPI_COMM_WORLD_LOCAL_SIZE","OMPI_COMM_WORLD_NODE_RANK","PMIX_RANK","MV2_COMM_WORLD_RANK","MV2_COMM_WORLD_SIZE","MV2_COMM_WORLD_LOCAL_RANK","MV2_COMM_WORLD_LOCAL_SIZE","PALS_RANKID","PALS_NODEID","PALS_LOCAL_RANKID","ALPS_APP_PE","JSM_NAMESPACE_RANK","JSM_NAMESPACE_SIZE","JSM_NAMESPACE_LOCAL_RANK","JSM_NAMESPACE_LOCAL_SIZE","FLUX_TASK_RANK","FLUX_TASK_LOCAL_ID"],"heartbeat_timeout":30,"grace_period":10,"lenient":false,"telemetry":true,"stdin":0,"instances":0,"first_instance":0,"each":[]}'
export I_MPI_HYDRA_BOOTSTRAP=ssh
export I_MPI_HYDRA_BOOTSTRAP_EXEC=/venv/cpulaunch/launchers/ssh.sh
export I_MPI_HYDRA_RMK=user
export I_MPI_PIN=off
mpiexec.hydra -f hostfile -n 4 -ppn 2 -wdir /home/me -genv CPULAUNCH_BACKEND gloo -genv CPULAUNCH_PRECISION fp32 -genv CPULAUNCH_RANK_PRECISION_IS_PLANNED 1 -genv GLOO_SOCKET_IFNAME ib0 -genv MASTER_ADDR 10.0.0.1 -genv OMP_NUM_THREADS 28 /venv/bin/python -I -S /venv/cpulaunch/agent/run_agent.py -- /venv/bin/python train.py --lr 0.1
)
