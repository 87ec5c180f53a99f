"""`ripstop kube` without a cluster."""

import json
import subprocess
import sys
from typing import Any

import kubernetes_validate
import pytest

from ripstop.cli import main
from ripstop.cli.commands.kube import COMMANDS
from ripstop.cli.kube.cluster_commands import describe_cluster_job, ripstop_command_on_cluster
from ripstop.cli.kube.job_objects import job_objects, parse_job_objects_arguments
from ripstop.kubernetes.deploy import is_deployment_rolled_out
from ripstop.kubernetes.manifests import Owner, pod_manifest
from ripstop.kubernetes.pods import pod_waiting_reason
from ripstop.kubernetes.spec import Spec, read_spec

IMAGE = "--image=registry.example/train:7"
TORCHRUN = "--nnodes=2:4 --nproc-per-node=8 --max-restarts=3 train.py --lr 0.1"


def render(line: str) -> list[dict[str, Any]]:
    return job_objects(parse_job_objects_arguments([IMAGE, *line.split()]), "t0ken")


def spec(line: str) -> dict[str, Any]:
    (job,) = render(line)
    found: dict[str, Any] = job["spec"]
    return found


def trainer(line: str) -> dict[str, Any]:
    found: dict[str, Any] = spec(line)["template"]["spec"]["containers"][0]
    return found


def test_torchruns_command_line_is_a_job() -> None:
    (job,) = render(f"-n ml {TORCHRUN}")
    assert job == {
        "apiVersion": "ripstop.dev/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "train", "namespace": "ml"},
        "spec": {
            "minReplicas": 2,
            "maxReplicas": 4,
            "replicas": 4,
            "nprocPerNode": "8",
            "maxRestarts": 3,
            "template": {
                "spec": {
                    "containers": [
                        {
                            "name": "trainer",
                            "image": "registry.example/train:7",
                            "command": ["ripstop", "run", "train.py", "--lr", "0.1"],
                        }
                    ]
                }
            },
        },
    }


def test_defaults_are_torchruns() -> None:
    found = spec("train.py")
    assert {name: found[name] for name in ("minReplicas", "maxReplicas", "nprocPerNode", "maxRestarts")} == {
        "minReplicas": 1,
        "maxReplicas": 1,
        "nprocPerNode": "1",
        "maxRestarts": 0,
    }


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--nnodes=1:4 --replicas=2 t.py", "replicas", 2),
        ("--spares=1 t.py", "spares", 1),
        ("--gpus=8 t.py", "nprocPerNode", "8"),
        ("--gpus=8 --nproc-per-node=auto t.py", "nprocPerNode", "auto"),
        ("--max-restarts=3 --restart-window=1h t.py", "restartWindow", "1h"),
        ("--shutdown-timeout=60 t.py", "shutdownTimeout", 60),
        ("--standby=auto t.py", "standby", "auto"),
        ("--standby=auto --standby-until=elastic t.py", "standbyUntil", "elastic"),
        ("--secret-name=mine t.py", "secretName", "mine"),
        ("--rdzv-conf=lease=5 t.py", "rendezvous", {"conf": "lease=5"}),
        (
            "--rdzv-backend=etcd --rdzv-endpoint=e1:2379,e2:2379 --rdzv-conf=protocol=https t.py",
            "rendezvous",
            {"backend": "etcd", "endpoints": ["e1:2379", "e2:2379"], "conf": "protocol=https"},
        ),
    ],
)
def test_a_flag_is_a_field(line: str, field: str, value: object) -> None:
    assert spec(line)[field] == value


def test_flags_of_a_pods_own_processes_are_in_its_command() -> None:
    line = "-m --tee=3 --start_method exec --virtual-local-rank --nnodes=2 pkg.train a --tee"
    command = ["ripstop", "run", "--module", "--start-method=exec", "--virtual-local-rank", "--tee=3"]
    assert trainer(f"--name=t {line}")["command"] == [*command, "pkg.train", "a", "--tee"]


def test_a_script_that_looks_like_a_flag_keeps_its_dashes() -> None:
    assert trainer("--name=t --image=i -- --flag")["command"] == ["ripstop", "run", "--", "--flag"]
    assert trainer("--image=i train.py -- -- a")["command"] == ["ripstop", "run", "--", "train.py", "--", "a"]


