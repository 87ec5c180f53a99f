"""The objects that a job owns, and those that bring the operator: as the files say, and as newer clusters want them."""

import json
from typing import Any

import kubernetes_validate
import pytest

from ripstop.kubernetes import crd, deploy, manifests
from ripstop.kubernetes.spec import FIELDS, Spec, read_spec
from tests.kubernetes.golden import DEPLOY, HERE, OWNER, deploy_files, manifests_by_name, spec_of

REMEDY = "if it is as it should be: python -m tests.kubernetes.golden"
NEWER = ("1.28", "1.34")


@pytest.mark.parametrize("name", manifests_by_name())
def test_a_manifest_is_as_its_file_says(name: str) -> None:
    assert manifests_by_name()[name] == json.loads((HERE / f"{name}.json").read_text()), REMEDY


@pytest.mark.parametrize("name", deploy_files())
def test_the_deployed_objects_equal_their_files(name: str) -> None:
    assert deploy_files()[name] == (DEPLOY / name).read_text(), REMEDY


def test_there_is_no_other_file() -> None:
    assert {path.name for path in DEPLOY.glob("*.yaml")} == set(deploy_files())
    assert {path.stem for path in HERE.glob("*.json")} == set(manifests_by_name())


@pytest.mark.parametrize("version", NEWER)
def test_newer_clusters_take_the_manifests(version: str) -> None:
    for item in [*manifests_by_name().values(), *deploy.objects_to_deploy()]:
        kubernetes_validate.validate(item, version, strict=True)
    kubernetes_validate.validate(crd.definition(rules=False), version, strict=True)


def test_the_first_container_is_the_trainer_and_others_stay_as_they_are() -> None:
    trainer, beside = manifests.pod_manifest(OWNER, spec_of(), 1)["spec"]["containers"]
    assert beside == {"name": "beside", "image": "registry.example/beside:1"}
    assert trainer["command"] == ["ripstop", "run", "train.py"]


def test_variables_of_the_template_are_kept() -> None:
    trainer = manifests.pod_manifest(OWNER, spec_of(), 1)["spec"]["containers"][0]
    assert [each for each in trainer["env"] if each["name"] == "PET_MAX_RESTARTS"] == [
        {"name": "PET_MAX_RESTARTS", "value": "9"}
    ]


def test_a_template_is_not_changed_by_the_pods_made_of_it() -> None:
    spec = spec_of()
    before = json.dumps(spec.template)
    manifests.pod_manifest(OWNER, spec, 0)
    assert json.dumps(spec.template) == before


def test_the_schema_has_the_fields_and_the_defaults_of_the_reader() -> None:
    version = crd.definition()["spec"]["versions"][0]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert set(schema) == {field.name for field in FIELDS} | {"template", "rendezvous"}
    defaults = {name: each["default"] for name, each in schema.items() if "default" in each}
    given = {"maxReplicas": 4, "template": {"spec": {"containers": [{"name": "a"}]}}}
    plain = read_spec("x", given)
    assert isinstance(plain, Spec)
    assert read_spec("x", given | defaults) == plain


def test_the_operator_runs_without_privileges() -> None:
    pod = deploy.deployment("x:1", "home")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    own = pod["containers"][0]["securityContext"]
    assert own["readOnlyRootFilesystem"] is True
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}


def test_the_operator_reads_no_secrets_but_its_own() -> None:
    about = [rule for rule in deploy.OPERATORS if "secrets" in rule["resources"]]
    assert [rule["verbs"] for rule in about] == [["create"]]
    assert [rule["resourceNames"] for rule in deploy.KEYS] == [[manifests.KEY]]


def test_the_operator_may_do_nothing_to_everything() -> None:
    assert "*" not in json.dumps(deploy.OPERATORS)
