"""Secrets are removed from texts that operators may publish."""

import pytest

from ripstop.model.redaction import is_secret_name, without_secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("HF_TOKEN=hf_abc not valid", "HF_TOKEN=*** not valid"),
        ("Authorization: Bearer abc.def rejected", "Authorization: *** rejected"),
        ("cannot open s3://key:secret@bucket/x", "cannot open s3://***@bucket/x"),
        ("password = hunter2; retry", "password = *** retry"),
        ("tokenizer: gpt2 has 50257 tokens", "tokenizer: gpt2 has 50257 tokens"),
        ("ValueError: bad shard", "ValueError: bad shard"),
    ],
)
def test_values_that_look_like_secrets_are_removed(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


@pytest.mark.parametrize("name", ["--token", "HF_TOKEN", "--api-key", "api_key", "db.password", "--auth"])
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["--tokenizer", "--max-tokens", "author", "--keyboard", "compass", "monkey"])
def test_other_names_are_no_secrets(name: str) -> None:
    assert not is_secret_name(name)
