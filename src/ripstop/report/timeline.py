"""The timeline of a report as SVG: rounds as bars, downtime between them, numbered failures, other events.  Pure.

Positions are percentages and sizes are pixels, so the picture fits any width while its text keeps its size.  Tooltips
are `<title>` elements and marks are links, so no script is needed.
"""

from collections.abc import Iterator

from ripstop.model.text_formatting import count, duration
from ripstop.report.model import Report, RoundReport
from ripstop.report.moments import moment
from ripstop.report.safe_text import safe

HEIGHT = 132
MARKS_Y, BARS_Y, BARS_HEIGHT, EVENTS_Y, AXIS_Y = 13, 28, 56, 98, 112
MIN_WIDTH = 0.12  # percent
MAX_NUMBERED = 40
MAX_MARKS = 400
TICK_STEPS = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(n * 60 for n in (1, 2, 5, 10, 15, 30)),
    *(n * 3600 for n in (1, 2, 3, 6, 12, 24, 48, 168, 720)),
)


def timeline(report: Report) -> str:
    return "".join(_timeline_elements(report))


def _timeline_elements(report: Report) -> Iterator[str]:
    began, ended = report.summary.began, report.summary.ended
    scale = _TimelineScale(began, ended)
    label = f"Timeline: {count(report.summary.rounds, 'round')} in {duration(ended - began)}"
    yield f'<svg class="timeline" width="100%" height="{HEIGHT}" role="group" aria-label="{safe(label)}">'
    yield (
        '<defs><pattern id="down" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" class="down-bg"/><line x1="0" y1="0" x2="0" y2="6" class="down-line"/>'
        "</pattern></defs>"
    )
    yield from _timeline_axis(scale)
    yield from _timeline_bars(report, scale)
    yield from _timeline_marks(report, scale)
    yield "</svg>"


class _TimelineScale:
    def __init__(self, began: float, ended: float) -> None:
        self.began, self.seconds = began, max(ended - began, 1e-3)

    def x(self, at: float) -> float:
        return round(min(100.0, max(0.0, 100 * (at - self.began) / self.seconds)), 3)

    def box(self, start: float, end: float) -> str:
        x = self.x(start)
        width = max(MIN_WIDTH, round(self.x(end) - x, 3))
        return f'x="{x:g}%" width="{width:g}%"'


def _timeline_axis(scale: _TimelineScale) -> Iterator[str]:
    step = next((step for step in TICK_STEPS if scale.seconds / step <= 8), scale.seconds / 4)
    yield f'<line class="axis" x1="0" x2="100%" y1="{AXIS_Y}" y2="{AXIS_Y}"/>'
    for number in range(int(scale.seconds / step) + 1):
        x = 100 * number * step / scale.seconds
        if x > 100:
            break
        anchor = "start" if x < 4 else "end" if x > 96 else "middle"
        text = duration(number * step) if number else moment(scale.began, clock_only=True)
        yield f'<line class="grid" x1="{x:.3f}%" x2="{x:.3f}%" y1="{BARS_Y - 4}" y2="{AXIS_Y + 4}"/>'
        css = "tick odd" if number % 2 else "tick"
        yield f'<text class="{css}" x="{x:.3f}%" y="{AXIS_Y + 16}" text-anchor="{anchor}">{safe(text)}</text>'


def _timeline_bars(report: Report, scale: _TimelineScale) -> Iterator[str]:
    """A round's height is its world size: resizes are visible."""
    largest = max((round.world_size for round in report.rounds), default=0) or 1
    before = report.summary.began
    for index, round in enumerate(report.rounds):
        ended = round.trained_until
        running = min(max(round.running_at, before), max(ended, before))
        height = max(10, BARS_HEIGHT * round.world_size // largest)
        y = BARS_Y + BARS_HEIGHT - height
        why = (
            f"start-up: {duration(running - before)}"
            if index == 0
            else _timeline_downtime_tooltip(round, running - before)
        )
        yield _timeline_bar("down", scale.box(before, running), BARS_Y + BARS_HEIGHT - 10, 10, why)
        if ended > running:
            text = _timeline_round_tooltip(round, ended)
            yield _timeline_bar("round", scale.box(running, ended), y, height, text)
            if round.repeated:
                yield _timeline_bar("repeated", scale.box(max(running, ended - round.repeated), ended), y, height, text)
            if scale.x(ended) - scale.x(running) > 4:
                yield f'<text class="number" x="{scale.x(running):g}%" dx="6" y="{y + 15}">{round.number}</text>'
        before = max(before, ended)


def _timeline_bar(css: str, box: str, y: int, height: int, text: str) -> str:
    return f'<rect class="{css}" {box} y="{y}" height="{height}" rx="1.5"><title>{safe(text)}</title></rect>'


def _timeline_downtime_tooltip(round: RoundReport, seconds: float) -> str:
    return f"before round {round.number}: {duration(seconds)} without training"


def _timeline_round_tooltip(round: RoundReport, ended: float) -> str:
    workers = f"{count(round.nodes, 'node')}, {count(round.world_size, 'worker')}"
    steps = f"\nsteps {round.first_step} to {round.last_step}" if round.last_step is not None else ""
    repeated = f"\n{count(round.repeated_steps, 'step')} repeated ({duration(round.repeated)})"
    lost = repeated if round.repeated_steps else ""
    end = f"\nended: {round.why_ended}" if round.why_ended else ""
    return f"round {round.number}: {workers}, {duration(ended - round.running_at)}{steps}{lost}{end}"


def _timeline_marks(report: Report, scale: _TimelineScale) -> Iterator[str]:
    numbered = len(report.incidents) <= MAX_NUMBERED
    for number, incident in list(enumerate(report.incidents, 1))[-MAX_MARKS:]:
        x = min(99.2, max(0.8, scale.x(incident.at)))
        yield f'<a href="#failure-{number}"><title>{safe(f"{number}: {incident.title}")}</title>'
        foot = BARS_Y + (BARS_HEIGHT if numbered else -2)  # many lines would hide the rounds
        yield f'<line class="fault" x1="{x:g}%" x2="{x:g}%" y1="{MARKS_Y}" y2="{foot}"/>'
        yield f'<circle class="fault" cx="{x:g}%" cy="{MARKS_Y}" r="{9 if numbered else 3}"/>'
        if numbered:
            yield f'<text class="fault-number" x="{x:g}%" y="{MARKS_Y + 4}" text-anchor="middle">{number}</text>'
        yield "</a>"
    for action in report.actions[-MAX_MARKS:]:
        x = min(99.6, max(0.4, scale.x(action.at)))
        text = f"{moment(action.at)}: {action.text}"
        yield f'<circle class="event" cx="{x:g}%" cy="{EVENTS_Y}" r="3.5"><title>{safe(text)}</title></circle>'