def test_resources_are_those_of_the_flags() -> None:
    found = trainer("--gpus=2 --cpus=8 --memory=64Gi --shared-memory=8Gi --env=A=1,B=x t.py")
    limits = {"nvidia.com/gpu": 2, "cpu": "8", "memory": "64Gi"}
    assert found["resources"] == {"limits": limits, "requests": limits}
    assert found["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "x"}]
    assert found["volumeMounts"] == [{"name": "shared-memory", "mountPath": "/dev/shm"}]


@pytest.mark.parametrize(
    ("script", "name"), [("train.py", "train"), ("src/Train_Big.py", "train-big"), ("-m pkg.train", "pkg-train")]
)
def test_a_job_is_called_as_its_script(script: str, name: str) -> None:
    assert render(script)[0]["metadata"]["name"] == name


def test_variables_of_this_shell_are_not_the_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "7")
    assert spec("t.py")["maxReplicas"] == 1


def test_the_operator_takes_what_is_rendered_and_the_agent_what_the_operator_makes_of_it() -> None:
    found = read_spec("train", spec(TORCHRUN))
    assert isinstance(found, Spec)
    made = pod_manifest(Owner("train", "ml", "u-1"), found, 1)
    env = {v["name"]: v.get("value", "") for v in made["spec"]["containers"][0]["env"]}
    assert (env["PET_NNODES"], env["PET_NPROC_PER_NODE"], env["PET_MAX_RESTARTS"]) == ("2:4", "8", "3")


# without an operator --------------------------------------------------------------------------------------------------


def parts(kind: str, line: str = TORCHRUN) -> dict[str, dict[str, Any]]:
    return {item["kind"]: item for item in render(f"--without-operator={kind} {line}")}


def environment(template: dict[str, Any]) -> dict[str, str]:
    return {v["name"]: v.get("value", "") for v in template["spec"]["containers"][0]["env"]}


def test_a_stateful_sets_pods_meet_at_the_first_and_stay_when_the_job_is_over() -> None:
    found = parts("statefulset")
    body = found["StatefulSet"]["spec"]
    assert (body["serviceName"], body["replicas"], body["podManagementPolicy"]) == ("train", 4, "Parallel")
    env = environment(body["template"])
    assert (env["PET_RDZV_ENDPOINT"], env["PET_RDZV_CONF"], env["PET_LINGER"]) == (
        "train-0.train:29400",
        "rank_by=slot",
        "1",
    )
    assert "livenessProbe" not in body["template"]["spec"]["containers"][0], "an agent that lingers serves no probes"
    assert body["selector"]["matchLabels"].items() <= body["template"]["metadata"]["labels"].items()
    assert found["Service"]["spec"]["publishNotReadyAddresses"]
    assert found["Secret"]["stringData"] == {"token": "t0ken"}


def test_an_indexed_job_ends_with_the_training_job_and_replaces_what_is_lost() -> None:
    body = parts("job")["Job"]["spec"]
    assert (body["completionMode"], body["completions"], body["parallelism"]) == ("Indexed", 4, 4)
    assert (body["template"]["spec"]["subdomain"], body["template"]["spec"]["restartPolicy"]) == ("train", "Never")
    assert [rule["action"] for rule in body["podFailurePolicy"]["rules"]] == ["Ignore", "FailJob"]
    assert "PET_LINGER" not in environment(body["template"])


def test_a_secret_that_is_named_is_not_made() -> None:
    assert parts("job", f"--secret-name=mine {TORCHRUN}").keys() == {"Service", "Job"}


@pytest.mark.parametrize("version", ["1.28", "1.34"])
@pytest.mark.parametrize("kind", ["statefulset", "job"])
def test_the_objects_are_valid_in_several_versions_of_kubernetes(kind: str, version: str) -> None:
    for item in parts(kind, f"--gpus=8 --shared-memory=8Gi {TORCHRUN}").values():
        kubernetes_validate.validate(item, version, strict=True)


# mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "kube nonsense: unknown command; write one of render, submit,"),
        ("render train.py", "--image is missing; write --image=REGISTRY/NAME:TAG"),
        (f"render {IMAGE}", "no script; write it after the flags"),
        (f"render {IMAGE} --nnodes=4:2 t.py", "--nnodes=4:2: the minimum (4) is above the maximum (2)"),
        (f"render {IMAGE} --nnodes=2:4 --replicas=5 t.py", "--replicas=5: above the maximum (4)"),
        (f"render {IMAGE} --nproc-per-node=some t.py", "--nproc-per-node=some: not a whole number"),
        (f"render {IMAGE} --gpus=foo t.py", "--gpus=foo: not a whole number"),
        (f"render {IMAGE} --gpus=0 t.py", "--gpus=0: "),
        ("install x", "x: unexpected argument; write ripstop kube install [--image=IMAGE] [--timeout S] [--dry-run]\n"),
        ("install --timeout=soon", "--timeout=soon: not a whole number"),
        (
            f"render {IMAGE} --standalone t.py",
            "--standalone: not available on Kubernetes: every pod gets its own settings; leave it out",
        ),
        (
            f"render {IMAGE} --node-rank=0 t.py",
            "--node-rank: not available on Kubernetes: every pod gets its own settings; leave it out",
        ),
        (f"render {IMAGE} --rdzv-backend=static t.py", "--rdzv-backend=static: not available on Kubernetes"),
        (f"render {IMAGE} --rdzv-endpoint=h t.py", "--rdzv-endpoint=h: with c10d the endpoint is the first pod"),
        (f"render {IMAGE} --rdzv-backend=etcd t.py", "--rdzv-backend=etcd: the address of etcd is missing"),
        (f"render {IMAGE} --rdzv-conf=is_host=1 t.py", "--rdzv-conf is_host: derived from the pod's number"),
        (f"render {IMAGE} --rdzv-conf=target=1 t.py", "--rdzv-conf target: set by the operator; leave it out"),
        (f"render {IMAGE} --rdzv-conf=leese=1 t.py", "--rdzv-conf leese: unknown key; the keys are"),
        (f"render {IMAGE} --memory=lots t.py", "--memory=lots: not a Kubernetes quantity"),
        (f"render {IMAGE} --name={'x' * 60} t.py", "metadata.name has 60 characters"),
        (f"render {IMAGE} --name=Train t.py", "metadata.name must be a service name"),
        (f"render {IMAGE} --without-operator=deployment t.py", "unknown kind; write statefulset or job"),
        (f"render {IMAGE} --imgae=x t.py", "--imgae=x: unknown flag; did you mean --image?"),
        ("submit -f job.yaml train.py", "--file and a command line both describe a job"),
        ("status a b", "kube status: b: unexpected argument; write ripstop kube status [NAME]"),
        ("scale train", "kube scale: an argument is missing; write ripstop kube scale NAME N"),
        ("scale train none", "N=none: not a whole number"),
        ("logs train x", "SLOT=x: not a whole number"),
        ("stacks", "kube stacks: an argument is missing; write ripstop kube stacks NAME [RANK]"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kube", *(line.split() or ["nonsense"])]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith("ripstop kube: error: ")
    assert message in printed.err


@pytest.mark.parametrize("command", [["--help"], [], ["render", "--help"], ["logs", "-h"]])
def test_help_is_printed(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kube", *command]) == 0
    assert capsys.readouterr().out.startswith("usage: ripstop kube ")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["kube"])
    usage = capsys.readouterr().out
    assert [name for name in COMMANDS if f"\n  {name} " not in usage] == []


def test_rendering_needs_no_package_and_no_cluster() -> None:
    blocked = "import sys; sys.modules |= dict.fromkeys(['kubernetes', 'yaml', 'kopf', 'aiohttp']); "
    program = f"{blocked}from ripstop.cli import main; sys.exit(main(sys.argv[1:]))"
    argv = [sys.executable, "-c", program, "kube", "render", "--json", IMAGE, *TORCHRUN.split()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == render(TORCHRUN)[0]


@pytest.mark.parametrize("command", ["status", "delete train", "operator"])
def test_a_missing_package_is_named(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["kube", *command.split()]) == 2
    assert "the package kubernetes is not installed; pip install 'ripstop[kubernetes]'" in capsys.readouterr().err


# output ---------------------------------------------------------------------------------------------------------------


def test_a_job_is_described_with_its_pods_and_what_happened() -> None:
    since = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    job = {
        "metadata": {"name": "train"},
        "spec": {"replicas": 2, "maxReplicas": 4},
        "status": {
            "phase": "Running",
            "readyReplicas": 1,
            "round": 3,
            "conditions": [
                {"type": "Running", "status": "True", "message": "1 nodes", **since},
                {"type": "Recovering", "status": "False", "message": "", **since},
            ],
            "lastFailure": "rank 3 was killed",
        },
    }
    container = {"ready": False, "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    pods = [
        {
            "metadata": {"name": "train-0"},
            "spec": {"nodeName": "n1"},
            "status": {"phase": "Pending", "containerStatuses": [container]},
        },
        {"metadata": {"name": "train-1"}, "spec": {}},
    ]
    events = [{"lastTimestamp": "2026-01-01T00:00:01Z", "reason": "Running", "message": "1 nodes"}]
    assert describe_cluster_job(job, pods, events).splitlines() == [
        "NAME   PHASE    NODES  WANTED  ROUND  RESTARTS  GOODPUT",
        "train  Running  1      2       3      -         -",
        "Running since 2026-01-01T00:00:00Z: 1 nodes",
        "last failure: rank 3 was killed",
        "",
        "POD      PHASE    READY  NODE  REASON",
        "train-0  Pending  no     n1    ImagePullBackOff",
        "train-1  -        no     -",
        "",
        "TIME                  EVENT    COUNT  MESSAGE",
        "2026-01-01T00:00:01Z  Running  1      1 nodes",
    ]


@pytest.mark.parametrize(
    ("command", "arguments", "called"),
    [
        (["ripstop", "run", "train.py"], [], ["ripstop"]),
        (["/opt/venv/bin/ripstop"], ["run", "train.py"], ["/opt/venv/bin/ripstop"]),
        (["python3", "-m", "ripstop"], ["run", "train.py"], ["python3", "-m", "ripstop"]),
        (["sh", "-c", "ripstop run train.py"], [], ["ripstop"]),
        (["train.sh", "run"], [], ["ripstop"]),
        ([], ["run"], ["ripstop"]),
    ],
)
def test_stacks_calls_ripstop_as_the_pod_does(command: list[str], arguments: list[str], called: list[str]) -> None:
    container = {"name": "main", "command": command, "args": arguments}
    assert ripstop_command_on_cluster({"spec": {"containers": [container]}}) == called


# install --------------------------------------------------------------------------------------------------------------


def a_deployment(**status: int) -> dict[str, Any]:
    return {"metadata": {"generation": 2}, "spec": {"replicas": 1}, "status": status}


RUNS = {"observedGeneration": 2, "replicas": 1, "updatedReplicas": 1, "availableReplicas": 1}


@pytest.mark.parametrize(
    ("status", "done"),
    [
        (RUNS, True),
        ({}, False),
        (RUNS | {"observedGeneration": 1}, False),  # what runs may be the version before
        (RUNS | {"replicas": 2}, False),  # an earlier one has not ended
        (RUNS | {"updatedReplicas": 0}, False),
        (RUNS | {"availableReplicas": 0}, False),
    ],
)
def test_an_operator_is_installed_when_its_latest_version_runs(status: dict[str, int], done: bool) -> None:
    assert is_deployment_rolled_out(a_deployment(**status)) is done


def test_the_reason_why_an_operators_pod_waits_is_the_clusters() -> None:
    wait = {"reason": "ImagePullBackOff", "message": "Back-off pulling image x:1"}
    status: dict[str, Any] = {"containerStatuses": [{"state": {"waiting": wait}}]}
    assert pod_waiting_reason({"metadata": {"name": "p"}, "status": status}) == (
        "pod p: ImagePullBackOff: Back-off pulling image x:1"
    )
    leaving = {"name": "p", "deletionTimestamp": "2027-01-15T08:00:00Z"}
    assert pod_waiting_reason({"metadata": leaving, "status": status}) == "", "it is of the version before"
    nowhere = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    assert (
        pod_waiting_reason({"metadata": {"name": "p"}, "status": {"conditions": [nowhere]}})
        == "pod p: Unschedulable: 0/3 nodes"
    )
    assert (
        pod_waiting_reason({"metadata": {"name": "p"}, "status": {"containerStatuses": [{"state": {"running": {}}}]}})
        == ""
    )
