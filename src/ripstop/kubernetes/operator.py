"""The operator: watches, reads a job that something happened to and its pods, has `reconcile` decide and `deeds` do it.

kopf keeps the watches, and sees to it that they come back; it writes nothing into objects, since only raw events are
asked of it.  Rules:

1.  What is decided upon is read afresh; a watch only says when to look.  So a lost or late event costs time, not sense.
2.  The status is written first, and only onto the object that was read: what a decision must remember is kept before
    anything follows from it, and of two operators one looks again.
3.  An operator may be killed anywhere, and a second one does no harm, since every deed can be done twice; so no leader
    is elected.
4.  A job's trouble is its own: it is tried again, ever more slowly, while others are served.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from msgspec import Struct, field

from ripstop.kubernetes.actions import Actions, CreationRefused, operator_key
from ripstop.kubernetes.client import READ, THREADS, Cluster, Conflict, NotFound, core_path, jobs_path
from ripstop.kubernetes.job_api import JobApi
from ripstop.kubernetes.job_poller import TELEMETRY, JobPoller
from ripstop.kubernetes.manifests import HOME, JOB, Owner
from ripstop.kubernetes.reconcile import CreatePod, Decision, ResizeJob, decide
from ripstop.kubernetes.snapshot import coordinator_addresses, node_of, seen_job, seen_pods, silent_since
from ripstop.kubernetes.spec import GROUP, PLURAL, VERSION, Json
from ripstop.model.errors import RipstopError

CALM = 0.05  # seconds in which what happens to a job is gathered, beside the time that it takes to look at it
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # before the next try
RESYNC = 600.0  # a job is looked at so often although nothing happened
FURNISH = 60.0  # and one that is not over so often, for its service, its secret and its budget to be made sure of

P = ParamSpec("P")
T = TypeVar("T")
Name = tuple[str, str]  # namespace and name of a job

log = logging.getLogger("ripstop.operator")


class TrackedJob(Struct):
    """A job that is looked after, and what is known of it besides what the cluster knows."""

    woken: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    nodes: frozenset[str] = frozenset()
    troubles: int = 0  # in a row
    uid: str = ""  # of the job that the rest is about: there may be another of its name
    furnished: float = -math.inf  # when its service, its secret and its budget were there
    refused: str = ""
    ignored: str = ""
    talk: JobPoller | None = None  # while it runs

    def meet(self, uid: str) -> None:
        """Forget what was about another job."""
        if self.uid != uid:
            self.uid, self.furnished, self.refused, self.ignored = uid, -math.inf, "", ""
            self.hush()

    def hush(self) -> None:
        if self.talk is not None:
            self.talk.end()
            self.talk = None

    @property
    def heard(self) -> tuple[Json, str]:
        """What the job said last, and why it has not said anything for long."""
        return ({}, "") if self.talk is None else (self.talk.telemetry, self.talk.unreachable)


class Operator:
    """Looks after all jobs that it hears of."""

    def __init__(self, cluster: Cluster, key: bytes, api: JobApi | None = None) -> None:
        self._cluster = cluster
        self._deeds = Actions(cluster, key)
        self._api = api
        self._threads = ThreadPoolExecutor(THREADS, "ripstop-api")
        self._talkers = ThreadPoolExecutor(THREADS, "ripstop-jobs")
        self._tended: dict[Name, TrackedJob] = {}
        self._silent: dict[str, float] = {}  # nodes, and since when
        self._gone: dict[str, float] = {}  # nodes that the cluster forgot, and pods of ours did not

    # what happens -----------------------------------------------------------------------------------------------------

    def job_changed(self, name: Name) -> None:
        """Look at the job soon."""
        tended = self._tended.get(name)
        if tended is None:
            tended = self._tended[name] = TrackedJob()
            tended.task = asyncio.create_task(self._tend(name, tended), name=f"job {'/'.join(name)}")
        tended.woken.set()

    def node_changed(self, item: Json, *, gone: bool) -> None:
        """Look at the jobs on a node that fell silent, or came back."""
        node = item["metadata"]["name"]
        before = self._silences().get(node)
        self._silent.pop(node, None)
        self._gone = {name: since for name, since in self._gone.items() if self._on(name) and name != node}
        since = silent_since(item)
        if gone and self._on(node):
            self._gone[node] = time.time()
        elif since is not None and not gone:
            self._silent[node] = since
        if self._silences().get(node) != before:
            log.info("node=%s silent=%s", node, node in self._silences())
            for tended in self._on(node):
                tended.woken.set()

    def _on(self, node: str) -> list[TrackedJob]:
        return [tended for tended in self._tended.values() if node in tended.nodes]

    def _silences(self) -> dict[str, float]:
        return self._silent | self._gone

    # one job ----------------------------------------------------------------------------------------------------------

    async def _tend(self, name: Name, tended: TrackedJob) -> None:
        took = 0.0
        while True:
            await asyncio.sleep(CALM + took)  # large jobs are dear to read, and much happens to them
            tended.woken.clear()
            began = time.monotonic()
            again = await self._look(name, tended)
            took = min(time.monotonic() - began, LONGEST_PAUSE)
            if again is None and not tended.woken.is_set():
                tended.hush()
                del self._tended[name]
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(again):
                    await tended.woken.wait()

    async def _look(self, name: Name, tended: TrackedJob) -> float | None:
        """Look at a job once.  When to look again; None: it is gone."""
        try:
            again = await self._reconcile(name, tended)
            trouble = tended.refused
        except Conflict:
            return 0.0  # somebody else wrote: look again
        except RipstopError as error:
            trouble = str(error)
        except Exception:  # rule 4
            log.exception("job=%s/%s", *name)
            trouble = "see above"
        if not trouble:
            tended.troubles = 0
            return again
        tended.troubles += 1
        pause: float = min(FIRST_PAUSE * 2 ** min(tended.troubles - 1, 10), LONGEST_PAUSE)
        log.warning("job=%s/%s again in %.0f s: %s", *name, pause, trouble)
        return pause

    async def _reconcile(self, name: Name, tended: TrackedJob) -> float | None:
        try:
            item = await self._call(self._cluster.get, jobs_path(*name))
        except NotFound:
            return None
        pods = await self._call(self._cluster.list, core_path(name[0], "pods"), labelSelector=f"{JOB}={name[1]}")
        tended.nodes = frozenset(filter(None, map(node_of, pods)))
        tended.meet(item["metadata"]["uid"])
        telemetry, unreachable = tended.heard
        job = seen_job(
            item, telemetry=telemetry, refused=tended.refused, ignored=tended.ignored, unreachable=unreachable
        )
        decision = decide(job, seen_pods(pods, job.owner, self._silences()), time.time())
        item = await self._call(self._deeds.write_status, item, decision.status)
        now = time.monotonic()
        due = now - tended.furnished >= FURNISH
        furnish = due or any(isinstance(action, CreatePod) for action in decision.actions)
        try:
            ignored = await self._call(self._deeds.carry_out, item, job.owner, decision, furnish=furnish)
            tended.furnished, tended.refused = now if furnish else tended.furnished, ""
            tended.ignored = _ignored(ignored) or tended.ignored
        except CreationRefused as error:
            tended.refused = str(error)
        if (tended.refused, tended.ignored) != (job.refused, job.ignored):
            tended.woken.set()  # for the status to say so
        self._speak(tended, job.owner, decision, pods)
        over = decision.spec is None or "completionTime" in decision.status
        calm = TELEMETRY if tended.talk is not None else RESYNC if over else FURNISH
        return min(decision.again or calm, calm)

    def _speak(self, tended: TrackedJob, owner: Owner, decision: Decision, pods: Sequence[Json]) -> None:
        """Speak to the job, if it runs and its secret is of our making."""
        spec = decision.spec
        if self._api is None or spec is None or spec.secret_name or decision.status["phase"] != "Running":
            tended.hush()
            return
        if tended.talk is None:
            token = self._deeds.token(owner)
            tended.talk = JobPoller(self._api, self._talkers, owner, token, tended.woken.set)
        addresses = coordinator_addresses(pods, owner, elected=spec.rendezvous.backend == "etcd")
        size = next((action.nodes for action in decision.actions if isinstance(action, ResizeJob)), None)
        tended.talk.go_on(addresses, size, time.monotonic())

    async def _call(self, function: Callable[P, T], *words: P.args, **options: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *words, **options))


def _ignored(fields: Sequence[str]) -> str:
    if not fields:
        return ""
    return f"the cluster does not know these fields of the template, and drops them: {', '.join(fields)}; {_SPELLING}"


_SPELLING = "correct their spelling or their place, in a new job"


def run_operator(
    namespace: str | None = None, *, home: str = HOME, health: str | None = None, api: JobApi | None = None
) -> None:
    """Look after the ElasticJobs of a namespace, or of all, until SIGTERM.

    `home` is the namespace of the operator's own key, `health` the HOST:PORT where `GET /healthz` is answered,
    `api` that of the jobs; without, they are not spoken to.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for noisy in ("kopf", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    cluster = Cluster()
    operator = Operator(cluster, operator_key(cluster, home), api)
    if namespace is not None:
        _defined(cluster, namespace)
    asyncio.run(_watch(cluster, operator, namespace, health))


def _defined(cluster: Cluster, namespace: str) -> None:
    """Only who sees all of a cluster notices when the definition comes."""
    try:
        cluster.get(jobs_path(namespace), limit="1")
    except NotFound as error:
        raise RipstopError("this cluster knows no ElasticJobs; `ripstop kube install` defines them") from error


async def _watch(cluster: Cluster, operator: Operator, namespace: str | None, health: str | None) -> None:
    import kopf

    async def on_login(**_: Any) -> Any:
        return kopf.ConnectionInfo(**await asyncio.to_thread(cluster.credentials))

    async def on_job(namespace: str, name: str, **_: Any) -> None:
        operator.job_changed((namespace, name))

    async def on_pod(namespace: str, labels: Json, **_: Any) -> None:
        operator.job_changed((namespace, labels[JOB]))

    async def on_node(type: str | None, body: Json, **_: Any) -> None:
        operator.node_changed(body, gone=type == "DELETED")

    log.info("operator watches namespace=%s", namespace or "*")
    registry, settings = kopf.OperatorRegistry(), kopf.OperatorSettings()
    kopf.on.login(registry=registry)(on_login)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(on_job)
    kopf.on.event("", "v1", "pods", labels={JOB: kopf.PRESENT}, registry=registry)(on_pod)
    kopf.on.event("", "v1", "nodes", registry=registry)(on_node)
    settings.watching.label_selectors["", "v1", "pods"] = JOB
    settings.networking.request_timeout = READ
    settings.posting.enabled = False  # we tell our own events
    settings.scanning.disabled = namespace is not None  # it would want to see all namespaces
    await kopf.operator(
        registry=registry,
        settings=settings,
        standalone=True,
        identity="ripstop",  # kopf would ask for our user's name, and in a pod that may have none
        clusterwide=namespace is None,
        namespaces=[namespace] if namespace is not None else [],
        liveness_endpoint=f"http://{health}/healthz" if health else None,
    )
