"""Environment variables as the starters set them."""


def srun(number: int = 0, nodes: str = "n[1-4]", count: int = 4, **more: str) -> dict[str, str]:
    """Task `number` of a step with one task on each of `count` nodes; as Slurm 22.05 sets them."""
    return {
        "HOME": "/home/ann",
        "SLURM_CLUSTER_NAME": "lab",
        "SLURM_JOB_ID": "1234",
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": str(number),
        "SLURM_NNODES": str(count),
        "SLURM_STEP_NUM_NODES": str(count),
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{count})" if count > 1 else "1",
        **more,
    }


BATCH_SCRIPT = {"SLURM_JOB_ID": "1234", "SLURM_JOB_NUM_NODES": "4", "SLURM_NODEID": "0"}
OPEN_MPI = {
    "HOME": "/home/ann",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "3061383169",
}
AWS_BATCH = {
    "AWS_BATCH_JOB_ID": "6c2a5e00-aaaa-bbbb-cccc-0123456789ab#2",
    "AWS_BATCH_JOB_ATTEMPT": "1",
    "AWS_BATCH_JOB_NUM_NODES": "3",
    "AWS_BATCH_JOB_NODE_INDEX": "2",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7",
}
