"""Pods, as machines: named by their slots, told what manifests say, and with a name service that is slow to know them.

A kubelet writes a pod's own name into its /etc/hosts.  The others' names come from the cluster's name service, which
here is what the test adds to these files.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ripstop.kubernetes.manifests import Owner, manifests_without_operator, pod_manifest
from ripstop.kubernetes.spec import Spec, read_spec
from tests.e2e.harness import TRAIN, Agent, Job
from tests.hosts.network import Cluster, Host, hosts, needs_hosts

pytestmark = needs_hosts

FULL = "train.ml.svc.cluster.local"
SPEC = {
    "minReplicas": 2,
    "maxReplicas": 2,
    "nprocPerNode": 1,
    "rendezvous": {"conf": "lease=1,last_call_timeout=20"},
    "template": {"spec": {"containers": [{"name": "main", "image": "x:1"}]}},
}


class Pods(Cluster):
    """Each on a host of its own."""

    def bring(self, host: Host, slot: int, made: dict[str, Any], **known: Host) -> Agent:
        """A pod of this slot begins here, as the manifest of a pod says."""
        name = f"train-{slot}"
        subprocess.run([*host.namespace.enter, "hostname", name], check=True, timeout=120)
        self.tell(host, **known)
        env = {"POD_IP": host.address, "RIPSTOP_TOKEN": "t0ken"}
        for variable in made["spec"]["containers"][0]["env"]:
            if "value" in variable:
                env[variable["name"]] = variable["value"].replace("$(POD_IP)", host.address)
        env["RIPSTOP_TERMINATION_LOG"] = str(self.job.folder / f"termination-log-{host.number}")
        return self.job.run(str(TRAIN), env=env, wrap=host.namespace.enter)

    def tell(self, host: Host, **slots: Host) -> None:
        """What this pod knows: itself, and what the name service says of others."""
        name = subprocess.run(
            [*host.namespace.enter, "hostname"], check=True, timeout=120, capture_output=True, text=True
        ).stdout.strip()
        lines = ["127.0.0.1 localhost", f"{host.address} {name}.{FULL} {name}"]
        for slot, other in slots.items():
            pod = slot.replace("_", "-")
            lines.append(f"{other.address} {pod}.train.ml.svc {pod}.train")
        (self.job.folder / f"etc-hosts-host{host.number}").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    with hosts(3, tmp_path) as machines, Job(tmp_path, TRAIN_STEPS="100000") as job:
        yield Pods(job, machines)


def spec() -> Spec:
    found = read_spec("train", SPEC)
    assert isinstance(found, Spec)
    return found


def of_operator(slot: int) -> dict[str, Any]:
    return pod_manifest(Owner("train", "ml", "u-1"), spec(), slot)


def of_stateful_set(slot: int) -> dict[str, Any]:
    *_, found = manifests_without_operator("statefulset", {"name": "train"}, spec(), "t0ken")
    template: dict[str, Any] = found["spec"]["template"]
    return template


@pytest.mark.parametrize("made", [of_operator, pytest.param(of_stateful_set, marks=pytest.mark.long)])
def test_pods_meet_when_their_names_are_known_and_a_new_first_pod_is_found_at_its_new_address(
    pods: Pods, made: Any
) -> None:
    first, second, third = pods.hosts
    pods.bring(second, 1, made(1))
    zero = pods.bring(first, 0, made(0))
    zero.wait_for_log(r"does not resolve to this node yet; listening at 10\.83\.7\.1:29400")
    pods.tell(second, train_0=first)
    before = pods.ranks(2)
    assert before == {"train-0": 0, "train-1": 1}

    pods.die(first)
    when = float(pods.job.worker_events()[-1]["t"])
    again = pods.bring(third, 0, made(0), train_0=first)  # the name service has not noticed
    again.wait_for_log(r"does not resolve to this node yet; listening at 10\.83\.7\.3:29400")
    pods.tell(second, train_0=third)
    assert pods.ranks(2, after=when) == before
