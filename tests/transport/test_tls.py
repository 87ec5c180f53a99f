"""Agents and the coordinator over TLS: who is let in, and what both sides are told when somebody is not."""

import asyncio
import contextlib
import shutil
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ripstop.cli.commands.coordinator import configure as configure_coordinator
from ripstop.cli.commands.run import configure
from ripstop.launch import bind_endpoint
from ripstop.model.config import Tls
from ripstop.model.errors import UsageError
from ripstop.model.round import Address, Outcome
from ripstop.protocol.messages import Assign, Closed, Left, Succeeded
from ripstop.transport import server
from ripstop.transport.tls import examine_host, for_agent
from tests.certificates import Authority
from tests.e2e.harness import free_port

DEADLINE = 20.0


def conf(tls: Tls) -> str:
    """What `--rdzv-conf` says of these certificates."""
    return "--rdzv-conf=" + ",".join(f"tls_{k}={getattr(tls, k)}" for k in ("cert", "key", "ca") if getattr(tls, k))


def objection(tls: Tls) -> str:
    """What the command line has against these certificates."""
    with pytest.raises(UsageError) as refused:
        configure([conf(tls), "--no-python", "true"], {})
    return str(refused.value)


async def works(harness: Any, coordinator: Any, address: Address, tls: Tls | None) -> None:
    """A whole job of one node."""
    async with harness.linking(address, node="honest", tls=tls) as (link, agent):
        await agent.until(lambda a: a.count("linked") == 1)
        link.send(harness.join("honest"))
        link.send(Succeeded((await agent.heard(Assign)).place.round))
        await agent.heard(Closed)
        link.send(Left("the job is over"))
    assert (await asyncio.wait_for(coordinator.ended, DEADLINE)).outcome is Outcome.SUCCEEDED


async def refusal(harness: Any, address: Address, tls: Tls | None) -> str:
    """The word for which an agent gives up."""
    async with harness.linking(address, tls=tls) as (_, agent):
        await agent.until(lambda a: a.count("refused") == 1)
        assert agent.count("linked") == 0
        return str(agent.told[-1][1])


# who is let in --------------------------------------------------------------------------------------------------------


def test_a_job_runs_over_tls_with_certificates_on_both_sides(harness: Any, authority: Authority) -> None:
    async def scenario() -> None:
        async with harness.serving(tls=authority.node("a")) as (coordinator, address):
            await works(harness, coordinator, address, authority.node("b"))

    asyncio.run(scenario())


def test_a_coordinator_without_a_ca_wants_no_certificate_of_its_agents(harness: Any, authority: Authority) -> None:
    async def scenario() -> None:
        async with harness.serving(tls=replace(authority.node("a"), ca=None)) as (coordinator, address):
            await works(harness, coordinator, address, Tls(ca=authority.ca))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("ours", "word"),
    [
        ({"expired": True}, "is not good (certificate has expired)"),
        ({"names": "DNS:elsewhere"}, "is not for 127.0.0.1; make one"),
    ],
)
def test_an_agent_does_not_trust_a_coordinator_with_a_bad_certificate(
    harness: Any, authority: Authority, caplog: pytest.LogCaptureFixture, ours: dict[str, Any], word: str
) -> None:
    async def scenario() -> None:
        async with harness.serving(tls=authority.node("bad", **ours)) as (coordinator, address):
            why = await refusal(harness, address, authority.node("b"))
            assert f"the coordinator at {address} is not trusted: its certificate {word}" in why
            assert coordinator.attached == []

    asyncio.run(scenario())
    assert "peer=127.0.0.1 why='it broke off the TLS handshake" in caplog.text


