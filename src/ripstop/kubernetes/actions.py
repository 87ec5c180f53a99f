"""Carries a decision out, and writes the status.  Blocking; every deed can be done twice.

Things are made under names that follow from the job and deleted by uid: that one is there already, or gone, is what was
wanted.  A thing of that name that belongs to somebody else is not touched; it is a reason why ours cannot be made.
Secrets are made and never read: the names of ours carry the job's uid, and the token follows from the operator's key,
so that a secret which somebody deleted comes back as it was.  A cluster drops the fields of a pod that it does not
know, without a word; what it answers shows which.
"""

import base64
import hashlib
import hmac
import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from ripstop.kubernetes import manifests
from ripstop.kubernetes.client import ApiError, Cluster, Conflict, NotFound, budgets_path, core_path, jobs_path
from ripstop.kubernetes.manifests import KEY, Owner
from ripstop.kubernetes.reconcile import (
    MOST_TEXT,
    SAID,
    Action,
    CreatePod,
    Decision,
    DeleteJob,
    DeletePod,
    Emit,
    Ensure,
    SetReplicas,
)
from ripstop.kubernetes.snapshot import owned
from ripstop.kubernetes.spec import GROUP, KIND, VERSION, Json, Spec
from ripstop.model.errors import RipstopError

COMPONENT = "ripstop-operator"
REMEDIES = {  # what to do when something cannot be made, by HTTP's code
    403: "have the quota or the policy changed, or delete the job",
    404: "create the namespace, or delete the job",
    409: "delete the other, or give the job another name",
}
REMEDY = "correct the template, in a new job"

log = logging.getLogger("ripstop.operator")


class CreationRefused(RipstopError):
    """The cluster does not let us make something: what, why, what to do."""


