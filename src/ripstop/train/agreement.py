"""Which commit the ranks of a new round restore, and who gives which shard to whom.  Pure.

Each rank offers the complete commits that its node holds: its own shards, and those of other ranks.  Rank 0 decides for
all: the newest commit that can be restored.  A commit is identified by its round and number: after a fall-back to
commit 9, a later round writes another commit 10, and a rank that still has the old one must not mix it with the new one
of its peers.

| the commit | its shards in the job | every rank gets |
| --- | --- | --- |
| of as many ranks as the round has | all | its own shard |
| of another number of ranks or another mesh, sharded | all; what is not sharded is equal | its part of all shards |
| of another number of ranks | all, and they are equal | any shard |
| any number of ranks | some; they are equal, and were so at an earlier commit of all ranks | its own or any shard |

Equality is never assumed: the ranks compare digests before a shard stands in for another.  The random states of a rank
are its own; a rank that gets another's shard keeps those that its script has set.
"""

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace


@dataclass(frozen=True, slots=True, order=True)
class Commit:
    """A commit of a job, and the number of ranks that took part in it."""

    round: int
    number: int
    world_size: int


@dataclass(frozen=True, slots=True)
class AgreementOffer:
    """A rank's complete part of a commit.

    `is_replicated`: the state was found equal on all ranks.  `is_sharded`: the tensors are parts of larger ones.
    """

    commit: Commit
    shard: int
    is_replicated: bool = False
    is_sharded: bool = False

    def pack(self) -> list[int]:
        return [*astuple(self.commit), self.shard, int(self.is_replicated), int(self.is_sharded)]

    @classmethod
    def unpack(cls, packed: Sequence[int]) -> "AgreementOffer":
        round, number, world_size, shard, is_replicated, is_sharded = packed
        return cls(Commit(round, number, world_size), shard, bool(is_replicated), bool(is_sharded))


@dataclass(frozen=True, slots=True)
class Holding:
    """What a rank offers; the ranks of one node share its memory, and offer the same."""

    node: int
    offers: Collection[AgreementOffer]


