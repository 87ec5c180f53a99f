"""Machines for tests: each host is a network namespace with a cable to a switch, an address, and a name of its own.

A namespace has no name that another test could know: it lives as long as the process that holds it, and that lives as
long as its stdin is open, so none is left when the test process and the agents it started are gone.  The machine's own
network is not touched.  Neighbours are told to each other once and for all, so a cut is silent: nobody asks for them,
nobody is told that they cannot be found, nobody gets a reset.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.etcd import Member, endpoints, running
from tests.e2e.harness import Agent, Job

NET = "10.83.7"
PORT = 29400
NOBODY = "02:00:00:00:00:ff"  # a MAC address that no host has

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))),
    reason="hosts are network namespaces: that needs root, iproute2 and util-linux",
)


needs_loss = pytest.mark.skipif(shutil.which("iptables") is None, reason="no iptables here to lose packets with")


class Namespace:
    """A network, a host name and an /etc/hosts, held by a process that only waits for its stdin to close."""

    def __init__(self, name: str, hosts: Path) -> None:
        setup = 'hostname "$0" && mount --bind "$1" /etc/hosts && ip link set lo up && echo up && exec cat'
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-ec", setup, name, str(hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "up\n", "a namespace could not be made"

    @property
    def pid(self) -> int:
        return self._holder.pid

    @property
    def enter(self) -> list[str]:
        """In front of a command: it is run here, under its own pid."""
        return ["nsenter", "--net", "--uts", "--mount", f"--target={self.pid}", f"--wd={Path.cwd()}"]

    def ip(self, *words: str) -> None:
        self._configure("ip", *words)

    def iptables(self, *words: str) -> None:
        self._configure("iptables", "-t", "raw", *words)

    def _configure(self, *words: str) -> None:
        subprocess.run(["nsenter", "--net", f"--target={self.pid}", *words], check=True, timeout=120)

    def close(self) -> None:
        self._holder.communicate(timeout=120)


class Host:
    """One machine."""

    def __init__(self, number: int, namespace: Namespace, switch: Namespace) -> None:
        self.number = number
        self.address = f"{NET}.{number}"
        self.mac = f"02:00:00:00:00:{number:02x}"
        self.namespace = namespace
        self._switch = switch
        self._port = f"p{number}"
        cable = ("type", "veth", "peer", "name", self._port, "netns", str(switch.pid))
        namespace.ip("link", "add", "eth0", "address", self.mac, *cable)
        namespace.ip("addr", "add", f"{self.address}/24", "dev", "eth0")
        namespace.ip("link", "set", "eth0", "up")
        switch.ip("link", "set", self._port, "up")
        self.heal()

    def cut(self) -> None:
        """Nothing reaches this host and nothing it sends reaches anybody."""
        self._switch.ip("link", "set", self._port, "nomaster")

    def heal(self) -> None:
        self._switch.ip("link", "set", self._port, "master", "switch")

    def knows(self, other: "Host") -> None:
        self._neighbour(other, other.mac)

    def speaks_past(self, other: "Host") -> None:
        """What this host sends to the other gets lost; what the other sends arrives."""
        self._neighbour(other, NOBODY)

    def loses(self, share: float) -> None:
        """This share of all packets that come here gets lost."""
        self.namespace.iptables("-F", "PREROUTING")
        if share:
            chance = ("-m", "statistic", "--mode", "random", "--probability", str(share))
            self.namespace.iptables("-A", "PREROUTING", "-i", "eth0", *chance, "-j", "DROP")

    def signal(self, signum: int) -> None:
        """To every process that runs here."""
        here = Path(f"/proc/{self.namespace.pid}/ns/net").stat().st_ino
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile
                if process.name != str(self.namespace.pid) and (process / "ns/net").stat().st_ino == here:
                    os.kill(int(process.name), signum)

    def _neighbour(self, other: "Host", mac: str) -> None:
        self.namespace.ip("neigh", "replace", other.address, "lladdr", mac, "dev", "eth0", "nud", "permanent")


@contextmanager
def hosts(count: int, folder: Path) -> Iterator[list[Host]]:
    """So many hosts on one switch."""
    with ExitStack() as stack:

        def namespace(name: str, address: str) -> Namespace:
            file = folder / f"etc-hosts-{name}"
            file.write_text(f"127.0.0.1 localhost\n{address} {name}\n")
            made = Namespace(name, file)
            stack.callback(made.close)
            return made

        switch = namespace("switch", "127.0.0.1")
        switch.ip("link", "add", "switch", "type", "bridge")
        switch.ip("link", "set", "switch", "up")
        found = [Host(n, namespace(f"host{n}", f"{NET}.{n}"), switch) for n in range(1, count + 1)]
        for one in found:
            for other in found:
                if one is not other:
                    one.knows(other)
        yield found


def part(one: list[Host], other: list[Host]) -> None:
    """Nothing goes from one side to the other any more."""
    for near in one:
        for far in other:
            near.speaks_past(far)
            far.speaks_past(near)


def rejoin(one: list[Host], other: list[Host]) -> None:
    for near in one:
        for far in other:
            near.knows(far)
            far.knows(near)


@contextmanager
def etcd(machines: list[Host], folder: Path) -> Iterator[str]:
    """A member of etcd on each of these hosts; its endpoints."""
    members = [
        Member(f"m{host.number}", folder, address=host.address, wrap=tuple(host.namespace.enter)) for host in machines
    ]
    with running(members):
        yield endpoints(members)


class Cluster:
    """A job on hosts; its endpoint is the first's, or etcd's, or all of the first `successors` hosts'."""

    def __init__(self, job: Job, machines: list[Host], elector: str = "", successors: int = 1) -> None:
        self.job = job
        self.hosts = machines
        self.elected = bool(elector)
        self._rendezvous_flags = (
            ("--rdzv-backend=etcd", f"--rdzv-endpoint={elector}")
            if elector
            else ("--rdzv-backend=c10d", f"--rdzv-endpoint={self._addresses(machines[:successors])}")
        )

    @staticmethod
    def _addresses(machines: list[Host]) -> str:
        return ",".join(f"{host.address}:{PORT}" for host in machines)

    def node(
        self, host: Host, *flags: str, nnodes: str, lease: float = 1.0, last_call: int = 20, conf: str = "", **more: Any
    ) -> Agent:
        """Start this host's node, with one worker, exactly as a user would: no word about its own address."""
        return self.job.node(
            f"--rdzv-conf=lease={lease},last_call_timeout={last_call}{conf}",
            *self._rendezvous_flags,
            *flags,
            nnodes=nnodes,
            wrap=host.namespace.enter,
            **more,
        )

    def die(self, host: Host) -> None:
        """Power off: the cable is silent, every process is gone."""
        host.cut()
        host.signal(signal.SIGKILL)

    def ranks(self, world: int, after: float = 0.0) -> dict[str, int]:
        """Which host had which rank in the newest full step of a world of this size."""
        self.job.steps(world, after=after)
        return {h["host"]: h["rank"] for h in self.job.worker_events(event="step", world=world) if h["t"] > after}
