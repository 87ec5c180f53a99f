import pytest
from msgspec.structs import replace

from ripstop.protocol.secret import Exchange, same

EXCHANGE = Exchange(run_id="job", node="a", challenge="c0ffee", answer="beef")


def test_both_sides_with_the_same_secret_agree() -> None:
    assert same(EXCHANGE.by_agent("s3cret"), replace(EXCHANGE).by_agent("s3cret"))
    assert same(EXCHANGE.by_coordinator("s3cret"), replace(EXCHANGE).by_coordinator("s3cret"))


def test_another_secret_proves_nothing() -> None:
    assert not same(EXCHANGE.by_agent("s3cret"), EXCHANGE.by_agent("other"))


def test_no_secret_is_a_secret_of_its_own() -> None:
    assert same(EXCHANGE.by_agent(""), EXCHANGE.by_agent(""))
    assert not same(EXCHANGE.by_agent(""), EXCHANGE.by_agent("s3cret"))


def test_a_proof_cannot_be_reflected_to_its_author() -> None:
    assert not same(EXCHANGE.by_agent("s3cret"), EXCHANGE.by_coordinator("s3cret"))


@pytest.mark.parametrize("field", ["run_id", "node", "challenge", "answer"])
def test_a_proof_holds_for_one_exchange_only(field: str) -> None:
    other = replace(EXCHANGE, **{field: "different"})
    assert not same(EXCHANGE.by_agent("s3cret"), other.by_agent("s3cret"))
    assert not same(EXCHANGE.by_coordinator("s3cret"), other.by_coordinator("s3cret"))


def test_parts_cannot_be_shifted_into_each_other() -> None:
    left = replace(EXCHANGE, run_id="jo", node="ba")
    assert not same(EXCHANGE.by_agent("s3cret"), left.by_agent("s3cret"))


def test_any_text_from_the_wire_can_be_compared() -> None:
    assert not same("naïve \udcff", EXCHANGE.by_agent("s3cret"))
