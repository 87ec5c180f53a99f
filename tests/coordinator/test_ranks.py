"""Who gets which rank."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from ripstop.coordinator.ranks import Candidate, denied, order, places
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


def newcomers(*nodes: Node, by: RankBy) -> list[str]:
    return names(*((n, None) for n in nodes), by=by)


@st.composite
def gatherings(draw: st.DrawFn) -> list[Candidate]:
    """Survivors, with distinct ranks of a round of before, and newcomers, in any order."""
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


ANY_WAY = st.sampled_from(RankBy)


@given(gatherings(), ANY_WAY)
def test_everybody_gets_exactly_one_rank(gathering: list[Candidate], by: RankBy) -> None:
    assert sorted(n.id for n in order(gathering, by)) == sorted(n.id for n, _ in gathering)


@given(gatherings(), ANY_WAY)
def test_a_survivor_keeps_its_rank_where_the_new_size_allows_it(gathering: list[Candidate], by: RankBy) -> None:
    seated = order(gathering, by)
    for survivor, before in gathering:
        if before is not None and before < len(gathering):
            assert seated[before] == survivor


@given(gatherings(), st.sampled_from([RankBy.ADDRESS, RankBy.SLOT, RankBy.LABEL]), st.randoms())
def test_ranks_by_what_a_node_is_do_not_depend_on_who_came_first(
    gathering: list[Candidate], by: RankBy, random: Random
) -> None:
    alike = {RankBy.ADDRESS: "host", RankBy.SLOT: "number", RankBy.LABEL: "label"}[by]
    seen: set[object] = set()
    distinct = [c for c in gathering if (what := getattr(c[0], alike)) not in seen and not seen.add(what)]
    seated = order(distinct, by)
    random.shuffle(distinct)
    assert order(distinct, by) == seated


@given(gatherings(), ANY_WAY)
def test_every_wish_is_granted_or_denied_with_a_reason(gathering: list[Candidate], by: RankBy) -> None:
    seated = order(gathering, by)
    told = {name: (wish, rank) for name, wish, rank, why in denied(gathering, seated) if why}
    for rank, who in enumerate(seated):
        keeps = (who, rank) in gathering
        if who.requested_rank is None or rank == who.requested_rank or keeps:
            assert who.id not in told
        else:
            assert told[who.id] == (who.requested_rank, rank)


@given(gatherings(), ANY_WAY)
def test_a_newcomer_that_wishes_for_a_rank_loses_it_only_to_somebody_with_a_claim(
    gathering: list[Candidate], by: RankBy
) -> None:
    seated, before = order(gathering, by), {n.id: rank for n, rank in gathering}
    for newcomer, rank in gathering:
        wish = newcomer.requested_rank
        if rank is None and wish is not None and 0 <= wish < len(seated) and seated[wish] != newcomer:
            winner = seated[wish]
            assert before[winner.id] is not None or winner.requested_rank == wish


@given(gatherings(), ANY_WAY)
def test_survivors_without_a_seat_come_before_newcomers_without_a_wish(gathering: list[Candidate], by: RankBy) -> None:
    seated = [n.id for n in order(gathering, by)]
    homeless = [n.id for n, rank in gathering if rank is not None and rank >= len(seated) and n.requested_rank is None]
    plain = [n.id for n, rank in gathering if rank is None and n.requested_rank is None]
    for survivor in homeless:
        for newcomer in plain:
            assert seated.index(survivor) < seated.index(newcomer)


@given(gatherings())
def test_ranks_offsets_and_sizes_are_dense_for_any_slots_and_roles(gathering: list[Candidate]) -> None:
    nodes = order(gathering)
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


def test_a_growing_job_moves_nobody() -> None:
    assert names((node("b"), 1), (node("a"), 0), (node("new"), None)) == ["a", "b", "new"]


def test_newcomers_are_seated_in_the_order_given() -> None:
    assert names((node("x"), None), (node("a"), 1), (node("y"), None)) == ["x", "a", "y"]


def test_first_ranks_follow_the_wishes() -> None:
    assert names((node("x", requested_rank=2), None), (node("y", requested_rank=0), None), (node("z"), None)) == [
        "y",
        "z",
        "x",
    ]


def test_a_wish_does_not_unseat_a_survivor() -> None:
    assert names((node("a"), 0), (node("x", requested_rank=0), None)) == ["a", "x"]


def test_a_wish_that_no_round_can_grant_is_no_wish() -> None:
    assert names((node("x", requested_rank=-1), None), (node("y", requested_rank=7), None), (node("z"), None)) == [
        "x",
        "y",
        "z",
    ]


def test_by_address_neighbours_in_the_network_are_neighbours_in_rank() -> None:
    hosts = ["gpu-10", "10.0.0.10", "fd00::7", "gpu-9", "10.0.0.9", "9.9.9.9", "fd00::6%eth0"]
    seated = newcomers(*(node(host, host=host) for host in hosts), by=RankBy.ADDRESS)
    assert seated == ["9.9.9.9", "10.0.0.9", "10.0.0.10", "fd00::6%eth0", "fd00::7", "gpu-9", "gpu-10"]


def test_by_slot_ranks_follow_the_numbers_and_who_has_none_comes_last() -> None:
    numbers = {"x": None, "ten": 10, "two": 2, "zero": 0}
    seated = newcomers(*(node(name, number=number) for name, number in numbers.items()), by=RankBy.SLOT)
    assert seated == ["zero", "two", "ten", "x"]


def test_nodes_have_their_old_ranks_again_when_the_one_between_them_is_replaced() -> None:
    zero, one, two, other = (node(name, number=n) for name, n in (("zero", 0), ("one", 1), ("two", 2), ("other", 1)))
    assert names((zero, 0), (one, 1), (two, 2), by=RankBy.SLOT) == ["zero", "one", "two"]
    assert names((zero, 0), (two, 2), by=RankBy.SLOT) == ["zero", "two"]
    assert names((zero, 0), (two, 1), (other, None), by=RankBy.SLOT) == ["zero", "other", "two"]


def test_by_label_nodes_of_a_rack_stand_together_in_the_order_of_coming() -> None:
    labels = {"a": "rack10", "b": "rack9", "c": "rack10", "d": "rack9"}
    seated = newcomers(*(node(name, label=label) for name, label in labels.items()), by=RankBy.LABEL)
    assert seated == ["b", "d", "a", "c"]


def test_newcomers_are_sorted_and_survivors_are_not() -> None:
    survivors = [(node("z", label="r9"), 0), (node("a", label="r1"), 3)]
    late = [(node("y", label="r8"), None), (node("b", label="r2"), None)]
    assert names(*survivors, *late, by=RankBy.LABEL) == ["z", "b", "y", "a"]


def test_a_wish_goes_before_the_order() -> None:
    assert newcomers(node("a", label="r1"), node("b", label="r2", requested_rank=0), by=RankBy.LABEL) == ["b", "a"]


def test_a_denied_wish_names_who_has_the_rank_and_why() -> None:
    candidates = [
        (node("kept", requested_rank=1), 0),
        (node("late", requested_rank=0), None),
        (node("first", requested_rank=2), None),
        (node("second", requested_rank=2), None),
        (node("far", requested_rank=9), None),
    ]
    assert list(denied(candidates, order(candidates))) == [
        ("late", 0, 1, "node kept has that and keeps it"),
        ("second", 2, 3, "node first wished for it too, and comes first"),
        ("far", 9, 4, "the ranks of 5 nodes are 0 to 4"),
    ]
