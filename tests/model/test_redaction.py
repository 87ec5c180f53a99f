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
        ('{"api_key": "sk x", "user": "me"}', '{"api_key": ***, "user": "me"}'),
        ("{'password': 'it\\'s', 'user': 'me'}", "{'password': ***, 'user': 'me'}"),
        ("{'password': b'a b'}", "{'password': ***}"),
        (r'"{\"api_key\": \"sk-x\"}"', r'"{\"api_key\": ***'),
        ('token="not closed', "token=***"),
        ("Authorization: Basic abc= rejected", "Authorization: *** rejected"),
        ("{'Authorization': 'Bearer abc'}", "{'Authorization': ***}"),
        ('{"authorization" : "Basic abc"}', '{"authorization" : ***}'),
        ("('Authorization', 'Bearer abc')", "('Authorization', 'Bearer ***"),
        ("curl --header 'Authorization: Bearer abc' x", "curl --header 'Authorization: *** x"),
        ("no bearer token was sent", "no bearer token was sent"),
        ("PGPASSWORD=abc psql", "PGPASSWORD=*** psql"),
        ("accessToken=abc", "accessToken=***"),
        ("--hf-token abc x", "--hf-token *** x"),
        ("--hfToken=abc x", "--hfToken=*** x"),
        ("--token -abc x", "--token *** x"),
        ("--token 'a b' x", "--token *** x"),
        ("--token --lr 1", "--token --lr 1"),
        ("GET https://host/x?a=1&token=abc failed", "GET https://host/x?a=1&token=*** failed"),
        ("token == 'abc'", "token == ***"),
        ("x://me:p@ss@host/x", "x://***@host/x"),
        ("the token is wrong", "the token is wrong"),
        ("tokenizer: gpt2 has 50257 tokens", "tokenizer: gpt2 has 50257 tokens"),
        ("ValueError: bad shard", "ValueError: bad shard"),
    ],
)
def test_values_that_look_like_secrets_are_removed(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


@pytest.mark.parametrize(
    "piece", ["a-", "--", "token", "--token", "token ", "token='", '\\"token\\":', "bearer ", "://a"]
)
def test_the_time_is_linear(piece: str) -> None:
    """This takes many minutes if the time is quadratic."""
    without_secrets(piece * 200_000)


@pytest.mark.parametrize(
    "name",
    ["--hfToken", "PGPASSWORD", "accessToken", "--token", "HF_TOKEN", "--api-key", "api_key", "db.password", "--auth"],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["--tokenizer", "--max-tokens", "author", "--keyboard", "compass", "monkey"])
def test_other_names_are_no_secrets(name: str) -> None:
    assert not is_secret_name(name)
