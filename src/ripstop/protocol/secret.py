"""Proofs of knowing the job's secret.

HMAC-SHA256 over everything that makes an exchange unique: who proves (so that a proof cannot be sent back to its
author), the job, the node, and both sides' nonces (so that none can be used twice).  The nonces are arguments.  An
empty secret takes the same path: it proves nothing, and costs nothing.  Pure.
"""

import hashlib
import hmac

from msgspec import Struct


class Exchange(Struct, frozen=True):
    """One handshake, as both sides saw it."""

    run_id: str
    node: str
    challenge: str  # the coordinator's nonce
    answer: str  # the agent's nonce

    def by_agent(self, token: str) -> str:
        """The agent's proof."""
        return self._proof(token, "agent")

    def by_coordinator(self, token: str) -> str:
        """The coordinator's proof."""
        return self._proof(token, "coordinator")

    def _proof(self, token: str, prover: str) -> str:
        return _mac(token, prover, self.run_id, self.node, self.challenge, self.answer)


def sign(token: str, run_id: str, text: str) -> str:
    """The proof that a text, left where others can write, comes from the job."""
    return _mac(token, "signature", run_id, text)


def api_token(token: str, run_id: str) -> str:
    """What operators show to steer the job over HTTP: made of the secret, which itself is never sent."""
    return _mac(token, "api", run_id)


def same(proof: str, expected: str) -> bool:
    """Compare proofs in a time that tells nothing."""
    return hmac.compare_digest(_bytes(proof), _bytes(expected))


def _mac(token: str, *words: str) -> str:
    parts = [_bytes(word) for word in words]
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)  # no part can pose as two
    return hmac.new(_bytes(token), b"ripstop" + framed, hashlib.sha256).hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # whatever string arrives from the wire has bytes
