"""The flags about the rendezvous: where a job's nodes meet, and this node's identity.  Pure.

A single node needs no rendezvous: its coordinator runs in its own process (`LOCAL`) with any backend, unless it has an
endpoint that other nodes can connect to.  With etcd, the nodes elect the host of the coordinator.  Flags that a choice
leaves without effect are named in the notes.
"""

import re
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from ripstop.cli.options.flags import ParsedArguments, note_unused_option_flags
from ripstop.model.config import COORDINATOR_PORT, ETCD_PORT, MASTER_PORT, MAX_NODES, Backend
from ripstop.model.errors import UsageError
from ripstop.model.parsers import address, boolean, host, identifier, integer, port
from ripstop.model.rendezvous_conf import rank_by, target
from ripstop.model.round import Address, RankBy

BACKENDS = ("c10d", "static", "etcd", "etcd-v2")
ENDPOINT_FLAGS = ("--rdzv-backend", "--rdzv-endpoint")
MASTER_FLAGS = ("--master-addr", "--master-port")
MAX_ENDPOINTS = 16  # addresses of agents that may become the coordinator
MIN_ELECTING_NODES = 3  # two nodes have no majority when one is lost
NODE_NUMBER_VARIABLES = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")  # of Slurm, and of an indexed Kubernetes Job


class RendezvousOptions(Struct, frozen=True):
    """Where the nodes meet, and this node's identity and rank; the fields are `RunConfig`'s."""

    backend: Backend
    endpoint: Address | None = None
    successors: tuple[Address, ...] = ()
    is_host: bool | None = None
    node_rank: int | None = None
    local_addr: str | None = None
    store_port: int = 0
    rank_by: RankBy = RankBy.JOIN
    node_number: int | None = None
    node_label: str = ""


def rendezvous_options(
    args: ParsedArguments, conf: Mapping[str, str], min_nodes: int, max_nodes: int, notes: list[str]
) -> RendezvousOptions:
    name = args.label("--rdzv-conf")
    is_host = boolean(f"{name} is_host", conf["is_host"]) if "is_host" in conf else None
    found = _rendezvous_options_from_backend_flag(args, min_nodes, max_nodes, notes)
    if found.backend is Backend.COORDINATOR:
        return replace(found, is_host=is_host)
    if is_host is not None:
        reasons = {
            Backend.LOCAL: "on a single node",
            Backend.STATIC: "with static: node 0 is the host",
            Backend.ETCD: f"with {args.quoted('--rdzv-backend')}: etcd elects the host",
        }
        notes.append(f"{name} is_host has no effect {reasons[found.backend]}")
    return found


def _rendezvous_options_from_backend_flag(
    args: ParsedArguments, min_nodes: int, max_nodes: int, notes: list[str]
) -> RendezvousOptions:
    local_addr = _rendezvous_local_address(args)
    single_node = RendezvousOptions(Backend.LOCAL, local_addr=local_addr)
    if "--standalone" in args:
        if max_nodes != 1:
            raise UsageError(f"{args.quoted('--nnodes')}: --standalone is for one node; remove one of the two")
        note_unused_option_flags(args, (*ENDPOINT_FLAGS, *MASTER_FLAGS, "--node-rank"), "with --standalone", notes)
        return single_node
    node_rank = _rendezvous_node_rank(args, max_nodes)
    match backend := args.text("--rdzv-backend", "static"):
        case "c10d":
            note_unused_option_flags(
                args, MASTER_FLAGS, "with --rdzv-backend=c10d: the endpoint is --rdzv-endpoint", notes
            )
            endpoint, successors = _rendezvous_endpoints(args, max_nodes, notes)
            if endpoint is None:
                return single_node
            return RendezvousOptions(
                Backend.COORDINATOR, endpoint, successors, node_rank=node_rank, local_addr=local_addr
            )
        case "static" if max_nodes == 1:
            if (master := _rendezvous_master_option(args, notes)) is None:
                return single_node
            has_port = "--master-port" in args or "--rdzv-endpoint" in args
            return replace(single_node, local_addr=local_addr or master.host, store_port=master.port if has_port else 0)
        case "static":
            master = _static_master(args, min_nodes, max_nodes, node_rank, notes)
            return RendezvousOptions(Backend.STATIC, master, (), node_rank == 0, node_rank, local_addr)
        case "etcd" | "etcd-v2":
            _check_etcd(args, backend, notes)
            return RendezvousOptions(Backend.ETCD, node_rank=node_rank, local_addr=local_addr)
    raise UsageError(
        f"{args.label('--rdzv-backend')}={backend}: unknown backend; write c10d, etcd, static or slurm, or install the "
        "package that provides it as an entry point torchrun.handlers"
    )


