"""The manifests as files.  `python -m tests.kubernetes.golden` writes them anew, for a person to compare."""

import json
from pathlib import Path
from typing import Any

from ripstop.kubernetes import deploy, manifests
from ripstop.kubernetes.manifests import Owner, to_yaml
from ripstop.kubernetes.spec import Spec, read_spec

HERE = Path(__file__).parent / "golden"
DEPLOY = Path(__file__).parents[2] / "deploy"
OWNER = Owner("train", "ml", "0a1b2c3d-1111-2222-3333-444455556666")
CONTAINER = {
    "name": "trainer",
    "image": "registry.example/train:7",
    "command": ["ripstop", "run", "train.py"],
    "env": [{"name": "PET_MAX_RESTARTS", "value": "9"}],
}
TEMPLATE = {
    "metadata": {"labels": {"team": "vision"}, "annotations": {"note": "mine"}},
    "spec": {"containers": [CONTAINER, {"name": "beside", "image": "registry.example/beside:1"}]},
}


def spec_of(**fields: Any) -> Spec:
    spec = read_spec("train", {"minReplicas": 2, "maxReplicas": 4, "template": TEMPLATE} | fields)
    assert isinstance(spec, Spec), spec
    return spec


def manifests_by_name() -> dict[str, dict[str, Any]]:
    plain = spec_of()
    etcd = spec_of(
        nprocPerNode=8,
        restartWindow="1h",
        standby="auto",
        standbyUntil="elastic",
        secretName="mine",
        shutdownTimeout=60,
        rendezvous={"backend": "etcd", "endpoints": ["e1:2379", "e2:2379"], "conf": "lease=5"},
    )
    return {
        "pod": manifests.pod_manifest(OWNER, plain, 0),
        "pod-etcd": manifests.pod_manifest(OWNER, etcd, 3),
        "pod-spare": manifests.pod_manifest(OWNER, spec_of(replicas=2, spares=1), 2),
        "service": manifests.service_manifest(OWNER),
        "secret": manifests.secret_manifest(OWNER, plain, "t0ken"),
        "disruption-budget": manifests.disruption_budget_manifest(OWNER, plain),
    }


def deploy_files() -> dict[str, str]:
    files = {**deploy.objects_to_deploy_by_file(), "kustomization.yaml": [deploy.kustomization()]}
    return {name: f"# Written by python -m tests.kubernetes.golden\n{to_yaml(items)}" for name, items in files.items()}


def main() -> None:
    for name, manifest in manifests_by_name().items():
        (HERE / f"{name}.json").write_text(json.dumps(manifest, indent=2) + "\n")
    for name, text in deploy_files().items():
        (DEPLOY / name).write_text(text)


if __name__ == "__main__":
    main()
