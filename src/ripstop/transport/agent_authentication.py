"""How an agent proves to the coordinator that it has the job's secret, and the coordinator to it.

An agent proves it twice: in a header of its request (pre-authentication), then over a fresh challenge (handshake).
Parsing HTTP takes more than a millisecond of a process that also supervises workers.  So an agent sends its `Hello`,
computed over an empty challenge, in its request.  HTTP parses no request for the agents' path that is the first of its
connection.  Rules:

1.  Pre-authentication grants nothing.  Only the proof over the fresh challenge admits an agent, so a recorded request
    fails there at the latest.
2.  A pre-auth nonce is valid once.
3.  A web page cannot be an agent: a request with an `Origin` header is rejected.
4.  A peer without the secret does not learn the run id.
5.  Bytes that cannot be an agent's request go to HTTP at once, unchanged.
6.  A request for the agents' path, in any form, becomes an agent's connection if its pre-authentication is valid
    (`agent_connection.py`).  Otherwise the rejection is the only answer.
7.  This module has no timer.  `connection_limits.py` closes a peer that sends nothing.
"""

import asyncio
import secrets
import time
from collections.abc import Callable

from ripstop.coordinator.job_types import JobSettings
from ripstop.model.errors import ProtocolError
from ripstop.protocol import secret
from ripstop.protocol.codec import decode
from ripstop.protocol.limits import MAX_NAME, is_name_within_limits
from ripstop.protocol.messages import Challenge, Hello, Rejected, Welcome
from ripstop.transport.agent_request import (
    BAD_REQUEST,
    END_OF_HEAD,
    agent_request_path,
    agent_request_rejection,
    request_header,
)
from ripstop.transport.rejection_log import RejectionLog
from ripstop.transport.websocket import AGENT_PATH, PREAUTH_HEADER

MAX_REMEMBERED_NONCES = 4096
MAX_REQUEST_HEAD_BYTES = 8192  # more than an agent's request needs
PRINTABLE = bytes(range(0x20, 0x7F))  # the bytes of a valid request line


class AgentAuthentication:
    """The coordinator's side, for one job."""

    def __init__(
        self,
        settings: JobSettings,
        has_ended: Callable[[], bool],
        token: str,
        rejections: RejectionLog,
        listed_address: str = "",
    ) -> None:
        self._listed_address = listed_address  # this server's address, if the job has several
        self._run_id = settings.run_id
        self._lease = settings.timing.lease
        self._has_ended = has_ended
        self._token = token
        self._rejections = rejections
        self._nonces: dict[str, None] = {}  # used in pre-authentication, the oldest first

    def pre_authenticate(self, host: str, text: str, origin: str | None) -> Rejected | None:
        """Check the headers of an agent's request; None if they are valid, which uses up the nonce."""
        if origin is not None:
            self._rejections.log(host, f"a web page of {origin[:MAX_NAME]} tried to join the job", kind="page")
            return Rejected("a web page cannot join a job; start a node with ripstop run")
        try:
            hello = decode(text or "{}", (Hello,))  # no header: another version, or not an agent
        except ProtocolError as error:
            self._rejections.log(host, str(error), kind="protocol")
            return Rejected(str(error))
        rejected = self._check(hello, challenge="")
        if rejected is None and hello.nonce in self._nonces:
            rejected = Rejected("a pre-auth nonce is valid once; connect again with a new nonce", final=False)
        if rejected is not None:
            self._log(host, hello, rejected)
            return rejected
        self._nonces[hello.nonce] = None
        if len(self._nonces) > MAX_REMEMBERED_NONCES:
            del self._nonces[next(iter(self._nonces))]
        return None

    @staticmethod
    def new_challenge() -> Challenge:
        return Challenge(secrets.token_hex(16))

    def answer(self, text: str, challenge: Challenge, host: str) -> Rejected | tuple[str, Welcome]:
        """The answer to an agent's `Hello`, with the id of the node if it has authenticated itself."""
        hello = decode(text, (Hello,))
        if rejected := self._check(hello, challenge.nonce):
            self._log(host, hello, rejected)
            return rejected
        exchange = secret.SecretProofExchange(
            hello.run_id, hello.node, challenge.nonce, hello.nonce, self._listed_address
        )
        return hello.node, Welcome(exchange.coordinator_proof(self._token), self._lease, time.time())

    def _check(self, hello: Hello, challenge: str) -> Rejected | None:
        if not all(text and is_name_within_limits(text) for text in (hello.run_id, hello.node, hello.nonce)):
            return Rejected(f"a run id, a node id and a nonce are text of 1 to {MAX_NAME} characters, these are not")
        exchange = secret.SecretProofExchange(hello.run_id, hello.node, challenge, hello.nonce, self._listed_address)
        has_secret = secret.proofs_match(hello.proof, exchange.agent_proof(self._token))
        if hello.run_id != self._run_id:
            name = f"job {self._run_id!r}" if has_secret and self._token else "another job"  # rule 4
            return Rejected(
                f"this is the coordinator of {name}, not of {hello.run_id!r}; "
                "use another --rdzv-endpoint, or the same --rdzv-id on every node",
                final=not self._has_ended(),  # a job that has ended soon leaves the port to the next one
            )
        if not has_secret:
            return Rejected("the job secret does not match the coordinator's; set the same RIPSTOP_TOKEN on every node")
        return None

    def _log(self, host: str, hello: Hello, rejected: Rejected) -> None:
        self._rejections.log(host, rejected.why, kind="secret" if hello.run_id == self._run_id else "job")


# pre-authentication -------------------------------------------------------------------------------------------------


class AgentPreAuthenticationProtocol(asyncio.Protocol):
    """One connection, until it goes to HTTP or is rejected.

    `check` gets the pre-auth header and the `Origin` header.  `accept` gets the bytes received so far, and whether the
    peer may become an agent.
    """

    def __init__(
        self,
        check: Callable[[asyncio.Transport, str, str | None], Rejected | None],
        accept: Callable[[asyncio.Transport, bytes, bool], None],
        on_lost: Callable[[asyncio.Transport], None],
    ) -> None:
        self._check = check
        self._accept = accept
        self._on_lost = on_lost
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        self._received += data
        line, newline, _ = self._received.partition(b"\r\n")
        if line.rstrip(b"\r").strip(PRINTABLE) or (newline and agent_request_path(line) != AGENT_PATH):
            self._accept(self._transport, self._received, False)
        elif newline and (end := self._received.find(END_OF_HEAD, 0, MAX_REQUEST_HEAD_BYTES)) >= 0:
            head = self._received[: end + len(END_OF_HEAD)]
            text, origin = request_header(head, PREAUTH_HEADER) or "", request_header(head, "Origin")
            if rejected := self._check(self._transport, text, origin):
                self._reject(agent_request_rejection(head, rejected))
            else:
                self._accept(self._transport, self._received, True)
        elif len(self._received) >= MAX_REQUEST_HEAD_BYTES:
            self._reject(BAD_REQUEST)

    def _reject(self, response: bytes) -> None:
        assert self._transport is not None
        self._transport.write(response)
        self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        assert self._transport is not None
        self._on_lost(self._transport)
