"""Every decision about an ElasticJob: the job and its pods go in, what to do comes out."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from ripstop.kubernetes.manifests import Owner
from ripstop.kubernetes.pods import Pod
from ripstop.kubernetes.reconcile import (
    EXIT_TIMEOUT_S,
    NODE_TIMEOUT_S,
    Action,
    CreatePod,
    Decision,
    DeleteJob,
    DeletePod,
    ElasticJob,
    Emit,
    Ensure,
    ResizeJob,
    SetReplicas,
    decide_reconciliation,
)

OWNER = Owner("train", "ml", "u-1")
TEMPLATE = {"spec": {"containers": [{"name": "main", "image": "x:1"}]}}
NOW = 1_800_000_000.0


def a_job(status: dict[str, Any] | None = None, **spec: Any) -> ElasticJob:
    return ElasticJob(OWNER, {"maxReplicas": 4, "replicas": 2, "template": TEMPLATE} | spec, status or {})


def running(slot: int, **more: Any) -> Pod:
    return replace(Pod(f"train-{slot}", slot, f"uid-{slot}", "Running", NOW, ready=True), **more)


def lost(slot: int, **more: Any) -> Pod:
    return running(slot, phase="Failed", ready=False, exit_code=137, finished=NOW + 100, **more)


def said(slot: int, outcome: str, code: int = 0) -> Pod:
    word = json.dumps({"outcome": outcome, "why": "because"})
    phase = "Succeeded" if code == 0 else "Failed"
    return running(slot, phase=phase, ready=False, exit_code=code, finished=NOW, message=word)


def actions(decision: Decision) -> list[Action]:
    """What is done, without what is only made sure of or said."""
    return [action for action in decision.actions if not isinstance(action, Ensure | Emit)]


def emitted(decision: Decision) -> list[str]:
    return [action.reason for action in decision.actions if isinstance(action, Emit)]


def condition(decision: Decision, kind: str) -> Any:
    return next((c for c in decision.status["conditions"] if c["type"] == kind), None)


def after(job: ElasticJob, decision: Decision) -> ElasticJob:
    return replace(job, status=json.loads(json.dumps(decision.status)))


def settled(job: ElasticJob, *pods: Pod, now: float = NOW) -> ElasticJob:
    """The job with the status of a decision that was carried out."""
    return after(job, decide_reconciliation(job, pods, now))


# pods -----------------------------------------------------------------------------------------------------------------


def test_a_new_job_gets_its_service_secret_and_pods() -> None:
    decision = decide_reconciliation(a_job(), [], NOW)
    assert decision.actions == (Ensure("service"), Ensure("secret"), CreatePod(0), CreatePod(1))
    assert decision.status["phase"] == "Pending"


def test_a_secret_that_the_job_names_is_not_made() -> None:
    assert Ensure("secret") not in decide_reconciliation(a_job(secretName="mine"), [], NOW).actions


def test_replicas_that_are_not_given_are_written_into_the_spec() -> None:
    job = a_job()
    del job.spec["replicas"]  # type: ignore[attr-defined]
    assert actions(decide_reconciliation(job, [], NOW)) == [SetReplicas(4), *(CreatePod(slot) for slot in range(4))]


def test_spares_are_pods_beyond_the_replicas() -> None:
    assert actions(decide_reconciliation(a_job(spares=1), [], NOW)) == [CreatePod(0), CreatePod(1), CreatePod(2)]


def test_running_pods_are_not_changed() -> None:
    decision = decide_reconciliation(a_job(), [running(0), running(1)], NOW)
    assert actions(decision) == []
    assert decision.status["phase"] == "Running"
    assert decision.status["members"] == ["train-0", "train-1"]


def test_scaling_up_makes_the_missing_slots() -> None:
    assert actions(decide_reconciliation(a_job(replicas=3), [running(0), running(1)], NOW)) == [CreatePod(2)]


def test_scaling_down_takes_the_highest_slots() -> None:
    decision = decide_reconciliation(a_job(replicas=1), [running(0), running(1), running(2)], NOW)
    assert actions(decision) == [DeletePod("train-2", "uid-2"), DeletePod("train-1", "uid-1")]
    assert emitted(decision)[:2] == ["ScaledDown", "ScaledDown"]


def test_a_pod_that_is_leaving_is_sent_once() -> None:
    assert actions(decide_reconciliation(a_job(replicas=1), [running(0), running(1, deleting=True)], NOW)) == []


def test_a_lost_pod_is_deleted_first_and_replaced_when_it_is_gone() -> None:
    job = settled(a_job(), running(0), running(1))
    decision = decide_reconciliation(job, [running(0), lost(1)], NOW + 100)
    assert actions(decision) == [DeletePod("train-1", "uid-1")]
    assert emitted(decision) == ["Killed"]
    assert actions(decide_reconciliation(after(job, decision), [running(0)], NOW + 101)) == [CreatePod(1)]


@pytest.mark.parametrize("beside", [{"has_sidecars": True}, {"exit_code": None, "reason": "Evicted"}])
def test_a_pod_in_which_something_may_still_run_has_its_grace_period(beside: dict[str, Any]) -> None:
    job = settled(a_job(), running(0), running(1))
    ended = replace(lost(1), **beside)
    decision = decide_reconciliation(job, [running(0), ended], NOW + 100)
    assert actions(decision) == [DeletePod("train-1", "uid-1")]
    assert (
        actions(decide_reconciliation(after(job, decision), [running(0), replace(ended, deleting=True)], NOW + 100))
        == []
    )


def test_a_loss_is_sent_once() -> None:
    job = settled(a_job(), running(0), lost(1), now=NOW + 100)
    assert emitted(decide_reconciliation(job, [running(0), lost(1)], NOW + 101)) == []
    assert job.status["replaced"] == 1


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (lost(1, reason="Evicted", detail="low on disk"), "Evicted"),
        (lost(1, disrupted="preempted by another"), "Preempted"),
        (lost(1, reason="OOMKilled"), "OOMKilled"),
        (lost(1), "Killed"),
        (replace(lost(1), exit_code=1, message="no coordinator"), "PodFailed"),
        (replace(lost(1), exit_code=None, reason="UnexpectedAdmissionError"), "UnexpectedAdmissionError"),
    ],
)
def test_a_loss_has_its_reason(pod: Pod, reason: str) -> None:
    assert emitted(decide_reconciliation(settled(a_job(), running(0)), [running(0), pod], NOW)) == [reason]


def test_a_slot_whose_pods_die_quickly_waits() -> None:
    job, now = a_job(), NOW
    waits = []
    for n in range(6):
        dead = replace(lost(1), uid=f"try-{n}", created=now, finished=now + 1)
        job = settled(job, running(0), dead, now=now + 1)
        decision = decide_reconciliation(job, [running(0)], now + 1)
        waits.append(decision.requeue_after if not actions(decision) else 0)
        now += 1000
    assert waits == [0, 1, 2, 4, 8, 16]


def test_an_evicted_pod_is_replaced_at_once_however_often() -> None:
    job = a_job()
    for n in range(4):
        dead = replace(lost(1, reason="Evicted"), uid=f"try-{n}", finished=NOW + 1)
        job = settled(job, running(0), dead)
    assert actions(decide_reconciliation(job, [running(0)], NOW)) == [CreatePod(1)]


def test_a_pod_whose_node_does_not_answer_is_given_up_after_a_while() -> None:
    job = settled(a_job(), running(0), running(1))
    silent = running(1, unreachable_since=NOW)
    early = decide_reconciliation(job, [running(0), silent], NOW + 5)
    assert (actions(early), early.requeue_after) == ([], NODE_TIMEOUT_S - 5)
    late = decide_reconciliation(job, [running(0), silent], NOW + NODE_TIMEOUT_S)
    assert actions(late) == [DeletePod("train-1", "uid-1", force=True)]
    assert "NodeLost" in emitted(late)


def test_a_pod_that_is_being_deleted_on_a_dead_node_is_forced_at_once() -> None:
    stuck = running(1, unreachable_since=NOW, deleting=True)
    assert actions(decide_reconciliation(a_job(), [running(0), stuck], NOW)) == [
        DeletePod("train-1", "uid-1", force=True)
    ]


def test_a_pod_that_was_sent_to_leave_and_has_ended_is_not_waited_for() -> None:
    ended = running(1, deleting=True, phase="Failed", ready=False, exit_code=143)
    decision = decide_reconciliation(settled(a_job(), running(0), running(1)), [running(0), ended], NOW)
    assert actions(decision) == [DeletePod("train-1", "uid-1", force=True)]


@pytest.mark.parametrize(
    ("disrupted", "reason"),
    [
        ("", "Deleted"),
        ("EvictionByEvictionAPI: Eviction API: evicting", "Evicted"),
        ("DeletionByTaintManager: Taint manager: deleting", "Evicted"),
        ("PreemptionByScheduler: preempting to accommodate a higher priority pod", "Preempted"),
    ],
)
def test_a_pod_that_is_taken_away_is_sent_and_counted_once(disrupted: str, reason: str) -> None:
    job = settled(a_job(), running(0), running(1))
    leaving = running(1, deleting=True, disrupted=disrupted)
    decision = decide_reconciliation(job, [running(0), leaving], NOW + 1)
    assert (actions(decision), emitted(decision)) == ([], [reason])
    job = after(job, decision)
    assert emitted(decide_reconciliation(job, [running(0), leaving], NOW + 2)) == []
    ended = replace(lost(1), deleting=True)
    assert emitted(decide_reconciliation(job, [running(0), ended], NOW + 2)) == []
    gone = decide_reconciliation(job, [running(0)], NOW + 3)
    assert (actions(gone), emitted(gone), gone.status["replaced"]) == ([CreatePod(1)], [], 1)


def test_a_pod_that_vanishes_is_sent_and_counted_each_time() -> None:
    job = settled(a_job(), running(0), running(1))
    for n in range(2):
        decision = decide_reconciliation(job, [running(0)], NOW + n)
        assert (actions(decision), emitted(decision)) == ([CreatePod(1)], ["Deleted"])
        job = settled(after(job, decision), running(0), running(1, uid=f"next-{n}"))
    assert job.status["replaced"] == 2


def test_a_pod_that_was_deleted_and_has_ended_is_sent_once() -> None:
    job = settled(a_job(), running(0), running(1))
    ended = replace(lost(1), deleting=True)
    decision = decide_reconciliation(job, [running(0), ended], NOW)
    assert (actions(decision), emitted(decision)) == ([DeletePod("train-1", "uid-1", force=True)], ["Deleted"])


def test_a_pod_on_a_lost_node_is_counted_once() -> None:
    job = settled(a_job(), running(0), running(1))
    job = settled(job, running(0), running(1, unreachable_since=NOW), now=NOW + NODE_TIMEOUT_S)
    decision = decide_reconciliation(job, [running(0)], NOW + NODE_TIMEOUT_S + 1)
    assert (emitted(decision), decision.status["replaced"]) == ([], 1)


@pytest.mark.parametrize("change", [{"replicas": 1}, {"suspend": True}])
def test_a_pod_that_we_sent_to_leave_is_no_loss(change: dict[str, Any]) -> None:
    job = settled(a_job(), running(0), running(1))
    smaller = settled(replace(job, spec={**job.spec, **change}), running(0), running(1))
    back = decide_reconciliation(replace(smaller, spec=job.spec), [running(0), running(1, deleting=True)], NOW + 1)
    assert "Deleted" not in emitted(back)
    assert "replaced" not in back.status


def test_one_node_is_not_many() -> None:
    assert (
        condition(decide_reconciliation(a_job(replicas=1), [running(0)], NOW), "Running")["message"]
        == "1 node is ready"
    )


def test_a_disruption_budget_is_made_when_it_is_wanted() -> None:
    assert Ensure("disruption-budget") in decide_reconciliation(a_job(disruptionBudget=True), [], NOW).actions


# how many train -------------------------------------------------------------------------------------------------------


def trains(job: ElasticJob, **telemetry: Any) -> ElasticJob:
    return replace(job, telemetry=telemetry)


@pytest.mark.parametrize(
    ("spec", "told", "wanted"),
    [
        ({"spares": 1}, 4, [ResizeJob(2)]),  # spares are not taken in because there would be room for them
        ({"spares": 1}, 2, []),
        ({"spares": 1, "replicas": 3}, 2, [CreatePod(3), ResizeJob(3)]),
        ({"spares": 1, "replicas": 4}, 3, [CreatePod(3), CreatePod(4), ResizeJob(4)]),
        ({}, 4, [ResizeJob(2)]),  # replicas is the size, with and without spares
        ({}, 2, []),
        ({"spares": 1, "secretName": "mine"}, 4, []),  # the operator has the operator does not have its secret
    ],
)
def test_the_job_is_sent_how_many_are_to_train(spec: dict[str, Any], told: int, wanted: list[Action]) -> None:
    decision = decide_reconciliation(trains(a_job(**spec), target=told), [running(0), running(1), running(2)], NOW)
    assert [action for action in actions(decision) if not isinstance(action, DeletePod)] == wanted


def test_a_job_that_says_nothing_is_sent_nothing() -> None:
    assert actions(decide_reconciliation(a_job(spares=1), [running(0), running(1), running(2)], NOW)) == []


def test_a_job_with_spares_that_has_not_answered_for_long_is_a_condition_with_a_remedy() -> None:
    job = replace(a_job(spares=1), unreachable="10.0.0.7: timed out")
    decision = decide_reconciliation(job, [running(0), running(1), running(2)], NOW)
    message = condition(decision, "CoordinatorUnreachable")["message"]
    assert "10.0.0.7: timed out; let the operator's pod reach port 29400 of the job's pods" in message
    heard = decide_reconciliation(
        replace(after(job, decision), unreachable=""), [running(0), running(1), running(2)], NOW
    )
    assert condition(heard, "CoordinatorUnreachable")["status"] == "False"


def test_a_job_without_spares_need_not_answer() -> None:
    decision = decide_reconciliation(replace(a_job(), unreachable="timed out"), [running(0), running(1)], NOW)
    assert condition(decision, "CoordinatorUnreachable") is None


@pytest.mark.parametrize(
    ("spec", "pods", "phase"),
    [
        ({}, [said(0, "succeeded"), running(1), running(2)], "Succeeded"),
        ({}, [], "Recovering"),
        ({"suspend": True}, [running(0), running(1), running(2)], "Suspended"),
    ],
)
def test_only_a_job_that_runs_is_waited_for(spec: dict[str, Any], pods: list[Pod], phase: str) -> None:
    job = settled(replace(a_job(spares=1), unreachable="timed out"), running(0), running(1), running(2))
    decision = decide_reconciliation(replace(job, spec={**job.spec, **spec}), pods, NOW + 1)
    assert decision.status["phase"] == phase
    assert condition(decision, "CoordinatorUnreachable")["status"] == "False"


def test_a_running_job_says_how_it_is_doing() -> None:
    says = {"round": 7, "restarts": 2, "goodput": 0.97, "lastFailure": "rank 3 was killed", "target": 4}
    status = decide_reconciliation(trains(a_job(), **says), [running(0), running(1)], NOW).status
    assert {name: status.get(name) for name in says} == says | {"target": None}


def test_the_last_status_of_a_job_does_not_replace_its_end() -> None:
    job = trains(a_job(), lastFailure="rank 3 was killed")
    job = settled(job, said(0, "failed", 1), said(1, "failed", 1))
    assert job.status["lastFailure"] == "because"
    assert decide_reconciliation(job, [said(0, "failed", 1)], NOW + 1).status["lastFailure"] == "because"


# phases and conditions ------------------------------------------------------------------------------------------------


def test_a_job_that_ran_and_has_too_few_nodes_is_recovering() -> None:
    job = settled(a_job(minReplicas=2), running(0), running(1))
    assert job.status["phase"] == "Running"
    decision = decide_reconciliation(job, [running(0), running(1, ready=False)], NOW)
    assert decision.status["phase"] == "Recovering"
    assert condition(decision, "Running")["status"] == "False"


def test_a_suspended_job_has_no_pods_and_comes_back() -> None:
    job = settled(a_job(), running(0), running(1))
    job.spec["suspend"] = True  # type: ignore[index]
    decision = decide_reconciliation(job, [running(0), running(1)], NOW)
    assert actions(decision) == [DeletePod("train-1", "uid-1"), DeletePod("train-0", "uid-0")]
    assert decision.status["phase"] == "Suspended"
    job = after(job, decision)
    job.spec["suspend"] = False  # type: ignore[index]
    assert actions(decide_reconciliation(job, [], NOW)) == [CreatePod(0), CreatePod(1)]


def test_an_image_that_does_not_exist_is_a_condition_and_no_loop() -> None:
    bad = running(0, phase="Pending", ready=False, waiting="ImagePullBackOff", detail="no such image x:1")
    decision = decide_reconciliation(a_job(replicas=1), [bad], NOW)
    assert actions(decision) == []
    assert "no such image" in condition(decision, "CannotStart")["message"]


def test_a_missing_secret_is_not_the_images_fault() -> None:
    detail = 'secret "mine" not found'
    bad = running(0, phase="Pending", ready=False, waiting="CreateContainerConfigError", detail=detail)
    message = condition(decide_reconciliation(a_job(replicas=1), [bad], NOW), "CannotStart")["message"]
    assert "create the template's Secret or ConfigMap" in message and "image" not in message


NOT_STARTED = {
    "phase": "Failed",
    "ready": False,
    "exit_code": 128,
    "reason": "StartError",
    "message": 'exec: "nope": executable file not found in $PATH',
}


def test_a_command_that_is_not_in_the_image_is_a_condition_until_a_pod_runs() -> None:
    job = a_job(replicas=1)
    failed = running(0, finished=NOW, **NOT_STARTED)
    decision = decide_reconciliation(job, [failed], NOW)
    assert (actions(decision), emitted(decision)) == ([DeletePod("train-0", "uid-0")], ["CannotStart"])
    said = condition(decision, "CannotStart")
    assert (said["status"], said["reason"]) == ("True", "StartError")
    assert said["message"] == (
        'pod train-0: exec: "nope": executable file not found in $PATH; correct the command or the image in a new job'
    )
    for pods in ([], [running(0, uid="next", phase="Pending", ready=False)]):
        job = after(job, decision)
        decision = decide_reconciliation(job, pods, NOW + 1)
        assert condition(decision, "CannotStart") == said
    runs = decide_reconciliation(after(job, decision), [running(0, uid="next")], NOW + 2)
    assert condition(runs, "CannotStart")["status"] == "False"


def test_pods_that_cannot_start_are_replaced_ever_more_slowly() -> None:
    job, waits = a_job(replicas=1), []
    for n in range(4):
        job = settled(job, running(0, uid=f"try-{n}", finished=NOW, **NOT_STARTED))
        waits.append(decide_reconciliation(job, [], NOW).requeue_after)
    assert waits == [None, 1, 2, 4]


def test_fields_that_the_cluster_dropped_are_a_condition_that_stays() -> None:
    job = replace(a_job(), ignored="spec.containers[0].imagePulPolicy")
    decision = decide_reconciliation(job, [running(0), running(1)], NOW)
    assert "imagePulPolicy" in condition(decision, "FieldsIgnored")["message"]
    assert "FieldsIgnored" in emitted(decision)
    later = decide_reconciliation(replace(after(job, decision), ignored=""), [running(0), running(1)], NOW)
    assert condition(later, "FieldsIgnored")["status"] == "True"
    assert emitted(later) == []


def test_a_pod_that_fits_nowhere_is_a_condition() -> None:
    decision = decide_reconciliation(
        a_job(replicas=1), [running(0, phase="Pending", ready=False, unschedulable="no GPU")], NOW
    )
    assert condition(decision, "Unschedulable")["message"] == "pod train-0: no GPU"


def test_a_condition_keeps_the_time_of_its_last_change() -> None:
    job = settled(a_job(), running(0), running(1))
    since = condition(decide_reconciliation(job, [running(0), running(1)], NOW + 50), "Running")["lastTransitionTime"]
    assert since == condition(decide_reconciliation(job, [running(0)], NOW), "Running")["lastTransitionTime"]


def test_a_decision_on_a_settled_job_changes_nothing() -> None:
    job = settled(a_job(), running(0), running(1))
    again = decide_reconciliation(job, [running(0), running(1)], NOW + 10)
    assert again.status == job.status
    assert all(isinstance(action, Ensure) for action in again.actions)


# what cannot be right -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ({"minReplicas": 5}, "above maxReplicas (4)"),
        ({"replicas": 9}, "from minReplicas (1) to maxReplicas (4)"),
        ({"replicas": 0}, "from 1 to 10000"),
        ({"maxReplicas": None}, "is required"),
        ({"maxReplicas": "four"}, "a whole number"),
        ({"maxRestart": 3}, "not a field"),
        ({"template": {"spec": {"containers": []}}}, "needs a container"),
        ({"rendezvous": {"backend": "etcd"}}, "endpoints"),
        ({"rendezvous": {"backend": "zk"}}, "embedded or etcd"),
    ],
)
def test_a_spec_that_cannot_be_right_is_a_condition_and_starts_nothing(spec: dict[str, Any], word: str) -> None:
    decision = decide_reconciliation(a_job(**spec), [], NOW)
    assert (actions(decision), emitted(decision)) == ([], ["Invalid"])
    assert decision.status["phase"] == "Invalid"
    assert word in condition(decision, "Invalid")["message"]
    assert decide_reconciliation(after(a_job(**spec), decision), [], NOW).actions == (), "it is told once"


def test_a_name_too_long_for_a_host_is_a_condition() -> None:
    job = replace(a_job(), owner=Owner("x" * 60, "ml", "u"))
    assert "allow 52" in condition(decide_reconciliation(job, [], NOW), "Invalid")["message"]


def test_a_fixed_field_that_is_changed_has_no_effect_but_a_condition() -> None:
    job = settled(a_job(), running(0), running(1))
    job.spec.update(maxRestarts=9, replicas=3)  # type: ignore[attr-defined]
    decision = decide_reconciliation(job, [running(0), running(1)], NOW)
    assert "spec.maxRestarts cannot be changed" in condition(decision, "Invalid")["message"]
    assert actions(decision) == [CreatePod(2)]
    assert decision.spec is not None and decision.spec.max_restarts == 3


def test_a_size_out_of_range_leaves_the_running_job_as_it_is() -> None:
    job = settled(a_job(), running(0), running(1))
    job.spec["replicas"] = 50  # type: ignore[index]
    decision = decide_reconciliation(job, [running(0), running(1)], NOW)
    assert actions(decision) == []
    assert "to maxReplicas (4)" in condition(decision, "Invalid")["message"]
    job = after(job, decision)
    job.spec["replicas"] = 3  # type: ignore[index]
    mended = decide_reconciliation(job, [running(0), running(1)], NOW)
    assert actions(mended) == [CreatePod(2)]
    assert condition(mended, "Invalid")["status"] == "False"


def out_of_range(job: ElasticJob) -> ElasticJob:
    return replace(job, spec={**job.spec, "replicas": 50})


def test_a_size_out_of_range_leaves_a_resumed_job_running() -> None:
    job = settled(a_job(suspend=True))
    job = settled(replace(job, spec={**job.spec, "suspend": False}), running(0), running(1))
    decision = decide_reconciliation(out_of_range(job), [running(0), running(1)], NOW + 1)
    assert (actions(decision), decision.status["phase"]) == ([], "Running")


def test_a_size_out_of_range_leaves_a_suspended_job_without_pods() -> None:
    job = settled(a_job(), running(0), running(1))
    job = settled(replace(job, spec={**job.spec, "suspend": True}))
    decision = decide_reconciliation(out_of_range(job), [], NOW + 1)
    assert (actions(decision), decision.status["phase"]) == ([], "Suspended")


def test_a_size_out_of_range_leaves_an_extended_deadline() -> None:
    job = settled(a_job(activeDeadlineSeconds=100), running(0), running(1))
    job = settled(replace(job, spec={**job.spec, "activeDeadlineSeconds": 1000}), running(0), running(1))
    decision = decide_reconciliation(out_of_range(job), [running(0), running(1)], NOW + 200)
    assert (decision.status["phase"], decision.requeue_after) == ("Running", 800)


def test_a_size_out_of_range_leaves_the_last_valid_one_however_many_pods_are_lost() -> None:
    job = settled(a_job(), running(0), running(1))
    job = settled(replace(job, spec={**job.spec, "replicas": 3}), running(0), running(1), running(2))
    job = settled(out_of_range(job), running(0), running(1), running(2))
    assert actions(decide_reconciliation(job, [running(0)], NOW + 1)) == [CreatePod(1), CreatePod(2)]


def test_a_valid_field_that_is_changed_beside_an_invalid_one_counts() -> None:
    job = out_of_range(settled(a_job(), running(0), running(1)))
    decision = decide_reconciliation(replace(job, spec={**job.spec, "suspend": True}), [running(0), running(1)], NOW)
    assert actions(decision) == [DeletePod("train-1", "uid-1"), DeletePod("train-0", "uid-0")]
    assert "to maxReplicas (4)" in condition(decision, "Invalid")["message"]


@pytest.mark.parametrize(
    "wrong", [{"spares": -1}, {"suspend": "yes"}, {"activeDeadlineSeconds": 0}, {"ttlSecondsAfterFinished": "soon"}]
)
def test_any_invalid_field_keeps_its_last_valid_value(wrong: dict[str, Any]) -> None:
    good = {"spares": 1, "suspend": False, "activeDeadlineSeconds": 100, "ttlSecondsAfterFinished": 7}
    job = settled(a_job(**good), running(0), running(1), running(2))
    decision = decide_reconciliation(replace(job, spec={**job.spec, "replicas": 3, **wrong}), [running(0)], NOW)
    spec = decision.spec
    assert spec is not None
    assert (spec.replicas, spec.spares, spec.suspend, spec.active_deadline, spec.ttl) == (3, 1, False, 100, 7)


def test_two_invalid_fields_keep_their_last_valid_values() -> None:
    job = settled(a_job(spares=1), running(0), running(1), running(2))
    wrong = {"replicas": 99, "spares": -1, "ttlSecondsAfterFinished": 7}
    decision = decide_reconciliation(
        replace(job, spec={**job.spec, **wrong}), [running(0), running(1), running(2)], NOW
    )
    spec = decision.spec
    assert spec is not None and (spec.replicas, spec.spares, spec.ttl) == (2, 1, 7)
    assert (actions(decision), decision.status["phase"]) == ([], "Running")
    message = condition(decision, "Invalid")["message"]
    assert "spec.spares" in message and "spec.replicas (99)" in message


def test_an_invalid_field_that_was_never_given_has_its_default() -> None:
    job = settled(a_job(), running(0), running(1))
    decision = decide_reconciliation(replace(job, spec={**job.spec, "spares": -1}), [running(0), running(1)], NOW)
    assert (actions(decision), decision.spec and decision.spec.spares) == ([], 0)


# the end --------------------------------------------------------------------------------------------------------------


def test_a_job_succeeds_when_a_pod_says_so() -> None:
    decision = decide_reconciliation(a_job(), [said(0, "succeeded"), running(1)], NOW)
    assert (actions(decision), emitted(decision)) == ([], ["Succeeded"])
    assert decision.status["phase"] == "Succeeded"


def test_a_job_fails_with_the_report_of_its_pods() -> None:
    decision = decide_reconciliation(a_job(), [said(0, "failed", 1), said(1, "failed", 1)], NOW)
    assert (decision.status["phase"], decision.status["lastFailure"]) == ("Failed", "because")


def test_the_end_has_the_counts_of_the_report_and_not_of_the_last_answer() -> None:
    word = json.dumps({"outcome": "failed", "why": "1 of 1 restarts are used", "rounds": 2, "restarts": 1})
    job = trains(a_job(), round=1, restarts=0)
    status = decide_reconciliation(job, [replace(said(0, "failed", 1), message=word), running(1)], NOW).status
    assert (status["round"], status["restarts"]) == (2, 1)


@pytest.mark.parametrize("count", [-1, "many", True, None])
def test_counts_that_are_none_are_left_out(count: Any) -> None:
    word = json.dumps({"outcome": "failed", "restarts": count})
    assert "restarts" not in decide_reconciliation(a_job(), [replace(said(0, "failed", 1), message=word)], NOW).status


def test_wrong_input_ends_the_job_at_once() -> None:
    pod = running(0, phase="Failed", ready=False, exit_code=2, message="--nproc-per-node=x: no number")
    decision = decide_reconciliation(a_job(), [pod], NOW)
    assert (decision.status["phase"], emitted(decision)) == ("Failed", ["WrongInput"])


def test_a_job_that_is_over_stays_over() -> None:
    job = settled(a_job(), said(0, "succeeded"), running(1))
    assert actions(decide_reconciliation(job, [running(1)], NOW + 1)) == []
    assert actions(decide_reconciliation(job, [running(1)], NOW + EXIT_TIMEOUT_S)) == [DeletePod("train-1", "uid-1")]


def test_a_job_is_deleted_when_its_time_to_live_is_over() -> None:
    job = settled(a_job(ttlSecondsAfterFinished=100), said(0, "succeeded"))
    assert decide_reconciliation(job, [], NOW + 70).requeue_after == 30
    assert actions(decide_reconciliation(job, [], NOW + 100)) == [DeleteJob()]


def test_a_job_past_its_deadline_fails_and_its_pods_go() -> None:
    job = settled(a_job(activeDeadlineSeconds=100), running(0), running(1))
    decision = decide_reconciliation(job, [running(0), running(1)], NOW + 100)
    assert decision.status["phase"] == "Failed"
    assert actions(decision) == [DeletePod("train-0", "uid-0"), DeletePod("train-1", "uid-1")]


def test_nothing_is_done_for_a_job_that_is_being_deleted() -> None:
    assert decide_reconciliation(replace(a_job(), deleting=True), [], NOW).actions == ()


def test_how_the_job_ended_counts_more_than_a_latecomer_that_was_turned_away() -> None:
    latecomer = running(0, phase="Failed", ready=False, exit_code=2, message="the job is over")
    decision = decide_reconciliation(
        a_job({"startTime": "2027-01-15T08:00:00Z"}), [latecomer, said(1, "succeeded")], NOW
    )
    assert decision.status["phase"] == "Succeeded"


# the cluster's no, and what changes while a job lives -----------------------------------------------------------------


def test_an_object_that_the_cluster_rejects_sets_a_condition_once_and_is_retried() -> None:
    job = replace(a_job(), refused="Pod train-0 cannot be created: exceeded quota")
    decision = decide_reconciliation(job, [], NOW)
    assert condition(decision, "Refused")["message"] == "Pod train-0 cannot be created: exceeded quota"
    assert (emitted(decision), actions(decision)) == (["Refused"], [CreatePod(0), CreatePod(1)])
    again = decide_reconciliation(after(job, decision), [], NOW + 1)
    assert emitted(again) == []
    made = decide_reconciliation(replace(after(job, decision), refused=""), [running(0), running(1)], NOW + 2)
    assert condition(made, "Refused")["status"] == "False"


def test_replicas_are_written_until_they_are_there() -> None:
    job = settled(a_job())
    del job.spec["replicas"]  # type: ignore[attr-defined]
    assert SetReplicas(4) in decide_reconciliation(job, [], NOW).actions


def test_a_suspended_job_does_not_run_towards_its_deadline() -> None:
    job = settled(a_job(activeDeadlineSeconds=100), running(0), running(1))
    job.spec["suspend"] = True  # type: ignore[index]
    job = settled(job, now=NOW + 50)
    assert "startTime" not in job.status
    job.spec["suspend"] = False  # type: ignore[index]
    resumed = decide_reconciliation(job, [], NOW + 1000)
    assert (resumed.status["phase"], resumed.requeue_after) == ("Recovering", 100)


@pytest.mark.parametrize(
    "pod",
    [said(1, "stopped", 143), replace(said(1, ""), message=""), replace(said(1, "", 2), message="usage")],
)
def test_the_end_of_a_removed_pod_is_not_the_end_of_the_job(pod: Pod) -> None:
    decision = decide_reconciliation(settled(a_job(), running(0)), [running(0), replace(pod, deleting=True)], NOW)
    assert decision.status["phase"] == "Running"


def test_a_job_that_ends_while_a_pod_is_leaving_has_ended() -> None:
    leaving = replace(said(1, "succeeded"), deleting=True)
    assert (
        decide_reconciliation(settled(a_job(), running(0)), [running(0), leaving], NOW).status["phase"] == "Succeeded"
    )


def test_an_unreadable_accepted_spec_is_accepted_again() -> None:
    decision = decide_reconciliation(a_job({"accepted": "{"}), [running(0), running(1)], NOW)
    assert decision.status["phase"] == "Running"
    assert json.loads(decision.status["accepted"])["maxReplicas"] == 4


def test_a_spec_that_another_version_accepted_sets_a_condition() -> None:
    decision = decide_reconciliation(a_job({"accepted": '{"maxReplicas": 0}'}, maxReplicas=0), [running(0)], NOW)
    assert (actions(decision), decision.status["phase"]) == ([], "Invalid")


@pytest.mark.parametrize("name", ["7up", "a.b", "-a", "A"])
def test_a_name_that_no_service_can_have_is_a_condition(name: str) -> None:
    job = replace(a_job(), owner=Owner(name, "ml", "u"))
    assert "must be a service name" in condition(decide_reconciliation(job, [], NOW), "Invalid")["message"]


def test_a_default_that_is_written_out_changes_nothing() -> None:
    job = settled(a_job(), running(0), running(1))
    job.spec["maxRestarts"] = 3  # type: ignore[index]
    assert condition(decide_reconciliation(job, [running(0), running(1)], NOW), "Invalid") is None
