"""`ripstop run --rdzv-backend=NAME`, where NAME is a torch-style rendezvous handler of another package.

Only this layer may import torch and such handlers.  So `ripstop run`, which is in a lower layer, replaces itself with
this program, and this program calls it again with the handler.
"""

import sys

from ripstop import cli, launch
from ripstop.compat.launcher.handler_link import HANDLER_TIMEOUT_S, HandlerLink
from ripstop.compat.rendezvous import RendezvousHandler, RendezvousParameters, get_rendezvous_handler
from ripstop.model.config import RunConfig


def main() -> int:
    return cli.main(["run", *sys.argv[1:]], with_handler=run)


def run(config: RunConfig) -> int:
    """Run this node's part of a job with a rendezvous handler."""
    return launch.run(config, HandlerLink(lambda: handler(config), config))


def handler(config: RunConfig) -> RendezvousHandler:
    named = config.handler
    assert named is not None, "the configuration names a handler"
    conf = {"timeout": HANDLER_TIMEOUT_S} | dict(named.conf)
    return get_rendezvous_handler(
        RendezvousParameters(
            named.name, named.endpoint, config.run_id, config.min_nodes, config.max_nodes, config.local_addr, **conf
        )
    )