def rendezvous_options_from_handler_flags(args: ParsedArguments, notes: list[str]) -> RendezvousOptions:
    why = f"with {args.quoted('--rdzv-backend')}: its handler does the rendezvous"
    note_unused_option_flags(args, (*MASTER_FLAGS, "--node-rank"), why, notes)
    return RendezvousOptions(Backend.HANDLER, local_addr=_rendezvous_local_address(args))


def rendezvous_target_nodes_option(
    conf_name: str, conf: Mapping[str, str], rdzv: RendezvousOptions, min_nodes: int, max_nodes: int, notes: list[str]
) -> int | None:
    if "target" in conf and rdzv.backend in (Backend.LOCAL, Backend.STATIC):
        why = "on a single node" if rdzv.backend is Backend.LOCAL else "with static: all nodes have a rank"
        notes.append(f"{conf_name} target has no effect {why}")
        return None
    return target(conf_name, conf, min_nodes, max_nodes)


def rendezvous_options_with_ranking(
    args: ParsedArguments,
    conf: Mapping[str, str],
    rdzv: RendezvousOptions,
    environ: Mapping[str, str],
    hostname: str,
    notes: list[str],
    started_as: int | None = None,
) -> RendezvousOptions:
    """Add the order of first ranks, and this node's key in it; `started_as` is its number if a starter gave one."""
    name = args.label("--rdzv-conf")
    by = rank_by(name, conf)
    if "rank_by" in conf and rdzv.backend in (Backend.LOCAL, Backend.STATIC):
        why = "on a single node" if rdzv.backend is Backend.LOCAL else "with static: --node-rank is the rank"
        notes.append(f"{name} rank_by has no effect {why}")
        by = RankBy.JOIN
    if by is not RankBy.LABEL:
        note_unused_option_flags(args, ["--node-label"], f"without {name} rank_by=label", notes)
    match by:
        case RankBy.SLOT:
            given = rdzv.node_rank if rdzv.node_rank is not None else started_as
            number = _rendezvous_node_number(name, given, environ, hostname, notes)
            return replace(rdzv, rank_by=by, node_number=number)
        case RankBy.LABEL if "--node-label" not in args:
            raise UsageError(f"{name} rank_by=label: this node has no label; add one such as --node-label=rack7")
        case RankBy.LABEL:
            return replace(rdzv, rank_by=by, node_label=identifier(*args.labelled("--node-label")))
    return replace(rdzv, rank_by=by)


def _rendezvous_node_number(
    name: str, given: int | None, environ: Mapping[str, str], hostname: str, notes: list[str]
) -> int:
    if given is not None:
        return given
    for variable in NODE_NUMBER_VARIABLES:
        if environ.get(variable):
            return integer(variable, environ[variable], minimum=0, maximum=MAX_NODES - 1)
    if ordinal := re.search(r"-([0-9]{1,9})$", hostname.partition(".")[0]):
        notes.append(f"{name} rank_by=slot: this node's number is {int(ordinal[1])}, from its host name {hostname}")
        return int(ordinal[1])
    raise UsageError(
        f"{name} rank_by=slot: this node has no number ({', '.join(NODE_NUMBER_VARIABLES)} are not set, and the host "
        f"name {hostname} does not end with a dash and a number); write --node-rank=N"
    )


def _rendezvous_local_address(args: ParsedArguments) -> str | None:
    return host(*args.labelled("--local-addr")) if "--local-addr" in args else None


def _check_etcd(args: ParsedArguments, backend: str, notes: list[str]) -> None:
    """`rendezvous_conf.etcd` parses the addresses."""
    flag = args.quoted("--rdzv-backend")
    if not args.text("--rdzv-endpoint"):
        raise UsageError(
            f"{flag}: the address of etcd is missing; write --rdzv-endpoint=HOST:{ETCD_PORT}, or several with commas"
        )
    note_unused_option_flags(args, MASTER_FLAGS, f"with {flag}: etcd's endpoint is --rdzv-endpoint", notes)
    if backend == "etcd-v2":
        notes.append(f"{flag} means etcd: ripstop uses etcd's v3 API")


