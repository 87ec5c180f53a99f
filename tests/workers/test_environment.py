"""A worker's environment equals torchrun's."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ripstop.model.round import Address, Place
from ripstop.workers.environment import shared_environment, worker_environment

PLACE = Place(
    round=3,
    group_rank=1,
    group_size=3,
    first_rank=4,
    world_size=10,
    slots=2,
    role_first_rank=2,
    role_size=6,
    store=Address("node0", 29500),
    restarts=2,
)


def environment(base: dict[str, str], place: Place = PLACE, local_rank: int = 1) -> dict[str, str]:
    return worker_environment(
        base, place, local_rank, run_id="job7", role="trainer", max_restarts=5, error_file=Path("/logs/error.json")
    )


def test_the_environment_describes_the_workers_place() -> None:
    assert environment({"HOME": "/root"}) == {
        "HOME": "/root",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "10",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "6",
        "ROLE_NAME": "trainer",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "job7",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_ERROR_FILE": "/logs/error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


@pytest.mark.parametrize(
    ("base", "gpus"),
    [
        ({}, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "4, 6"}, ["4", "6"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aa"}, ["GPU-aa", ""]),
    ],
)
def test_with_a_virtual_local_rank_every_worker_is_local_rank_0_and_sees_one_gpu(
    base: dict[str, str], gpus: list[str]
) -> None:
    for local_rank, gpu in enumerate(gpus):
        env = worker_environment(
            base,
            PLACE,
            local_rank,
            run_id="job7",
            role="trainer",
            max_restarts=5,
            error_file=Path("/logs/error.json"),
            virtual_local_rank=True,
        )
        assert (env["LOCAL_RANK"], env["RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", str(4 + local_rank), gpu)


def test_variables_of_the_user_are_kept() -> None:
    mine = {"OMP_NUM_THREADS": "7", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert environment(mine).items() >= mine.items()


def test_a_job_inside_another_jobs_worker_does_not_take_its_place() -> None:
    assert environment({"RANK": "77", "MASTER_PORT": "1"}) == environment({})


def test_a_single_worker_keeps_all_its_threads() -> None:
    assert "OMP_NUM_THREADS" not in shared_environment({}, slots=1)
    assert shared_environment({}, slots=2)["OMP_NUM_THREADS"] == "1"


def test_the_given_environment_is_not_changed() -> None:
    base: dict[str, str] = {}
    environment(base)
    assert base == {}


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="compares with the real torchrun")
def test_the_environment_equals_torchruns(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(
        "import json, os, sys\n"
        "with open(sys.argv[1] + os.environ['RANK'], 'w') as file: json.dump(dict(os.environ), file)\n"
    )
    base = {"PATH": os.environ["PATH"], "LC_CTYPE": "C.UTF-8", "TMPDIR": str(tmp_path)}
    command = "-m torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=5 --role=trainer"
    subprocess.run(
        [sys.executable, *command.split(), str(script), str(tmp_path / "env")],
        env=base,
        check=True,
        timeout=120,
        capture_output=True,
    )
    for rank in range(2):
        theirs = json.loads((tmp_path / f"env{rank}").read_text())
        place = Place(1, 0, 1, 0, 2, 2, 0, 2, Address("localhost", int(theirs["MASTER_PORT"])), 0)
        ours = worker_environment(
            base,
            place,
            rank,
            run_id=theirs["TORCHELASTIC_RUN_ID"],
            role="trainer",
            max_restarts=5,
            error_file=Path(theirs["TORCHELASTIC_ERROR_FILE"]),
        )
        assert ours == theirs
