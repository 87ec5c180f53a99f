"""The operator: watches jobs, pods and nodes, and reconciles each job that changed.

`reconcile` decides; `cluster_writer` executes.  kopf maintains the watches; it uses raw events only, so it writes
nothing into objects.  Rules:

1.  Every reconciliation reads the job and its pods again.  A watch event only triggers it, so a lost event costs
    time but no correctness.
2.  The status is written first, and only if the job has not changed since it was read.  Decisions that must be
    remembered are therefore stored before they are executed, and of two operators one retries.  Exception: if the
    cluster refuses every status of a job as invalid, the operator logs it, keeps the status in memory and executes the
    actions.  Until a status is accepted, a restarted operator continues from the last stored one.
3.  Every action is idempotent.  An operator may be killed at any time, and two operators do no harm, so there is no
    leader election.
4.  An error in one job does not affect others.  The job is retried with growing delays.
"""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from msgspec import Struct, field

from ripstop.kubernetes import kube_client
from ripstop.kubernetes.cluster_writer import (
    ClusterWriter,
    CreationRefused,
    StatusRefused,
    ensure_operator_key_in_cluster,
)
from ripstop.kubernetes.job_poller import POLL_INTERVAL_S, JobPoller, PolledJobApi
from ripstop.kubernetes.kube_client import (
    MAX_THREADS,
    Conflict,
    KubeClient,
    NotFound,
    in_thread,
    kube_core_path,
    kube_jobs_path,
)
from ripstop.kubernetes.manifests import JOB, Owner
from ripstop.kubernetes.pods import coordinator_pod_addresses, node_of_pod, pod_node_unreachable_since, read_pods
from ripstop.kubernetes.reconcile import CreatePod, Decision, ResizeJob, decide_reconciliation, job_to_reconcile
from ripstop.kubernetes.spec import GROUP, PLURAL, VERSION, Json
from ripstop.model.errors import RipstopError

DEBOUNCE_S = 0.05  # plus the duration of the last reconciliation: events of a job are batched
FIRST_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 1.0, 60.0
FINISHED_RESYNC_S = 600.0  # reconcile a finished job this often without an event
ACTIVE_RESYNC_S = 60.0  # and an active one this often, to recreate its service, secret and budget

Name = tuple[str, str]  # namespace and name of a job

log = logging.getLogger("ripstop.operator")


class OperatorJob(Struct):
    """A job and the operator's state about it that is not in the cluster."""

    woken: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    nodes: frozenset[str] = frozenset()
    failures: int = 0  # consecutive
    uid: str = ""  # a new job may have the same name
    ensured_at: float = -math.inf  # when its service, secret and budget existed
    refused: str = ""
    ignored: str = ""
    refused_status: Json | None = None  # the latest status, while the cluster refuses to store it (rule 2)
    poller: JobPoller | None = None  # while it runs

    def reset_for(self, uid: str) -> None:
        """Drop the state of an earlier job of the same name."""
        if self.uid != uid:
            self.uid, self.ensured_at, self.refused, self.ignored = uid, -math.inf, "", ""
            self.refused_status = None
            self.stop_polling()

    def stop_polling(self) -> None:
        if self.poller is not None:
            self.poller.stop()
            self.poller = None

    @property
    def telemetry(self) -> tuple[Json, str]:
        """The job's latest telemetry, and why it has been unreachable for a while."""
        return ({}, "") if self.poller is None else (self.poller.telemetry, self.poller.unreachable)


