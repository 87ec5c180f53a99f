"""How an agent proves to the coordinator that it has the job's secret, and the coordinator to it.  Rules:

1.  An agent proves it twice: in its request, over an empty challenge (pre-authentication), then over a fresh challenge
    (handshake).  Only the second proof admits it.
2.  A pre-auth nonce is valid once.
3.  A web page cannot be an agent: a request with an `Origin` header is rejected.
4.  A peer without the secret does not learn the run id.
"""

import secrets
import time
from collections.abc import Callable

from aiohttp import web

from ripstop.model.errors import ProtocolError
from ripstop.protocol import secret
from ripstop.protocol.codec import decode, encode
from ripstop.protocol.limits import MAX_NAME, is_valid_name
from ripstop.protocol.messages import Challenge, Hello, Rejected, Welcome
from ripstop.transport.rejection_log import RejectionLog
from ripstop.transport.websocket import receive

MAX_REMEMBERED_NONCES = 4096


class AgentAuthentication:
    """The coordinator's side, for one job."""

    def __init__(
        self, run_id: str, token: str, lease: float, *, has_ended: Callable[[], bool], rejections: RejectionLog
    ) -> None:
        self._run_id = run_id
        self._token = token
        self._lease = lease
        self._has_ended = has_ended
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

    async def handshake(self, ws: web.WebSocketResponse, host: str) -> str | None:
        """The id of the node that authenticated itself; None if it did not."""
        challenge = secrets.token_hex(16)
        await ws.send_str(encode(Challenge(challenge)))
        text = await receive(ws)
        if text is None:
            return None
        try:
            hello = decode(text, (Hello,))
        except ProtocolError as error:
            await ws.send_str(encode(Rejected(str(error))))
            raise
        if rejected := self._check(hello, challenge):
            await ws.send_str(encode(rejected))
            self._log(host, hello, rejected)
            return None
        exchange = secret.Exchange(hello.run_id, hello.node, challenge, hello.nonce)
        await ws.send_str(encode(Welcome(exchange.coordinator_proof(self._token), self._lease, time.time())))
        return hello.node

    def _check(self, hello: Hello, challenge: str) -> Rejected | None:
        if not all(text and is_valid_name(text) for text in (hello.run_id, hello.node, hello.nonce)):
            return Rejected(f"a run id, a node id and a nonce are text of 1 to {MAX_NAME} characters, these are not")
        exchange = secret.Exchange(hello.run_id, hello.node, challenge, hello.nonce)
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
