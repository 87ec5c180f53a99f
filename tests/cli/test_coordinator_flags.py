"""What the words of `ripstop coordinator` come to mean."""

from pathlib import Path

from ripstop.cli.commands.coordinator import configure
from ripstop.model.config import Budget, CoordinatorConfig, QuarantineLimits, Timing
from ripstop.model.round import Address, RankBy


def test_a_coordinator_is_told_where_to_listen_and_for_whom() -> None:
    words = "--rdzv-endpoint=head --rdzv-id=job7 --nnodes=2:4 --max-restarts=3 --restart-window=1h"
    conf = "--rdzv_conf=lease=1,rank_by=slot,target=3"
    assert configure([*words.split(), conf], {"RIPSTOP_TOKEN": "s"}) == CoordinatorConfig(
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
    config = configure([], {"PET_RDZV_ENDPOINT": "head:99", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"})
    assert config is not None
    assert (config.endpoint, config.min_nodes, config.run_id) == (Address("head", 99), 2, "none")


def test_a_coordinator_that_anyone_can_join_says_so() -> None:
    config = configure(["--rdzv-endpoint=head"], {})
    assert config is not None
    assert "whoever can reach head:29400" in config.notes[0]


def test_a_coordinator_writes_events_where_it_is_told() -> None:
    def told(words: str) -> Path | None:
        config = configure(["--rdzv-endpoint=head", *words.split()], {})
        assert config is not None
        return config.log_dir

    assert [told(""), told("--log-dir=/dev/null"), told("--log-dir=logs")] == [None, None, Path("logs")]


def test_quarantine_is_the_coordinators_and_health_is_the_nodes() -> None:
    config = configure(
        ["--rdzv-endpoint=head", "--rdzv-conf=quarantine_failures=9,min_disk=1G"], {"RIPSTOP_TOKEN": "s"}
    )
    assert config is not None
    assert config.quarantine == QuarantineLimits(failures=9)
    assert config.notes == ("--rdzv-conf min_disk has no effect here: it is about nodes",)
