"""Which node gets which rank."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from ripstop.coordinator.ranks import Candidate, denied_ranks, order, places
from ripstop.model.round import Address, Node, RankBy

STORE = Address("h0", 4000)


def node(
    name: str,
    slots: int = 1,
    role: str = "default",
    requested_rank: int | None = None,
    *,
    host: str = "",
    number: int | None = None,
    label: str = "",
) -> Node:
    return Node(name, host or f"host-{name}", slots, role, requested_rank, number, label)


def names(*candidates: Candidate, by: RankBy = RankBy.JOIN) -> list[str]:
    return [n.id for n in order(candidates, by)]


def new_nodes(*nodes: Node, by: RankBy) -> list[str]:
    return names(*((n, None) for n in nodes), by=by)


@st.composite
def candidate_lists(draw: st.DrawFn) -> list[Candidate]:
    """Survivors with distinct ranks, and new nodes, in any order."""
    before = draw(st.lists(st.integers(0, 12), unique=True, max_size=8))
    count = draw(st.integers(0 if before else 1, 6))
    ranks: list[int | None] = [*before, *[None] * count]
    ranks = draw(st.permutations(ranks))
    return [
        (
            node(
                f"n{i}",
                slots=draw(st.integers(1, 8)),
                role=draw(st.sampled_from(["trainer", "reader"])),
                requested_rank=draw(st.none() | st.integers(-2, 12)),
                host=draw(st.sampled_from(["10.0.0.9", "10.0.0.10", "fd00::7", "fe80::1%eth0", "gpu-9", "", "1.2"])),
                number=draw(st.none() | st.integers(-1, 20)),
                label=draw(st.text(max_size=3) | st.sampled_from(["rack9", "rack10", "9" * 5000])),
            ),
            rank,
        )
        for i, rank in enumerate(ranks)
    ]


ANY_ORDER = st.sampled_from(RankBy)


@given(candidate_lists(), ANY_ORDER)
def test_every_node_gets_exactly_one_rank(candidates: list[Candidate], by: RankBy) -> None:
    assert sorted(n.id for n in order(candidates, by)) == sorted(n.id for n, _ in candidates)


@given(candidate_lists(), ANY_ORDER)
def test_a_survivor_keeps_its_rank_where_the_new_size_allows_it(candidates: list[Candidate], by: RankBy) -> None:
    ranked = order(candidates, by)
    for survivor, before in candidates:
        if before is not None and before < len(candidates):
            assert ranked[before] == survivor


@given(candidate_lists(), st.sampled_from([RankBy.ADDRESS, RankBy.SLOT, RankBy.LABEL]), st.randoms())
def test_ranks_by_a_property_do_not_depend_on_the_join_order(
    candidates: list[Candidate], by: RankBy, random: Random
) -> None:
    alike = {RankBy.ADDRESS: "host", RankBy.SLOT: "number", RankBy.LABEL: "label"}[by]
    seen: set[object] = set()
    distinct = [c for c in candidates if (what := getattr(c[0], alike)) not in seen and not seen.add(what)]
    ranked = order(distinct, by)
    random.shuffle(distinct)
    assert order(distinct, by) == ranked


@given(candidate_lists(), ANY_ORDER)
def test_every_rank_request_is_granted_or_denied_with_a_reason(candidates: list[Candidate], by: RankBy) -> None:
    ranked = order(candidates, by)
    denials = {name: (wish, rank) for name, wish, rank, why in denied_ranks(candidates, ranked) if why}
    for rank, holder in enumerate(ranked):
        keeps = (holder, rank) in candidates
        if holder.requested_rank is None or rank == holder.requested_rank or keeps:
            assert holder.id not in denials
        else:
            assert denials[holder.id] == (holder.requested_rank, rank)


@given(candidate_lists(), ANY_ORDER)
def test_a_rank_request_is_denied_only_for_a_survivor_or_an_earlier_request(
    candidates: list[Candidate], by: RankBy
) -> None:
    ranked, before = order(candidates, by), {n.id: rank for n, rank in candidates}
    for new_node, rank in candidates:
        wish = new_node.requested_rank
        if rank is None and wish is not None and 0 <= wish < len(ranked) and ranked[wish] != new_node:
            winner = ranked[wish]
            assert before[winner.id] is not None or winner.requested_rank == wish


@given(candidate_lists(), ANY_ORDER)
def test_displaced_survivors_come_before_new_nodes_without_a_request(candidates: list[Candidate], by: RankBy) -> None:
    ranked = [n.id for n in order(candidates, by)]
    displaced = [
        n.id for n, rank in candidates if rank is not None and rank >= len(ranked) and n.requested_rank is None
    ]
    plain = [n.id for n, rank in candidates if rank is None and n.requested_rank is None]
    for survivor in displaced:
        for new_node in plain:
            assert ranked.index(survivor) < ranked.index(new_node)


@given(candidate_lists())
def test_ranks_offsets_and_sizes_are_dense_for_any_slots_and_roles(candidates: list[Candidate]) -> None:
    nodes = order(candidates)
    table = places(nodes, round=3, store=STORE, restarts=2)
    world = sum(n.slots for n in nodes)
    ranks = [r for p in table for r in range(p.first_rank, p.first_rank + p.slots)]
    assert ranks == list(range(world))
    assert [p.group_rank for p in table] == list(range(len(nodes)))
    for role in {n.role for n in nodes}:
        mine = [(n, p) for n, p in zip(nodes, table, strict=True) if n.role == role]
        size = sum(n.slots for n, _ in mine)
        assert [r for n, p in mine for r in range(p.role_first_rank, p.role_first_rank + n.slots)] == list(range(size))
        assert {p.role_size for _, p in mine} == {size}
    assert {(p.round, p.group_size, p.world_size, p.store, p.restarts) for p in table} == {
        (3, len(nodes), world, STORE, 2)
    }


def test_a_replacement_takes_the_vacated_rank() -> None:
    assert names((node("a"), 0), (node("c"), 2), (node("new"), None)) == ["a", "new", "c"]


def test_only_the_last_moves_when_one_in_the_middle_is_lost() -> None:
    assert names((node("a"), 0), (node("c"), 2), (node("d"), 3)) == ["a", "d", "c"]


def test_a_growing_job_changes_no_rank() -> None:
    assert names((node("b"), 1), (node("a"), 0), (node("new"), None)) == ["a", "b", "new"]


def test_new_nodes_get_ranks_in_the_order_given() -> None:
    assert names((node("x"), None), (node("a"), 1), (node("y"), None)) == ["x", "a", "y"]


def test_first_ranks_follow_the_requests() -> None:
    assert names((node("x", requested_rank=2), None), (node("y", requested_rank=0), None), (node("z"), None)) == [
        "y",
        "z",
        "x",
    ]


def test_a_rank_request_does_not_displace_a_survivor() -> None:
    assert names((node("a"), 0), (node("x", requested_rank=0), None)) == ["a", "x"]


def test_a_rank_request_out_of_range_is_ignored() -> None:
    assert names((node("x", requested_rank=-1), None), (node("y", requested_rank=7), None), (node("z"), None)) == [
        "x",
        "y",
        "z",
    ]


def test_by_address_neighbours_in_the_network_are_neighbours_in_rank() -> None:
    hosts = ["gpu-10", "10.0.0.10", "fd00::7", "gpu-9", "10.0.0.9", "9.9.9.9", "fd00::6%eth0"]
    ranked = new_nodes(*(node(host, host=host) for host in hosts), by=RankBy.ADDRESS)
    assert ranked == ["9.9.9.9", "10.0.0.9", "10.0.0.10", "fd00::6%eth0", "fd00::7", "gpu-9", "gpu-10"]


def test_by_slot_ranks_follow_the_numbers_and_nodes_without_one_come_last() -> None:
    numbers = {"x": None, "ten": 10, "two": 2, "zero": 0}
    ranked = new_nodes(*(node(name, number=number) for name, number in numbers.items()), by=RankBy.SLOT)
    assert ranked == ["zero", "two", "ten", "x"]


def test_nodes_get_their_old_ranks_again_after_a_replacement() -> None:
    zero, one, two, other = (node(name, number=n) for name, n in (("zero", 0), ("one", 1), ("two", 2), ("other", 1)))
    assert names((zero, 0), (one, 1), (two, 2), by=RankBy.SLOT) == ["zero", "one", "two"]
    assert names((zero, 0), (two, 2), by=RankBy.SLOT) == ["zero", "two"]
    assert names((zero, 0), (two, 1), (other, None), by=RankBy.SLOT) == ["zero", "other", "two"]


def test_by_label_nodes_of_a_rack_are_neighbours_in_join_order() -> None:
    labels = {"a": "rack10", "b": "rack9", "c": "rack10", "d": "rack9"}
    ranked = new_nodes(*(node(name, label=label) for name, label in labels.items()), by=RankBy.LABEL)
    assert ranked == ["b", "d", "a", "c"]


def test_new_nodes_are_sorted_and_survivors_are_not() -> None:
    survivors = [(node("z", label="r9"), 0), (node("a", label="r1"), 3)]
    late = [(node("y", label="r8"), None), (node("b", label="r2"), None)]
    assert names(*survivors, *late, by=RankBy.LABEL) == ["z", "b", "y", "a"]


def test_a_rank_request_comes_before_the_sort_order() -> None:
    assert new_nodes(node("a", label="r1"), node("b", label="r2", requested_rank=0), by=RankBy.LABEL) == ["b", "a"]


def test_a_denied_rank_request_names_the_holder_and_the_reason() -> None:
    candidates = [
        (node("kept", requested_rank=1), 0),
        (node("late", requested_rank=0), None),
        (node("first", requested_rank=2), None),
        (node("second", requested_rank=2), None),
        (node("far", requested_rank=9), None),
    ]
    assert list(denied_ranks(candidates, order(candidates))) == [
        ("late", 0, 1, "node kept has that rank and keeps it"),
        ("second", 2, 3, "node first requested it too and comes first"),
        ("far", 9, 4, "the ranks of 5 nodes are 0 to 4"),
    ]
