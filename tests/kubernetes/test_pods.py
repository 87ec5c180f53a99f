"""Jobs, pods and nodes, as read from the objects of a cluster."""

from typing import Any

from ripstop.kubernetes.manifests import SLOT, Owner
from ripstop.kubernetes.pods import Pod, coordinator_pod_addresses, pod_node_unreachable_since, read_pods
from ripstop.kubernetes.reconcile import job_to_reconcile

OWNER = Owner("train", "ml", "u-1")
BEGIN = "2027-01-15T08:00:00Z"
NOW = 1_800_000_000.0


def a_pod(status: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "train-1", "uid": "p-1", "labels": {SLOT: "1"}, "creationTimestamp": BEGIN,
            "ownerReferences": [{"uid": "u-1"}],
        } | metadata,
        "spec": {"nodeName": "n1", "containers": [{"name": "trainer"}, {"name": "beside"}]},
        "status": status or {},
    }  # fmt: skip


def pod_of(status: dict[str, Any] | None = None, unreachable: dict[str, float] | None = None, **metadata: Any) -> Pod:
    (pod,) = read_pods([a_pod(status, **metadata)], OWNER, unreachable or {})
    return pod


def container(name: str, **state: Any) -> dict[str, Any]:
    return {"name": name, "state": state}


def condition(kind: str, status: str, **more: str) -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": status} | more]}


def test_a_job_is_what_was_read() -> None:
    metadata = {"name": "train", "namespace": "ml", "uid": "u-1", "creationTimestamp": BEGIN, "generation": 3}
    job = job_to_reconcile({"metadata": metadata, "spec": {"maxReplicas": 2}})
    assert (job.owner.name, job.owner.namespace, job.owner.uid) == ("train", "ml", "u-1")
    assert (job.generation, job.deleting, dict(job.status)) == (3, False, {})


def test_a_job_that_is_being_deleted_says_so() -> None:
    metadata = {"name": "a", "namespace": "b", "uid": "c", "creationTimestamp": BEGIN, "deletionTimestamp": BEGIN}
    assert job_to_reconcile({"metadata": metadata}).deleting


def test_pods_of_an_earlier_job_of_the_same_name_are_not_the_jobs() -> None:
    assert read_pods([a_pod(ownerReferences=[{"uid": "u-0"}]), a_pod(ownerReferences=None)], OWNER, {}) == []


def test_a_pod_whose_slot_was_taken_from_it_is_left_alone() -> None:
    assert read_pods([a_pod(labels={}), a_pod(labels={SLOT: "x"})], OWNER, {}) == []


def test_a_pod_that_has_just_been_made() -> None:
    assert pod_of() == Pod("train-1", 1, "p-1", "Pending", NOW)


def test_a_pod_that_runs_and_is_ready() -> None:
    pod = pod_of({"phase": "Running", **condition("Ready", "True")})
    assert (pod.phase, pod.ready, pod.over) == ("Running", True, False)


def test_the_end_of_the_trainer_is_the_pods_also_while_something_runs_beside_it() -> None:
    end = {"exitCode": 1, "finishedAt": BEGIN, "message": "alas", "reason": "Error"}
    statuses = [container("beside", running={}), container("trainer", terminated=end)]
    pod = pod_of({"phase": "Running", "containerStatuses": statuses, **condition("Ready", "True")})
    assert (pod.phase, pod.ready, pod.exit_code, pod.finished, pod.message) == ("Failed", False, 1, NOW, "alas")
    assert pod.reason == ""
    assert (pod.has_sidecars, pod.empty) == (True, False)
    alone = pod_of({"phase": "Failed", "containerStatuses": [statuses[1]]})
    assert (alone.has_sidecars, alone.empty) == (False, True)


def test_the_end_of_another_container_is_not_the_end_of_the_pod() -> None:
    statuses = [container("beside", terminated={"exitCode": 1}), container("trainer", running={})]
    assert not pod_of({"phase": "Running", "containerStatuses": statuses}).over


def test_an_eviction_has_its_reason_and_its_words() -> None:
    pod = pod_of({"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."})
    assert (pod.over, pod.reason, pod.detail) == (True, "Evicted", "The node was low on resource: memory.")
    assert not pod.empty, "its containers may still be ending"


