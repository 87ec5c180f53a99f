"""The operator's service account: that its rights are enough, the other tests show, which use it; here: and no more."""

from pathlib import Path

import pytest

from ripstop.kubernetes.cluster_writer import ensure_operator_key_in_cluster
from ripstop.kubernetes.kube_client import ApiError, KubeClient
from tests.kubernetes.kube.conftest import HOME
from tests.kubernetes.kube.lab import Place, needs_a_cluster

needs_a_cluster()

NOT_ITS = [
    ("GET", "/api/v1/namespaces/{}/secrets"),
    ("GET", "/api/v1/namespaces/{}/secrets/mine"),
    ("GET", "/api/v1/secrets"),
    ("DELETE", "/api/v1/namespaces/{}/secrets/mine"),
    ("GET", "/api/v1/namespaces/{}/configmaps"),
    ("DELETE", "/api/v1/namespaces/{}/services/mine"),
    ("PATCH", "/api/v1/namespaces/{}/pods/train-0"),
    ("GET", "/api/v1/namespaces/{}/pods/train-0/log"),
    ("POST", "/api/v1/namespaces/{}/pods/train-0/exec"),
    ("POST", "/api/v1/namespaces/{}/serviceaccounts/default/token"),
    ("POST", "/apis/ripstop.dev/v1alpha1/namespaces/{}/elasticjobs"),
    ("POST", "/apis/apps/v1/namespaces/{}/deployments"),
    ("POST", "/apis/batch/v1/namespaces/{}/jobs"),
    ("POST", "/api/v1/namespaces"),
    ("DELETE", "/api/v1/namespaces/{}"),
    ("PATCH", "/api/v1/nodes/n1"),
    ("DELETE", "/api/v1/nodes/n1"),
    ("POST", "/apis/rbac.authorization.k8s.io/v1/clusterroles"),
    ("PATCH", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/elasticjobs.ripstop.dev"),
]


@pytest.fixture
def as_operator(account: Path) -> KubeClient:
    return KubeClient(kubeconfig=str(account))


@pytest.mark.parametrize(("method", "path"), NOT_ITS)
def test_the_operator_may_not(method: str, path: str, as_operator: KubeClient, place: Place) -> None:
    body = {} if method in ("POST", "PATCH") else None
    with pytest.raises(ApiError) as refused:
        as_operator.request(method, path.format(place.name), body)
    assert refused.value.code == 403


def test_the_operators_key_is_made_once_and_read_by_the_next(as_operator: KubeClient) -> None:
    key = ensure_operator_key_in_cluster(as_operator, HOME)
    assert (len(key), ensure_operator_key_in_cluster(as_operator, HOME)) == (32, key)
