"""torch's distributed features under ripstop: each script in `scripts/` uses one of them.

A script checks its own results and prints `ok` at its end.  It runs as two workers, with gloo.
"""

from pathlib import Path

import pytest

from tests.e2e.harness import Job, free_port

SCRIPTS = Path(__file__).parent / "scripts"

FEATURES = {
    "breakpoint": "dist.breakpoint, its commands from the launcher's stdin",
    "checkpoint": "torch.distributed.checkpoint",
    "ddp": "DDP with a communication hook, and Join",
    "debug": "TORCH_DISTRIBUTED_DEBUG=DETAIL, GLOO_SOCKET_IFNAME",
    "dtensor": "DTensor and device mesh",
    "flight_recorder": "flight recorder dump",
    "fsdp2": "FSDP2",
    "groups": "P2POp, new_group, subgroups, monitored_barrier",
    "init_methods": "init_method tcp:// and file://",
    "pipeline": "pipelining",
    "rpc": "RPC",
    "spawn": "torch.multiprocessing.spawn in a worker",
    "stores": "TCPStore, FileStore, HashStore, PrefixStore",
    "zero": "ZeroRedundancyOptimizer",
}
SHORT = {"checkpoint", "ddp", "fsdp2", "groups"}  # these are most used: `make test` runs them
ENVIRONMENT = {
    "debug": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "GLOO_SOCKET_IFNAME": "lo"},
    "flight_recorder": {"TORCH_FR_BUFFER_SIZE": "100", "TORCH_NCCL_TRACE_BUFFER_SIZE": "100"},
}
TYPED = ["sh", "-c", r"""printf 'up\n!answer = 42\nc\n' | "$@" """, "sh"]  # input for the debugger


@pytest.mark.parametrize(
    "feature", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in FEATURES]
)
def test_a_feature_of_torch_works_under_ripstop(feature: str, tmp_path: Path) -> None:
    own = {"SCRATCH": str(tmp_path), "OWN_PORT": str(free_port()), **ENVIRONMENT.get(feature, {})}
    with Job(tmp_path, **own) as job:
        agent = job.run(
            "--standalone",
            "--nproc-per-node=2",
            "--redirects=1",
            str(SCRIPTS / f"{feature}.py"),
            wrap=TYPED if feature == "breakpoint" else None,
        )
        assert agent.wait() == 0, f"{FEATURES[feature]}\n{agent.err}"
        outputs = [path.read_text() for path in sorted(job.logs.glob("*/round_1/*/stdout.log"))]
        assert len(outputs) == 2
        assert all(output.endswith("ok\n") for output in outputs), outputs


def test_every_script_is_run() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.py")} == set(FEATURES)
