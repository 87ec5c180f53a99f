"""The installed torchrun's parser and ours: the same command lines have the same meaning."""

import argparse
from pathlib import Path

import pytest

from ripstop.cli.commands.run import FLAGS, configure_run
from ripstop.cli.options.flags import parse_flags
from ripstop.model.config import Module, Numa, RunConfig, Script

torchrun = pytest.importorskip("torch.distributed.run")
OURS_ALONE = {
    *("--api", "--preload", "--config", "--dry-run", "--node-label", "--health-check", "--health-interval"),
    *("--checkpoint-dir", "--checkpoint-interval"),
    *("--restart-window", "--restart-backoff", "--hang-timeout", "--max-infra-restarts", "--probe-port", "--linger"),
    *("--standby", "--standby-warmup", "--standby-until", "--notify-url"),
    *("--quiet", "--log-level", "--log-format"),
    *("--replicate", "--replicate-bandwidth", "--allow-chaos", "--inprocess-timeout"),
    *("--straggler", "--straggler-factor", "--straggler-time", "--drain-timeout", "--preemption-notice"),
}
TORCHS_SINCE_2_12 = {
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
    "--shutdown-timeout",
    "--virtual-local-rank",
}


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with the scripts the tests name."""
    for name in ("train.py", "-"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)


def torchs_actions() -> list[argparse.Action]:
    return [action for action in torchrun.get_args_parser()._actions if action.option_strings]


def torchs_names() -> set[str]:
    options = {option for action in torchs_actions() for option in action.option_strings}
    return {option.replace("_", "-") for option in options if option.startswith("--")} | TORCHS_SINCE_2_12


def ours(arguments: str) -> RunConfig:
    return configure_run(arguments.split(), {})


def test_every_flag_of_torchrun_is_known_in_each_spelling_and_takes_a_value_where_torchs_does() -> None:
    for action in torchs_actions():
        for option in action.option_strings:
            takes_value = action.nargs != 0
            arguments = [option, "1", "train.py"] if takes_value else [option, "train.py"]
            assert parse_flags(FLAGS, arguments, {}).program == ("train.py",), option


def test_every_flag_has_torchruns_variable() -> None:
    torchs = {f"PET_{action.dest.upper()}" for action in torchs_actions() if action.dest != "help"}
    assert torchs <= {flag.variable for flag in FLAGS}


def test_we_have_no_flag_besides_torchruns_and_our_own() -> None:
    assert {flag.name for flag in FLAGS if flag.ours} == OURS_ALONE
    assert {flag.name for flag in FLAGS if not flag.ours} == torchs_names()


def test_a_beginning_that_means_one_flag_of_torchruns_means_the_same_here() -> None:
    for name in torchs_names():
        takes_value = any(flag.metavar for flag in FLAGS if flag.name == name)
        for end in range(len("--x"), len(name)):
            beginning = name[:end]
            if [other for other in torchs_names() if other.startswith(beginning)] == [name]:
                arguments = [beginning, "1", "train.py"] if takes_value else [beginning, "train.py"]
                argv = parse_flags(FLAGS, arguments, {})
                assert (list(argv.texts), argv.program) == ([name], ("train.py",)), beginning


def test_a_beginning_that_only_our_own_flags_have_means_them() -> None:
    argv = parse_flags(FLAGS, ["--dry", "--node-l", "rack1", "--restart-b=1", "train.py"], {})
    assert set(argv.texts) == {"--dry-run", "--node-label", "--restart-backoff"}


def test_named_values_of_torchrun_are_accepted_under_the_same_names() -> None:
    for action in torchs_actions():
        if action.choices and action.dest != "numa_binding":  # that one needs GPUs
            for choice in action.choices:
                ours(f"{action.option_strings[0]}={choice} train.py")
    (numa,) = (action for action in torchs_actions() if action.dest == "numa_binding")
    assert set(numa.choices or ()) == {mode.value for mode in Numa}


def test_the_defaults_are_torchruns() -> None:
    torchs, config = torchrun.parse_args(["train.py"]), ours("train.py")
    assert torchrun.parse_min_max_nnodes(torchs.nnodes) == (config.min_nodes, config.max_nodes)
    assert int(torchs.nproc_per_node) == config.slots
    assert torchs.max_restarts == config.budget.max_restarts
    assert torchs.role == config.role
    assert int(torchs.redirects) == int(config.logs.redirects.default)
    assert int(torchs.tee) == int(config.logs.tee.default)
    assert (torchs.local_ranks_filter or None) == config.logs.shown
    assert tuple(torchs.signals_to_handle.split(",")) == config.signals
    assert (torchs.logs_specs or "", torchs.numa_binding or ()) == (config.logs.specs, config.bindings)
    assert tuple(getattr(torchs, "duplicate_stdout_filters", ())) == config.logs.stdout_filters
    assert tuple(getattr(torchs, "duplicate_stderr_filters", ())) == config.logs.stderr_filters
    assert getattr(torchs, "virtual_local_rank", False) == config.virtual_local_rank
    assert (torchs.module, torchs.no_python, torchs.run_path) == (False,) * 3
    assert config.timing.shutdown == 30.0 and getattr(torchs, "shutdown_timeout", None) is None


@pytest.mark.parametrize("arguments", ["apple", "apple,orange", "a,,b", "a,,b,c", ",,", "a b,c"])
def test_a_list_of_filters_is_read_as_torchrun_reads_it(arguments: str) -> None:
    if not any(action.dest == "duplicate_stdout_filters" for action in torchs_actions()):
        pytest.skip("this torchrun has no such flag yet")
    argv = [f"--duplicate-stdout-filters={arguments}", "-t", "1", "train.py"]
    config = configure_run(argv, {})
    assert config.logs.stdout_filters == tuple(torchrun.parse_args(argv).duplicate_stdout_filters)


@pytest.mark.parametrize(
    "arguments",
    [
        "train.py a b",
        "train.py --nnodes 3 -m",
        "train.py -- --a",
        "train.py a -- --b",
        "train.py --",
        "-- train.py a",
        "-- train.py -- a",
        "-m -- pkg -m",
        "-m pkg --help",
        "- a",
        "-r3 train.py",
        "-r=3 train.py",
        "-r 3 train.py",
        "--standalone train.py --standalone",
        "--nnode 1 train.py x",
        "--rdzv_conf join_timeout=1 train.py",
    ],
)
def test_the_program_and_its_arguments_begin_where_torchrun_begins_them(arguments: str) -> None:
    torchs, entry = torchrun.parse_args(arguments.split()), ours(arguments).entry
    expected = (torchs.training_script, tuple(torchs.training_script_args))
    match entry:
        case Script(path, args):
            assert (path, args, False) == (*expected, torchs.module)
        case Module(name, args):
            assert (name, args, True) == (*expected, torchs.module)
        case _:
            pytest.fail(f"{entry} is neither a script nor a module")


@pytest.mark.parametrize("endpoint", ["node0", "node0:1", "10.0.0.7:29400", "[::1]:99", "[fd00::7]", "a-b.c_d:5"])
def test_an_endpoint_is_read_as_torch_reads_it(endpoint: str) -> None:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    config = ours(f"--rdzv-backend=c10d --rdzv-endpoint={endpoint} train.py")
    assert config.endpoint is not None
    assert (config.endpoint.host, config.endpoint.port) == parse_rendezvous_endpoint(endpoint, 29400)
