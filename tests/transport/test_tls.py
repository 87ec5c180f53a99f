"""Agents and the coordinator over TLS: which peers are accepted, and the errors on both sides."""

import asyncio
import contextlib
import shutil
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ripstop.cli.commands.coordinator import configure_coordinator
from ripstop.cli.commands.run import configure_run
from ripstop.launch import bind_launch_endpoint
from ripstop.model.config import Tls
from ripstop.model.errors import UsageError
from ripstop.model.round import Address, Outcome
from ripstop.protocol.messages import Assign, Closed, Left, Succeeded
from ripstop.transport import connection_limits
from ripstop.transport.tls import check_coordinator_certificate, client_context
from tests.certificates import Authority
from tests.e2e.harness import free_port

DEADLINE = 120.0


def conf(tls: Tls) -> str:
    """The `--rdzv-conf` flag for these certificates."""
    return "--rdzv-conf=" + ",".join(f"tls_{k}={getattr(tls, k)}" for k in ("cert", "key", "ca") if getattr(tls, k))


def usage_error(tls: Tls) -> str:
    """The error of the command line for these certificates."""
    with pytest.raises(UsageError) as raised:
        configure_run([conf(tls), "--no-python", "true"], {})
    return str(raised.value)


async def job_runs(harness: Any, coordinator: Any, address: Address, tls: Tls | None) -> None:
    """A whole job of one node."""
    async with harness.linking(address, node="honest", tls=tls) as (link, agent):
        await agent.until(lambda a: a.count("linked") == 1)
        link.send(harness.join("honest"))
        link.send(Succeeded((await agent.heard(Assign)).place.round))
        await agent.heard(Closed)
        link.send(Left("the job is over"))
    assert (await asyncio.wait_for(coordinator.ended, DEADLINE)).outcome is Outcome.SUCCEEDED


async def rejection(harness: Any, address: Address, tls: Tls | None) -> str:
    """The reason of an agent's final rejection."""
    async with harness.linking(address, tls=tls) as (_, agent):
        await agent.until(lambda a: a.count("refused") == 1)
        assert agent.count("linked") == 0
        return str(agent.told[-1][1])


# accepted peers -------------------------------------------------------------------------------------------------------


def test_a_job_runs_over_tls_with_certificates_on_both_sides(harness: Any, authority: Authority) -> None:
    async def scenario() -> None:
        async with harness.serving(tls=authority.node("a")) as (coordinator, address):
            await job_runs(harness, coordinator, address, authority.node("b"))

    asyncio.run(scenario())


def test_a_coordinator_without_a_ca_requires_no_agent_certificate(harness: Any, authority: Authority) -> None:
    async def scenario() -> None:
        async with harness.serving(tls=replace(authority.node("a"), ca=None)) as (coordinator, address):
            await job_runs(harness, coordinator, address, Tls(ca=authority.ca))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("certificate", "expected"),
    [
        ({"expired": True}, "is not valid (certificate has expired)"),
        ({"names": "DNS:elsewhere"}, "is not for 127.0.0.1; add it"),
    ],
)
def test_an_agent_does_not_trust_a_coordinator_with_a_bad_certificate(
    harness: Any, authority: Authority, caplog: pytest.LogCaptureFixture, certificate: dict[str, Any], expected: str
) -> None:
    async def scenario() -> None:
        async with harness.serving(tls=authority.node("bad", **certificate)) as (coordinator, address):
            why = await rejection(harness, address, authority.node("b"))
            assert f"the coordinator at {address} is not trusted: its certificate {expected}" in why
            assert coordinator.attached == []

    asyncio.run(scenario())
    assert "peer=127.0.0.1 why='it aborted the TLS handshake" in caplog.text


