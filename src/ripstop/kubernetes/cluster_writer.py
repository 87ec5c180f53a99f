"""The operator's changes to a cluster: executes a decision, and writes the status.  Calls block.

Every action is idempotent.  Objects have names derived from the job and are deleted by uid, so "already exists" and
"not found" are successes.  An object of the same name with another owner is not touched and is reported.  Secrets are
created and never read: their names contain the job's uid, and the token is derived from the operator's key, so a
deleted secret is recreated with the same value.  A cluster silently drops pod fields that it does not know; its
response shows which.
"""

import base64
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import Any

from ripstop.kubernetes import manifests, reconcile
from ripstop.kubernetes.kube_client import (
    ApiError,
    Conflict,
    Invalid,
    KubeClient,
    NotFound,
    kube_budgets_path,
    kube_core_path,
    kube_jobs_path,
)
from ripstop.kubernetes.manifests import KEY, Owner, new_object
from ripstop.kubernetes.pods import MAX_MESSAGE_CHARS
from ripstop.kubernetes.reconcile import JOB_REPORTED, Action, Decision, Emit
from ripstop.kubernetes.spec import Json, Spec
from ripstop.kubernetes.timestamps import seconds_to_timestamp
from ripstop.model.errors import RipstopError

COMPONENT = "ripstop-operator"
REMEDIES = {  # by HTTP status, if an object cannot be created
    403: "change the quota or the policy, or delete the job",
    404: "create the namespace, or delete the job",
    409: "delete the other object, or give the job another name",
}
REMEDY = "correct the template in a new job"

log = logging.getLogger("ripstop.operator")


class CreationRefused(RipstopError):
    """The cluster refuses to create an object: which, why, remedy."""


class StatusRefused(RipstopError):
    """The cluster refuses every status of a job."""


def ensure_operator_key_in_cluster(cluster: KubeClient, home: str) -> bytes:
    """The key from which all tokens are derived; created by the first operator."""
    path = kube_core_path(home, "secrets")
    try:
        return _operator_key_stored_in_cluster(cluster, path)
    except NotFound:
        key = secrets.token_bytes(32)
        data = {"key": base64.b64encode(key).decode()}
        try:
            cluster.create(path, new_object("v1", "Secret", {"name": KEY, "namespace": home}, data=data))
        except Conflict:  # another operator created it at the same time
            return _operator_key_stored_in_cluster(cluster, path)
        except NotFound as error:
            text = f"the operator's namespace {home} does not exist; `ripstop kube install` creates it"
            raise RipstopError(text) from error
        return key


def _operator_key_stored_in_cluster(cluster: KubeClient, path: str) -> bytes:
    return base64.b64decode(cluster.get(f"{path}/{KEY}")["data"]["key"])


