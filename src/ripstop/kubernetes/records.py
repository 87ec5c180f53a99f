"""The records that `reconcile` works on: a job, its pods, the actions and the decision.  Pure data."""

from typing import Any

from msgspec import Struct, field

from ripstop.kubernetes.manifests import Owner
from ripstop.kubernetes.spec import Json, Spec


class Pod(Struct, frozen=True):
    """A pod of the job.  Times are seconds since the epoch."""

    name: str
    slot: int
    uid: str
    phase: str = "Pending"
    created: float = 0.0
    ready: bool = False
    deleting: bool = False
    exit_code: int | None = None
    finished: float | None = None
    message: str = ""  # the trainer's termination message
    reason: str = ""  # why the pod failed: Evicted, OOMKilled …
    waiting: str = ""  # why a container does not start
    detail: str = ""  # details of `waiting` or `reason`
    unschedulable: str = ""
    disrupted: str = ""  # why the cluster evicts it
    unreachable_since: float | None = None  # its node's last contact, if the node is unreachable
    has_sidecars: bool = False  # other containers still run after the trainer exited

    @property
    def over(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def empty(self) -> bool:
        """Whether the kubelet reports that no container runs."""
        return self.over and self.exit_code is not None and not self.has_sidecars


class ElasticJob(Struct, frozen=True):
    """An ElasticJob as read from the cluster.  `telemetry` is the latest reply of its coordinator, if any."""

    owner: Owner
    spec: Json
    status: Json
    created: float
    generation: int = 1
    deleting: bool = False
    telemetry: Json = field(default_factory=dict)
    refused: str = ""  # an object that the cluster refused to create, and why
    ignored: str = ""  # template fields that the cluster dropped
    unreachable: str = ""  # why the coordinator has not replied for a while


# actions --------------------------------------------------------------------------------------------------------------


class CreatePod(Struct, frozen=True):
    slot: int


class DeletePod(Struct, frozen=True):
    """`force`: do not wait for the kubelet."""

    name: str
    uid: str
    force: bool = False


class Ensure(Struct, frozen=True):
    """Create a service, secret or disruption-budget if it does not exist."""

    what: str


class SetReplicas(Struct, frozen=True):
    """Write the default into the spec, for `kubectl scale` and autoscalers."""

    replicas: int


class ResizeJob(Struct, frozen=True):
    """Tell the coordinator how many nodes train."""

    nodes: int


class DeleteJob(Struct, frozen=True):
    pass


class Emit(Struct, frozen=True):
    """Create a Kubernetes event."""

    reason: str
    text: str
    warning: bool = False


Action = CreatePod | DeletePod | Ensure | SetReplicas | ResizeJob | DeleteJob | Emit


class Decision(Struct, frozen=True):
    """Ordered actions, the new status, the spec for new pods, and when to reconcile again without a change."""

    actions: tuple[Action, ...]
    status: dict[str, Any]
    spec: Spec | None = None
    requeue_after: float | None = None  # seconds
