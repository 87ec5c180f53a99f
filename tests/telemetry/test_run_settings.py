"""Settings and programs as texts, without secrets."""

from pathlib import Path

import pytest

from ripstop.model.config import Backend, Budget, Etcd, Executable, Handler, Module, RunConfig, Script
from ripstop.model.round import Address
from ripstop.telemetry.run_settings import changed_run_settings, program_setting_text, torch_version_setting


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (("--lr", "0.1"), "train.py --lr 0.1"),
        (("--api-key=abc", "--lr=1"), "train.py --api-key=*** --lr=1"),
        (("--hf-token", "hf_abc", "x"), "train.py --hf-token *** x"),
        (("--hf_token", "--lr=1"), "train.py --hf_token --lr=1"),
        (("--token", "-abc", "x"), "train.py --token *** x"),
        (("--hfToken=abc", "PGPASSWORD=abc"), "train.py --hfToken=*** PGPASSWORD=***"),
        (("--header", "Authorization: Bearer abc"), "train.py --header 'Authorization: ***'"),
        (("--conf", '{"api_key": "abc"}'), """train.py --conf '{"api_key": ***}'"""),
        (("-c", "run --token=abc --lr 1"), "train.py -c 'run --token=***'"),
        (("-c", "run --token abc --lr 1"), "train.py -c 'run --token *** --lr 1'"),
        (("https://host/x?token=abc",), "train.py 'https://host/x?token=***'"),
        (("password=abc",), "train.py password=***"),
        (("--tokenizer=gpt2", "--max-tokens", "512"), "train.py --tokenizer=gpt2 --max-tokens 512"),
        (("--db=postgres://me:pw@host/x",), "train.py --db=postgres://***@host/x"),
        (("--url", "https://host/x@y"), "train.py --url https://host/x@y"),
        (("a b", "$HOME"), "train.py 'a b' '$HOME'"),
    ],
)
def test_a_program_is_shown_without_secrets(args: tuple[str, ...], shown: str) -> None:
    assert program_setting_text(Script("train.py", args)) == shown


def test_every_kind_of_program_is_shown() -> None:
    assert program_setting_text(Module("pkg.train", ("--token", "x"))) == "-m pkg.train --token ***"
    assert program_setting_text(Executable(("bash", "run.sh"))) == "bash run.sh"


def test_only_settings_that_differ_from_the_defaults_are_shown() -> None:
    assert changed_run_settings(RunConfig(Script("x"), "job7")) == ()
    config = RunConfig(
        Script("x"), "job7", slots=8, budget=Budget(max_restarts=3), start=RunConfig(Script("x"), "y").start
    )
    assert changed_run_settings(config) == ("slots=8", "budget.max_restarts=3")


def test_no_setting_shows_a_secret() -> None:
    config = RunConfig(
        Script("x", ("--token=hush",)),
        "job7",
        backend=Backend.ETCD,
        etcd=Etcd((Address("etcd", 2379),), "/ripstop", user="hush", password="hush", ca=Path("ca.pem")),
        handler=Handler(
            "other", "http://hush:hush@host", (("password", "hush"), ("timeout", "3"), ("url", "x?token=hush"))
        ),
        notify_url="https://hooks/hush",
        token="hush",
        notes=("hush",),
    )
    texts = changed_run_settings(config)
    assert not [text for text in texts if "hush" in text]
    assert any("timeout=3" in text and "password=***" in text for text in texts)
    assert any("etcd:2379" in text for text in texts)


def test_the_version_of_torch_is_found_without_its_import() -> None:
    from importlib.metadata import version

    pytest.importorskip("torch")
    assert torch_version_setting() == version("torch")
