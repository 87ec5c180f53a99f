"""The operator's care of a job, in a cluster that is a dictionary."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from ripstop.kubernetes import operator as operator_module
from ripstop.kubernetes.cluster_writer import fields_dropped_by_cluster
from ripstop.kubernetes.job_poller import PolledJobApi
from ripstop.kubernetes.kube_client import Invalid, KubeClient, NotFound
from ripstop.kubernetes.operator import Operator

JOB, PODS = "/apis/ripstop.dev/v1alpha1/namespaces/ml/elasticjobs/train", "/api/v1/namespaces/ml/pods"
NAME = ("ml", "train")
BEGIN = "2027-01-15T08:00:00Z"


class Shelf(KubeClient):
    """A job and its pods; pods run as soon as they are made.

    `number_is_text`: the definition is an old one.  `refuses_patches`: the job breaks a rule of the definition.
    """

    def __init__(self, *, number_is_text: bool = False, refuses_patches: bool = False, **spec: Any) -> None:
        template = {"spec": {"containers": [{"name": "main", "image": "x:1"}]}}
        self.number_is_text = number_is_text
        self.refuses_patches = refuses_patches
        self.job: dict[str, Any] = {
            "metadata": {"name": "train", "namespace": "ml", "uid": "u-1", "creationTimestamp": BEGIN,
                         "resourceVersion": "1"},
            "spec": {"maxReplicas": 2, "replicas": 2, "template": template} | spec,
        }  # fmt: skip
        self.pods: dict[str, dict[str, Any]] = {}
        self.made = 0
        self.others: list[str] = []  # kinds of other things that were made
        self.events: list[str] = []  # their reasons

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        match method, path:
            case "GET", path if path == JOB:
                return self.job
            case "GET", path if path == PODS:
                return {"items": list(self.pods.values()), "metadata": {}}
            case "PATCH", path if path.startswith(JOB) and self.refuses_patches:
                raise Invalid(422, "spec: Invalid value: replicas must be from minReplicas to maxReplicas")
            case "PATCH", path if path == f"{JOB}/status":
                return self._patch(dict(body or {})["status"])
            case "POST", path if path == PODS:
                return self._start(dict(body or {}))
            case "POST", _:
                self.others.append(path.rpartition("/")[2])
                self.events += [body["reason"]] if body and path.endswith("/events") else []
                return dict(body or {})
        raise NotFound(404, path)

    def _patch(self, status: Mapping[str, Any]) -> dict[str, Any]:
        merged = {**self.job.get("status", {}), **status}
        if self.number_is_text and not isinstance(merged.get("goodput", ""), str | None):
            raise Invalid(422, "status.goodput: must be of type string")
        self.job = {**self.job, "status": {name: value for name, value in merged.items() if value is not None}}
        return self.job

    def _start(self, pod: dict[str, Any]) -> dict[str, Any]:
        self.made += 1
        pod["metadata"] |= {"uid": f"p-{self.made}", "creationTimestamp": BEGIN}
        pod["status"] = {"phase": "Running", "podIP": f"10.0.0.{self.made}",
                         "conditions": [{"type": "Ready", "status": "True"}]}  # fmt: skip
        self.pods[pod["metadata"]["name"]] = pod
        return {**pod, "spec": {name: value for name, value in pod["spec"].items() if name != "unheardOf"}}


class Talkative(PolledJobApi):
    """Every pod answers when `answers` is set."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.answers = threading.Event()

    def status(self, address: str, token: str, run_id: str) -> dict[str, Any]:
        self.asked.set()
        self.answers.wait(120)
        return {"round": 7, "goodput": 0.97}


def tracked(cluster: Shelf, api: Talkative, story: Callable[[Operator], Awaitable[None]]) -> None:
    async def main() -> None:
        operator = Operator(cluster, b"key", api)
        operator.job_changed(NAME)
        try:
            await story(operator)
        finally:
            api.answers.set()

    asyncio.run(main())


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not look():  # noqa: ASYNC110 - threads do what is waited for
            await asyncio.sleep(0.01)


def test_a_job_that_hangs_when_it_is_asked_does_not_delay_the_care_of_its_pods() -> None:
    cluster, api = Shelf(), Talkative()

    async def story(operator: Operator) -> None:
        await until(lambda: cluster.made == 2)
        operator.job_changed(NAME)
        await until(api.asked.is_set)
        del cluster.pods["train-1"]
        operator.job_changed(NAME)
        await until(lambda: cluster.made == 3)

    tracked(cluster, api, story)


