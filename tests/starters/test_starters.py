"""What ripstop reads from the environment variables of Slurm, MPI and AWS Batch."""

import pytest

from ripstop.model.errors import UsageError
from ripstop.model.round import Address
from ripstop.starters.aws_batch import read_aws_batch
from ripstop.starters.mpi import read_mpi
from ripstop.starters.slurm import is_slurm_step, read_slurm, slurm_node_count_outside_step
from ripstop.starters.start import Start
from tests.starters.variables import AWS_BATCH, BATCH_SCRIPT, OPEN_MPI, srun

BATCH_STEP, INTERACTIVE_STEP, EXTERN_STEP = "4294967291", "4294967290", "4294967292"


def test_a_task_of_srun_knows_its_node_and_the_coordinators() -> None:
    assert read_slurm(srun(2, "n[1-3,07-09],gpu-a[01-02]", 8), "any") == Start(
        starter="Slurm",
        run_id="1234.0",
        nodes=8,
        node_number=2,
        endpoint=Address("n1", 20_000 + 1234 * 4),
        key_context="slurm lab 1234.0 0",
        signals=("SIGUSR1", "SIGUSR2"),
    )


def test_steps_and_jobs_have_ports_of_their_own() -> None:
    def port(job: int, step: int) -> int:
        found = read_slurm(srun(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)), "any").endpoint
        assert found is not None
        return found.port

    ports = [port(job, step) for job in (1, 2, 1_000_000, 67_000_000) for step in range(4)]
    assert len(set(ports)) == len(ports)
    assert all(20_000 <= each < 29_000 for each in ports)


def test_a_port_that_srun_has_reserved_is_used() -> None:
    reserved = read_slurm(srun(SLURM_STEP_RESV_PORTS="12005-12006"), "any")
    assert reserved.endpoint == Address("n1", 12005)


def test_a_requeued_job_keeps_its_name_and_gets_another_secret() -> None:
    first, second = (read_slurm(srun(SLURM_RESTART_COUNT=count), "any") for count in ("0", "2"))
    assert first.run_id == second.run_id
    assert first.key_context != second.key_context
    assert (first.earlier_restarts, second.earlier_restarts) == (0, 2)


@pytest.mark.parametrize("step", ["", BATCH_STEP, INTERACTIVE_STEP, EXTERN_STEP])
def test_a_batch_script_and_an_interactive_shell_are_no_steps(step: str) -> None:
    environ = {**BATCH_SCRIPT, "SLURM_STEP_ID": step}
    assert not is_slurm_step(environ)
    assert slurm_node_count_outside_step(environ) == 4
    with pytest.raises(UsageError, match="not a step of srun; write srun"):
        read_slurm(environ, "any")


def test_without_a_job_the_error_names_the_variable() -> None:
    with pytest.raises(UsageError, match="SLURM_JOB_ID is not set; write srun"):
        read_slurm({}, "any")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, "8 tasks on one node; .*--ntasks-per-node=1 .*--nproc-per-node=8"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,2,1(x2)"}, "2 tasks on one node"),
        ({"SLURM_STEP_TASKS_PER_NODE": "0(x4)"}, "0 tasks on one node"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x3)"}, r"has 4 nodes; start ripstop with srun"),
        ({"SLURM_STEP_TASKS_PER_NODE": "one"}, "not a list of task counts"),
        ({"SLURM_STEP_NODELIST": "n[1-2"}, "not a node list"),
        ({"SLURM_STEP_NODELIST": "n[1-3]"}, "has 3 nodes"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set, although SLURM_STEP_ID is"),
        ({"SLURM_NNODES": "2"}, "SLURM_NNODES=2: .* has 4 nodes"),
        ({"SLURM_STEP_NUM_NODES": "5"}, "SLURM_STEP_NUM_NODES=5: .* has 4 nodes"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS=8: .* has 4 nodes"),
        ({"SLURM_LOCALID": "1"}, r"SLURM_LOCALID=1: a second task on this node, although .*=1\(x4\)"),
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set, although SLURM_STEP_ID is; .* pass all SLURM_ variables on"),
        ({"SLURM_NODEID": "4"}, "has the nodes 0 to 3"),
        ({"SLURM_NODEID": "x"}, "not a whole number; start ripstop with srun"),
        ({"SLURM_JOB_ID": "12_3"}, "not a whole number"),
        ({"SLURM_STEP_ID": "zero"}, "not a whole number"),
        ({"SLURMD_NODENAME": "n9"}, r"SLURMD_NODENAME=n9: node 0 of .* is n1"),
        ({"SLURM_RESTART_COUNT": "-1"}, "below the minimum"),
        ({"SLURM_GPUS_ON_NODE": "many"}, "not a whole number; start ripstop with srun"),
        ({"SLURM_STEP_RESV_PORTS": "x"}, "not a whole number; start ripstop with srun"),
    ],
)
def test_slurm_variables_that_make_no_sense_are_an_error(changed: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_slurm({**srun(), **changed}, "any")


# MPI ------------------------------------------------------------------------------------------------------------------


def test_a_process_of_open_mpi_knows_its_number_and_the_jobs_name() -> None:
    found = read_mpi(OPEN_MPI, "any")
    assert found == Start("MPI", "3061383169", 4, 2, key_context="mpi 3061383169")


def test_open_mpi_5_has_names_that_become_a_run_id() -> None:
    found = read_mpi({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-node0-4711@1"}, "any")
    assert found.run_id == "prterun-node0-4711-1"


def test_a_process_of_mpich_knows_its_number() -> None:
    found = read_mpi({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "1"}, "any")
    assert found == Start("MPI", "", 2, 1)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "neither OMPI_COMM_WORLD_SIZE nor PMI_SIZE is set; write mpirun -N 1"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, "several processes on one node; .*--nproc-per-node=8"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "allows 0 to 3"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": ""}, "OMPI_COMM_WORLD_RANK is not set"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "x"}, "not a whole number"),
        ({**OPEN_MPI, "PMI_SIZE": "2", "PMI_RANK": "1"}, "contradict each other"),
    ],
)
def test_mpi_variables_that_make_no_sense_are_an_error(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_mpi(environ, "any")


# AWS Batch ------------------------------------------------------------------------------------------------------------


def test_a_node_of_aws_batch_knows_the_main_node() -> None:
    assert read_aws_batch(AWS_BATCH, "ip-10-0-0-9") == Start(
        starter="AWS Batch",
        run_id="6c2a5e00-aaaa-bbbb-cccc-0123456789ab",
        nodes=3,
        node_number=2,
        endpoint=Address("10.0.0.7", 29400),
    )


def test_the_main_node_of_aws_batch_is_node_0_at_its_own_name() -> None:
    main = {**AWS_BATCH, "AWS_BATCH_JOB_MAIN_NODE_INDEX": "2", "AWS_BATCH_JOB_ATTEMPT": "3"}
    del main["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"]
    found = read_aws_batch(main, "ip-10-0-0-7")
    assert (found.node_number, found.endpoint) == (0, Address("ip-10-0-0-7", 29400))
    assert found.earlier_restarts == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"AWS_BATCH_JOB_NUM_NODES": ""}, "AWS_BATCH_JOB_NUM_NODES is not set; start ripstop in a multi-node"),
        ({"AWS_BATCH_JOB_NODE_INDEX": "3"}, "allows 0 to 2"),
        ({"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": ""}, "IPV4_ADDRESS is not set"),
        ({"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "a b"}, "not a host name"),
    ],
)
def test_aws_batch_variables_that_make_no_sense_are_an_error(changed: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_aws_batch({**AWS_BATCH, **changed}, "any")