class ClusterWriter:
    def __init__(self, cluster: KubeClient, key: bytes) -> None:
        self._cluster = cluster
        self._key = key
        self._warned_outdated = False

    def token(self, owner: Owner) -> str:
        """The job's secret."""
        identity = f"{owner.namespace}/{owner.name}/{owner.uid}"
        return hmac.new(self._key, identity.encode(), hashlib.sha256).hexdigest()

    def write_status(self, item: dict[str, Any], status: Json) -> dict[str, Any]:
        """Write the status and return the updated job.  Raises Conflict if the job changed since it was read.

        A definition of another version may have other types for informational fields.  The status is then written
        without these fields, because pods are managed only after the status is written.  Raises StatusRefused if that
        is invalid too: Kubernetes 1.25 to 1.29 refuses any status of a job whose spec breaks a rule of the definition.
        """
        before: Json = item.get("status") or {}
        changes = {name: value for name, value in status.items() if before.get(name) != value}
        changes |= {name: None for name in before if name not in status}
        if not changes:
            return item
        metadata = item["metadata"]
        path = kube_jobs_path(metadata["namespace"], metadata["name"], part="status")
        version = {"resourceVersion": metadata["resourceVersion"]}
        try:
            return self._cluster.patch(path, {"metadata": version, "status": changes})
        except Invalid as error:
            why = str(error)
        try:
            answer = self._cluster.patch(path, {"metadata": version, "status": changes | dict.fromkeys(JOB_REPORTED)})
        except Invalid as error:
            raise StatusRefused(str(error)) from error
        if not self._warned_outdated:
            self._warned_outdated = True
            log.warning(
                "the cluster's ElasticJob definition has another version; the status omits %s: %s; "
                "run `ripstop kube install` to update it",
                *(", ".join(JOB_REPORTED), why),
            )
        return answer

    def execute(self, item: Json, owner: Owner, decision: Decision, *, create: bool) -> list[str]:
        """Execute all actions; `create`: also those that create objects.  Returns pod fields that the cluster dropped.

        Raises CreationRefused after all other actions are done.
        """
        refused: CreationRefused | None = None
        ignored: list[str] = []
        for action in decision.actions:
            try:
                ignored = self._execute(action, item, owner, decision.spec, create and refused is None) or ignored
            except CreationRefused as error:
                refused = refused or error
        if refused is not None:
            raise refused
        return ignored

    def _execute(self, action: Action, item: Json, owner: Owner, spec: Spec | None, create: bool) -> list[str]:
        where = f"job={owner.namespace}/{owner.name}"
        match action:
            case Emit():
                self._emit(owner, action)
            case reconcile.DeletePod(name, uid, force):
                log.info("%s delete pod=%s force=%s", where, name, force)
                options = {"gracePeriodSeconds": 0} if force else {}
                self._delete(kube_core_path(owner.namespace, "pods", name), uid, **options)
            case reconcile.DeleteJob():
                log.info("%s is deleted: its time to live is over", where)
                self._delete(kube_jobs_path(owner.namespace, owner.name), owner.uid, propagationPolicy="Background")
            case reconcile.SetReplicas(replicas):
                version = {"resourceVersion": item["metadata"]["resourceVersion"]}
                body = {"metadata": version, "spec": {"replicas": replicas}}
                with suppress(Conflict, NotFound, Invalid):  # an invalid spec does not stop the other actions
                    self._cluster.patch(kube_jobs_path(owner.namespace, owner.name), body)
            case reconcile.CreatePod(slot) if create:
                assert spec is not None, "an action needs a spec"
                log.info("%s create pod slot=%d", where, slot)
                return self._create_owned(
                    kube_core_path(owner.namespace, "pods"), manifests.pod_manifest(owner, spec, slot), owner
                )
            case reconcile.Ensure(what) if create:
                assert spec is not None, "an action needs a spec"
                self._ensure(what, owner, spec)
        return []  # also if an earlier creation was refused, or the object exists

    def _ensure(self, what: str, owner: Owner, spec: Spec) -> None:
        match what:
            case "service":
                self._create_owned(
                    kube_core_path(owner.namespace, "services"), manifests.service_manifest(owner), owner
                )
            case "secret":
                secret = manifests.secret_manifest(owner, spec, self.token(owner))
                with suppress(Conflict):
                    self._create(kube_core_path(owner.namespace, "secrets"), secret)
            case "disruption-budget":
                budget = manifests.disruption_budget_manifest(owner, spec, version=self._budgets_version)
                self._create_owned(kube_budgets_path(owner.namespace, self._budgets_version), budget, owner)

    def _create_owned(self, path: str, body: Json, owner: Owner) -> list[str]:
        """Create an object unless the job already owns it.  Returns the fields that the cluster dropped."""
        try:
            return fields_dropped_by_cluster(body, self._create(path, body))
        except Conflict as error:
            name = body["metadata"]["name"]
            with suppress(NotFound):  # deleted meanwhile; the next reconciliation creates it
                if not owner.owns(self._cluster.get(f"{path}/{name}")):
                    why = "an object of this name exists and belongs to another owner"
                    raise _cluster_refusal(body, 409, why) from error
        return []

    def _create(self, path: str, body: Json) -> Json:
        try:
            return self._cluster.create(path, body)
        except Conflict:
            raise
        except ApiError as error:
            if error.code not in (400, 403, 404, 422):
                raise
            raise _cluster_refusal(body, error.code, str(error)) from error

    def _delete(self, path: str, uid: str, **options: Any) -> None:
        with suppress(NotFound, Conflict):  # it is gone, or a new object has its name
            self._cluster.delete(path, {"preconditions": {"uid": uid}, **options})

    @cached_property
    def _budgets_version(self) -> str:
        """The API version of disruption budgets in this cluster."""
        known = {version["groupVersion"] for version in self._cluster.get("/apis/policy")["versions"]}
        return "policy/v1" if "policy/v1" in known else "policy/v1beta1"

    def _emit(self, owner: Owner, event: Emit) -> None:
        """Create an event, or increase the count of the same event."""
        digest = hashlib.sha256(f"{owner.uid} {event.reason} {event.text}".encode()).hexdigest()[:12]
        name = f"{owner.name}.{digest}"
        path, now = kube_core_path(owner.namespace, "events"), seconds_to_timestamp(time.time())
        try:
            try:
                self._cluster.create(path, _cluster_event_object(owner, event, name, now))
            except Conflict:
                count = self._cluster.get(f"{path}/{name}").get("count") or 1
                self._cluster.patch(f"{path}/{name}", {"count": count + 1, "lastTimestamp": now})
        except ApiError as error:  # a terminating namespace accepts no events
            log.info("job=%s/%s event=%s could not be created: %s", owner.namespace, owner.name, event.reason, error)


