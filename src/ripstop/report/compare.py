"""Compares the reports of two runs, figure by figure.  Pure."""

from collections.abc import Callable, Iterator

from msgspec import Struct

from ripstop.model.text_formatting import duration, percent
from ripstop.report.model import Phases, Report


class Figure(Struct, frozen=True):
    """One line: both values as numbers (None: unknown) and as texts, and the change."""

    name: str
    a: float | str | None
    b: float | str | None
    a_text: str
    b_text: str
    change: str


def compare(a: Report, b: Report) -> tuple[Figure, ...]:
    return tuple(_compared_figures(a, b))


def _compared_figures(a: Report, b: Report) -> Iterator[Figure]:
    for name, text in (("result", _compared_result), ("program", _compared_program), ("versions", _compared_versions)):
        yield Figure(name, text(a), text(b), text(a), text(b), "" if text(a) == text(b) else "differs")
    yield _compared_figure("goodput", a.summary.goodput, b.summary.goodput, percent, _compared_points)
    yield _compared_seconds("duration", a.summary.seconds, b.summary.seconds)
    yield _compared_seconds("step time", a.summary.seconds_per_step, b.summary.seconds_per_step)
    yield _compared_number("last step", a.summary.last_step, b.summary.last_step)
    yield _compared_number("workers", a.summary.world_size, b.summary.world_size)
    yield _compared_number("nodes", a.summary.nodes, b.summary.nodes)
    yield _compared_number("nodes lost", a.summary.nodes_lost, b.summary.nodes_lost)
    yield _compared_number("rounds", a.summary.rounds, b.summary.rounds)
    yield _compared_number("restarts", a.summary.restarts, b.summary.restarts)
    yield _compared_number("worker failures", a.summary.worker_failures, b.summary.worker_failures)
    yield _compared_seconds("start-up", a.time.startup, b.time.startup)
    yield _compared_seconds("downtime", a.time.downtime, b.time.downtime)
    yield _compared_seconds("repeated steps", a.time.repeated, b.time.repeated)
    recoveries = [[round.phases for round in report.rounds[1:]] for report in (a, b)]
    yield _compared_seconds("recovery, median", *map(_compared_median_recovery, recoveries))
    for phase in Phases.__struct_fields__:
        means = [_compared_mean_recovery(phases, phase) for phases in recoveries]
        if any(means):
            yield _compared_seconds(f"recovery, mean {phase.replace('_', ' ')}", *means)
    causes = {loss.cause: None for report in (a, b) for loss in report.time.losses}
    for cause in causes:
        yield _compared_seconds(
            f"lost to {cause.replace('_', ' ')}", *(_compared_loss(report, cause) for report in (a, b))
        )


def _compared_result(report: Report) -> str:
    return report.summary.result.value


def _compared_program(report: Report) -> str:
    return "; ".join(report.programs)


def _compared_versions(report: Report) -> str:
    return ", ".join(f"{one.name} {one.value}" for one in report.versions if one.name != "kernel")


def _compared_loss(report: Report, cause: str) -> float:
    return sum(loss.total for loss in report.time.losses if loss.cause == cause)


def _compared_median_recovery(recoveries: list[Phases]) -> float | None:
    totals = sorted(phases.total for phases in recoveries)
    return totals[len(totals) // 2] if totals else None


def _compared_mean_recovery(recoveries: list[Phases], phase: str) -> float | None:
    return sum(getattr(phases, phase) for phases in recoveries) / len(recoveries) if recoveries else None


def _compared_seconds(name: str, a: float | None, b: float | None) -> Figure:
    return _compared_figure(name, a, b, duration, _compared_ratio)


def _compared_number(name: str, a: int | None, b: int | None) -> Figure:
    return _compared_figure(name, a, b, lambda value: f"{value:,.0f}", lambda a, b: f"{b - a:+,.0f}")


def _compared_figure(
    name: str,
    a: float | None,
    b: float | None,
    text: Callable[[float], str],
    change: Callable[[float, float], str],
) -> Figure:
    change_text = change(a, b) if a is not None and b is not None and a != b else ""
    return Figure(name, a, b, _compared_text(a, text), _compared_text(b, text), change_text)


def _compared_text(value: float | None, text: Callable[[float], str]) -> str:
    return "–" if value is None else text(value)


def _compared_points(a: float, b: float) -> str:
    return f"{(b - a) * 100:+.1f} points"


def _compared_ratio(a: float, b: float) -> str:
    return f"{b / a - 1:+.0%}" if a > 0 and b / a < 10 else f"×{b / a:.0f}" if a > 0 else "new"