def _static_master(
    args: ParsedArguments, min_nodes: int, max_nodes: int, node_rank: int | None, notes: list[str]
) -> Address:
    flag = args.quoted("--nnodes")
    if min_nodes != max_nodes:
        raise UsageError(
            f"{flag}: static has a fixed number of nodes; write --nnodes={max_nodes}, or --rdzv-backend=c10d"
        )
    master = _rendezvous_master_option(args, notes)
    if master is None:
        raise UsageError(
            f"{flag}: several nodes need a rendezvous endpoint; write --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT, "
            "or --master-addr=HOST --node-rank=N"
        )
    if node_rank is None:
        raise UsageError(
            f"{flag}: static needs the rank of each node; write --node-rank=0 on {master.host} and --node-rank=N on "
            "the others, or --rdzv-backend=c10d, which assigns ranks"
        )
    return master


def _rendezvous_endpoints(
    args: ParsedArguments, max_nodes: int, notes: list[str]
) -> tuple[Address | None, tuple[Address, ...]]:
    """The coordinator's address, and all addresses if the nodes elect the coordinator."""
    name, text = args.labelled("--rdzv-endpoint")
    first, *others = text.split(",")
    endpoint = _rendezvous_endpoint(args, name, first, max_nodes)
    if not others:
        return endpoint, ()
    found = tuple(dict.fromkeys(address(name, part, default_port=COORDINATOR_PORT) for part in text.split(",")))
    if not all(each.port for each in found):
        raise UsageError(f"{name}={text}: several nodes need fixed ports, not 0; write HOST:{COORDINATOR_PORT}")
    if len(found) > MAX_ENDPOINTS:
        raise UsageError(f"{name} has at most {MAX_ENDPOINTS} addresses, this has {len(found)}; remove some")
    if max_nodes < MIN_ELECTING_NODES:
        notes.append(
            f"{name}={text}: the coordinator is always at {endpoint}, because {max_nodes} nodes have no majority "
            f"without one of them; a successor needs --nnodes={MIN_ELECTING_NODES} or more, or --rdzv-backend=etcd"
        )
        return endpoint, ()
    return endpoint, found if len(found) > 1 else ()


def _rendezvous_endpoint(args: ParsedArguments, name: str, text: str, max_nodes: int) -> Address | None:
    """The coordinator's address; None for a single node that other nodes cannot connect to."""
    if not text:
        if max_nodes == 1:
            return None
        raise UsageError(
            f"{args.quoted('--nnodes')}: several nodes need a rendezvous endpoint; "
            f"write --rdzv-endpoint=HOST:{COORDINATOR_PORT}, the same on all nodes"
        )
    endpoint = address(name, text, default_port=COORDINATOR_PORT)
    if endpoint.port:
        return endpoint
    if max_nodes == 1:
        return None
    raise UsageError(f"{name}={text}: several nodes need a fixed port, not 0; write {endpoint.host}:{COORDINATOR_PORT}")


def _rendezvous_master_option(args: ParsedArguments, notes: list[str]) -> Address | None:
    """The address of static's node 0; None if no flag names it."""
    if args.text("--rdzv-endpoint"):
        note_unused_option_flags(args, MASTER_FLAGS, "with --rdzv-endpoint", notes)
        return address(*args.labelled("--rdzv-endpoint"), default_port=MASTER_PORT)
    if not any(flag in args for flag in MASTER_FLAGS):
        return None
    if "--master-addr" not in args and args.text("--nnodes", "1") not in ("1", "1:1"):
        notes.append("no --master-addr: using 127.0.0.1, so all nodes must be on this machine")
    return Address(
        host(*args.labelled("--master-addr", "127.0.0.1")), port(*args.labelled("--master-port", str(MASTER_PORT)))
    )


def _rendezvous_node_rank(args: ParsedArguments, max_nodes: int) -> int | None:
    if "--node-rank" not in args:
        return None
    remedy = f"the ranks of {max_nodes} nodes are 0 to {max_nodes - 1}" if max_nodes > 1 else "a single node's is 0"
    return integer(*args.labelled("--node-rank"), minimum=0, maximum=max_nodes - 1, remedy=remedy)