@dataclass(frozen=True, slots=True)
class Transfer:
    giver: int
    receiver: int
    shard: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Rank r loads `shards[r]`, after the transfers; or, if `shards` is empty, its part of all shards."""

    commit: Commit
    shards: tuple[int, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    holders: tuple[tuple[int, ...], ...] = ()  # of each shard of sharded state: the ranks whose node has it
    skipped: str = ""  # why a newer commit is not restored


@dataclass(frozen=True, slots=True)
class Compare:
    """Each rank is to compute the digests of these shards, which its node holds."""

    commit: Commit
    shards: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Start:
    """There is nothing to restore; `problem` says why if there are commits."""

    problem: str = ""


Digests = Sequence[Mapping[int, Mapping[str, str]]]  # by rank, shard and part of the state


def agree(holdings: Sequence[Holding]) -> Generator[Compare, Digests, Restore | Start]:
    """Decide from what each rank holds, in the order of ranks; asks for digests where they are needed."""
    world_size = len(holdings)
    held: dict[Commit, dict[int, set[int]]] = {}  # → shard → nodes
    traits: dict[Commit, set[tuple[bool, bool]]] = {}
    for holding in holdings:
        for offer in holding.offers:
            held.setdefault(offer.commit, {}).setdefault(offer.shard, set()).add(holding.node)
            traits.setdefault(offer.commit, set()).add((offer.is_replicated, offer.is_sharded))
    problem = ""
    for commit in _commits_to_agree_on(held, world_size):
        missing = sorted(set(range(commit.world_size)) - set(held[commit]))
        is_sharded = any(sharded for _, sharded in traits[commit])
        if not missing and commit.world_size == world_size:
            plan = _agreed_restore(commit, held[commit], holdings, problem)
            return replace(plan, holders=_agreed_shard_holders(held[commit], holdings)) if is_sharded else plan
        lacks = (
            f"commit {commit.number} lacks the shards of ranks {_agreement_problem_list(missing)}" if missing else ""
        )
        if missing and (is_sharded or not all(replicated for replicated, _ in traits[commit])):
            problem = problem or f"{lacks}, and the state is not known to be equal on all ranks"
            continue
        differing = _disagreeing_parts((yield Compare(commit, _shards_compared_to_agree(held[commit], holdings))))
        if not differing and is_sharded:
            return Restore(commit, holders=_agreed_shard_holders(held[commit], holdings), skipped=problem)
        if not differing:
            return _agreed_restore(commit, held[commit], holdings, problem)
        lacks = lacks or f"commit {commit.number} was made by {commit.world_size} ranks, this round has {world_size}"
        problem = problem or f"{lacks}, and these values differ between ranks: {_agreement_problem_list(differing)}"
    return Start(problem)


def _commits_to_agree_on(held: Mapping[Commit, Mapping[int, object]], world_size: int) -> list[Commit]:
    """The newest first.  But if some ranks were killed during the newest commit, the one before it comes first: all
    ranks have their own shard of it, so that the step is repeated with the same random numbers."""
    commits = sorted(held, reverse=True)
    for before in commits[1:]:
        is_own = before.world_size == world_size == len(held[before])
        if is_own and before.number == commits[0].number - 1 and len(held[commits[0]]) < commits[0].world_size:
            return [before, *(commit for commit in commits if commit != before)]
    return commits


def _holding_ranks_by_node(holdings: Sequence[Holding]) -> dict[int, list[int]]:
    ranks: dict[int, list[int]] = {}
    for rank, holding in enumerate(holdings):
        ranks.setdefault(holding.node, []).append(rank)
    return ranks


def _agreed_restore(commit: Commit, held: Mapping[int, set[int]], holdings: Sequence[Holding], skipped: str) -> Restore:
    """Which shard each rank loads, and the transfers: no node receives a shard twice, and givers take turns."""
    there = {shard: set(nodes) for shard, nodes in held.items()}
    ranks, given = _holding_ranks_by_node(holdings), [0] * len(holdings)
    shards, transfers = [], []
    for rank, holding in enumerate(holdings):
        local = [shard for shard in sorted(there) if holding.node in there[shard]]
        if rank in local or (rank in held and (commit.world_size == len(holdings) or not local)):
            shard = rank
        else:
            shard = local[0] if local else min(held)
        shards.append(shard)
        if holding.node not in there[shard]:
            giver = min((r for node in held[shard] for r in ranks[node]), key=lambda rank: (given[rank], rank))
            given[giver] += 1
            transfers.append(Transfer(giver, rank, shard))
            there[shard].add(holding.node)
    return Restore(commit, tuple(shards), tuple(transfers), skipped=skipped)


def _agreed_shard_holders(held: Mapping[int, set[int]], holdings: Sequence[Holding]) -> tuple[tuple[int, ...], ...]:
    ranks = _holding_ranks_by_node(holdings)
    return tuple(tuple(rank for node in sorted(held[shard]) for rank in ranks[node]) for shard in sorted(held))


def _shards_compared_to_agree(held: Mapping[int, set[int]], holdings: Sequence[Holding]) -> tuple[tuple[int, ...], ...]:
    """The shards whose digests each rank computes: each shard once, evenly."""
    ranks = _holding_ranks_by_node(holdings)
    work: list[list[int]] = [[] for _ in holdings]
    for shard in sorted(held):
        rank = min((r for node in held[shard] for r in ranks[node]), key=lambda rank: (len(work[rank]), rank))
        work[rank].append(shard)
    return tuple(map(tuple, work))


def _disagreeing_parts(digests: Digests) -> list[str]:
    """The parts of the state that are not equal in all shards."""
    all_shards = [parts for by_shard in digests for parts in by_shard.values()]
    names = dict.fromkeys(name for parts in all_shards for name in parts)
    return [name for name in names if len({parts.get(name) for parts in all_shards}) > 1]


def _agreement_problem_list(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:8])) + (", …" if len(values) > 8 else "")
