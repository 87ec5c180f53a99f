"""Where a job's nodes meet, from the flags of `ripstop run`.

One node needs no meeting: its coordinator is in its own process (`LOCAL`), whichever backend was named, unless it was
given an endpoint that others could come to.  With etcd no node is the meeting place: one of them is elected.  Words
that a choice leaves without effect are said in the notes.
"""

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from ripstop.cli.options.flags import Given
from ripstop.model.config import COORDINATOR_PORT, ETCD_PORT, MASTER_PORT, MAX_NODES, Backend
from ripstop.model.errors import UsageError
from ripstop.model.parsers import address, boolean, host, identifier, integer, port, rank_by
from ripstop.model.round import Address, RankBy

BACKENDS = ("c10d", "static", "etcd", "etcd-v2")
ENDPOINT = ("--rdzv-backend", "--rdzv-endpoint")
MASTER = ("--master-addr", "--master-port")
NUMBERS = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")  # a node's number, from Slurm and from an indexed Kubernetes Job


class RendezvousOptions(Struct, frozen=True):
    """Where the nodes meet, and who this one is among them; the fields are `RunConfig`'s."""

    backend: Backend
    endpoint: Address | None = None
    is_host: bool | None = None
    node_rank: int | None = None
    local_addr: str | None = None
    store_port: int = 0


class Ranking(Struct, frozen=True):
    """What first ranks go by, and what this node brings for it."""

    by: RankBy = RankBy.JOIN
    number: int | None = None
    label: str = ""


def meeting(given: Given, min_nodes: int, max_nodes: int, is_host: str | None, notes: list[str]) -> RendezvousOptions:
    hosting = None if is_host is None else boolean(f"{given.label('--rdzv-conf')} is_host", is_host)
    local_addr = host(given.label("--local-addr"), given.text("--local-addr", "")) if "--local-addr" in given else None
    if "--standalone" in given:
        if max_nodes != 1:
            raise UsageError(f"{_said(given, '--nnodes')}: --standalone is for one node; leave out one of the two")
        idle(given, (*ENDPOINT, *MASTER, "--node-rank"), "with --standalone", notes)
        return _alone(local_addr, hosting, given, notes)
    node_rank = _node_rank(given, max_nodes)
    match backend := given.text("--rdzv-backend", "static"):
        case "c10d":
            idle(given, MASTER, "with --rdzv-backend=c10d: the endpoint is --rdzv-endpoint", notes)
            endpoint = _endpoint(given, max_nodes)
            if endpoint is None:
                return _alone(local_addr, hosting, given, notes)
            return RendezvousOptions(Backend.COORDINATOR, endpoint, hosting, node_rank, local_addr)
        case "static" if max_nodes == 1:
            master = _master(given, notes)
            store_port = master.port if master and ("--master-port" in given or "--rdzv-endpoint" in given) else 0
            return _alone(local_addr or (master.host if master else None), hosting, given, notes, store_port)
        case "static":
            if is_host is not None:
                notes.append(f"{given.label('--rdzv-conf')} is_host has no effect with static: node 0 is the host")
            return _fixed(given, min_nodes, max_nodes, node_rank, local_addr, notes)
        case "etcd" | "etcd-v2":
            return _elected(given, backend, hosting, node_rank, local_addr, notes)
    raise UsageError(
        f"{given.label('--rdzv-backend')}={backend}: there is no such backend; write c10d, etcd or static, or install "
        "the package that has it as an entry point torchrun.handlers"
    )


def ranking(
    given: Given,
    conf: Mapping[str, str],
    place: RendezvousOptions,
    environ: Mapping[str, str],
    machine: str,
    notes: list[str],
) -> Ranking:
    """`machine` is what this machine calls itself."""
    name = given.label("--rdzv-conf")
    by = rank_by(name, conf)
    if "rank_by" in conf and place.backend in (Backend.LOCAL, Backend.STATIC):
        why = "on a single node" if place.backend is Backend.LOCAL else "with static: --node-rank is the rank"
        notes.append(f"{name} rank_by has no effect {why}")
        by = RankBy.JOIN
    if by is not RankBy.LABEL:
        idle(given, ["--node-label"], f"without {name} rank_by=label", notes)
    match by:
        case RankBy.SLOT:
            return Ranking(by, number=_number(name, place.node_rank, environ, machine, notes))
        case RankBy.LABEL if "--node-label" not in given:
            raise UsageError(f"{name} rank_by=label: this node has no label; say where it stands: --node-label=rack7")
        case RankBy.LABEL:
            return Ranking(by, label=identifier(given.label("--node-label"), given.text("--node-label", "")))
    return Ranking(by)


def _number(name: str, node_rank: int | None, environ: Mapping[str, str], machine: str, notes: list[str]) -> int:
    if node_rank is not None:
        return node_rank
    for variable in NUMBERS:
        if environ.get(variable):
            return integer(variable, environ[variable], minimum=0, maximum=MAX_NODES - 1)
    if ordinal := re.search(r"-([0-9]{1,9})$", machine.partition(".")[0]):
        notes.append(f"{name} rank_by=slot: this node's number is {int(ordinal[1])}, as {machine} says")
        return int(ordinal[1])
    raise UsageError(
        f"{name} rank_by=slot: this node has no number ({', '.join(NUMBERS)} are not set, and {machine} does not end "
        "in one after a dash); write --node-rank=N"
    )


