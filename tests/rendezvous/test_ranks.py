"""Who gets which rank."""

from hypothesis import given
from hypothesis import strategies as st

from ripstop.rendezvous.ranks import order, places
from ripstop.round import Address, Node

STORE = Address("h0", 4000)


def node(name: str, slots: int = 1, role: str = "default", wish: int | None = None) -> Node:
    return Node(name, f"host-{name}", slots, role, wish)


def names(*candidates: tuple[Node, int | None]) -> list[str]:
    return [n.id for n in order(candidates)]


@st.composite
def gatherings(draw: st.DrawFn) -> list[tuple[Node, int | None]]:
    """Survivors, with distinct ranks of a round of before, and newcomers, in any order."""
    before = draw(st.lists(st.integers(0, 12), unique=True, max_size=8))
    newcomers = draw(st.integers(0 if before else 1, 6))
    ranks: list[int | None] = [*before, *[None] * newcomers]
    ranks = draw(st.permutations(ranks))
    return [
        (
            node(
                f"n{i}",
                slots=draw(st.integers(1, 8)),
                role=draw(st.sampled_from(["trainer", "reader"])),
                wish=draw(st.none() | st.integers(-2, 12)),
            ),
            rank,
        )
        for i, rank in enumerate(ranks)
    ]


@given(gatherings())
def test_everybody_gets_exactly_one_rank(gathering: list[tuple[Node, int | None]]) -> None:
    assert sorted(n.id for n in order(gathering)) == sorted(n.id for n, _ in gathering)


@given(gatherings())
def test_a_survivor_keeps_its_rank_where_the_new_size_allows_it(gathering: list[tuple[Node, int | None]]) -> None:
    seated = order(gathering)
    for survivor, before in gathering:
        if before is not None and before < len(gathering):
            assert seated[before] == survivor


@given(gatherings())
def test_a_newcomer_that_wishes_for_a_rank_loses_it_only_to_somebody_with_a_claim(
    gathering: list[tuple[Node, int | None]],
) -> None:
    seated, before = order(gathering), {n.id: rank for n, rank in gathering}
    for newcomer, rank in gathering:
        wish = newcomer.wish
        if rank is None and wish is not None and 0 <= wish < len(seated) and seated[wish] != newcomer:
            winner = seated[wish]
            assert before[winner.id] is not None or winner.wish == wish


@given(gatherings())
def test_survivors_without_a_seat_come_before_newcomers_without_a_wish(
    gathering: list[tuple[Node, int | None]],
) -> None:
    seated = [n.id for n in order(gathering)]
    homeless = [n.id for n, rank in gathering if rank is not None and rank >= len(seated) and n.wish is None]
    plain = [n.id for n, rank in gathering if rank is None and n.wish is None]
    for survivor in homeless:
        for newcomer in plain:
            assert seated.index(survivor) < seated.index(newcomer)


@given(gatherings())
def test_ranks_offsets_and_sizes_are_dense_for_any_slots_and_roles(gathering: list[tuple[Node, int | None]]) -> None:
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
    assert names((node("x", wish=2), None), (node("y", wish=0), None), (node("z"), None)) == ["y", "z", "x"]


def test_a_wish_does_not_unseat_a_survivor() -> None:
    assert names((node("a"), 0), (node("x", wish=0), None)) == ["a", "x"]


def test_a_wish_that_no_round_can_grant_is_no_wish() -> None:
    assert names((node("x", wish=-1), None), (node("y", wish=7), None), (node("z"), None)) == ["x", "y", "z"]
