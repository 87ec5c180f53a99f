"""`ripstop run --rdzv-backend=NAME`, where NAME is a rendezvous handler of torch's kind from another package.

Such handlers, and torch with them, are for this layer alone.  So `ripstop run`, which is below it, starts this program
in its own place, and this calls it again with what it lacked.
"""

import sys

from ripstop import cli, launch
from ripstop.compat.launcher.handler_link import TIMEOUT, HandlerLink
from ripstop.compat.rendezvous import RendezvousHandler, RendezvousParameters, get_rendezvous_handler
from ripstop.model.config import RunConfig


def main() -> int:
    return cli.main(["run", *sys.argv[1:]], with_handler=run)


def run(config: RunConfig) -> int:
    """Run this node's part of a job whose nodes meet through a handler."""
    return launch.run(config, HandlerLink(lambda: handler(config), config))


def handler(config: RunConfig) -> RendezvousHandler:
    """The one that the configuration names."""
    named = config.handler
    assert named is not None, "this is what the configuration says"
    conf = {"timeout": TIMEOUT} | dict(named.conf)
    return get_rendezvous_handler(
        RendezvousParameters(
            named.name, named.endpoint, config.run_id, config.min_nodes, config.max_nodes, config.local_addr, **conf
        )
    )
