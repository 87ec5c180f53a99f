"""The CEL rules of the definition, as a cluster of 1.25 or later would check them.

They are evaluated by another implementation of CEL than Kubernetes', without its types and its estimate of costs.
"""

from typing import Any

import cel
import pytest

from ripstop.kubernetes import crd, deploy
from ripstop.kubernetes.spec import FIELDS, Spec, SpecProblem, changed_spec_fields, read_spec

TEMPLATE = {"spec": {"containers": [{"name": "main", "image": "x:1"}]}}
ETCD = {"backend": "etcd", "endpoints": ["e1:2379"]}
DEFAULTS = {field.name: field.default for field in FIELDS if field.default is not None}


def defaulted(spec: dict[str, Any]) -> dict[str, Any]:
    """As a cluster fills it in before it looks at the rules."""
    filled = DEFAULTS | {"maxReplicas": 4, "template": TEMPLATE} | spec
    if "rendezvous" in filled:
        filled["rendezvous"] = {"backend": "embedded"} | filled["rendezvous"]
    return {name: value for name, value in filled.items() if value is not None}


def schema() -> dict[str, Any]:
    found: dict[str, Any] = crd.definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def broken(part: dict[str, Any], value: dict[str, Any], before: dict[str, Any] | None = None) -> list[str]:
    """The messages of the rules that do not hold; without a value before, rules on changes are not looked at."""
    rules = [rule for rule in part["x-kubernetes-validations"] if before is not None or "oldSelf" not in rule["rule"]]
    names = {"self": value, "oldSelf": before}
    return [rule["message"] for rule in rules if cel.evaluate(rule["rule"], names) is not True]


def refused(spec: dict[str, Any], before: dict[str, Any] | None = None) -> list[str]:
    part = schema()["properties"]["spec"]
    return broken(part, defaulted(spec), None if before is None else defaulted(before))


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"minReplicas": 4, "maxReplicas": 4, "replicas": 4},
        {"minReplicas": 2, "replicas": 2},
        {"rendezvous": ETCD},
        {"rendezvous": {"conf": "lease=5"}},
        {"nprocPerNode": 8},
        {"nprocPerNode": 8, "standby": 8},
        {"standby": "auto"},
        {"standby": "auto", "standbyUntil": "elastic"},
    ],
)
def test_a_spec_that_is_right_is_taken_by_the_rules_and_by_the_operator(spec: dict[str, Any]) -> None:
    assert refused(spec) == []
    assert refused(spec, spec) == []
    assert isinstance(read_spec("train", defaulted(spec)), Spec)


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ({"minReplicas": 5}, "minReplicas must not be above maxReplicas"),
        ({"replicas": 5}, "replicas must be from minReplicas to maxReplicas"),
        ({"minReplicas": 2, "replicas": 1}, "replicas must be from minReplicas to maxReplicas"),
        ({"rendezvous": {"backend": "etcd"}}, "rendezvous.endpoints"),
        ({"rendezvous": {"backend": "etcd", "endpoints": []}}, "rendezvous.endpoints"),
        ({"rendezvous": {"endpoints": ["e1:2379"]}}, "rendezvous.endpoints"),
    ],
)
def test_a_spec_that_cannot_be_right_is_refused_by_the_rules_and_by_the_operator(
    spec: dict[str, Any], word: str
) -> None:
    (said,) = refused(spec)
    assert word in said
    assert not isinstance(read_spec("train", defaulted(spec)), Spec)


CHANGES = {
    "minReplicas": 2,
    "maxReplicas": 5,
    "nprocPerNode": "gpu",
    "maxRestarts": 9,
    "restartWindow": "1h",
    "standby": "auto",
    "standbyUntil": "elastic",
    "shutdownTimeout": 60,
    "secretName": "mine",
    "disruptionBudget": True,
    "rendezvous": ETCD,
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_fixed_field_cannot_be_changed(field: str) -> None:
    assert refused({field: CHANGES[field]}, {}) == [
        f"{field} cannot be changed while the job exists; delete the job and create a new one"
    ]
    assert changed_spec_fields(defaulted({}), defaulted({field: CHANGES[field]}))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"standby": "some"}, "is a number, `auto` or `off`, not 'some'"),
        ({"standby": -1}, "is a number, `auto` or `off`, not '-1'"),
        ({"standby": 3, "nprocPerNode": 2}, "(3) is above nprocPerNode (2); write auto for all"),
    ],
)
def test_a_number_of_standbys_that_cannot_be_is_refused_by_the_operator(spec: dict[str, Any], text: str) -> None:
    assert read_spec("train", defaulted(spec)) == [SpecProblem("spec.standby", text)]


def test_a_point_at_which_no_standby_can_wait_is_refused_by_the_operator() -> None:
    problem = SpecProblem("spec.standbyUntil", "is script or elastic, not 'step'")
    assert read_spec("train", defaulted({"standbyUntil": "step"})) == [problem]


def test_every_fixed_field_has_a_rule() -> None:
    assert set(CHANGES) == {field.name for field in FIELDS if field.fixed} | {"rendezvous"}


@pytest.mark.parametrize(
    "change",
    [{"replicas": 2}, {"spares": 1}, {"suspend": True}, {"activeDeadlineSeconds": 9}, {"ttlSecondsAfterFinished": 9}],
)
def test_the_other_fields_can_be_changed(change: dict[str, Any]) -> None:
    assert refused(change, {}) == []
    assert refused({}, change) == []


@pytest.mark.parametrize(
    ("name", "right"),
    [("train", True), ("t-0", True), ("t" * 52, True), ("t" * 53, False), ("7up", False), ("a.b", False)],
)
def test_a_name_is_one_for_pods_and_services(name: str, right: bool) -> None:
    assert (broken(schema(), {"metadata": {"name": name}}) == []) is right
    assert isinstance(read_spec(name, defaulted({})), Spec) is right


@pytest.mark.parametrize(
    ("major", "minor", "knows"),
    [
        ("1", "25", True),
        ("1", "34", True),
        ("2", "0", True),
        ("1", "25+", True),
        ("1", "24", False),
        ("1", "20+", False),
    ],
)
def test_a_cluster_older_than_the_rules_gets_none(major: str, minor: str, knows: bool) -> None:
    found = crd.supports_rules({"major": major, "minor": minor})
    assert found is knows
    assert ("x-kubernetes-validations" in str(deploy.objects_to_deploy(rules=found))) is knows


def test_a_cluster_that_does_not_say_its_version_gets_none() -> None:
    assert not crd.supports_rules({})
