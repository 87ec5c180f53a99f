import pytest
from msgspec.structs import replace

from ripstop.protocol.secret import SecretProofExchange, proofs_match

EXCHANGE = SecretProofExchange(run_id="job", node="a", coordinator_nonce="c0ffee", agent_nonce="beef")


def test_two_sides_with_one_secret_agree() -> None:
    assert proofs_match(EXCHANGE.agent_proof("s3cret"), replace(EXCHANGE).agent_proof("s3cret"))
    assert proofs_match(EXCHANGE.coordinator_proof("s3cret"), replace(EXCHANGE).coordinator_proof("s3cret"))


def test_a_proof_from_another_secret_does_not_match() -> None:
    assert not proofs_match(EXCHANGE.agent_proof("s3cret"), EXCHANGE.agent_proof("other"))


def test_an_empty_secret_matches_only_an_empty_secret() -> None:
    assert proofs_match(EXCHANGE.agent_proof(""), EXCHANGE.agent_proof(""))
    assert not proofs_match(EXCHANGE.agent_proof(""), EXCHANGE.agent_proof("s3cret"))


def test_a_proof_cannot_be_reflected() -> None:
    assert not proofs_match(EXCHANGE.agent_proof("s3cret"), EXCHANGE.coordinator_proof("s3cret"))


@pytest.mark.parametrize("field", ["run_id", "node", "coordinator_nonce", "agent_nonce"])
def test_a_proof_is_valid_for_one_exchange_only(field: str) -> None:
    other = replace(EXCHANGE, **{field: "different"})
    assert not proofs_match(EXCHANGE.agent_proof("s3cret"), other.agent_proof("s3cret"))
    assert not proofs_match(EXCHANGE.coordinator_proof("s3cret"), other.coordinator_proof("s3cret"))


def test_the_boundary_between_two_fields_is_part_of_the_proof() -> None:
    left = replace(EXCHANGE, run_id="jo", node="ba")
    assert not proofs_match(EXCHANGE.agent_proof("s3cret"), left.agent_proof("s3cret"))


def test_any_received_text_can_be_compared() -> None:
    assert not proofs_match("naïve \udcff", EXCHANGE.agent_proof("s3cret"))
