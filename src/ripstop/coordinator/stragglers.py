"""Which ranks the others wait for, from the profiles of their steps.  Pure.

In synchronous training every rank has the same time per step.  A rank is late if it enters the collectives of a step
later than the median rank, or, on GPUs with timing, if its collectives take less time than the median's: it waits for
nobody.  Without collectives, a rank is late if its steps take longer than the median rank's.  The *own time* of a rank
is what a step would take if no rank were later than this one.

Rules
1.  Ranks are compared with the lower median of all ranks, so that of two ranks the faster one counts.
2.  A rank is slow if a step takes `factor` times as long as it would if this rank were like the median one.
3.  A rank becomes a straggler when it was slow in all samples for `seconds`, and in at least `MIN_PROFILES` profiles.
    It stops being one when it was not slow for `seconds`, or when its round has ended.
4.  Delays of less than `MIN_LATENESS_S` do not count: the scheduler of a busy machine delays any rank by as much.
5.  Ranks whose steps have another number of collectives than most are not compared.
"""

from collections import Counter
from collections.abc import Mapping
from statistics import median_low

from msgspec import Struct

from ripstop.model.config import StragglerLimits
from ripstop.model.events import StragglerDetected, StragglerEnded
from ripstop.model.status import StragglerStatus
from ripstop.model.text_formatting import format_bytes, rank_list
from ripstop.model.usage import GpuSample, NodeSample, StepProfile

MIN_PROFILES = 2
MIN_LATENESS_S = 0.005
LOW_CLOCK = 0.8  # of the highest one
MAX_GPUS = 4  # in one text


class Pace(Struct, frozen=True):
    """The time of a step, and how much of it is lost because this rank is later than the median one."""

    period: float
    lateness: float
    own_time: float

    @property
    def without(self) -> float:
        """What a step would take if this rank were like the median one."""
        return max(self.period - self.lateness, self.period / 100)

    @property
    def slowdown(self) -> float:
        return self.period / self.without


class _Rank(Struct):
    node: str
    slow_since: float | None = None
    fine_since: float | None = None
    first_profile: int = 0  # since it is slow, or fine
    is_straggler: bool = False
    detected_at: float = 0.0
    pace: Pace = Pace(0.0, 0.0, 0.0)


def paces_to_find_stragglers(profiles: Mapping[int, StepProfile]) -> dict[int, Pace]:
    """The pace of each rank that can be compared with the others."""
    sizes = Counter(len(profile.arrivals) for profile in profiles.values())
    if not sizes:
        return {}
    size = sizes.most_common(1)[0][0]
    alike = {rank: profile for rank, profile in profiles.items() if len(profile.arrivals) == size}  # rule 5
    if len(alike) < 2:
        return {}
    period = median_low(each.period for each in alike.values())
    if not size:  # no collectives: each rank has its own time
        late = {rank: each.period - period for rank, each in alike.items()}
        return {rank: Pace(period + late[rank], max(0.0, late[rank]), period + late[rank]) for rank in alike}
    medians = [median_low(column) for column in zip(*(each.arrivals for each in alike.values()), strict=True)]
    waits = [each.waiting for each in alike.values() if each.waiting is not None]
    usual_wait = median_low(waits) if len(waits) == len(alike) else None
    late = {}
    for rank, profile in alike.items():
        lateness = max(at - usual for at, usual in zip(profile.arrivals, medians, strict=True))
        if usual_wait is not None and profile.waiting is not None:
            lateness = max(lateness, usual_wait - profile.waiting)
        late[rank] = lateness
    latest = max(late.values())
    return {rank: Pace(period, max(0.0, by), max(0.0, period - latest + by)) for rank, by in late.items()}