def test_an_agent_does_not_trust_a_coordinator_that_another_authority_signed(
    harness: Any, authority: Authority, other_authority: Authority
) -> None:
    async def scenario() -> None:
        async with harness.serving(tls=other_authority.node("a")) as (_, address):
            why = await rejection(harness, address, authority.node("b"))
            assert "was not signed by an authority that is trusted here" in why

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["none", "foreign", "expired"])
def test_an_agent_without_a_valid_certificate_is_rejected_and_both_sides_log_the_reason(
    harness: Any, authority: Authority, other_authority: Authority, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    shown = {
        "none": Tls(),
        "foreign": other_authority.node("c"),
        "expired": authority.node("old", expired=True),
    }[kind]
    reasons = {
        "none": "it sent no certificate",
        "foreign": "was not signed by an authority",
        "expired": "certificate has expired",
    }

    async def scenario() -> None:
        async with harness.serving(tls=authority.node("a")) as (coordinator, address):
            why = await rejection(harness, address, replace(shown, ca=authority.ca))
            assert "give this node a certificate" in why
            assert coordinator.attached == []
            await job_runs(harness, coordinator, address, authority.node("b"))

    asyncio.run(scenario())
    assert reasons[kind] in caplog.text


def test_an_agent_without_tls_is_rejected_at_a_tls_port(
    harness: Any, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with harness.serving(tls=authority.node("a")) as (coordinator, address):
            assert "it requires TLS; add tls_ca=FILE" in await rejection(harness, address, None)
            await job_runs(harness, coordinator, address, authority.node("b"))

    asyncio.run(scenario())
    assert "it does not use TLS, and this coordinator requires it" in caplog.text


def test_an_agent_with_tls_is_rejected_at_a_port_without_tls(
    harness: Any, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            assert "it does not use TLS; give the coordinator" in await rejection(harness, address, authority.node("b"))
            await job_runs(harness, coordinator, address, None)

    asyncio.run(scenario())
    assert "it uses TLS; give this coordinator tls_cert and tls_key" in caplog.text


def test_unfinished_tls_handshakes_do_not_delay_other_peers(
    harness: Any, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "MAX_UNAUTHENTICATED", 8)

    async def scenario() -> None:
        async with harness.serving(tls=authority.node("a")) as (coordinator, address):
            idle = [await asyncio.open_connection(address.host, address.port) for _ in range(20)]
            for _, writer in idle[::2]:
                writer.write(b"\x16\x03\x01\x02")
            await job_runs(harness, coordinator, address, authority.node("b"))
            for _, writer in idle:
                writer.close()

    asyncio.run(scenario())


def test_a_connection_that_is_reset_before_its_handshake_does_not_stop_the_server(
    harness: Any, authority: Authority
) -> None:
    async def scenario() -> None:
        async with harness.serving(tls=authority.node("a")) as (coordinator, address):
            for _ in range(8):
                with socket.create_connection((address.host, address.port)) as peer:  # resets, before it is accepted
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            await job_runs(harness, coordinator, address, authority.node("b"))

    asyncio.run(scenario())


def test_rejected_peers_that_do_not_close_take_a_limited_number_of_descriptors(
    harness: Any, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "MAX_UNAUTHENTICATED", 4)
    context = client_context(authority.node("b"))

    def connect(address: Address) -> ssl.SSLSocket:
        """An agent's request without pre-authentication, from a peer that never reads and so never closes."""
        plain = socket.create_connection((address.host, address.port), DEADLINE)
        encrypted = context.wrap_socket(plain, server_hostname=address.host)
        encrypted.sendall(b"GET /agent HTTP/1.1\r\nHost: x\r\n\r\n")
        return encrypted

    def descriptors() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    async def scenario() -> None:
        async with harness.serving(tls=authority.node("a")) as (coordinator, address):
            before = descriptors()
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(20):
                    stack.enter_context(await asyncio.to_thread(connect, address))
                await job_runs(harness, coordinator, address, authority.node("b"))
                assert descriptors() - before - 20 <= 4 + 1 + 4  # the limit, one per node, and `job_runs`

    asyncio.run(scenario())


# checks of the own certificates at the start --------------------------------------------------------------------------


def test_certificates_are_read_from_the_command_line(authority: Authority) -> None:
    tls = authority.node("a")
    run = configure_run(
        [conf(tls), "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=h", "--no-python", "true"], {}
    )
    assert (run.tls, run.notes) == (tls, ())  # and no warning: only nodes of the authority can join
    alone = configure_coordinator([conf(tls), "--rdzv-endpoint=h"], {})
    assert (alone.tls, alone.notes) == (tls, ())


def test_certificates_for_a_single_node_are_a_note(authority: Authority) -> None:
    config = configure_run([conf(authority.node("a")), "--no-python", "true"], {})
    assert "--rdzv-conf tls_… has no effect on a single node: there are no connections to encrypt" in config.notes


def test_a_certificate_and_its_key_go_together(authority: Authority) -> None:
    error = "a certificate and its key go together; add"
    assert f"{error} tls_key=FILE" in usage_error(replace(authority.node("a"), key=None))
    assert f"{error} tls_cert=FILE" in usage_error(replace(authority.node("a"), cert=None))


def test_the_error_names_a_missing_or_invalid_file(authority: Authority, tmp_path: Path) -> None:
    tls, junk = authority.node("a"), tmp_path / "junk"
    junk.write_text("no PEM\n")
    missing = usage_error(replace(tls, ca=tmp_path / "none"))
    assert missing.endswith("/none: cannot be read: No such file or directory; name a PEM file you may read")
    assert f"tls_ca={junk}: not a certificate in PEM form" in usage_error(replace(tls, ca=junk))
    assert f"tls_cert={junk}" in usage_error(replace(tls, cert=junk))


def test_a_key_that_everyone_can_read_is_a_note(authority: Authority, tmp_path: Path) -> None:
    tls = authority.node("a")
    assert tls.key is not None
    key = tmp_path / "open.key"
    shutil.copy(tls.key, key)
    key.chmod(0o644)
    config = configure_run([conf(replace(tls, key=key)), "--no-python", "true"], {})
    assert f"--rdzv-conf tls_key={key}: everyone can read it; chmod 600 {key}" in config.notes


def test_a_key_of_another_certificate_is_an_error(authority: Authority) -> None:
    mixed = replace(authority.node("a"), key=authority.node("b").key)
    assert "does not match tls_key=" in usage_error(mixed)


@pytest.mark.parametrize("with_ca", [True, False])
def test_an_own_expired_certificate_is_an_error(authority: Authority, with_ca: bool) -> None:
    old = authority.node("old", expired=True)
    assert "certificate has expired" in usage_error(old if with_ca else replace(old, ca=None))


def test_the_own_certificate_must_be_signed_by_the_ca(authority: Authority, other_authority: Authority) -> None:
    assert "was not signed by an authority" in usage_error(replace(authority.node("a"), ca=other_authority.ca))


def test_a_ca_that_is_not_an_authority_is_an_error(authority: Authority) -> None:
    tls = authority.node("a")
    assert "is not the certificate of an authority" in usage_error(replace(tls, ca=tls.cert))


def test_a_host_whose_certificate_is_for_another_name_does_not_start(authority: Authority) -> None:
    tls = authority.node("elsewhere", names="DNS:elsewhere")
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    config = configure_run([conf(tls), "--nnodes=2", "--rdzv-backend=c10d", endpoint, "--no-python", "true"], {})
    with pytest.raises(UsageError, match=r"is not for 127\.0\.0\.1; add it as subjectAltName"):
        bind_launch_endpoint(config)
    check_coordinator_certificate(tls, "elsewhere")


def test_a_host_without_a_certificate_does_not_start(authority: Authority) -> None:
    with pytest.raises(UsageError, match=r"add tls_cert=FILE,tls_key=FILE, or is_host=0"):
        check_coordinator_certificate(Tls(ca=authority.ca), "h")
    with pytest.raises(UsageError, match="a coordinator needs a certificate"):
        configure_coordinator([f"--rdzv-conf=tls_ca={authority.ca}", "--rdzv-endpoint=h"], {})
