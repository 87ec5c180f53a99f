"""Flags that a cluster manager sets: Slurm, MPI or AWS Batch.  Their variables become defaults of the flags.

Rules: (1) only a step of srun is recognized without a flag, and only if no flag about the rendezvous is given; the
others are named with --rdzv-backend; (2) a flag overrides a variable, except where both describe the same fact: then
they must agree; (3) a worker of a job inherits the variables, but is no node: nothing is recognized there.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from ripstop.cli.options.flags import ParsedArguments
from ripstop.model.config import STOP_SIGNALS
from ripstop.model.errors import UsageError
from ripstop.model.parsers import boolean, integer, key_values, parse_node_range
from ripstop.starters.aws_batch import read_aws_batch
from ripstop.starters.mpi import is_open_mpi, read_mpi
from ripstop.starters.slurm import is_slurm_step, read_slurm, slurm_node_count_outside_step
from ripstop.starters.start import Start

STARTERS = {"slurm": read_slurm, "mpi": read_mpi, "aws-batch": read_aws_batch}
RENDEZVOUS_FLAGS = (
    *("--standalone", "--rdzv-backend", "--rdzv-endpoint", "--master-addr", "--master-port", "--node-rank"),
)
WORKER_VARIABLE = "TORCHELASTIC_RUN_ID"


def with_starter(
    args: ParsedArguments, environ: Mapping[str, str], hostname: str, notes: list[str]
) -> tuple[ParsedArguments, Start | None]:
    """The flags with the starter's defaults, and what it said; None if none is named or recognized."""
    name = args.text("--rdzv-backend")
    if "--standalone" in args or (name not in STARTERS and not _is_slurm_starter(args, environ, notes)):
        return args, None
    start = STARTERS[name or "slurm"](environ, hostname)
    _check_starter_node_rank(args, start)
    texts = {"--rdzv-id": start.run_id} if start.run_id else {}
    texts["--nproc-per-node"] = str(_starter_workers(start, environ))
    if start.signals:
        texts["--signals-to-handle"] = ",".join((*STOP_SIGNALS, *start.signals))
    if start.nodes > 1:
        if start.endpoint is None and not args.text("--rdzv-endpoint"):
            raise UsageError(
                f"{args.quoted('--rdzv-backend')}: {start.starter} does not say where node 0 is; write "
                "--rdzv-endpoint=HOST, the node of rank 0"
            )
        if "," in args.text("--rdzv-endpoint"):
            raise UsageError(
                f"{args.quoted('--rdzv-endpoint')}: with {start.starter}, node 0 hosts the coordinator; write its "
                "address alone, or --rdzv-backend=c10d for several"
            )
        texts["--rdzv-endpoint"] = str(start.endpoint)
    found = args.with_defaults(texts, f"{start.starter}'s", ())
    replaced = {"--rdzv-backend": "c10d", "--nnodes": _starter_nnodes(args, start, notes)}
    if start.nodes > 1:
        replaced["--rdzv-conf"] = _starter_rdzv_conf(args, start)
    return replace(found, texts={**found.texts, **replaced}), start


def _is_slurm_starter(args: ParsedArguments, environ: Mapping[str, str], notes: list[str]) -> bool:
    if any(flag in args for flag in RENDEZVOUS_FLAGS) or environ.get(WORKER_VARIABLE):
        return False
    outside = slurm_node_count_outside_step(environ)
    if not outside and not is_slurm_step(environ):
        return False
    job = environ.get("SLURM_JOB_ID", "")
    if is_open_mpi(environ):
        raise UsageError(
            f"SLURM_JOB_ID={job} and OMPI_COMM_WORLD_SIZE={environ['OMPI_COMM_WORLD_SIZE']}: mpirun in a Slurm job; "
            "write srun instead of mpirun, or add --rdzv-backend=mpi --rdzv-endpoint=HOST"
        )
    if outside > 1 and "--nnodes" in args and parse_node_range(*args.labelled("--nnodes"))[1] > 1:
        raise UsageError(
            f"{args.quoted('--nnodes')}: srun did not start this process, so it has one node of SLURM_JOB_ID={job}; "
            "write srun --ntasks-per-node=1 ripstop run …"
        )
    if outside > 1:
        notes.append(
            f"SLURM_JOB_ID={job} has {outside} nodes, but srun did not start this process: only this node is used; "
            "write srun --ntasks-per-node=1 ripstop run … for all"
        )
    return not outside


def _check_starter_node_rank(args: ParsedArguments, start: Start) -> None:
    if "--node-rank" not in args:
        return
    remedy = f"{start.starter} says that this is node {start.node_number}; leave it out"
    integer(*args.labelled("--node-rank"), minimum=start.node_number, maximum=start.node_number, remedy=remedy)


def _starter_workers(start: Start, environ: Mapping[str, str]) -> int:
    """One for each GPU that workers may use; one without GPUs."""
    if start.gpus is not None and "CUDA_VISIBLE_DEVICES" not in environ:
        return max(start.gpus, 1)
    from ripstop.system.gpus import visible_gpu_count  # --help does not need it

    return visible_gpu_count(environ) or 1


def _starter_nnodes(args: ParsedArguments, start: Start, notes: list[str]) -> str:
    """--nnodes, with the starter's number of nodes as the maximum."""
    if "--nnodes" not in args:
        return str(start.nodes)
    least, most = parse_node_range(*args.labelled("--nnodes"))
    flag = args.quoted("--nnodes")
    if not least <= start.nodes <= most:
        remedy = "--standalone for a job of its own on each node" if most == 1 else f"--nnodes={start.nodes}"
        raise UsageError(
            f"{flag}: {start.starter} has started ripstop on {start.nodes} nodes; write {remedy}, or start it on the "
            "number of nodes in the flag"
        )
    if start.nodes < most:
        notes.append(f"{flag}: {start.starter} has given {start.nodes} nodes, so the job has at most {start.nodes}")
    return f"{least}:{start.nodes}"


def _starter_rdzv_conf(args: ParsedArguments, start: Start) -> str:
    """--rdzv-conf, with the `is_host` and `rank_by` of this node's number."""
    given = key_values(*args.labelled("--rdzv-conf"))
    if start.node_number and boolean("--rdzv-conf is_host", given.get("is_host", "0")):
        raise UsageError(
            f"--rdzv-conf is_host={given['is_host']}: with {start.starter}, node 0 hosts the coordinator, and this is "
            f"node {start.node_number}; leave it out"
        )
    ours = {"is_host": str(int(start.node_number == 0)), "rank_by": "slot"}
    text = args.text("--rdzv-conf")
    return ",".join(filter(None, (text, *(f"{key}={value}" for key, value in ours.items() if key not in given))))
