"""An operator under its own service account, and a real API server.  What a kubelet would say of pods, we say."""

import json
from typing import Any

import pytest

from ripstop.kubernetes.kube_client import KubeClient, kube_core_path, kube_jobs_path
from tests.kubernetes.kube.lab import NOWHERE, SAYS, TALKATIVE, Place, eventually, needs_a_cluster, stamp

needs_a_cluster()

pytestmark = pytest.mark.usefixtures("operator")


def said(outcome: str) -> str:
    return json.dumps({"outcome": outcome, "why": "rank 3 was killed"})


def test_a_job_gets_what_it_needs_and_owns_it(place: Place) -> None:
    job = place.submit(disruptionBudget=True)
    pods = place.there("train-0", "train-1")
    policy = place.cluster.get("/apis/policy")["preferredVersion"]["groupVersion"]
    budget = f"/apis/{policy}/namespaces/{place.name}/poddisruptionbudgets/train"
    token = f"train-token-{job['metadata']['uid'][:8]}"
    found = [
        *place.pods().values(),
        place.cluster.get(kube_core_path(place.name, "services", "train")),
        place.cluster.get(kube_core_path(place.name, "secrets", token)),
        place.cluster.get(budget),
    ]
    owners = {reference["uid"] for item in found for reference in item["metadata"]["ownerReferences"]}
    assert owners == {job["metadata"]["uid"]}
    assert place.pods()["train-1"]["spec"]["hostname"] == "train-1"
    assert len(set(pods.values())) == 2
    eventually(lambda: place.phase() == "Pending")


def test_a_job_whose_pods_are_ready_runs(place: Place) -> None:
    place.submit()
    place.there("train-0", "train-1")
    place.start("train-0", "train-1")
    eventually(lambda: place.phase() == "Running")
    status = place.job()["status"]
    assert (status["readyReplicas"], status["members"]) == (2, ["train-0", "train-1"])
    assert place.condition("Running")["status"] == "True"


def test_a_running_job_is_asked_how_it_is_doing(place: Place) -> None:
    place.submit()
    place.there("train-0", "train-1")
    place.set_status("train-0", podIP=TALKATIVE, podIPs=[{"ip": TALKATIVE}])
    place.start("train-0", "train-1")
    eventually(lambda: place.job()["status"]["round"] == SAYS["round"])
    status = place.job()["status"]
    assert {name: status.get(name) for name in SAYS} == SAYS | {"target": None}


def test_a_job_that_does_not_answer_runs_all_the_same(place: Place) -> None:
    place.submit()
    place.there("train-0", "train-1")
    place.set_status("train-0", podIP="10.9.9.9", podIPs=[{"ip": "10.9.9.9"}])
    place.start("train-0", "train-1")
    eventually(lambda: place.phase() == "Running")
    eventually(lambda: "Running" in place.events())
    assert "round" not in place.job()["status"]


def test_replicas_that_were_not_given_can_be_seen_and_scaled(place: Place) -> None:
    place.submit(replicas=None, maxReplicas=2)
    place.there("train-0", "train-1")
    assert (
        eventually(lambda: place.cluster.get(kube_jobs_path(place.name, "train", part="scale"))["spec"]["replicas"])
        == 2
    )


def test_scaling_makes_and_takes_the_highest_slots(place: Place) -> None:
    place.submit()
    before = place.there("train-0", "train-1")
    place.scale(4)
    more = place.there("train-0", "train-1", "train-2", "train-3")
    place.scale(1)
    assert place.there("train-0") == {"train-0": before["train-0"]}
    assert more.items() >= before.items()


def test_a_lost_pod_is_replaced_in_its_slot_and_the_others_stay(place: Place) -> None:
    place.submit()
    before = place.there("train-0", "train-1")
    place.start("train-0", "train-1")
    eventually(lambda: place.phase() == "Running")
    place.end("train-1", 137)
    eventually(lambda: place.uids().get("train-1") not in (None, before["train-1"]))
    assert place.uids()["train-0"] == before["train-0"]
    eventually(lambda: place.job()["status"].get("replaced") == 1)
    eventually(lambda: "Killed" in place.events())


def test_a_pod_that_somebody_deletes_is_replaced_sent_and_counted(place: Place) -> None:
    place.submit()
    before = place.there("train-0", "train-1")
    place.start("train-0", "train-1")
    eventually(lambda: place.job()["status"].get("members") == ["train-0", "train-1"])
    place.cluster.delete(kube_core_path(place.name, "pods", "train-0"))
    eventually(lambda: place.uids().get("train-0") not in (None, before["train-0"]))
    eventually(lambda: "Deleted" in place.events())
    assert place.job()["status"]["replaced"] == 1


