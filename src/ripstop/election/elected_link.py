"""The interface of an election: a link to the coordinator that is elected, wherever it runs.

`EtcdLink` (etcd elects) and `SuccessionLink` (the nodes elect) implement it.  Both take `on_leader`, which is called
with the address of each new coordinator, and with the coordinator if it runs in this process; with None and None when
the coordinator in this process steps down.
"""

import asyncio
from typing import Protocol

from ripstop.transport.link import Link


class ElectedLink(Link, Protocol):
    """A `Link` that may host the coordinator.  `failed` gets the exception if that, or the link, has a defect."""

    failed: asyncio.Future[None]