def _alone(
    local_addr: str | None, hosting: bool | None, given: Given, notes: list[str], store_port: int = 0
) -> RendezvousOptions:
    if hosting is not None:
        notes.append(f"{given.label('--rdzv-conf')} is_host has no effect on a single node")
    return RendezvousOptions(Backend.LOCAL, local_addr=local_addr, store_port=store_port)


def _elected(
    given: Given,
    backend: str,
    hosting: bool | None,
    node_rank: int | None,
    local_addr: str | None,
    notes: list[str],
) -> RendezvousOptions:
    """By etcd; where that is, `config.etcd` reads."""
    said = _said(given, "--rdzv-backend")
    if not given.text("--rdzv-endpoint", ""):
        raise UsageError(
            f"{said}: no etcd is named; write --rdzv-endpoint=HOST:{ETCD_PORT}, several of them parted by commas"
        )
    idle(given, MASTER, f"with {said}: etcd's endpoint is --rdzv-endpoint", notes)
    if backend == "etcd-v2":
        notes.append(f"{said} is etcd here: ripstop speaks etcd's v3 API")
    if hosting is not None:
        notes.append(f"{given.label('--rdzv-conf')} is_host has no effect with {said}: etcd elects the host")
    return RendezvousOptions(Backend.ETCD, node_rank=node_rank, local_addr=local_addr)


def _fixed(
    given: Given, min_nodes: int, max_nodes: int, node_rank: int | None, local_addr: str | None, notes: list[str]
) -> RendezvousOptions:
    if min_nodes != max_nodes:
        said = _said(given, "--nnodes")
        raise UsageError(
            f"{said}: static has a fixed number of nodes; write --nnodes={max_nodes}, or --rdzv-backend=c10d"
        )
    master = _master(given, notes)
    if master is None:
        said = _said(given, "--nnodes")
        raise UsageError(
            f"{said}: several nodes need a place to meet; write --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT, "
            "or --master-addr=HOST --node-rank=N"
        )
    if node_rank is None:
        raise UsageError(
            f"{_said(given, '--nnodes')}: static needs every node's rank; write --node-rank=N, 0 on {master.host}, "
            "or --rdzv-backend=c10d, which gives ranks itself"
        )
    return RendezvousOptions(Backend.STATIC, master, node_rank == 0, node_rank, local_addr)


def _endpoint(given: Given, max_nodes: int) -> Address | None:
    """The coordinator's address; None for a single node that nobody else could come to."""
    name, text = given.label("--rdzv-endpoint"), given.text("--rdzv-endpoint", "")
    if not text:
        if max_nodes == 1:
            return None
        raise UsageError(
            f"{_said(given, '--nnodes')}: several nodes need a place to meet; "
            f"write --rdzv-endpoint=HOST:{COORDINATOR_PORT}, the same on all of them"
        )
    endpoint = address(name, text, default_port=COORDINATOR_PORT)
    if endpoint.port:
        return endpoint
    if max_nodes == 1:
        return None
    raise UsageError(f"{name}={text}: several nodes cannot meet at port 0; write {endpoint.host}:{COORDINATOR_PORT}")


def _master(given: Given, notes: list[str]) -> Address | None:
    """Where static nodes meet; None when nothing was said."""
    if given.text("--rdzv-endpoint", ""):
        idle(given, MASTER, "beside --rdzv-endpoint", notes)
        return address(given.label("--rdzv-endpoint"), given.text("--rdzv-endpoint", ""), default_port=MASTER_PORT)
    if not any(flag in given for flag in MASTER):
        return None
    if "--master-addr" not in given and given.text("--nnodes", "1") not in ("1", "1:1"):
        notes.append("no --master-addr: the nodes meet at 127.0.0.1, so all must be on this machine")
    return Address(
        host(given.label("--master-addr"), given.text("--master-addr", "127.0.0.1")),
        port(given.label("--master-port"), given.text("--master-port", str(MASTER_PORT))),
    )


def _node_rank(given: Given, max_nodes: int) -> int | None:
    if "--node-rank" not in given:
        return None
    remedy = f"the ranks of {max_nodes} nodes are 0 to {max_nodes - 1}" if max_nodes > 1 else "a single node's is 0"
    return integer(
        given.label("--node-rank"), given.text("--node-rank", ""), minimum=0, maximum=max_nodes - 1, remedy=remedy
    )


def idle(given: Given, flags: Sequence[str], why: str, notes: list[str]) -> None:
    notes.extend(f"{given.label(flag)} has no effect {why}" for flag in flags if flag in given)


def _said(given: Given, flag: str) -> str:
    return f"{given.label(flag)}={given.text(flag, '')}"