def test_a_size_out_of_range_leaves_a_resumed_job_running(place: Place) -> None:
    place.submit(suspend=True)
    eventually(lambda: place.phase() == "Suspended")
    place.change(suspend=False)
    before = place.there("train-0", "train-1")
    place.start("train-0", "train-1")
    eventually(lambda: place.phase() == "Running")
    place.scale(9)
    eventually(lambda: "spec.replicas (9) must be" in place.condition("Invalid")["message"])
    eventually(lambda: "Invalid" in place.events())
    assert (place.phase(), place.uids()) == ("Running", before)
    place.scale(3)
    assert place.there("train-0", "train-1", "train-2").items() >= before.items()


def test_fields_of_the_template_that_the_cluster_does_not_know_are_a_condition(place: Place) -> None:
    container = {"name": "main", "image": "x:1", "imagePulPolicy": "Never"}
    place.submit(template={"spec": {"nodeSelector": NOWHERE, "containers": [container]}})
    place.there("train-0", "train-1")
    eventually(lambda: "spec.containers[0].imagePulPolicy" in place.condition("FieldsIgnored")["message"])


def test_a_template_that_the_cluster_knows_is_no_condition(place: Place) -> None:
    place.submit()
    place.there("train-0", "train-1")
    place.start("train-0", "train-1")
    eventually(lambda: place.phase() == "Running")
    assert place.condition("FieldsIgnored")["status"] == ""


def test_a_job_succeeds_when_its_pods_say_so_and_goes_when_its_time_is_over(place: Place) -> None:
    place.submit(ttlSecondsAfterFinished=2)
    place.there("train-0", "train-1")
    place.end("train-0", 0, said("succeeded"))
    eventually(lambda: place.phase() == "Succeeded")
    eventually(lambda: "Succeeded" in place.events())
    eventually(place.forgotten)
    eventually(lambda: not place.pods() and place.gone("services", "train"))


def test_a_job_fails_with_its_own_words_and_nothing_is_replaced(place: Place) -> None:
    place.submit()
    before = place.there("train-0", "train-1")
    place.end("train-1", 1, said("failed"))
    eventually(lambda: place.phase() == "Failed")
    assert place.job()["status"]["lastFailure"] == "rank 3 was killed"
    assert place.uids() == before


def test_a_suspended_job_has_no_pods_until_it_is_resumed(place: Place) -> None:
    place.submit(suspend=True)
    eventually(lambda: place.phase() == "Suspended")
    assert place.pods() == {}
    place.change(suspend=False)
    place.there("train-0", "train-1")
    place.change(suspend=True)
    place.there()
    eventually(lambda: place.phase() == "Suspended")
    assert not place.gone("services", "train")


def test_a_job_past_its_deadline_fails(place: Place) -> None:
    place.submit(activeDeadlineSeconds=1)
    eventually(lambda: place.phase() == "Failed")
    place.there()
    assert place.condition("Failed")["reason"] == "DeadlineExceeded"


@pytest.mark.parametrize(
    ("wrong", "right", "word"),
    [
        ({"minReplicas": 3, "maxReplicas": 2}, {"minReplicas": 1}, "spec.minReplicas (3) is above maxReplicas (2)"),
        ({"replicas": 9}, {"replicas": 2}, "spec.replicas (9) must be from minReplicas (1) to maxReplicas (4)"),
        (
            {"rendezvous": {"backend": "etcd"}},
            {"rendezvous": {"backend": "etcd", "endpoints": ["e:2379"]}},
            "spec.rendezvous.endpoints",
        ),
    ],
)
def test_a_job_that_cannot_be_right_waits_to_be_corrected(
    place: Place, wrong: dict[str, Any], right: dict[str, Any], word: str
) -> None:
    place.submit(**wrong)
    eventually(lambda: word in place.condition("Invalid")["message"])
    assert (place.phase(), place.pods()) == ("Invalid", {})
    place.submit("other")
    place.there("other-0", "other-1", job="other")
    place.change(**right)
    place.there("train-0", "train-1")
    eventually(lambda: place.condition("Invalid")["status"] == "False")


@pytest.mark.parametrize("name", ["n" * 60, "7up", "a.b"])
def test_a_name_that_no_service_can_have_is_a_condition(place: Place, name: str) -> None:
    place.submit(name)
    eventually(lambda: "metadata.name" in place.condition("Invalid", name)["message"])


def test_a_fixed_field_that_is_changed_is_a_condition_and_changes_nothing(place: Place) -> None:
    place.submit()
    before = place.there("train-0", "train-1")
    eventually(lambda: "accepted" in place.job()["status"])
    place.change(maxRestarts=9)
    eventually(lambda: "spec.maxRestarts cannot be changed" in place.condition("Invalid")["message"])
    place.scale(3)
    assert place.there("train-0", "train-1", "train-2").items() >= before.items()


