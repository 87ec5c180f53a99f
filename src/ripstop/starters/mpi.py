"""A process that mpirun has started, from its environment variables: Open MPI's own, or PMI's.  Pure.

Rules: (1) mpirun starts one process a node; (2) no variable has the address of rank 0, so the user gives the endpoint.
"""

import re
from collections.abc import Mapping

from ripstop.model.config import MAX_NODES
from ripstop.model.errors import UsageError
from ripstop.model.parsers import MAX_NAME_LENGTH, integer
from ripstop.starters.start import Start

OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
PMI = ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS")  # MPICH and Intel MPI
JOB_NAMES = ("PMIX_NAMESPACE", "PMI_JOBID")


def is_open_mpi(environ: Mapping[str, str]) -> bool:
    """Whether mpirun has started this process and others."""
    return environ.get(OPEN_MPI[0], "1") != "1"


def read_mpi(environ: Mapping[str, str], hostname: str) -> Start:
    """UsageError if mpirun did not start this process, or started several on this node."""
    families = [family for family in (OPEN_MPI, PMI) if environ.get(family[0])]
    if not families:
        raise UsageError(
            f"--rdzv-backend=mpi: neither {OPEN_MPI[0]} nor {PMI[0]} is set; write mpirun -N 1 ripstop run …"
        )
    places = {_mpi_size_and_rank(environ, size, rank) for size, rank, _ in families}
    if len(places) > 1:
        seen = ", ".join(f"{name}={environ[name]}" for size, rank, _ in families for name in (size, rank))
        raise UsageError(f"--rdzv-backend=mpi: {seen}: the variables contradict each other; start one mpirun only")
    for _, _, local in families:
        if environ.get(local) and integer(local, environ[local], minimum=1, maximum=MAX_NODES) > 1:
            raise UsageError(
                f"{local}={environ[local]}: several processes on one node; ripstop needs one and starts the workers "
                f"itself: write mpirun -N 1 ripstop run --nproc-per-node={environ[local]} …"
            )
    (size, rank) = places.pop()
    name = next((environ[name] for name in JOB_NAMES if environ.get(name)), "")
    run_id = re.sub(r"[^A-Za-z0-9_-]", "-", name)[:MAX_NAME_LENGTH]
    return Start("MPI", run_id, size, rank, key_context=f"mpi {name}" if name else "")


def _mpi_size_and_rank(environ: Mapping[str, str], size_name: str, rank_name: str) -> tuple[int, int]:
    size = integer(size_name, environ[size_name], minimum=1, maximum=MAX_NODES)
    if not environ.get(rank_name):
        raise UsageError(f"{rank_name} is not set, although {size_name} is; start ripstop with mpirun")
    remedy = f"{size_name}={size} allows 0 to {size - 1}; start ripstop with mpirun"
    return size, integer(rank_name, environ[rank_name], minimum=0, maximum=size - 1, remedy=remedy)
