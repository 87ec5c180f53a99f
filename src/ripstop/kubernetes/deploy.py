"""The objects that install the operator: CRD, RBAC, Deployment.  Pure; `deploy/` contains them as files.

The operator has only the permissions that `operator` and `cluster_writer` use.  It creates secrets and reads only its
own key.
"""

from typing import Any

from ripstop.kubernetes import crd
from ripstop.kubernetes.manifests import HOME, KEY, new_object
from ripstop.kubernetes.spec import GROUP, PLURAL, Json

NAME = "ripstop-operator"
IMAGE = "ripstop-operator:0.1.0"
HEALTH_PORT = 8080
LABELS = {"app.kubernetes.io/name": NAME}
USER = 65532  # an unprivileged user
RBAC = "rbac.authorization.k8s.io"


def objects_to_deploy_by_file(
    image: str = IMAGE, home: str = HOME, *, rules: bool = True
) -> dict[str, list[dict[str, Any]]]:
    """All objects by file name, in the order of application; without `rules` for clusters older than 1.25."""
    return {
        "crd.yaml": [crd.definition(rules=rules)],
        "rbac.yaml": [new_object("v1", "Namespace", {"name": home, "labels": LABELS}), *_rbac(home)],
        "operator.yaml": [deployment(image, home)],
    }


def objects_to_deploy(image: str = IMAGE, home: str = HOME, *, rules: bool = True) -> list[dict[str, Any]]:
    """All objects in the order of application."""
    return [item for items in objects_to_deploy_by_file(image, home, rules=rules).values() for item in items]


def kustomization() -> dict[str, Any]:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(objects_to_deploy_by_file()),
    }


def _rbac(home: str) -> list[dict[str, Any]]:
    """The operator's service account and roles, and roles for users who may edit or view a namespace."""
    account = {"kind": "ServiceAccount", "name": NAME, "namespace": home}
    return [
        new_object("v1", "ServiceAccount", {"name": NAME, "namespace": home, "labels": LABELS}),
        _deployed_role("ClusterRole", {"name": NAME, "labels": LABELS}, OPERATORS),
        _deployed_role_binding("ClusterRole", {"name": NAME, "labels": LABELS}, account),
        _deployed_role("Role", {"name": NAME, "namespace": home, "labels": LABELS}, KEYS),
        _deployed_role_binding("Role", {"name": NAME, "namespace": home, "labels": LABELS}, account),
        _deployed_role(
            "ClusterRole", {"name": f"{PLURAL}-edit", "labels": _deployed_aggregation_labels("admin", "edit")}, EDITORS
        ),
        _deployed_role(
            "ClusterRole", {"name": f"{PLURAL}-view", "labels": _deployed_aggregation_labels("view")}, VIEWERS
        ),
    ]


def _deployed_rule(group: str, resources: str, verbs: str, names: tuple[str, ...] = ()) -> dict[str, Any]:
    rule = {"apiGroups": [group], "resources": resources.split(), "verbs": verbs.split()}
    return rule | ({"resourceNames": list(names)} if names else {})


OPERATORS = (
    _deployed_rule(GROUP, PLURAL, "get list watch patch delete"),
    _deployed_rule(GROUP, f"{PLURAL}/status", "patch"),
    _deployed_rule(GROUP, f"{PLURAL}/finalizers", "update"),  # to set owner references, where that is checked
    _deployed_rule("", "pods", "get list watch create delete"),
    _deployed_rule("", "services", "get create"),
    _deployed_rule("", "secrets", "create"),
    _deployed_rule("", "events", "get create patch"),
    _deployed_rule("", "nodes", "list watch"),
    _deployed_rule("policy", "poddisruptionbudgets", "get create"),
    _deployed_rule("apiextensions.k8s.io", "customresourcedefinitions", "list watch"),  # kopf waits for the definition
)
KEYS = (_deployed_rule("", "secrets", "get", (KEY,)),)
EDITORS = (
    _deployed_rule(GROUP, PLURAL, "create delete deletecollection get list patch update watch"),
    _deployed_rule(GROUP, f"{PLURAL}/scale", "get patch update"),
)
VIEWERS = (_deployed_rule(GROUP, PLURAL, "get list watch"),)


def deployment(image: str, home: str) -> dict[str, Any]:
    """One operator; an update replaces it."""
    probe = {"httpGet": {"path": "/healthz", "port": "health"}, "timeoutSeconds": 5}
    container = {
        "name": "operator",
        "image": image,
        "command": ["ripstop", "kube", "operator"],
        "args": ["--home=$(HOME_NAMESPACE)", f"--health=0.0.0.0:{HEALTH_PORT}"],
        "env": [
            {"name": "HOME_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
            {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
        ],
        "ports": [{"name": "health", "containerPort": HEALTH_PORT}],
        "livenessProbe": {**probe, "initialDelaySeconds": 10, "periodSeconds": 10, "failureThreshold": 6},
        "readinessProbe": {**probe, "periodSeconds": 5},
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    pod = {
        "serviceAccountName": NAME,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": LABELS},
        "template": {"metadata": {"labels": LABELS}, "spec": pod},
    }
    return new_object("apps/v1", "Deployment", {"name": NAME, "namespace": home, "labels": LABELS}, spec=spec)


def is_deployment_rolled_out(deployment: Json) -> bool:
    """Whether all pods of a deployment have its latest version and are available."""
    state: Json = deployment.get("status") or {}
    wanted = deployment["spec"]["replicas"]
    counts = (state.get(each, 0) for each in ("replicas", "updatedReplicas", "availableReplicas"))
    return state.get("observedGeneration", 0) >= deployment["metadata"]["generation"] and {*counts} == {wanted}


def _deployed_role(kind: str, metadata: dict[str, Any], rules: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    return new_object(f"{RBAC}/v1", kind, metadata, rules=list(rules))


def _deployed_role_binding(kind: str, metadata: dict[str, Any], account: dict[str, str]) -> dict[str, Any]:
    reference = {"apiGroup": RBAC, "kind": kind, "name": metadata["name"]}
    return new_object(f"{RBAC}/v1", f"{kind}Binding", metadata, roleRef=reference, subjects=[account])


def _deployed_aggregation_labels(*roles: str) -> dict[str, str]:
    """Labels that aggregate these permissions into the cluster's roles."""
    return LABELS | {f"{RBAC}/aggregate-to-{role}": "true" for role in roles}