def test_a_quota_that_is_too_small_is_a_condition_until_it_is_raised(place: Place) -> None:
    place.create("ResourceQuota", "small", spec={"hard": {"pods": "1"}})
    quota = kube_core_path(place.name, "resourcequotas", "small")
    eventually(lambda: place.cluster.get(quota)["status"]["hard"]["pods"] == "1")
    place.submit()
    eventually(lambda: "exceeded quota" in place.condition("Refused")["message"])
    place.there("train-0")
    place.cluster.patch(quota, {"spec": {"hard": {"pods": "2"}}})
    place.there("train-0", "train-1")
    eventually(lambda: place.condition("Refused")["status"] == "False")


def test_a_template_that_makes_no_pod_is_a_condition(place: Place) -> None:
    place.submit(template={"spec": {"nodeSelector": NOWHERE, "containers": [{"name": "main"}]}})
    eventually(lambda: "spec.containers[0].image" in place.condition("Refused")["message"])
    assert eventually(place.events) == ["Refused"]


def test_a_service_that_is_somebody_elses_is_left_alone(place: Place) -> None:
    place.create("Service", "train", spec={"ports": [{"port": 80}]})
    place.submit()
    eventually(lambda: "belongs to another owner" in place.condition("Refused")["message"])
    assert place.pods() == {}
    place.cluster.delete(kube_core_path(place.name, "services", "train"))
    place.there("train-0", "train-1")


def test_an_image_that_does_not_exist_is_a_condition_and_no_loop(place: Place) -> None:
    place.submit()
    before = place.there("train-0", "train-1")
    wait = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image x:1"}}
    status = {"name": "main", "state": wait, "ready": False, "restartCount": 0, "image": "x:1", "imageID": ""}
    place.set_status("train-1", containerStatuses=[status])
    eventually(lambda: "no such image x:1" in place.condition("CannotStart")["message"])
    assert place.uids() == before


def a_node(cluster: KubeClient, name: str, ready: str, ago: float = 0.0) -> None:
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": stamp(ago), "lastHeartbeatTime": stamp()}
    cluster.patch(f"/api/v1/nodes/{name}/status", {"status": {"conditions": [condition]}})


@pytest.mark.parametrize("gone", [False, True])
def test_a_pod_on_a_node_that_does_not_answer_is_replaced(place: Place, gone: bool) -> None:
    node = f"{place.name}-node"
    place.cluster.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
    try:
        a_node(place.cluster, node, "True")
        place.submit()
        before = place.there("train-0", "train-1")
        place.bind("train-1", node)
        place.start("train-0", "train-1")
        eventually(lambda: place.phase() == "Running")
        place.cluster.delete(kube_core_path(place.name, "pods", "train-1"))
        assert "deletionTimestamp" in place.pods()["train-1"]["metadata"], "its kubelet would have to agree"
        if gone:
            place.cluster.delete(f"/api/v1/nodes/{node}")
        else:
            a_node(place.cluster, node, "Unknown", ago=60)
        eventually(lambda: place.uids().get("train-1") not in (None, before["train-1"]))
        eventually(lambda: "NodeLost" in place.events())
    finally:
        if not gone:
            place.cluster.delete(f"/api/v1/nodes/{node}")


def test_a_job_that_is_made_anew_has_pods_of_its_own(place: Place) -> None:
    place.submit()
    before = place.there("train-0", "train-1")
    place.cluster.delete(kube_jobs_path(place.name, "train"))
    job = place.submit()

    def owners() -> set[str]:
        return {pod["metadata"]["ownerReferences"][0]["uid"] for pod in place.pods().values()}

    eventually(lambda: len(place.pods()) == 2 and owners() == {job["metadata"]["uid"]})
    assert not set(place.uids().values()) & set(before.values())


def test_nothing_is_written_while_nothing_changes(place: Place) -> None:
    place.submit()
    place.there("train-0", "train-1")
    place.start("train-0", "train-1")
    eventually(lambda: place.phase() == "Running")
    eventually(lambda: place.job()["status"]["observedGeneration"] == place.job()["metadata"]["generation"])
    eventually(lambda: "Running" in place.events())
    before = place.job()["metadata"]["resourceVersion"]
    for n in range(3):  # the operator looks each time
        place.cluster.patch(kube_core_path(place.name, "pods", "train-0"), {"metadata": {"annotations": {"n": str(n)}}})
    place.submit("other")
    place.there("other-0", "other-1", job="other")
    assert place.job()["metadata"]["resourceVersion"] == before
