"""Proofs that a peer has the job's secret, and the tokens and keys that are derived from it.

A proof is an HMAC-SHA256 over the side that proves (so that a proof cannot be reflected), the job, the node, both
sides' nonces (so that it cannot be replayed) and, if a job has several addresses, the one that the agent has dialed (so
that nobody can listen at one address and relay the handshake to another).  The caller makes the nonces.  An empty
secret works too, and proves nothing.  Pure.
"""

import hashlib
import hmac

from msgspec import Struct


class SecretProofExchange(Struct, frozen=True):
    """The values of one handshake that both sides have.

    `listed_address` is the address that the agent dialed, in a job with several addresses; otherwise empty.
    """

    run_id: str
    node: str
    coordinator_nonce: str
    agent_nonce: str
    listed_address: str = ""

    def agent_proof(self, token: str) -> str:
        return self._proof(token, "agent")

    def coordinator_proof(self, token: str) -> str:
        return self._proof(token, "coordinator")

    def _proof(self, token: str, prover: str) -> str:
        listed_address = [self.listed_address] if self.listed_address else []
        return _secret_mac(
            token, prover, self.run_id, self.node, self.coordinator_nonce, self.agent_nonce, *listed_address
        )


class ReplicaSecretProofExchange(Struct, frozen=True):
    """The values of a handshake between two nodes, one of which sends copies of its training state to the other."""

    run_id: str
    sender: str
    round: int
    receiver_nonce: str
    sender_nonce: str

    def sender_proof(self, token: str) -> str:
        return self._proof(token, "replica sender")

    def receiver_proof(self, token: str) -> str:
        return self._proof(token, "replica receiver")

    def _proof(self, token: str, prover: str) -> str:
        return _secret_mac(
            token, prover, self.run_id, self.sender, str(self.round), self.receiver_nonce, self.sender_nonce
        )


def derive_job_secret(key: str, context: str) -> str:
    """The secret of one job of the user who has this key."""
    return _secret_mac(key, "job secret", context)


def sign(token: str, run_id: str, text: str) -> str:
    """Sign a text that is stored where others can write."""
    return _secret_mac(token, "signature", run_id, text)


def api_token_from_secret(token: str, run_id: str) -> str:
    """The token for the HTTP API.  It is derived from the secret, which is never sent."""
    return _secret_mac(token, "api", run_id)


def state_key_from_secret(token: str, run_id: str, round: int) -> str:
    """The key with which the workers of a round know each other at a restore; "" without a secret."""
    return _secret_mac(token, "state", run_id, str(round)) if token else ""


def proofs_match(proof: str, expected: str) -> bool:
    """Compare proofs in constant time."""
    return hmac.compare_digest(_bytes_for_secret_mac(proof), _bytes_for_secret_mac(expected))


def _secret_mac(token: str, *texts: str) -> str:
    parts = [_bytes_for_secret_mac(text) for text in texts]
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)  # texts cannot be shifted into each other
    return hmac.new(_bytes_for_secret_mac(token), b"ripstop" + framed, hashlib.sha256).hexdigest()


def _bytes_for_secret_mac(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # never fails, for any string