class Stragglers:
    """The stragglers of one job."""

    def __init__(self, limits: StragglerLimits) -> None:
        self._limits = limits
        self._round = 0
        self._ranks: dict[int, _Rank] = {}
        self._steal: dict[str, tuple[float, float]] = {}  # by node: the time of the last sample, and its total
        self._evidence: dict[str, str] = {}  # by node

    def own_times(self) -> dict[int, float]:
        """The own time of each rank that has a profile."""
        return {number: rank.pace.own_time for number, rank in self._ranks.items()}

    def status(self, now: float) -> tuple[StragglerStatus, ...]:
        found: dict[str, list[int]] = {}
        for number, rank in sorted(self._ranks.items()):
            if rank.is_straggler:
                found.setdefault(rank.node, []).append(number)
        return tuple(
            StragglerStatus(
                node,
                tuple(ranks),
                max(self._ranks[r].pace.period for r in ranks),
                min(self._ranks[r].pace.without for r in ranks),
                max(now - self._ranks[r].detected_at for r in ranks),
                self._evidence.get(node, ""),
            )
            for node, ranks in found.items()
        )

    def on_samples(
        self, round: int, samples: Mapping[str, NodeSample], now: float
    ) -> list[StragglerDetected | StragglerEnded]:
        """What has changed, by node.  A node without a sample keeps its state."""
        events: list[StragglerDetected | StragglerEnded] = []
        if round != self._round:
            events = self._end(list(self._ranks), f"round {self._round} has ended", now)
            self._round, self._ranks = round, {}
        current = {node: sample for node, sample in samples.items() if sample.round == round}
        nodes = {rank.rank: node for node, sample in current.items() for rank in sample.ranks}
        profiles = {r.rank: r.profile for sample in current.values() for r in sample.ranks if r.profile is not None}
        began: dict[str, list[int]] = {}
        over: list[int] = []
        for number, pace in paces_to_find_stragglers(profiles).items():
            rank = self._ranks.setdefault(number, _Rank(nodes[number]))
            rank.pace = pace
            if self._has_become(rank, profiles[number].count, now):
                if rank.is_straggler:
                    began.setdefault(rank.node, []).append(number)
                else:
                    over.append(number)
        for node, sample in current.items():
            if node in began or any(rank.is_straggler for rank in self._ranks.values() if rank.node == node):
                self._evidence[node] = straggler_hardware_text(sample, self._steal.get(node))
            if sample.steal is not None:
                self._steal[node] = sample.at, sample.steal
        events += self._end(over, "as fast as its peers again", now)
        return events + [self._detected(node, ranks) for node, ranks in began.items()]

    def _has_become(self, rank: _Rank, profile: int, now: float) -> bool:
        """Whether the rank becomes a straggler, or is none any more (rule 3)."""
        limits, pace = self._limits, rank.pace
        if pace.slowdown >= limits.factor and pace.lateness >= MIN_LATENESS_S:
            rank.fine_since = None
            if rank.slow_since is None:
                rank.slow_since, rank.first_profile = now, profile
            since = rank.slow_since
        else:
            rank.slow_since = None
            if rank.fine_since is None:
                rank.fine_since, rank.first_profile = now, profile
            since = rank.fine_since
        is_settled = now - since >= limits.seconds and profile - rank.first_profile + 1 >= MIN_PROFILES
        if not is_settled or rank.is_straggler == (rank.slow_since is not None):
            return False
        rank.is_straggler = not rank.is_straggler
        rank.detected_at = now if rank.is_straggler else rank.detected_at
        return True

    def _detected(self, node: str, ranks: list[int]) -> StragglerDetected:
        worst = max((self._ranks[rank] for rank in ranks), key=lambda rank: rank.pace.slowdown)
        pace = worst.pace
        return StragglerDetected(
            self._round,
            node,
            tuple(ranks),
            pace.period,
            pace.without,
            self._limits.seconds,
            describe_straggler(node, ranks, pace, self._evidence.get(node, "")),
        )

    def _end(self, numbers: list[int], why: str, now: float) -> list[StragglerDetected | StragglerEnded]:
        """The end of those ranks that were reported."""
        over: dict[str, list[int]] = {}
        for number in numbers:
            rank = self._ranks[number]
            if rank.detected_at:
                over.setdefault(rank.node, []).append(number)
        ended: list[StragglerDetected | StragglerEnded] = []
        for node, ranks in over.items():
            seconds = max(now - self._ranks[rank].detected_at for rank in ranks)
            ended.append(StragglerEnded(self._round, node, tuple(ranks), seconds, why))
            for number in ranks:
                self._ranks[number].detected_at = 0.0
        return ended


# texts ----------------------------------------------------------------------------------------------------------------


def describe_straggler(node: str, ranks: list[int], pace: Pace, found: str) -> str:
    slow = f"{pace.slowdown:.1f} times as long as the others need ({pace.without * 1e3:.0f} ms)"
    what = f"{rank_list(ranks)} on node {node}: a step takes {pace.period * 1e3:.0f} ms, {slow}"
    return f"{what}; {found}" if found else what


def straggler_hardware_text(sample: NodeSample, before: tuple[float, float] | None) -> str:
    """What the node's hardware and kernel say; `before` is the time of an earlier sample, and its stolen time."""
    parts = [_straggler_gpu_text(gpu) for gpu in sample.gpus if _is_slow(gpu)][:MAX_GPUS]
    if not parts and sample.gpus:
        parts.append("no GPU is throttled")
    if before is not None and sample.steal is not None and sample.at > before[0]:
        parts.append(f"CPU steal {100 * max(0.0, sample.steal - before[1]) / (sample.at - before[0]):.0f} %")
    if sample.load is not None:
        parts.append(f"load {sample.load:.1f} per CPU")
    return ", ".join(parts)


def _is_slow(gpu: GpuSample) -> bool:
    return bool(gpu.throttled) or bool(gpu.clock and gpu.clock_max and gpu.clock < LOW_CLOCK * gpu.clock_max)


def _straggler_gpu_text(gpu: GpuSample) -> str:
    facts = [f"{gpu.clock} of {gpu.clock_max} MHz"] if gpu.clock and gpu.clock_max else []
    facts += [f"throttled by {' and '.join(gpu.throttled)}"] if gpu.throttled else []
    if gpu.memory_used is not None and gpu.memory_total:
        facts.append(f"{format_bytes(gpu.memory_used)} of {format_bytes(gpu.memory_total)} in use")
    return f"GPU {gpu.index}: {', '.join(facts)}"