class Operator:
    """Reconciles all jobs."""

    def __init__(self, cluster: KubeClient, key: bytes, api: PolledJobApi) -> None:
        self._cluster = cluster
        self._writer = ClusterWriter(cluster, key)
        self._api = api
        self._threads = ThreadPoolExecutor(MAX_THREADS, "ripstop-api")
        self._poll_threads = ThreadPoolExecutor(MAX_THREADS, "ripstop-jobs")
        self._jobs: dict[Name, OperatorJob] = {}
        self._unreachable: dict[str, float] = {}  # nodes and the time of their last contact
        self._deleted: dict[str, float] = {}  # deleted nodes that still have pods of jobs

    # watch events -----------------------------------------------------------------------------------------------------

    def job_changed(self, name: Name) -> None:
        """Reconcile the job soon."""
        tracked = self._jobs.get(name)
        if tracked is None:
            tracked = self._jobs[name] = OperatorJob()
            tracked.task = asyncio.create_task(self._run_job(name, tracked), name=f"job {'/'.join(name)}")
        tracked.woken.set()

    def node_changed(self, item: Json, *, deleted: bool) -> None:
        """Reconcile the jobs on a node that became unreachable or reachable."""
        node = item["metadata"]["name"]
        before = self._unreachable_nodes().get(node)
        self._unreachable.pop(node, None)
        self._deleted = {name: since for name, since in self._deleted.items() if self._jobs_on(name) and name != node}
        since = pod_node_unreachable_since(item)
        if deleted and self._jobs_on(node):
            self._deleted[node] = time.time()
        elif since is not None and not deleted:
            self._unreachable[node] = since
        if self._unreachable_nodes().get(node) != before:
            log.info("node=%s unreachable=%s", node, node in self._unreachable_nodes())
            for tracked in self._jobs_on(node):
                tracked.woken.set()

    def _jobs_on(self, node: str) -> list[OperatorJob]:
        return [tracked for tracked in self._jobs.values() if node in tracked.nodes]

    def _unreachable_nodes(self) -> dict[str, float]:
        return self._unreachable | self._deleted

    # one job ----------------------------------------------------------------------------------------------------------

    async def _run_job(self, name: Name, tracked: OperatorJob) -> None:
        took = 0.0
        while True:
            await asyncio.sleep(DEBOUNCE_S + took)  # large jobs are slow to read and have many events
            tracked.woken.clear()
            began = time.monotonic()
            requeue = await self._reconcile_or_retry(name, tracked)
            took = min(time.monotonic() - began, MAX_RETRY_DELAY_S)
            if requeue is None and not tracked.woken.is_set():
                tracked.stop_polling()
                del self._jobs[name]
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(requeue):
                    await tracked.woken.wait()

    async def _reconcile_or_retry(self, name: Name, tracked: OperatorJob) -> float | None:
        """Reconcile a job.  Returns the delay until the next time; None if the job is gone."""
        try:
            requeue = await self._reconcile(name, tracked)
            problem = tracked.refused
        except Conflict:
            return 0.0  # the job changed meanwhile
        except RipstopError as error:
            problem = str(error)
        except Exception:  # rule 4
            log.exception("job=%s/%s", *name)
            problem = "see above"
        if not problem:
            tracked.failures = 0
            return requeue
        tracked.failures += 1
        delay: float = min(FIRST_RETRY_DELAY_S * 2 ** min(tracked.failures - 1, 10), MAX_RETRY_DELAY_S)
        log.warning("job=%s/%s retry in %.0f s: %s", *name, delay, problem)
        return delay

    async def _reconcile(self, name: Name, tracked: OperatorJob) -> float | None:
        try:
            item = await in_thread(self._threads, self._cluster.get, kube_jobs_path(*name))
        except NotFound:
            return None
        selector, path = f"{JOB}={name[1]}", kube_core_path(name[0], "pods")
        pods = await in_thread(self._threads, self._cluster.list, path, labelSelector=selector)
        tracked.nodes = frozenset(filter(None, map(node_of_pod, pods)))
        tracked.reset_for(item["metadata"]["uid"])
        telemetry, unreachable = tracked.telemetry
        job = job_to_reconcile(
            item if tracked.refused_status is None else item | {"status": tracked.refused_status},
            telemetry=telemetry,
            refused=tracked.refused,
            ignored=tracked.ignored,
            unreachable=unreachable,
        )
        decision = decide_reconciliation(job, read_pods(pods, job.owner, self._unreachable_nodes()), time.time())
        updated = await self._write_status(name, tracked, item, decision.status)
        now = time.monotonic()
        due = now - tracked.ensured_at >= ACTIVE_RESYNC_S
        create = due or any(isinstance(action, CreatePod) for action in decision.actions)
        try:
            ignored = await in_thread(self._threads, self._writer.execute, updated, job.owner, decision, create=create)
            tracked.ensured_at, tracked.refused = now if create else tracked.ensured_at, ""
            if ignored:
                remedy = "correct their spelling or position in a new job"
                tracked.ignored = f"the cluster drops unknown template fields: {', '.join(ignored)}; {remedy}"
        except CreationRefused as error:
            tracked.refused = str(error)
        if (tracked.refused, tracked.ignored) != (job.refused, job.ignored):
            tracked.woken.set()  # to update the status
        self._poll(tracked, job.owner, decision, pods)
        finished = decision.spec is None or "completionTime" in decision.status
        resync = FINISHED_RESYNC_S if finished else ACTIVE_RESYNC_S
        longest = POLL_INTERVAL_S if tracked.poller is not None else resync
        return min(decision.requeue_after or longest, longest)

    async def _write_status(self, name: Name, tracked: OperatorJob, item: dict[str, Any], status: Json) -> Json:
        """Write the status, or keep it in memory if the cluster refuses it (rule 2).  Returns the job."""
        try:
            item = await in_thread(self._threads, self._writer.write_status, item, status)
            tracked.refused_status = None
        except StatusRefused as error:
            if tracked.refused_status is None:
                log.warning(
                    "job=%s/%s the cluster refuses its status, which is not updated: %s; "
                    "correct the job's spec, or run `ripstop kube install` to update the definition",
                    *(*name, error),
                )
            tracked.refused_status = status
        return item

    def _poll(self, tracked: OperatorJob, owner: Owner, decision: Decision, pods: Sequence[Json]) -> None:
        """Poll the job's API if it runs and the operator has its secret."""
        spec = decision.spec
        if spec is None or spec.secret_name or decision.status["phase"] != "Running":
            tracked.stop_polling()
            return
        if tracked.poller is None:
            token = self._writer.token(owner)
            tracked.poller = JobPoller(self._api, self._poll_threads, owner, token, tracked.woken.set)
        addresses = coordinator_pod_addresses(pods, owner, elected=spec.rendezvous.backend == "etcd")
        size = next((action.nodes for action in decision.actions if isinstance(action, ResizeJob)), None)
        tracked.poller.poll(addresses, size, time.monotonic())


