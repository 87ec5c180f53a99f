"""TLS between agents and the coordinator: contexts from certificates, and words for what is wrong with them.

TLS 1.3 and nothing older, since both ends are ours.  An agent checks the coordinator's certificate against `ca` (the
system's authorities without one) and the endpoint's host name; a coordinator with a `ca` wants every agent to show a
certificate of it.  What can be wrong with one's own certificates is found at the start, by a handshake in memory.
"""

import asyncio
import socket
import ssl
import time
from contextlib import suppress
from pathlib import Path

from ripstop.model.config import Tls
from ripstop.model.errors import UsageError

CLIENT_HELLO = b"\x16"  # the first byte of a TLS connection
WRONG_PURPOSE = 26  # OpenSSL's X509_V_ERR_INVALID_PURPOSE
WRONG_NAME = (62, 64)  # …_HOSTNAME_MISMATCH, …_IP_ADDRESS_MISMATCH
UNKNOWN_SIGNER = (18, 19, 20, 21)  # self-signed, or nobody that is trusted has signed it


def for_coordinator(tls: Tls) -> ssl.SSLContext:
    """What the coordinator accepts connections with."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, tls)
    if tls.ca is not None:
        context.load_verify_locations(tls.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def for_agent(tls: Tls) -> ssl.SSLContext:
    """What an agent connects with."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, tls)
    if tls.ca is None:
        context.load_default_certs()
    else:
        context.load_verify_locations(tls.ca)
    return context


def _context(side: int, tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key, password=_no_password)
    return context


def _no_password() -> str:
    raise UsageError("tls_key: is encrypted, and nobody is there to type its password; give a key without one")


# one's own certificates -----------------------------------------------------------------------------------------------


def examine(name: str, tls: Tls) -> None:
    """Refuse certificates that no peer would accept; `name` is what the user calls `--rdzv-conf`."""
    if tls.ca is not None:
        _examine_ca(f"{name} tls_ca={tls.ca}", tls.ca)
    if tls.cert is None or tls.key is None:
        return
    label = f"{name} tls_cert={tls.cert}"
    try:
        context = for_coordinator(tls)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(f"{label}: does not go with tls_key={tls.key}; name the key it was made with") from error
        raise UsageError(
            f"{label}, tls_key={tls.key}: no certificate and key in PEM form ({_reason(error)}); name such files"
        ) from error
    try:
        _shake_hands(context, _trusting(tls, tls.cert))
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == WRONG_PURPOSE:
            return  # good for an agent alone; a host is asked more
        raise UsageError(f"{label}: {_objection(error)}") from error


def examine_host(tls: Tls, host: str) -> None:
    """Refuse a certificate that agents would not take for the endpoint's."""
    if tls.cert is None:
        raise UsageError(
            f"--rdzv-conf tls_ca={tls.ca}: this node hosts the coordinator, which shows a certificate; "
            "add tls_cert=FILE,tls_key=FILE, or is_host=0 if it is to be elsewhere"
        )
    agent = _trusting(tls, tls.cert)
    agent.check_hostname = True
    try:
        _shake_hands(for_coordinator(Tls(tls.cert, tls.key)), agent, host)
    except ssl.SSLCertVerificationError as error:
        raise UsageError(f"--rdzv-conf tls_cert={tls.cert}: {_objection(error)}") from error


def _examine_ca(label: str, path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise UsageError(f"{label}: no certificate in PEM form ({_reason(error)}); name such a file") from error
    authorities = context.get_ca_certs()
    if not authorities:
        raise UsageError(
            f"{label}: is no authority's certificate (no CA:TRUE in it), so it can have signed no other; "
            "name the one that signed the nodes'"
        )
    ends = [str(authority["notAfter"]) for authority in authorities]
    if all(ssl.cert_time_to_seconds(end) < time.time() for end in ends):
        raise UsageError(f"{label}: has expired ({ends[-1]}); renew the authority, or mend this machine's clock")


def _trusting(tls: Tls, cert: Path) -> ssl.SSLContext:
    """An agent of the same job; without a `ca` it trusts this one certificate, as who signed it is not known here."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(tls.ca or cert)
    if tls.ca is None:
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    else:
        context.load_cert_chain(cert, tls.key, password=_no_password)
    return context


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "") -> None:
    """A handshake without a network; raises what the two would object to."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=host or None),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(3):  # there, back, and there again
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()


# words ----------------------------------------------------------------------------------------------------------------


def describe(error: Exception) -> str:
    """What TLS objects to in a peer, and what to do."""
    match error:
        case ssl.SSLCertVerificationError():
            return f"its certificate {_objection(error)}"
        case ssl.SSLError(reason="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
            return "it showed no certificate, and this job's tls_ca wants one; give that node tls_cert and tls_key"
        case ssl.SSLError(reason="WRONG_VERSION_NUMBER" | "RECORD_LAYER_FAILURE"):
            return (
                "it does not speak TLS; give the coordinator tls_cert and tls_key, or take tls_… from --rdzv-conf here"
            )
        case ssl.SSLError():
            return f"TLS failed: {_reason(error)}"
        case _:
            return f"TLS failed: {error}"


def _objection(error: ssl.SSLCertVerificationError) -> str:
    match error.verify_code:
        case code if code in WRONG_NAME:
            said = error.verify_message.partition("certificate is not valid for")[2].strip(" '.") or "the endpoint"
            return f"is not for {said}; make one with that name or address as subjectAltName, or mend --rdzv-endpoint"
        case code if code in UNKNOWN_SIGNER:
            return (
                f"was not signed by an authority that is trusted here ({error.verify_message}); name the right tls_ca"
            )
        case _:
            return f"is not good ({error.verify_message}); renew it, or mend this machine's clock if that is wrong"


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()


# the wire -------------------------------------------------------------------------------------------------------------


async def speaks_tls(connection: socket.socket) -> bool:
    """Does a connection begin as TLS does?  Nothing is taken from it."""
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    readable = loop.create_future()
    loop.add_reader(connection, lambda: None if readable.done() else readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(connection)
    return connection.recv(1, socket.MSG_PEEK) in (CLIENT_HELLO, b"")