def test_an_agent_does_not_trust_a_coordinator_that_another_authority_signed(
    harness: Any, authority: Authority, stranger: Authority
) -> None:
    async def scenario() -> None:
        async with harness.serving(tls=stranger.node("a")) as (_, address):
            why = await refusal(harness, address, authority.node("b"))
            assert "was not signed by an authority that is trusted here" in why

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["none", "foreign", "expired"])
def test_an_agent_without_a_good_certificate_is_refused_and_both_sides_know_why(
    harness: Any, authority: Authority, stranger: Authority, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    shown = {
        "none": Tls(),
        "foreign": stranger.node("c"),
        "expired": authority.node("old", expired=True),
    }[kind]
    words = {
        "none": "it showed no certificate",
        "foreign": "was not signed by an authority",
        "expired": "certificate has expired",
    }

    async def scenario() -> None:
        async with harness.serving(tls=authority.node("a")) as (coordinator, address):
            why = await refusal(harness, address, replace(shown, ca=authority.ca))
            assert "give this node a certificate" in why
            assert coordinator.attached == []
            await works(harness, coordinator, address, authority.node("b"))

    asyncio.run(scenario())
    assert words[kind] in caplog.text


def test_a_plain_agent_at_a_tls_port_is_told_so(
    harness: Any, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with harness.serving(tls=authority.node("a")) as (coordinator, address):
            assert "it speaks TLS only; add tls_ca=FILE" in await refusal(harness, address, None)
            await works(harness, coordinator, address, authority.node("b"))

    asyncio.run(scenario())
    assert "it does not speak TLS, as this coordinator does" in caplog.text


def test_a_tls_agent_at_a_plain_port_is_told_so(
    harness: Any, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            assert "it does not speak TLS; give the coordinator" in await refusal(harness, address, authority.node("b"))
            await works(harness, coordinator, address, None)

    asyncio.run(scenario())
    assert "it speaks TLS; give this coordinator tls_cert and tls_key" in caplog.text


def test_handshakes_that_never_end_hold_up_nobody(
    harness: Any, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_STRANGERS", 8)

    async def scenario() -> None:
        async with harness.serving(tls=authority.node("a")) as (coordinator, address):
            idle = [await asyncio.open_connection(address.host, address.port) for _ in range(20)]
            for _, writer in idle[::2]:
                writer.write(b"\x16\x03\x01\x02")
            await works(harness, coordinator, address, authority.node("b"))
            for _, writer in idle:
                writer.close()

    asyncio.run(scenario())


def test_who_is_refused_and_does_not_go_takes_no_more_descriptors_than_strangers_may(
    harness: Any, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_STRANGERS", 4)
    context = for_agent(authority.node("b"))

    def connect(address: Address) -> ssl.SSLSocket:
        """It asks as an agent without a knock, and never reads, so it never hears of the connection's end."""
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
                await works(harness, coordinator, address, authority.node("b"))
                assert descriptors() - before - 20 <= 4 + 1 + 4  # strangers, as many as nodes, and what works leaves

    asyncio.run(scenario())


# one's own certificates, before anything starts -----------------------------------------------------------------------


def test_certificates_are_read_from_the_command_line(authority: Authority) -> None:
    tls = authority.node("a")
    run = configure([conf(tls), "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=h", "--no-python", "true"], {})
    assert run is not None
    assert (run.tls, run.notes) == (tls, ())  # and no word of an open door: only the authority's nodes can join
    alone = configure_coordinator([conf(tls), "--rdzv-endpoint=h"], {})
    assert alone is not None
    assert (alone.tls, alone.notes) == (tls, ())


def test_certificates_for_a_single_node_are_said_to_have_no_effect(authority: Authority) -> None:
    config = configure([conf(authority.node("a")), "--no-python", "true"], {})
    assert config is not None
    assert "--rdzv-conf tls_… has no effect on a single node: there are no connections to encrypt" in config.notes


def test_a_certificate_and_its_key_go_together(authority: Authority) -> None:
    word = "a certificate and its key go together; add"
    assert f"{word} tls_key=FILE" in objection(replace(authority.node("a"), key=None))
    assert f"{word} tls_cert=FILE" in objection(replace(authority.node("a"), cert=None))


def test_a_file_that_is_missing_or_no_certificate_is_named(authority: Authority, tmp_path: Path) -> None:
    tls, junk = authority.node("a"), tmp_path / "junk"
    junk.write_text("no PEM\n")
    missing = objection(replace(tls, ca=tmp_path / "none"))
    assert missing.endswith("/none: cannot be read: No such file or directory; name a PEM file you may read")
    assert f"tls_ca={junk}: no certificate in PEM form" in objection(replace(tls, ca=junk))
    assert f"tls_cert={junk}" in objection(replace(tls, cert=junk))


def test_a_key_that_everyone_can_read_is_mentioned(authority: Authority, tmp_path: Path) -> None:
    tls = authority.node("a")
    assert tls.key is not None
    key = tmp_path / "open.key"
    shutil.copy(tls.key, key)
    key.chmod(0o644)
    config = configure([conf(replace(tls, key=key)), "--no-python", "true"], {})
    assert config is not None
    assert f"--rdzv-conf tls_key={key}: everyone can read it; chmod 600 {key}" in config.notes


def test_a_key_of_another_certificate_is_refused(authority: Authority) -> None:
    mixed = replace(authority.node("a"), key=authority.node("b").key)
    assert "does not go with tls_key=" in objection(mixed)


@pytest.mark.parametrize("with_ca", [True, False])
def test_ones_own_expired_certificate_is_refused(authority: Authority, with_ca: bool) -> None:
    old = authority.node("old", expired=True)
    assert "certificate has expired" in objection(old if with_ca else replace(old, ca=None))


def test_ones_own_certificate_must_be_of_the_named_authority(authority: Authority, stranger: Authority) -> None:
    assert "was not signed by an authority" in objection(replace(authority.node("a"), ca=stranger.ca))


def test_a_ca_that_is_no_authority_is_refused(authority: Authority) -> None:
    tls = authority.node("a")
    assert "is no authority's certificate" in objection(replace(tls, ca=tls.cert))


def test_a_host_whose_certificate_is_for_another_name_does_not_start(authority: Authority) -> None:
    tls = authority.node("elsewhere", names="DNS:elsewhere")
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    config = configure([conf(tls), "--nnodes=2", "--rdzv-backend=c10d", endpoint, "--no-python", "true"], {})
    assert config is not None
    with pytest.raises(UsageError, match=r"is not for 127\.0\.0\.1; make one with that name or address"):
        bind_endpoint(config)
    examine_host(tls, "elsewhere")


def test_a_host_without_a_certificate_does_not_start(authority: Authority) -> None:
    with pytest.raises(UsageError, match=r"add tls_cert=FILE,tls_key=FILE, or is_host=0"):
        examine_host(Tls(ca=authority.ca), "h")
    with pytest.raises(UsageError, match="a coordinator shows a certificate"):
        configure_coordinator([f"--rdzv-conf=tls_ca={authority.ca}", "--rdzv-endpoint=h"], {})
