"""The plan of a restore: which commit, which shard for each rank, and who gives it."""

from hypothesis import given
from hypothesis import strategies as st

from ripstop.train.agreement import AgreementOffer, Commit, Compare, Digests, Holding, Restore, Start, Transfer, agree

OLD, NEW = Commit(1, 8, 2), Commit(1, 9, 2)


def decide(*holdings: Holding, digests: Digests = ()) -> Restore | Start:
    steps = agree(holdings)
    try:
        next(steps)
        while True:
            steps.send(digests)
    except StopIteration as end:
        return end.value


def held(commit: Commit, *shards: int, replicated: bool = False, sharded: bool = False) -> list[AgreementOffer]:
    return [AgreementOffer(commit, shard, replicated, sharded) for shard in shards]


def equal(*shards: int) -> Digests:
    return [{shard: {"model": "same"}} for shard in shards]


def test_ranks_whose_nodes_hold_their_shards_receive_nothing() -> None:
    assert decide(Holding(0, held(NEW, 0)), Holding(1, held(NEW, 1))) == Restore(NEW, (0, 1))


def test_the_newest_commit_that_all_ranks_have_is_restored() -> None:
    decision = decide(Holding(0, held(NEW, 0) + held(OLD, 0)), Holding(1, held(OLD, 1)))
    assert isinstance(decision, Restore) and decision.commit == OLD


def test_ranks_that_change_nodes_exchange_their_shards() -> None:
    decision = decide(Holding(0, held(NEW, 1)), Holding(1, held(NEW, 0)))
    assert decision == Restore(NEW, (0, 1), (Transfer(1, 0, 0), Transfer(0, 1, 1)))


def test_a_copy_on_another_node_replaces_a_lost_one() -> None:
    decision = decide(Holding(0, held(NEW, 0, 1)), Holding(1, []))
    assert decision == Restore(NEW, (0, 1), (Transfer(0, 1, 1),))


def test_the_ranks_of_a_node_take_turns_to_give() -> None:
    commit = Commit(1, 9, 4)
    full = Holding(0, held(commit, 0, 1, 2, 3))
    decision = decide(full, full, Holding(1, []), Holding(1, []))
    assert isinstance(decision, Restore)
    assert [each.giver for each in decision.transfers] == [0, 1]


def test_a_lost_shard_of_state_that_is_not_replicated_is_a_problem() -> None:
    assert decide(Holding(0, held(NEW, 0)), Holding(1, [])) == Start(
        "commit 9 lacks the shards of ranks 1, and the state is not known to be equal on all ranks"
    )


def test_a_node_without_memory_receives_replicated_state_once() -> None:
    commit = Commit(1, 9, 4)
    full, empty = Holding(0, held(commit, 0, 1, replicated=True)), Holding(1, [])
    decision = decide(full, full, empty, empty, digests=equal(0, 1))
    assert decision == Restore(commit, (0, 1, 0, 0), (Transfer(0, 2, 0),))


def test_replicated_state_restores_fewer_and_more_ranks() -> None:
    both = Holding(0, held(NEW, 0, 1))
    assert decide(both, digests=equal(0, 1)) == Restore(NEW, (0,))
    assert decide(both, both, both, digests=equal(0, 1)) == Restore(NEW, (0, 1, 0))


def test_ranks_with_different_values_do_not_restore_another_number_of_ranks() -> None:
    digests: Digests = [{0: {"model": "same", "best": "a"}}, {1: {"model": "same", "best": "b"}}]
    both = Holding(0, held(NEW, 0, 1))
    problem = "commit 9 was made by 2 ranks, this round has 3, and these values differ between ranks: best"
    assert decide(both, both, both, digests=digests) == Start(problem)


def test_sharded_state_of_another_number_of_ranks_is_read_from_all_shards() -> None:
    decision = decide(Holding(0, held(NEW, 0, sharded=True)), Holding(1, held(NEW, 1, sharded=True)), Holding(1, []))
    assert decision == Restore(NEW, holders=((0,), (1, 2)))


def test_a_lost_shard_of_sharded_state_is_a_problem() -> None:
    assert isinstance(decide(Holding(0, held(NEW, 0, sharded=True))), Start)


@st.composite
def jobs(draw: st.DrawFn) -> list[Holding]:
    """Up to three nodes with up to three ranks each, and what each node holds of a few commits."""
    commits = [Commit(round, number, size) for round, number, size in draw(
        st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)), max_size=3, unique=True)
    )]  # fmt: skip
    holdings = []
    for node in range(draw(st.integers(1, 3))):
        offers = [AgreementOffer(commit, draw(st.integers(0, commit.world_size - 1)), True)
                  for commit in commits for _ in range(draw(st.integers(0, 4)))]  # fmt: skip
        holdings += [Holding(node, offers)] * draw(st.integers(1, 3))
    return holdings


@given(jobs(), st.booleans())
def test_every_plan_can_be_carried_out(job: list[Holding], is_equal: bool) -> None:
    steps = agree(job)
    asked = None
    try:
        asked = next(steps)
        while True:
            for rank, shards in enumerate(asked.shards):
                assert all(any((o.commit, o.shard) == (asked.commit, s) for o in job[rank].offers) for s in shards)
            asked = steps.send(
                [{s: {"model": "same" if is_equal else str(s)} for s in shards} for shards in asked.shards]
            )
    except StopIteration as end:
        decision = end.value
    if isinstance(decision, Start):
        return
    there = {
        (holding.node, offer.shard) for holding in job for offer in holding.offers if offer.commit == decision.commit
    }
    for each in decision.transfers:
        assert (job[each.giver].node, each.shard) in there
        assert job[each.giver].node != job[each.receiver].node
    arrived = [(job[each.receiver].node, each.shard) for each in decision.transfers]
    assert len(set(arrived)) == len(arrived) and not there & set(arrived)
    assert {(holding.node, decision.shards[rank]) for rank, holding in enumerate(job)} <= there | set(arrived)
    if len({shard for _, shard in there}) == decision.commit.world_size == len(job):
        assert list(decision.shards) == list(range(len(job)))  # each rank its own
    elif asked is not None and asked.commit == decision.commit:
        assert is_equal or len({shard for _, shard in there}) == 1


def test_digests_are_asked_for_only_where_a_shard_stands_in_for_another() -> None:
    steps = agree([Holding(0, held(NEW, 0, 1)), Holding(1, held(NEW, 0, 1)), Holding(2, [])])
    assert next(steps) == Compare(NEW, ((0,), (1,), ()))