def fields_dropped_by_cluster(sent: Any, kept: Any, where: str = "") -> list[str]:
    """The fields that were sent and are missing in the response.  Empty values may be missing.

    List items are compared by name if they have one, because the cluster may insert others.
    """
    if isinstance(sent, Mapping):
        if not isinstance(kept, Mapping):
            return [where]
        paths = {name: f"{where}.{name}".lstrip(".") for name in sent}
        missing = [paths[name] for name, value in sent.items() if value and name not in kept]
        inner = [
            fields_dropped_by_cluster(value, kept[name], paths[name]) for name, value in sent.items() if name in kept
        ]
        return [*missing, *chain.from_iterable(inner)]
    if isinstance(sent, list) and isinstance(kept, list):
        found = _items_kept_by_cluster(sent, kept)
        inner = [
            fields_dropped_by_cluster(value, found[n], f"{where}[{n}]") for n, value in enumerate(sent) if n in found
        ]
        return [*chain.from_iterable(inner)]
    return []


def _items_kept_by_cluster(sent: list[Any], kept: list[Any]) -> dict[int, Any]:
    """The response's item for each sent item, by index; ambiguous items are left out."""
    if len(sent) == len(kept):
        return dict(enumerate(kept))
    named = [item for item in kept if isinstance(item, Mapping) and "name" in item]
    names = {item["name"]: item for item in named}
    if len(names) < len(named):  # for example two mounts of one volume
        return {}
    candidates = [(n, item.get("name")) for n, item in enumerate(sent) if isinstance(item, Mapping)]
    return {n: names[name] for n, name in candidates if name in names}


def _cluster_event_object(owner: Owner, event: Emit, name: str, now: str) -> Json:
    return new_object(
        "v1",
        "Event",
        {"name": name, "namespace": owner.namespace},
        involvedObject=owner.reference() | {"namespace": owner.namespace},
        type="Warning" if event.warning else "Normal",
        reason=event.reason,
        message=event.text[:MAX_MESSAGE_CHARS],
        firstTimestamp=now,
        lastTimestamp=now,
        count=1,
        source={"component": COMPONENT},
        reportingComponent=COMPONENT,
        reportingInstance=COMPONENT,
    )


def _cluster_refusal(body: Json, code: int, why: str) -> CreationRefused:
    what = f"{body['kind']} {body['metadata']['name']}"
    return CreationRefused(f"{what} cannot be created: {why}; {REMEDIES.get(code, REMEDY)}")
