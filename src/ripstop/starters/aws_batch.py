"""A node of a multi-node parallel job of AWS Batch, from its environment variables.  Pure.

AWS Batch gives the main node's address to the other nodes only; the main node uses its host name.
"""

from collections.abc import Mapping

from ripstop.model.config import COORDINATOR_PORT, MAX_NODES
from ripstop.model.errors import UsageError
from ripstop.model.parsers import integer, parse_host
from ripstop.model.round import Address
from ripstop.starters.start import Start

PREFIX = "AWS_BATCH_JOB_"
MAX_ATTEMPTS = 1_000


def read_aws_batch(environ: Mapping[str, str], hostname: str) -> Start:
    """UsageError if this is no node of a multi-node parallel job, or the variables contradict each other."""
    nodes = integer(*_batch_variable(environ, "NUM_NODES"), minimum=1, maximum=MAX_NODES)
    remedy = f"{PREFIX}NUM_NODES={nodes} allows 0 to {nodes - 1}; do not set {PREFIX} variables"
    index = integer(*_batch_variable(environ, "NODE_INDEX"), minimum=0, maximum=nodes - 1, remedy=remedy)
    main = integer(*_batch_variable(environ, "MAIN_NODE_INDEX"), minimum=0, maximum=nodes - 1, remedy=remedy)
    address = hostname if index == main else parse_host(*_batch_variable(environ, "MAIN_NODE_PRIVATE_IPV4_ADDRESS"))
    attempt = integer(f"{PREFIX}ATTEMPT", environ.get(f"{PREFIX}ATTEMPT") or "1", minimum=1, maximum=MAX_ATTEMPTS)
    return Start(
        starter="AWS Batch",
        run_id=_batch_variable(environ, "ID")[1].partition("#")[0],  # each node's own id ends with # and its index
        nodes=nodes,
        node_number=(index - main) % nodes,  # the main node is node 0
        endpoint=Address(address, COORDINATOR_PORT),
        earlier_restarts=attempt - 1,
    )


def _batch_variable(environ: Mapping[str, str], name: str) -> tuple[str, str]:
    name = PREFIX + name
    if not environ.get(name):
        raise UsageError(
            f"--rdzv-backend=aws-batch: {name} is not set; start ripstop in a multi-node parallel job of AWS Batch"
        )
    return name, environ[name]
