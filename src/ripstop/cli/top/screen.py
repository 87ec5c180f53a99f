"""The screen of `ripstop top` as lines of styled text, for a terminal of any size from 80x24.  Pure.

A state is never shown by colour alone: each has its own character.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from msgspec import Struct

from ripstop.cli.top.job_view import SEVERITY, JobView, Level, Rank, RankState, job_view_verdict
from ripstop.model.text_formatting import format_bytes, one_line

MAX_GRID_LINES = 6
MIN_EVENTS = 3
MIN_WIDTH, MIN_HEIGHT = 40, 10
KEYS = "q quit  / filter  o sort  l log  s stack  S stacks  d drain  r restart  ? help"
HELP = """\
up, down, PgUp, PgDn, Home, End   select a rank
Enter, l     its log, followed; again up, down, PgUp, PgDn, End
s, S         its stack; the stacks of all workers
d            drain its node
r            restart all workers
o            sort by rank, state, step time, heartbeat or memory
/            filter: a rank (12), a range (8-15), a pid, a part of a node's name, a state
Escape       clear the filter, leave a view
q            quit

grid: one character a rank, or the worst of several
"""


class Style(Enum):
    """How text looks; without colours, only by weight."""

    PLAIN = "plain"
    DIM = "dim"
    BOLD = "bold"
    OK = "ok"
    WARN = "warn"
    BAD = "bad"
    SELECTED = "selected"


Span = tuple[str, Style]
Line = list[Span]

LEVELS = {Level.OK: Style.OK, Level.WARN: Style.WARN, Level.BAD: Style.BAD}
CELLS = {
    RankState.FAILED: ("X", Style.BAD),
    RankState.HANGS: ("H", Style.BAD),
    RankState.SILENT: ("!", Style.BAD),
    RankState.STRAGGLER: ("s", Style.WARN),
    RankState.STARTING: (".", Style.DIM),
    RankState.RUNNING: ("■", Style.OK),
    RankState.DONE: ("-", Style.DIM),
}


def _screen_sort_value(value: float | None) -> float:
    return float("-inf") if value is None else value


SORTS: dict[str, Callable[[Rank], Any]] = {
    "rank": lambda rank: rank.rank,
    "state": lambda rank: (SEVERITY[rank.state], rank.rank),
    "step time": lambda rank: (
        -_screen_sort_value(rank.step_time if rank.own_time is None else rank.own_time),
        rank.rank,
    ),
    "heartbeat": lambda rank: (-_screen_sort_value(rank.age), rank.rank),
    "memory": lambda rank: (-_screen_sort_value(rank.memory), rank.rank),
}


class Selection(Struct):
    """What the user has chosen."""

    rank: int = 0
    sort: str = "rank"
    filter: str = ""


def screen_rows(job: JobView, chosen: Selection) -> list[Rank]:
    """The ranks of the table, filtered and sorted."""
    tests = [_screen_filter_test(word) for word in chosen.filter.lower().split()]
    return sorted((rank for rank in job.ranks if all(test(rank) for test in tests)), key=SORTS[chosen.sort])


def _screen_filter_test(word: str) -> Callable[[Rank], bool]:
    first, dash, last = word.partition("-")
    if first.isdecimal() and last.isdecimal():
        return lambda rank: int(first) <= rank.rank <= int(last)
    if word.isdecimal() and not dash:
        return lambda rank: int(word) in (rank.rank, rank.pid)
    return lambda rank: word in rank.node.lower() or word in rank.host.lower() or rank.state.startswith(word)


def overview_screen(job: JobView, chosen: Selection, width: int, height: int) -> list[Line]:
    """The main screen: header, verdict, grid, table, rounds, events, keys."""
    found = screen_rows(job, chosen)
    top = [*_screen_header(job), *_screen_grid(job.ranks, width), _screen_note(job, found, chosen)]
    left = height - len(top) - 1  # the keys
    rounds = list(job.rounds[-2:]) if left >= 12 else []
    fixed = len(rounds) + (1 if rounds else 0) + 1  # their titles
    table = _screen_table(found, chosen, width, max(3, min(len(found) + 1, left - fixed - MIN_EVENTS)))
    events = job.events[-max(MIN_EVENTS, left - fixed - len(table)) :]
    bottom: list[Line] = [[("ROUNDS", Style.DIM)], *([(text, Style.PLAIN)] for text in rounds)] if rounds else []
    bottom += [[("EVENTS", Style.DIM)], *([(_overview_screen_event(text, width), Style.PLAIN)] for text in events)]
    return [*fit_to_screen([*top, *table, *bottom], width, height - 1), [(KEYS[:width], Style.DIM)]]


def _overview_screen_event(text: str, width: int) -> str:
    """`12:34:56.789 node: text`; on a narrow screen without milliseconds."""
    return text if width >= 100 else text[:8] + text[12:]


def _screen_note(job: JobView, found: list[Rank], chosen: Selection) -> Line:
    matching = f"  filter {chosen.filter!r}: {len(found)} of {len(job.ranks)}" if chosen.filter else ""
    return [(f"sorted by {chosen.sort}{matching}", Style.DIM)]


def _screen_header(job: JobView) -> list[Line]:
    status = job.status
    members = sum(node["first_rank"] >= 0 for node in status["nodes"])
    rate = f"{1 / job.median:.3g} steps/s" if job.median else "no steps"
    goodput = "-" if status["goodput"] is None else f"{status['goodput']:.0%}"
    saved = f"checkpoint {screen_duration(float(int(job.checkpoint[1])))} ago" if job.checkpoint else "no checkpoint"
    left = max(0, status["max_restarts"] - status["charged"])
    size = f"{status['world_size']} ranks on {members} nodes"
    phase = f"{status['phase']} {screen_duration(status['seconds'])}  round {status['round']}  {size}"
    level, text = job_view_verdict(job)
    return [
        [(f"{status['run_id']}  ", Style.BOLD), (phase, Style.PLAIN)],
        [(f"goodput {goodput}  {rate}  {saved}  {left} of {status['max_restarts']} restarts left", Style.PLAIN)],
        [(one_line(text), LEVELS[level])],
    ]


def _screen_grid(ranks: tuple[Rank, ...], width: int) -> list[Line]:
    """One character a rank; with too many ranks, one for the worst of several."""
    if not ranks:
        return []
    per_cell = max(1, -(-len(ranks) // (width * MAX_GRID_LINES)))
    cells = [
        CELLS[min(ranks[i : i + per_cell], key=lambda rank: SEVERITY[rank.state]).state]
        for i in range(0, len(ranks), per_cell)
    ]
    borders = [i for i in range(1, len(ranks)) if ranks[i].node != ranks[i - 1].node]
    if per_cell == 1 and len(borders) < len(ranks) - 1 and len(ranks) + len(borders) <= width * MAX_GRID_LINES:
        for border in reversed(borders):
            cells.insert(border, (" ", Style.PLAIN))
    counts = Counter(rank.state for rank in ranks)
    legend: Line = [("RANKS  ", Style.DIM)]
    for state in RankState:
        if counts[state]:
            legend += [(CELLS[state][0], CELLS[state][1]), (f" {state} {counts[state]}  ", Style.PLAIN)]
    if per_cell > 1:
        legend.append((f"1 character = {per_cell} ranks", Style.DIM))
    return [legend, *(_merged_screen_line(cells[i : i + width]) for i in range(0, len(cells), width))]


def _merged_screen_line(spans: Iterable[Span]) -> Line:
    line: Line = []
    for text, style in spans:
        if line and line[-1][1] is style:
            line[-1] = (line[-1][0] + text, style)
        else:
            line.append((text, style))
    return line


def _screen_table(found: list[Rank], chosen: Selection, width: int, height: int) -> list[Line]:
    wide = width >= 100
    longest = max((len(rank.node) for rank in found[:500]), default=0)
    name = max(4, min(longest, width - (70 if wide else 58)))
    head = f"{'RANK':>6} {'NODE':<{name}} {'STATE':<9} {'STEP':>9} {'STEP TIME':>9} {'BEAT':>7} {'MEMORY':>9}"
    head += f" {'PID':>9}" if wide else ""
    lines: list[Line] = [[(head, Style.DIM)]]
    at = next((i for i, rank in enumerate(found) if rank.rank == chosen.rank), 0)
    room = height - 1
    start = max(0, min(at - room // 2, len(found) - room))
    for index, rank in enumerate(found[start : start + room], start):
        step = "-" if rank.step is None else str(rank.step)
        age = "-" if rank.age is None else screen_duration(rank.age)
        memory = "-" if rank.memory is None else format_bytes(rank.memory)
        own_time = rank.step_time if rank.own_time is None else rank.own_time
        step_time = "-" if own_time is None else screen_duration(own_time)
        text = (
            f"{rank.rank:>6} {rank.node[:name]:<{name}} {rank.state:<9} {step:>9} {step_time:>9} {age:>7} {memory:>9}"
        )
        text += f" {rank.pid or '-':>9}" if wide else ""
        is_fine = rank.state in (RankState.RUNNING, RankState.DONE, RankState.STARTING)
        style = Style.SELECTED if index == at else Style.PLAIN if is_fine else CELLS[rank.state][1]
        lines.append([(text, style)])
    if not found:
        lines.append([("no ranks", Style.DIM)])
    return lines


def text_screen(title: str, text: list[str], first: int | None, width: int, height: int) -> list[Line]:
    """A scrolled text; `first` is its first line on the screen, None: the end is shown."""
    room = max(1, height - 2)
    start = max(0, len(text) - room) if first is None else max(0, min(first, len(text) - room))
    shown: list[Line] = [[(line, Style.PLAIN)] for line in text[start : start + room]]
    where = f"lines {start + 1}-{start + len(shown)} of {len(text)}" if text else "empty"
    keys = f"{where}  up, down, PgUp, PgDn, Home, End  Escape back"
    return [*fit_to_screen([[(title, Style.BOLD)], *shown], width, height - 1), [(keys[:width], Style.DIM)]]


def fit_to_screen(lines: list[Line], width: int, height: int) -> list[Line]:
    """Exactly `height` lines, none longer than the width."""
    found = [_cut_screen_line(line, width) for line in lines[:height]]
    return found + [[] for _ in range(height - len(found))]


def _cut_screen_line(line: Line, width: int) -> Line:
    cut: Line = []
    for text, style in line:
        if text and width > 0:
            cut.append((text[:width], style))
            width -= len(cut[-1][0])
    return cut


def screen_characters_as_ascii(text: str) -> str:
    """For a terminal without Unicode."""
    return text.replace("■", "=").encode("ascii", "replace").decode()


def screen_duration(seconds: float) -> str:
    if 0 < seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 1:
        return f"{seconds:.2f} s" if seconds else "0 s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds // 60:.0f} min"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} m"