def test_a_container_that_reached_its_memory_limit_says_so() -> None:
    end = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": BEGIN}
    assert (
        pod_of({"phase": "Failed", "containerStatuses": [container("trainer", terminated=end)]}).reason == "OOMKilled"
    )


def test_an_image_that_cannot_be_pulled_is_a_reason_to_wait() -> None:
    wait = {"reason": "ImagePullBackOff", "message": "no such image"}
    pod = pod_of({"phase": "Pending", "containerStatuses": [container("trainer", waiting=wait)]})
    assert (pod.waiting, pod.detail) == ("ImagePullBackOff", "no such image")


def test_a_pod_whose_init_container_failed_says_so() -> None:
    end = {"exitCode": 1, "reason": "Error", "message": "no data"}
    later = container("trainer", waiting={"reason": "PodInitializing"})
    status = {
        "phase": "Failed",
        "initContainerStatuses": [container("fetch", terminated=end)],
        "containerStatuses": [later],
    }
    pod = pod_of(status)
    assert (pod.over, pod.exit_code) == (True, None)
    assert pod.detail == "init container fetch exited with code 1: no data"
    assert pod_of(
        {**status, "initContainerStatuses": [container("a", terminated=end | {"reason": "StartError"})]}
    ).reason


def test_an_image_of_an_init_container_counts_too() -> None:
    wait = {"reason": "ErrImagePull"}
    later = {"reason": "PodInitializing"}
    status = {
        "initContainerStatuses": [container("first", waiting=wait)],
        "containerStatuses": [container("trainer", waiting=later)],
    }
    assert pod_of(status).waiting == "ErrImagePull"


def test_a_container_that_is_just_being_made_waits_for_nothing() -> None:
    assert pod_of({"containerStatuses": [container("trainer", waiting={"reason": "ContainerCreating"})]}).waiting == ""


def test_a_pod_that_fits_nowhere() -> None:
    status = condition("PodScheduled", "False", reason="Unschedulable", message="0/3 nodes")
    assert pod_of(status).unschedulable == "0/3 nodes"


def test_a_pod_that_the_cluster_takes_away() -> None:
    status = condition("DisruptionTarget", "True", reason="PreemptionByScheduler", message="for a better one")
    assert pod_of(status).disrupted == "PreemptionByScheduler: for a better one"


def test_a_pod_on_a_unreachable_node_is_unreachable_unless_it_is_over() -> None:
    assert pod_of({"phase": "Running"}, unreachable={"n1": NOW}).unreachable_since == NOW
    assert pod_of({"phase": "Failed"}, unreachable={"n1": NOW}).unreachable_since is None
    assert pod_of({"phase": "Running"}, unreachable={"n2": NOW}).unreachable_since is None


def test_a_node_is_unreachable_when_its_kubelet_is_not_heard() -> None:
    unreachable = condition("Ready", "Unknown", lastTransitionTime=BEGIN)
    assert pod_node_unreachable_since({"status": unreachable}) == NOW
    assert pod_node_unreachable_since({"status": condition("Ready", "False", lastTransitionTime=BEGIN)}) is None
    assert pod_node_unreachable_since({"status": condition("Ready", "True", lastTransitionTime=BEGIN)}) is None
    assert pod_node_unreachable_since({}) is None


def test_the_coordinator_is_at_slot_0_or_anywhere_if_it_is_elected() -> None:
    first = a_pod({"podIP": "10.0.0.7", "phase": "Running"}, labels={SLOT: "0"})
    second = a_pod({"podIP": "10.0.0.8", "phase": "Running"})
    assert coordinator_pod_addresses([second, first], OWNER, elected=False) == ["10.0.0.7"]
    assert coordinator_pod_addresses([second, first], OWNER, elected=True) == ["10.0.0.7", "10.0.0.8"]


def test_no_coordinator_is_in_a_pod_that_does_not_run_or_is_another_jobs() -> None:
    over = a_pod({"podIP": "10.0.0.7", "phase": "Failed"}, labels={SLOT: "0"})
    other = a_pod({"podIP": "10.0.0.8", "phase": "Running"}, ownerReferences=[{"uid": "u-0"}])
    assert coordinator_pod_addresses([over, other, a_pod()], OWNER, elected=True) == []