def run_operator(namespace: str | None, api: PolledJobApi, *, home: str, health: str | None = None) -> None:
    """Run the operator for one namespace or all, until SIGTERM.

    `home` is the namespace of the operator's key.  `health` is the HOST:PORT of `GET /healthz`.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for noisy in ("kopf", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    cluster = KubeClient()
    operator = Operator(cluster, ensure_operator_key_in_cluster(cluster, home), api)
    if namespace is not None:
        _check_definition(cluster, namespace)
    asyncio.run(_run_operator_watches(cluster, operator, namespace, health))


def _check_definition(cluster: KubeClient, namespace: str) -> None:
    """An operator of one namespace is not notified when the definition is installed."""
    try:
        cluster.get(kube_jobs_path(namespace), limit="1")
    except NotFound as error:
        raise RipstopError("this cluster has no ElasticJob definition; `ripstop kube install` creates it") from error


async def _run_operator_watches(
    cluster: KubeClient, operator: Operator, namespace: str | None, health: str | None
) -> None:
    import kopf

    async def on_login(**_: Any) -> Any:
        return kopf.ConnectionInfo(**await asyncio.to_thread(cluster.credentials))

    async def on_job(namespace: str, name: str, **_: Any) -> None:
        operator.job_changed((namespace, name))

    async def on_pod(namespace: str, labels: Json, **_: Any) -> None:
        operator.job_changed((namespace, labels[JOB]))

    async def on_node(type: str | None, body: Json, **_: Any) -> None:
        operator.node_changed(body, deleted=type == "DELETED")

    log.info("watching namespace=%s", namespace or "*")
    registry, settings = kopf.OperatorRegistry(), kopf.OperatorSettings()
    kopf.on.login(registry=registry)(on_login)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(on_job)
    kopf.on.event("", "v1", "pods", labels={JOB: kopf.PRESENT}, registry=registry)(on_pod)
    kopf.on.event("", "v1", "nodes", registry=registry)(on_node)
    settings.watching.label_selectors["", "v1", "pods"] = JOB
    settings.networking.request_timeout = kube_client.READ_TIMEOUT_S
    settings.posting.enabled = False  # the operator creates its own events
    settings.scanning.disabled = namespace is not None  # scanning needs access to all namespaces
    await kopf.operator(
        registry=registry,
        settings=settings,
        standalone=True,
        identity="ripstop",  # by default kopf uses the user name, and a pod may have none
        clusterwide=namespace is None,
        namespaces=[namespace] if namespace is not None else [],
        liveness_endpoint=f"http://{health}/healthz" if health else None,
    )
