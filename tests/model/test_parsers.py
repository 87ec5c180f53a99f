"""Parsers of values that name files."""

import os

import pytest

from ripstop.model import parsers
from ripstop.model.errors import UsageError


def test_a_pem_file_that_is_a_pipe_is_not_read() -> None:
    """`--rdzv-conf tls_ca=<(command)`: its content can be read only once."""
    reading, writing = os.pipe()
    os.write(writing, b"a certificate")
    os.close(writing)
    try:
        assert str(parsers.parse_pem_file("--rdzv-conf tls_ca", f"/dev/fd/{reading}")) == f"/dev/fd/{reading}"
        assert os.read(reading, 100) == b"a certificate"
    finally:
        os.close(reading)


@pytest.mark.parametrize("path", ["/no/such/file", "/", "/dev/zero"])
def test_a_pem_file_that_cannot_be_read_is_rejected(path: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        parsers.parse_pem_file("--rdzv-conf tls_ca", path)
