"""The configuration from the flags of `ripstop coordinator`."""

from pathlib import Path

from ripstop.cli.commands.coordinator import configure_coordinator
from ripstop.model.config import Budget, CoordinatorConfig, QuarantineLimits, Timing
from ripstop.model.round import Address, RankBy


def test_flags_set_the_endpoint_the_job_and_its_limits() -> None:
    arguments = "--rdzv-endpoint=head --rdzv-id=job7 --nnodes=2:4 --max-restarts=3 --restart-window=1h"
    conf = "--rdzv_conf=lease=1,rank_by=slot,target=3"
    assert configure_coordinator([*arguments.split(), conf], {"RIPSTOP_TOKEN": "s"}) == CoordinatorConfig(
        run_id="job7",
        endpoint=Address("head", 29400),
        min_nodes=2,
        max_nodes=4,
        target=3,
        rank_by=RankBy.SLOT,
        budget=Budget(3, 3600.0),
        timing=Timing(lease=1.0),
        token="s",
    )


def test_a_coordinator_takes_the_same_variables_as_its_nodes() -> None:
    config = configure_coordinator([], {"PET_RDZV_ENDPOINT": "head:99", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"})
    assert (config.endpoint, config.min_nodes, config.run_id) == (Address("head", 99), 2, "none")


def test_a_coordinator_without_a_secret_warns() -> None:
    config = configure_coordinator(["--rdzv-endpoint=head"], {})
    assert "anyone who can reach head:29400" in config.notes[0]


def test_events_are_written_to_the_log_directory_if_there_is_one() -> None:
    def log_dir(arguments: str) -> Path | None:
        config = configure_coordinator(["--rdzv-endpoint=head", *arguments.split()], {})
        return config.log_dir

    assert [log_dir(""), log_dir("--log-dir=/dev/null"), log_dir("--log-dir=logs")] == [None, None, Path("logs")]


def test_quarantine_settings_apply_and_health_settings_have_no_effect() -> None:
    config = configure_coordinator(
        ["--rdzv-endpoint=head", "--rdzv-conf=quarantine_failures=9,min_disk=1G"], {"RIPSTOP_TOKEN": "s"}
    )
    assert config.quarantine == QuarantineLimits(failures=9)
    assert config.notes == ("--rdzv-conf min_disk has no effect here: set it on the nodes",)
