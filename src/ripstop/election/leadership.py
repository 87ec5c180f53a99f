"""What an agent holds in the election: as a candidate a lease and a listening socket, as the leader the coordinator."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable

from msgspec import Struct

from ripstop.coordinator.driver import Coordinator
from ripstop.election.election import Expired, Leader, Renewed
from ripstop.election.etcd_client import Denied, EtcdClient, Unavailable
from ripstop.model.errors import RipstopError
from ripstop.model.round import Address
from ripstop.system.linux import boot_time
from ripstop.system.network import describe_network_error
from ripstop.transport.endpoint import Bound, bind_endpoint
from ripstop.transport.server import Server

log = logging.getLogger("ripstop.coordinator")

EXTRA_LEASE_S = 1  # beyond the job's lease: etcd may need it to elect its own leader
OUTCOME_TTL_S = 15  # how long etcd keeps the outcome of a job, for nodes that were disconnected at its end
RENEW_RETRY_S = 0.1


class Candidacy(Struct, frozen=True):
    """A lease, requested at a time, and a listening socket at the address that others will connect to."""

    lease: int
    ttl: float
    requested_at: float
    bound: Bound
    address: Address


async def prepare_for_leadership(client: EtcdClient, job_lease: float, local_addr: str | None, port: int) -> Candidacy:
    """Raises `Unavailable` or `Denied`."""
    try:
        host = local_addr or await client.local_host()
    except OSError as error:
        raise Unavailable(f"no route to etcd: {describe_network_error(error)}") from error
    requested_at = boot_time()
    lease, ttl = await client.grant(math.ceil(job_lease) + EXTRA_LEASE_S)
    try:
        bound = _bind_leadership_port(host, port)
    except RipstopError as error:
        raise Denied(f"{host}: this node cannot listen there; give one of its addresses as --local-addr") from error
    return Candidacy(lease, ttl, requested_at, bound, Address(host, bound.address.port))


def _bind_leadership_port(host: str, port: int) -> Bound:
    """Bind the requested port, or any other if it is in use: nodes read the address from etcd."""
    try:
        bound = bind_endpoint(Address(host, port), required=True)
    except RipstopError as error:
        if not port:
            raise
        log.warning("%s; the coordinator uses a free port instead, which nodes read from etcd", error)
        bound = bind_endpoint(Address(host, 0), required=True)
    assert bound is not None, "a required address is bound, or an error"
    return bound


class Leadership:
    """The coordinator in this process, and the renewal of its lease; `on_lease` gets the result of each renewal."""

    def __init__(
        self,
        client: EtcdClient,
        leader: Leader,
        candidacy: Candidacy,
        coordinator: Coordinator,
        server: Server,
        on_lease: Callable[[Renewed | Expired], None],
    ) -> None:
        self.leader = leader
        self.lease = candidacy.lease
        self.coordinator = coordinator
        self._server = server
        self._client = client
        self._renewing = asyncio.create_task(self._renew(candidacy.ttl, on_lease), name="ripstop-lease")

    async def _renew(self, ttl: float, on_lease: Callable[[Renewed | Expired], None]) -> None:
        delay = ttl / 4
        while True:
            await asyncio.sleep(delay)
            requested_at = boot_time()
            try:
                granted = await self._client.keep_alive(self.lease, timeout=ttl / 8)
            except (Unavailable, Denied):
                delay = RENEW_RETRY_S  # the election's deadline ends the leadership, if no retry succeeds
                continue
            delay = ttl / 4
            on_lease(Renewed(requested_at, granted) if granted > 0 else Expired())

    def stop(self) -> None:
        """The coordinator decides nothing and sends nothing after this call."""
        self.coordinator.stop()
        self._renewing.cancel()

    async def close(self) -> None:
        await asyncio.gather(give_up_leadership_lease(self._client, self.lease), self._server.close())

    async def publish_outcome(self, leader_key: str, outcome_key: str, outcome: str) -> None:
        """Replace the leader's key by the signed outcome of the job."""
        try:
            lease, _ = await self._client.grant(OUTCOME_TTL_S)
            await self._client.replace(leader_key, self.leader.revision, outcome_key, outcome, lease)
        except (Unavailable, Denied) as error:
            log.warning("the outcome of the job could not be written to etcd: %s", error)


async def give_up_leadership_lease(client: EtcdClient, lease: int) -> None:
    """End a lease; if etcd does not reply, the lease ends by itself."""
    with contextlib.suppress(Unavailable, Denied):
        await client.revoke(lease)
