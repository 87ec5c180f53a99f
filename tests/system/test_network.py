"""The error texts of failed connections."""

import asyncio
import errno
import socket
import ssl

import aiohttp
import pytest

from ripstop.system.network import describe_network_error


def wrapped(cause: OSError) -> aiohttp.ClientError:
    """As aiohttp raises it."""
    try:
        raise aiohttp.ClientOSError(*cause.args) from cause
    except aiohttp.ClientError as error:
        return error


REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 1)")  # asyncio's text


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (REFUSED, "connection refused"),
        (wrapped(REFUSED), "connection refused"),
        (wrapped(socket.gaierror(socket.EAI_NONAME, "Name or service not known")), "the name has no address"),
        (wrapped(ssl.SSLError(1, "certificate required")), "certificate required"),
        (TimeoutError(), "no answer in 2 s"),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), "connection timed out"),
        (aiohttp.ServerDisconnectedError(), "Server disconnected"),
        (asyncio.IncompleteReadError(b"", 1), "0 bytes read on a total of 1 expected bytes"),
        (ConnectionError(), "ConnectionError"),
    ],
    ids=repr,
)
def test_a_network_error_is_described_in_a_few_words(error: Exception, expected: str) -> None:
    assert describe_network_error(error, 2.0) == expected


def test_without_a_time_limit_the_text_has_no_number() -> None:
    assert describe_network_error(TimeoutError()) == "no reply in time"
