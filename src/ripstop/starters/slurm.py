"""The step of srun that this process is a task of, from its environment variables.  Pure.

Rules: (1) a step has one task a node: ripstop starts the workers itself; (2) variables that contradict each other are
an error, because a wrong guess would make two jobs out of one; (3) a batch script and an interactive shell are no steps
of srun, although newer versions of Slurm give them a step number.
"""

import re
from collections.abc import Mapping

from ripstop.model.config import MAX_NODES, MAX_SLOTS
from ripstop.model.errors import UsageError
from ripstop.model.parsers import integer, parse_host
from ripstop.model.round import Address
from ripstop.starters.node_list import expand_node_list
from ripstop.starters.start import Start

MAX_NUMBER = 2**32 - 1
FIRST_SPECIAL_STEP = 2**32 - 16  # steps from here on are Slurm's own: batch script, interactive shell, extern
FIRST_PORT = 20_000  # the ports of coordinators: below those that the kernel gives to connections
PORTS = 9_000
PORTS_PER_JOB = 4  # steps of one job that run at the same time differ
MAX_REQUEUES = 1_000_000
SIGNALS = ("SIGUSR1", "SIGUSR2")  # what users write in `--signal`
TASKS = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")
USE_SRUN = "start ripstop with srun, and do not set SLURM_ variables"


def is_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun has started this process, also if some of its variables were lost on the way."""
    number = environ.get("SLURM_STEP_ID", "")
    is_special = number.isascii() and number.isdigit() and int(number) >= FIRST_SPECIAL_STEP
    return bool(number) and not is_special


def slurm_node_count_outside_step(environ: Mapping[str, str]) -> int:
    """The number of nodes of the Slurm job, if this process is in a job and in no step of srun; otherwise 0."""
    count = environ.get("SLURM_JOB_NUM_NODES", "")
    if is_slurm_step(environ) or not environ.get("SLURM_JOB_ID") or not (count.isascii() and count.isdigit()):
        return 0
    return int(count)


def read_slurm(environ: Mapping[str, str], hostname: str) -> Start:
    """UsageError if this is no step of srun, if it has several tasks a node, or if its variables make no sense.

    The run id is Slurm's own name of the step; it stays the same when the job is requeued.  The secret changes, so that
    agents of an earlier run cannot join.
    """
    if not is_slurm_step(environ):
        state = "is set, but this is not a step of srun" if environ.get("SLURM_JOB_ID") else "is not set"
        raise UsageError(f"--rdzv-backend=slurm: SLURM_JOB_ID {state}; write srun --ntasks-per-node=1 ripstop run …")
    job, step = _slurm_number(environ, "SLURM_JOB_ID"), _slurm_number(environ, "SLURM_STEP_ID")
    name, text = _slurm_variable(environ, "SLURM_STEP_NODELIST")
    nodes = expand_node_list(name, text)
    _check_tasks(environ, len(nodes))
    node_number = _slurm_number(environ, "SLURM_NODEID")
    if node_number >= len(nodes):
        raise UsageError(f"SLURM_NODEID={node_number}: {name}={text} has the nodes 0 to {len(nodes) - 1}; {USE_SRUN}")
    own_name = environ.get("SLURMD_NODENAME", nodes[node_number])
    if own_name != nodes[node_number]:
        problem = f"node {node_number} of {name}={text} is {nodes[node_number]}"
        raise UsageError(f"SLURMD_NODENAME={own_name}: {problem}; {USE_SRUN}")
    requeues = _optional_slurm_number(environ, "SLURM_RESTART_COUNT", MAX_REQUEUES) or 0
    return Start(
        starter="Slurm",
        run_id=f"{job}.{step}",
        nodes=len(nodes),
        node_number=node_number,
        endpoint=Address(parse_host(name, nodes[0]), _slurm_coordinator_port(environ, job, step)),
        gpus=_optional_slurm_number(environ, "SLURM_GPUS_ON_NODE", MAX_SLOTS),
        earlier_restarts=requeues,
        key_context=f"slurm {environ.get('SLURM_CLUSTER_NAME', '')} {job}.{step} {requeues}",
        signals=SIGNALS,
    )


def _check_tasks(environ: Mapping[str, str], nodes: int) -> None:
    """UsageError unless the step has one task on each of its nodes."""
    name, text = _slurm_variable(environ, "SLURM_STEP_TASKS_PER_NODE")
    counts: list[tuple[int, int]] = []  # tasks a node, and how many such nodes
    for part in text.split(","):
        found = TASKS.fullmatch(part)
        if found is None:
            raise UsageError(f"{name}={text}: not a list of task counts, such as 1(x4) or 2,1(x3); {USE_SRUN}")
        counts.append((int(found[1]), int(found[2] or 1)))
    most = max(tasks for tasks, _ in counts)
    if most != 1:
        raise UsageError(
            f"{name}={text}: {most} tasks on one node; ripstop needs one and starts the workers itself: "
            f"write srun --ntasks-per-node=1 ripstop run --nproc-per-node={most} …"
        )
    if _optional_slurm_number(environ, "SLURM_LOCALID", MAX_NODES):
        problem = f"a second task on this node, although {name}={text}"
        raise UsageError(f"SLURM_LOCALID={environ['SLURM_LOCALID']}: {problem}; {USE_SRUN}")
    known = {name: sum(repeat for _, repeat in counts)}
    for other in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_STEP_NUM_TASKS"):
        if (value := _optional_slurm_number(environ, other, MAX_NODES)) is not None:
            known[other] = value
    for other, value in known.items():
        if value != nodes:
            listed = f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']} has {nodes} nodes"
            raise UsageError(
                f"{other}={environ[other]}: {listed}; {USE_SRUN} (a step over several parts of a heterogeneous job is "
                "not supported)"
            )


def _slurm_coordinator_port(environ: Mapping[str, str], job: int, step: int) -> int:
    """The first port that `srun --resv-ports` has reserved, or one derived from the job and the step."""
    reserved = environ.get("SLURM_STEP_RESV_PORTS", "")
    if not reserved:
        return FIRST_PORT + (job * PORTS_PER_JOB + step % PORTS_PER_JOB) % PORTS
    first = re.split("[-,]", reserved)[0]
    return integer("SLURM_STEP_RESV_PORTS", first, minimum=1, maximum=65535, remedy=USE_SRUN)


def _slurm_variable(environ: Mapping[str, str], name: str) -> tuple[str, str]:
    if not environ.get(name):
        raise UsageError(
            f"{name} is not set, although SLURM_STEP_ID is; start ripstop with srun, and pass all SLURM_ variables on "
            "to containers"
        )
    return name, environ[name]


def _slurm_number(environ: Mapping[str, str], name: str) -> int:
    return integer(*_slurm_variable(environ, name), minimum=0, maximum=MAX_NUMBER, remedy=USE_SRUN)


def _optional_slurm_number(environ: Mapping[str, str], name: str, maximum: int) -> int | None:
    if not environ.get(name):
        return None
    return integer(name, environ[name], minimum=0, maximum=maximum, remedy=USE_SRUN)