def operator_key(cluster: Cluster, home: str) -> bytes:
    """The key that all tokens follow from; made by the first operator."""
    path = core_path(home, "secrets")
    try:
        return _stored_key(cluster, path)
    except NotFound:
        key = secrets.token_bytes(32)
        metadata = {"name": KEY, "namespace": home}
        data = {"key": base64.b64encode(key).decode()}
        try:
            cluster.create(path, {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
        except Conflict:  # another operator began at the same time
            return _stored_key(cluster, path)
        except NotFound as error:
            raise RipstopError(
                f"the operator's namespace {home} is not there; `ripstop kube install` makes it"
            ) from error
        return key


def _stored_key(cluster: Cluster, path: str) -> bytes:
    return base64.b64decode(cluster.get(f"{path}/{KEY}")["data"]["key"])


class Actions:
    """All that the operator does to a cluster."""

    def __init__(self, cluster: Cluster, key: bytes) -> None:
        self._cluster = cluster
        self._key = key
        self._budgets = ""  # the API of disruption budgets that this cluster has
        self._outdated = False  # the definition of ElasticJobs, and it was said

    def token(self, owner: Owner) -> str:
        """The job's secret."""
        words = f"{owner.namespace}/{owner.name}/{owner.uid}"
        return hmac.new(self._key, words.encode(), hashlib.sha256).hexdigest()

    def write_status(self, item: dict[str, Any], status: Json) -> dict[str, Any]:
        """The job with its new status; raises Conflict when it is not as it was read.

        A definition of another version may know other types, of fields that are only to be looked at.  Pods are cared
        for once the status is written, so it is written without these then.
        """
        before: Json = item.get("status") or {}
        changes = {name: value for name, value in status.items() if before.get(name) != value}
        changes |= {name: None for name in before if name not in status}
        if not changes:
            return item
        metadata = item["metadata"]
        path = jobs_path(metadata["namespace"], metadata["name"], part="status")
        version = {"resourceVersion": metadata["resourceVersion"]}
        try:
            return self._cluster.patch(path, {"metadata": version, "status": changes})
        except ApiError as error:
            if error.code != 422:
                raise
            answer = self._cluster.patch(path, {"metadata": version, "status": changes | dict.fromkeys(SAID)})
            self._say_outdated(str(error))
            return answer

    def _say_outdated(self, why: str) -> None:
        if not self._outdated:
            self._outdated = True
            log.warning(
                "the cluster's definition of ElasticJobs is not this operator's, so their status is without %s: %s; "
                "`ripstop kube install` brings it up to date",
                ", ".join(SAID),
                why,
            )

    def carry_out(self, item: Json, owner: Owner, decision: Decision, *, furnish: bool) -> list[str]:
        """Do what was decided; `furnish`: also what may be there already.  Raises Refused, when all else is done.

        Returns the fields of the pods that the cluster does not know.
        """
        refused: CreationRefused | None = None
        ignored: list[str] = []
        for action in decision.actions:
            try:
                ignored = self._do(action, item, owner, decision.spec, furnish and refused is None) or ignored
            except CreationRefused as error:
                refused = refused or error
        if refused is not None:
            raise refused
        return ignored

    def _do(self, action: Action, item: Json, owner: Owner, spec: Spec | None, making: bool) -> list[str]:
        where = f"job={owner.namespace}/{owner.name}"
        match action:
            case Emit():
                self._emit(owner, action)
            case DeletePod(name, uid, force):
                log.info("%s deletes pod=%s force=%s", where, name, force)
                self._delete(
                    core_path(owner.namespace, "pods", name), uid, **({"gracePeriodSeconds": 0} if force else {})
                )
            case DeleteJob():
                log.info("%s deletes itself: its time to live is over", where)
                self._delete(jobs_path(owner.namespace, owner.name), owner.uid, propagationPolicy="Background")
            case SetReplicas(replicas):
                version = {"resourceVersion": item["metadata"]["resourceVersion"]}
                with suppress(Conflict, NotFound):
                    body = {"metadata": version, "spec": {"replicas": replicas}}
                    self._cluster.patch(jobs_path(owner.namespace, owner.name), body)
            case CreatePod(slot) if making:
                assert spec is not None, "pods are made of a spec"
                log.info("%s makes pod slot=%d", where, slot)
                return self._make(core_path(owner.namespace, "pods"), manifests.pod(owner, spec, slot), owner)
            case Ensure(what) if making:
                assert spec is not None, "what a job needs follows from its spec"
                self._furnish(what, owner, spec)
            case _:
                pass  # something before it was refused, or it is there
        return []

    def _furnish(self, what: str, owner: Owner, spec: Spec) -> None:
        match what:
            case "service":
                self._make(core_path(owner.namespace, "services"), manifests.service(owner), owner)
            case "secret":
                secret = manifests.secret(owner, spec, self.token(owner))
                with suppress(Conflict):
                    self._create(core_path(owner.namespace, "secrets"), secret)
            case "disruption-budget":
                version = self._budgets_version()
                budget = manifests.disruption_budget(owner, spec, version=version)
                self._make(budgets_path(owner.namespace, version), budget, owner)

    def _make(self, path: str, body: Json, owner: Owner) -> list[str]:
        """Create it, unless it is there and ours; the fields that the cluster dropped."""
        try:
            return dropped(body, self._create(path, body))
        except Conflict as error:
            name = body["metadata"]["name"]
            with suppress(NotFound):  # it has just gone; next time, then
                if not owned(self._cluster.get(f"{path}/{name}"), owner.uid):
                    raise CreationRefused(
                        _refusal(body, 409, "there is one already, and it is not the job's")
                    ) from error
        return []

    def _create(self, path: str, body: Json) -> Json:
        try:
            return self._cluster.create(path, body)
        except Conflict:
            raise
        except ApiError as error:
            if error.code not in (400, 403, 404, 422):
                raise
            raise CreationRefused(_refusal(body, error.code, str(error))) from error

    def _delete(self, path: str, uid: str, **options: Any) -> None:
        with suppress(NotFound, Conflict):  # it is gone, or there is another of its name
            self._cluster.delete(path, {"preconditions": {"uid": uid}, **options})

    def _budgets_version(self) -> str:
        if not self._budgets:
            known = {version["groupVersion"] for version in self._cluster.get("/apis/policy")["versions"]}
            self._budgets = "policy/v1" if "policy/v1" in known else "policy/v1beta1"
        return self._budgets

    def _emit(self, owner: Owner, event: Emit) -> None:
        """An event for `kubectl describe`; the same again counts up."""
        digest = hashlib.sha256(f"{owner.uid} {event.reason} {event.text}".encode()).hexdigest()[:12]
        name = f"{owner.name}.{digest}"
        path, now = core_path(owner.namespace, "events"), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        try:
            try:
                self._cluster.create(path, _event(owner, event, name, now))
            except Conflict:
                count = self._cluster.get(f"{path}/{name}").get("count") or 1
                self._cluster.patch(f"{path}/{name}", {"count": count + 1, "lastTimestamp": now})
        except ApiError as error:  # a namespace that is going away takes no events
            log.info("job=%s/%s event=%s could not be told: %s", owner.namespace, owner.name, event.reason, error)


def dropped(sent: Any, kept: Any, where: str = "") -> list[str]:
    """The fields that were sent and are not in the cluster's answer.  An empty value need not come back.

    Items of a list are compared by their names where they have any: others may have been put between them.
    """
    match sent:
        case Mapping():
            if not isinstance(kept, Mapping):
                return [where]
            gone = [f"{where}.{name}".lstrip(".") for name, value in sent.items() if value and name not in kept]
            inner = (
                dropped(value, kept[name], f"{where}.{name}".lstrip("."))
                for name, value in sent.items()
                if name in kept
            )
            return [*gone, *chain.from_iterable(inner)]
        case list() if isinstance(kept, list):
            found = _matching(sent, kept)
            inner = (dropped(value, found[n], f"{where}[{n}]") for n, value in enumerate(sent) if n in found)
            return list(chain.from_iterable(inner))
    return []


def _matching(sent: list[Any], kept: list[Any]) -> dict[int, Any]:
    """What became of the items of a list, by their numbers; those that cannot be told from others are left out."""
    if len(sent) == len(kept):
        return dict(enumerate(kept))
    named = [item for item in kept if isinstance(item, Mapping) and "name" in item]
    names = {item["name"]: item for item in named}
    if len(names) < len(named):  # two mounts of one volume have one name
        return {}
    return {
        n: names[item["name"]] for n, item in enumerate(sent) if isinstance(item, Mapping) and item.get("name") in names
    }


def _event(owner: Owner, event: Emit, name: str, now: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": owner.namespace},
        "involvedObject": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "name": owner.name,
            "namespace": owner.namespace,
            "uid": owner.uid,
        },
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason,
        "message": event.text[:MOST_TEXT],
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": COMPONENT,
    }


def _refusal(body: Json, code: int, why: str) -> str:
    what = f"{body['kind']} {body['metadata']['name']}"
    return f"{what} cannot be made: {why}; {REMEDIES.get(code, REMEDY)}"
