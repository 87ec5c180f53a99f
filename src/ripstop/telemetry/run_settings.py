"""Settings, programs and versions as texts for operators: in `--dry-run`, in events and in the report.

Secrets are left out: fields with a secret, and what `model/redaction.py` finds.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import Enum
from shlex import join, quote

from msgspec import Struct
from msgspec.structs import fields

from ripstop.model.config import Binding, Entrypoint, Executable, Handler, Module, RunConfig, Script
from ripstop.model.redaction import HIDDEN, is_secret_name, without_secrets, without_url_users
from ripstop.model.round import Address
from ripstop.model.text_formatting import cpu_ranges
from ripstop.workers.spawner import spawn_command_line

HIDDEN_FIELDS = ("notify_url", "token", "user", "password", "headers", "notes")
GROUPS = ("budget", "timing", "health", "quarantine", "logs", "own_log")  # their settings have names like `timing.join`


def settings(prefix: str, group: object) -> Iterator[tuple[str, object]]:
    """Every setting and its name; groups are flattened."""
    assert isinstance(group, Struct)
    for field in fields(group):
        value = getattr(group, field.name)
        if field.name in HIDDEN_FIELDS:
            continue
        if field.name in GROUPS:
            yield from settings(f"{field.name}.", value)
        else:
            yield prefix + field.name, value


def setting_text(value: object) -> str:
    match value:
        case None:
            return "-"
        case Script() | Module() | Executable():
            return join(spawn_command_line(value))
        case Handler(name, endpoint, conf):
            return " ".join(
                (name, without_secrets(endpoint), *(f"{key}={_shown_setting(key, value)}" for key, value in conf))
            )
        case Binding(cpus, memory):
            return f"processors {cpu_ranges(cpus)}" + (f", memory of node {memory}" if memory is not None else "")
        case Enum():
            return str(value.value) if isinstance(value.value, str) else str(value.name).lower()
        case (Binding(), *_):
            return "; ".join(map(setting_text, value))
        case tuple() | frozenset():
            return ", ".join(map(setting_text, sorted(value) if isinstance(value, frozenset) else value)) or "-"
        case Struct() if not isinstance(value, Address):
            return ", ".join(f"{name}={setting_text(inner)}" for name, inner in settings("", value))
    return str(value)


def changed_run_settings(config: RunConfig) -> tuple[str, ...]:
    """`name=value` of every setting that differs from its default."""
    defaults = dict(settings("", RunConfig(config.entry, config.run_id)))
    return tuple(
        f"{name}={without_url_users(setting_text(value))}"
        for name, value in settings("", config)
        if value != defaults.get(name) and name not in ("entry", "run_id")
    )


def program_setting_text(entry: Entrypoint) -> str:
    """The command line of the workers without secrets."""
    match entry:
        case Script(path, args):
            words = [path, *args]
        case Module(name, args):
            words = ["-m", name, *args]
        case Executable(argv):
            words = list(argv)
        case _:
            return ""
    return " ".join(map(_quoted_setting_word, _shown_program_setting(words)))


def _quoted_setting_word(word: str) -> str:
    """For a shell, but `--token=***` needs no quotes."""
    rest = word.replace(HIDDEN, "x")
    return word if quote(rest) == rest else quote(word)


def _shown_program_setting(words: Iterable[str]) -> Iterator[str]:
    is_next_secret = False
    for word in words:
        name, equals, _ = word.partition("=")
        if is_next_secret and not (word.startswith("--") and word[2:3].isalpha()):  # a secret may start with a dash
            yield HIDDEN
            is_next_secret = False
        elif equals and is_secret_name(name):
            yield f"{name}={HIDDEN}"
            is_next_secret = False
        else:
            is_next_secret = word.startswith("-") and is_secret_name(word)
            yield without_secrets(word)


def _shown_setting(key: str, value: str) -> str:
    return HIDDEN if is_secret_name(key) else without_secrets(value)


def torch_version_setting() -> str:
    """The version of the torch that workers import, from the name of its metadata; empty if there is none.

    The agent must not import torch, and `importlib.metadata` takes longer to import than this search.
    """
    for directory in filter(None, sys.path):
        with suppress(OSError):
            for name in os.listdir(directory):  # noqa: PTH208 - ten times as fast
                if name.startswith("torch-") and name.endswith(".dist-info"):
                    return name.removeprefix("torch-").removesuffix(".dist-info")
    return ""