def test_a_definition_of_an_older_version_costs_what_the_job_says_and_not_the_care_of_its_pods(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster, api = Shelf(number_is_text=True), Talkative()
    api.answers.set()

    async def story(operator: Operator) -> None:
        await until(lambda: cluster.made == 2)
        operator.job_changed(NAME)
        await until(lambda: "ripstop kube install" in caplog.text)
        del cluster.pods["train-1"]
        operator.job_changed(NAME)
        await until(lambda: cluster.made == 3)
        operator.job_changed(NAME)
        await until(lambda: cluster.job["status"]["replicas"] == 2)
        assert "round" not in cluster.job["status"]

    with caplog.at_level(logging.WARNING):
        tracked(cluster, api, story)
    assert len(caplog.records) == 1


def test_fields_of_an_older_version_are_removed_when_the_definition_forbids_them() -> None:
    cluster, api = Shelf(number_is_text=True), Talkative()
    cluster.job["status"] = {"goodput": 0.97, "restarts": 1}  # the other way round: what is stored is wrong

    async def story(operator: Operator) -> None:
        await until(lambda: cluster.made == 2 and "goodput" not in cluster.job["status"])

    tracked(cluster, api, story)


def test_a_job_whose_status_the_cluster_refuses_is_managed_and_its_status_remembered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster, api = Shelf(refuses_patches=True, replicas=None), Talkative()
    api.answers.set()

    async def story(operator: Operator) -> None:
        await until(lambda: cluster.made == 2)
        operator.job_changed(NAME)
        await until(lambda: "Running" in cluster.events)
        del cluster.pods["train-1"]
        operator.job_changed(NAME)
        await until(lambda: cluster.made == 3 and len(cluster.events) > 1)
        assert cluster.events == ["Running", "Deleted"], "a lost pod is known only by the last status"
        assert "status" not in cluster.job
        cluster.refuses_patches = False
        operator.job_changed(NAME)
        await until(lambda: cluster.job.get("status", {}).get("replaced") == 1)

    with caplog.at_level(logging.WARNING):
        tracked(cluster, api, story)
    (record,) = [record for record in caplog.records if record.name.startswith("ripstop")]
    assert "job=ml/train the cluster refuses its status" in record.getMessage()


def test_a_job_that_runs_no_more_is_not_asked_and_is_asked_anew_when_it_does() -> None:
    cluster, api = Shelf(minReplicas=2), Talkative()
    api.answers.set()

    async def story(operator: Operator) -> None:
        await until(lambda: cluster.made == 2)
        operator.job_changed(NAME)
        await until(lambda: cluster.job["status"].get("round") == 7)
        api.asked.clear()
        cluster.job["spec"]["suspend"] = True
        operator.job_changed(NAME)
        await until(lambda: cluster.job["status"]["phase"] == "Suspended")
        assert not api.asked.is_set()
        cluster.job["spec"]["suspend"] = False
        operator.job_changed(NAME)
        await until(api.asked.is_set)  # at once, though it was asked a moment ago

    tracked(cluster, api, story)


def test_a_service_or_secret_that_somebody_deleted_comes_back_although_no_pod_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operator_module, "ACTIVE_RESYNC_S", 0.2)
    cluster, api = Shelf(), Talkative()
    api.answers.set()

    async def story(operator: Operator) -> None:
        await until(lambda: cluster.made == 2)
        cluster.others.clear()
        await until(lambda: {"services", "secrets"} <= set(cluster.others))
        assert cluster.made == 2

    tracked(cluster, api, story)


def test_fields_of_the_template_that_the_cluster_drops_are_a_condition() -> None:
    template = {"spec": {"unheardOf": 1, "containers": [{"name": "main", "image": "x:1"}]}}
    cluster, api = Shelf(template=template), Talkative()

    async def story(operator: Operator) -> None:
        await until(lambda: "FieldsIgnored" in str(cluster.job.get("status")))
        (said,) = [c for c in cluster.job["status"]["conditions"] if c["type"] == "FieldsIgnored"]
        assert "drops unknown template fields: spec.unheardOf; correct" in said["message"]

    tracked(cluster, api, story)


@pytest.mark.parametrize(
    ("sent", "kept", "gone"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}, []),
        ({"a": {"b": 1, "x": 2}}, {"a": {"b": 1}}, ["a.x"]),
        ({"a": {}, "b": [], "c": None, "d": "", "e": 0, "f": False}, {}, []),  # empty, and so left out
        ({"l": [{"name": "a", "x": 1}]}, {"l": [{"name": "a"}]}, ["l[0].x"]),
        ({"l": [{"name": "a", "x": 1}]}, {"l": [{"name": "put"}, {"name": "a"}]}, ["l[0].x"]),
        ({"l": [{"x": 1}]}, {"l": [{}, {"x": 1}]}, []),  # which is which cannot be told
        ({"l": [{"name": "v", "x": 1}]}, {"l": [{"name": "v"}, {"name": "v", "x": 1}]}, []),
        ({"l": ["a", "b"]}, {"l": ["a"]}, []),
        ({"q": {"cpu": 1}}, {"q": {"cpu": "1"}}, []),
    ],
)
def test_fields_that_the_reply_lacks_were_dropped_by_the_cluster(sent: Any, kept: Any, gone: list[str]) -> None:
    assert fields_dropped_by_cluster(sent, kept) == gone
