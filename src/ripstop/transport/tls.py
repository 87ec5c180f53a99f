"""TLS between agents and the coordinator: contexts, checks of the own certificates, and error texts.

Rules:

1.  TLS 1.3 is required, because both ends are ripstop.
2.  An agent verifies the coordinator's certificate against `ca` (by default, the system's authorities) and against the
    endpoint's host name.
3.  A coordinator with a `ca` requires a certificate signed by it from every agent.
4.  A node checks its own certificates at the start, by a handshake in memory.
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
# OpenSSL's X509_V_ERR_…
WRONG_PURPOSE = 26  # INVALID_PURPOSE
WRONG_NAMES = (62, 64)  # HOSTNAME_MISMATCH, IP_ADDRESS_MISMATCH
UNTRUSTED_SIGNERS = (18, 19, 20, 21)  # self-signed, or signed by an unknown authority


def server_context(tls: Tls) -> ssl.SSLContext:
    """For the coordinator."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, tls)
    if tls.ca is not None:
        context.load_verify_locations(tls.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(tls: Tls) -> ssl.SSLContext:
    """For agents and operators."""
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
        context.load_cert_chain(tls.cert, tls.key, password=_refuse_tls_key_password)
    return context


def _refuse_tls_key_password() -> str:
    raise UsageError("tls_key: is encrypted, and ripstop cannot ask for its password; give a key without one")


# checks of the own certificates ---------------------------------------------------------------------------------------


def check_tls_certificates(name: str, tls: Tls) -> None:
    """Raise `UsageError` for certificates that no peer would accept; `name` is the flag or variable they come from."""
    if tls.ca is not None:
        _check_tls_ca(f"{name} tls_ca={tls.ca}", tls.ca)
    if tls.cert is None or tls.key is None:
        return
    label = f"{name} tls_cert={tls.cert}"
    try:
        context = server_context(tls)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(f"{label}: does not match tls_key={tls.key}; give the key of this certificate") from error
        reason = _tls_error_reason(error)
        raise UsageError(
            f"{label}, tls_key={tls.key}: not a certificate and a key in PEM form ({reason}); give PEM files"
        ) from error
    try:
        _handshake_in_memory(context, _tls_peer_context(tls, tls.cert))
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == WRONG_PURPOSE:
            return  # valid for an agent; `check_coordinator_certificate` requires more
        raise UsageError(f"{label}: {_tls_certificate_problem(error)}") from error


def check_coordinator_certificate(tls: Tls, host: str) -> None:
    """Raise `UsageError` for a certificate that agents would not accept for the endpoint's host."""
    if tls.cert is None:
        raise UsageError(
            f"--rdzv-conf tls_ca={tls.ca}: this node hosts the coordinator, which needs a certificate; "
            "add tls_cert=FILE,tls_key=FILE, or is_host=0 if another node is the host"
        )
    agent = _tls_peer_context(tls, tls.cert)
    agent.check_hostname = True
    try:
        _handshake_in_memory(server_context(Tls(tls.cert, tls.key)), agent, host)
    except ssl.SSLCertVerificationError as error:
        raise UsageError(f"--rdzv-conf tls_cert={tls.cert}: {_tls_certificate_problem(error)}") from error


def _check_tls_ca(label: str, path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise UsageError(
            f"{label}: not a certificate in PEM form ({_tls_error_reason(error)}); give a PEM file"
        ) from error
    authorities = context.get_ca_certs()
    if not authorities:
        raise UsageError(
            f"{label}: is not the certificate of an authority (it has no CA:TRUE), so it cannot sign others; "
            "give the certificate of the authority that signed the nodes' certificates"
        )
    ends = [str(authority["notAfter"]) for authority in authorities]
    if all(ssl.cert_time_to_seconds(end) < time.time() for end in ends):
        raise UsageError(f"{label}: has expired ({ends[-1]}); renew it, or correct this machine's clock")


def _tls_peer_context(tls: Tls, cert: Path) -> ssl.SSLContext:
    """The context of another agent of the job.  Without a `ca` it trusts this certificate: the signer is unknown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(tls.ca or cert)
    if tls.ca is None:
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    else:
        context.load_cert_chain(cert, tls.key, password=_refuse_tls_key_password)
    return context


def _handshake_in_memory(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "") -> None:
    """A handshake without a network; raises the error that either side would raise."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=host or None),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(3):  # there, back, and there again
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()


# error texts ----------------------------------------------------------------------------------------------------------


def describe_tls_error(error: Exception) -> str:
    """Why TLS rejects a peer, and what to do."""
    match error:
        case ssl.SSLCertVerificationError():
            return f"its certificate {_tls_certificate_problem(error)}"
        case ssl.SSLError(reason="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
            return "it sent no certificate, and this job's tls_ca requires one; give that node tls_cert and tls_key"
        case ssl.SSLError(reason="WRONG_VERSION_NUMBER" | "RECORD_LAYER_FAILURE"):
            return (
                "it does not use TLS; give the coordinator tls_cert and tls_key, or remove tls_… from --rdzv-conf here"
            )
        case ssl.SSLError():
            return f"TLS failed: {_tls_error_reason(error)}"
        case _:
            return f"TLS failed: {error}"


def _tls_certificate_problem(error: ssl.SSLCertVerificationError) -> str:
    match error.verify_code:
        case code if code in WRONG_NAMES:
            name = error.verify_message.partition("certificate is not valid for")[2].strip(" '.") or "the endpoint"
            return f"is not for {name}; add it as subjectAltName to the certificate, or correct --rdzv-endpoint"
        case code if code in UNTRUSTED_SIGNERS:
            return (
                f"was not signed by an authority that is trusted here ({error.verify_message}); give the right tls_ca"
            )
        case _:
            return f"is not valid ({error.verify_message}); renew it, or correct this machine's clock if it is wrong"


def _tls_error_reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()


# detection ------------------------------------------------------------------------------------------------------------


async def starts_tls(connection: socket.socket) -> bool:
    """Whether the first byte starts TLS; the byte stays in the socket."""
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    readable = loop.create_future()
    loop.add_reader(connection, lambda: None if readable.done() else readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(connection)
    return connection.recv(1, socket.MSG_PEEK) in (CLIENT_HELLO, b"")
