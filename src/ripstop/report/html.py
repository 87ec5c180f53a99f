"""Renders a report as one HTML page that needs nothing else: no script, no font, no other file.

Rules: (1) every text goes through `safe`, so it is shown and never run; (2) the page forbids scripts and requests by a
Content-Security-Policy; (3) a state is an icon and a word, not only a colour; (4) tables are bounded, and say what they
leave out.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from ripstop.model.text_formatting import count, duration, percent
from ripstop.report.builder import STARTUP
from ripstop.report.model import (
    Incident,
    JobResult,
    Loss,
    NodeReport,
    Phases,
    Report,
    RoundReport,
    Setting,
    StragglerReport,
    WorkerReport,
)
from ripstop.report.moments import moment, moment_range
from ripstop.report.safe_text import safe
from ripstop.report.timeline import timeline

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
MAX_ROWS = 200
MAX_CARDS = 100
MAX_OPEN = 5  # failures that are not folded
MAX_RECURRING = 5
MAX_TRACEBACK = 16_384
RESULTS = {
    JobResult.SUCCEEDED: ("good", "✓", "succeeded"),
    JobResult.FAILED: ("bad", "✕", "failed"),
    JobResult.STOPPED: ("soft", "■", "stopped by an operator"),
    JobResult.INTERRUPTED: ("warn", "▲", "interrupted"),
    JobResult.UNFINISHED: ("warn", "…", "no end recorded"),
}
CAUSES = {
    "application": "worker failed",
    "infrastructure": "hang",
    "node_lost": "node lost",
    "node_left": "node left",
    "node_joined": "node joined",
    "node_unfit": "node replaced",
    "scaled": "scaled",
    "operator": "restarted by an operator",
    "state_lost": "no commit to restore",
    "coordinator": "coordinator changed",
    STARTUP: "start-up",
}
PHASE_NAMES = {
    "detect": "detect",
    "decide": "decide",
    "stop": "stop workers",
    "wait": "wait",
    "start": "start workers",
    "first_step": "first step",
}


def render(report: Report) -> str:
    return "\n".join(_html_page(report)) + "\n"


@cache
def _style() -> str:
    return Path(__file__).with_name("style.css").read_text(encoding="utf-8")


def _html_page(report: Report) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<meta name="referrer" content="no-referrer">'
    yield f"<title>{safe(report.summary.run_id or 'job')}: {report.summary.result.value}</title>"
    yield f"<style>\n{_style()}</style>\n</head>\n<body>"
    yield from _html_header(report)
    yield "<main>"
    yield from _html_timeline_section(report)
    yield from _html_failures_section(report)
    yield from _html_time_section(report)
    yield from _html_rounds_section(report)
    yield from _html_nodes_section(report)
    yield from _html_stragglers_section(report)
    yield from _html_actions_section(report)
    yield from _html_configuration_section(report)
    yield "</main>"
    yield from _html_footer(report)
    yield "</body>\n</html>"


# the top --------------------------------------------------------------------------------------------------------------


def _html_header(report: Report) -> Iterator[str]:
    summary = report.summary
    css, icon, word = RESULTS[summary.result]
    yield '<header>\n<div class="kicker"><span>ripstop job report</span>'
    yield f"<span>{moment_range(summary.began, summary.ended)}</span></div>"
    badge = f'<span class="badge {css}"><span aria-hidden="true">{icon}</span> {word}</span>'
    yield f"<h1>{safe(summary.run_id or 'unnamed job')} {badge}</h1>"
    if summary.cause:
        yield f'<p class="cause"><strong>{safe(summary.cause, 500)}</strong></p>'
    if summary.why != summary.cause:
        sentence = f"{summary.why[:1].upper()}{summary.why[1:]}" + ("" if summary.why.endswith(".") else ".")
        yield f'<p class="soft">{safe(sentence, 1000)}</p>'
    yield '<dl class="facts">'
    yield from _html_facts(report)
    yield "</dl>\n</header>"


def _html_facts(report: Report) -> Iterator[str]:
    summary, time = report.summary, report.time
    if summary.goodput is None:
        yield _html_fact("Goodput", "unknown", "no steps were reported")
    else:
        yield _html_fact("Goodput", percent(summary.goodput), "of the time in steps that were kept")
    yield _html_fact("Duration", duration(summary.seconds), count(summary.rounds, "round"))
    lost = time.downtime + (time.repeated or 0.0)
    detail = f"{duration(time.downtime)} down, {count(time.repeated_steps, 'step')} repeated"
    yield _html_fact("Time lost", duration(lost), detail)
    budget = "" if summary.max_restarts is None else f"{summary.charged} of {summary.max_restarts} in the budget used"
    yield _html_fact("Restarts", str(summary.restarts), budget or "budget unknown")
    if summary.last_step is not None:
        speed = f"{duration(summary.seconds_per_step)} a step" if summary.seconds_per_step else "speed unknown"
        yield _html_fact("Last step", f"{summary.last_step:,}", speed)
    yield _html_fact(
        "Workers", f"{summary.world_size:,}", f"on {count(summary.nodes, 'node')}, {summary.nodes_lost} lost"
    )
    if summary.checkpoint_step is not None and summary.checkpoint_at is not None:
        age = duration(max(0.0, summary.ended - summary.checkpoint_at))
        yield _html_fact("Last checkpoint", f"{summary.checkpoint_step:,}", f"{age} before the end")


def _html_fact(name: str, value: str, detail: str) -> str:
    return f"<div><dt>{safe(name)}</dt><dd>{safe(value)}<small>{safe(detail)}</small></dd></div>"


def _html_timeline_section(report: Report) -> Iterator[str]:
    yield f"<section><h2>Timeline</h2>\n{timeline(report)}"
    kinds = [("steps", "training; the height is the number of workers"), ("down", "no training")]
    kinds += [("repeated", "steps that were repeated")] if report.time.repeated_steps else []
    kinds += [("fault", "failure")] if report.incidents else []
    kinds += [("event", "other event")] if report.actions else []
    yield _html_legend(kinds) + "</section>"


def _html_legend(kinds: Iterable[tuple[str, str]]) -> str:
    items = (f'<span><i class="k-{kind}"></i>{safe(text)}</span>' for kind, text in kinds)
    return f'<div class="legend">{"".join(items)}</div>'


# failures -------------------------------------------------------------------------------------------------------------


def _html_failures_section(report: Report) -> Iterator[str]:
    if not report.incidents:
        yield '<section><h2>Failures</h2>\n<p class="good"><span aria-hidden="true">✓</span> None.</p></section>'
        return
    yield f"<section><h2>Failures <small>{count(len(report.incidents), 'failure')}, the latest first</small></h2>"
    yield _html_recurring_failures(report.incidents)
    numbered = list(enumerate(report.incidents, 1))
    for number, incident in reversed(numbered[-MAX_CARDS:]):
        yield from _card(number, incident, age=len(numbered) - number)
    yield _left_out(len(numbered) - MAX_CARDS, "earlier failures")
    yield "</section>"


def _html_recurring_failures(incidents: Sequence[Incident]) -> str:
    """Causes that came back; numbers in their texts are ignored."""
    groups: dict[str, list[Incident]] = {}
    for incident in incidents:
        text = incident.root.message if incident.root else incident.cause
        groups.setdefault(re.sub(r"\d+", "0", text), []).append(incident)
    largest = sorted(groups.values(), key=len, reverse=True)[:MAX_RECURRING]
    rows = [
        [f"{len(group)}×", group[-1].title, f"{len({incident.node for incident in group})}", moment(group[-1].at)]
        for group in largest
        if len(group) > 1
    ]
    head = ("times", "the latest of them", "nodes", "last seen")
    return _table(head, rows, numeric={0, 2}, wide={1}, fixed={3}) if rows else ""


def _card(number: int, incident: Incident, age: int) -> Iterator[str]:
    """A failure; those with more than `MAX_OPEN` later ones are folded."""
    css, is_folded = "card" if incident.root else "card by-node", age >= MAX_OPEN
    title = f'<span class="no">{number}</span><h3>{safe(incident.title, 500)}</h3>'
    if is_folded:
        yield f'<details class="{css}" id="failure-{number}"><summary class="head">{title}</summary>'
    else:
        yield f'<article class="{css}" id="failure-{number}"><div class="head">{title}</div>'
    meta = [moment(incident.at), f"round {incident.round}", CAUSES.get(incident.cause, incident.cause)]
    if incident.is_end:
        meta.append("the job ended with it")
    elif incident.downtime:
        lost = f", {count(incident.repeated_steps, 'step')} repeated" if incident.repeated_steps else ""
        meta.append(f"cost {duration(incident.downtime + incident.repeated)}{lost}")
    yield f'<p class="meta">{safe(" · ".join(meta))}</p>'
    yield from _html_root_cause(incident, is_open=age == 0)
    if incident.victims:
        yield from _html_victims(incident)
    yield "</details>" if is_folded else "</article>"


def _html_root_cause(incident: Incident, is_open: bool) -> Iterator[str]:
    root = incident.root
    facts = _html_worker_facts(root, incident.title) if root else []
    facts.append(("decision", incident.decision))
    yield "<dl>" + "".join(f"<dt>{name}</dt><dd>{safe(text)}</dd>" for name, text in facts if text) + "</dl>"
    if root is None:
        return
    yield _html_folded_text("Stack" if root.is_hang else "Traceback", root.traceback, is_open)
    yield _html_folded_text("Last lines of stderr", "\n".join(root.log_tail))


def _html_worker_facts(worker: WorkerReport, title: str) -> list[tuple[str, str]]:
    pid = f", pid {worker.pid}" if worker.pid else ""
    local = f" (local rank {worker.local_rank}{pid})" if worker.local_rank is not None else ""
    return [
        ("root cause", f"rank {worker.rank}{local} on node {worker.node}"),
        ("how", worker.how if worker.how != "failed" else ""),
        ("message", "" if worker.message == worker.how or worker.message in title else worker.message),
        ("memory", worker.oom if worker.oom != worker.message else ""),
        ("collectives", worker.collectives),
        ("files", "  ".join(worker.files)),
    ]


def _html_folded_text(title: str, text: str, is_open: bool = False) -> str:
    opened = " open" if is_open else ""
    shown = f"<pre>{safe(text, MAX_TRACEBACK)}</pre>"
    return f"<details{opened}><summary>{title}</summary>{shown}</details>" if text else ""


def _html_victims(incident: Incident) -> Iterator[str]:
    more = f", {len(incident.victims)} are listed" if len(incident.victims) < incident.victim_count else ""
    yield f"<details><summary>{count(incident.victim_count, 'other failure')}, because of it{more}</summary>"
    yield _table(("rank", "host", "what"), map(_html_victim_row, incident.victims), numeric={0}, wide={2})
    yield "</details>"


def _html_victim_row(worker: WorkerReport) -> list[str]:
    what = worker.how if worker.message in ("", worker.how) else f"{worker.how}: {worker.message}"
    return [str(worker.rank), worker.host or worker.node, what]


# time -----------------------------------------------------------------------------------------------------------------


def _html_time_section(report: Report) -> Iterator[str]:
    time = report.time
    if time.total <= 0:
        return
    yield f"<section><h2>Time <small>{duration(time.total)} in total</small></h2>"
    parts = [("startup", "start-up", time.startup), ("down", "downtime", time.downtime)]
    if time.in_steps is None:
        parts.insert(0, ("steps", "workers ran", time.running))
    else:
        other = time.running - time.in_steps - (time.repeated or 0.0)
        parts.insert(0, ("steps", "steps that were kept", time.in_steps))
        parts.insert(1, ("repeated", "steps that were repeated", time.repeated or 0.0))
        parts.append(("other", "workers ran outside of counted steps", other))
    shares = [(css, name, seconds, min(1.0, seconds / time.total)) for css, name, seconds in parts]
    shares = [part for part in shares if part[-1] >= 0.0005]
    bars = (f'<span class="k-{css}" style="flex:{share:.4f}"></span>' for css, _, _, share in shares)
    yield f'<div class="split" role="img" aria-label="Shares of the time">{"".join(bars)}</div>'
    yield _html_legend((css, f"{name} {percent(share)} ({duration(seconds)})") for css, name, seconds, share in shares)
    if time.losses:
        yield "<h2>Time lost, by cause and phase</h2>"
        yield _losses_table(time.losses)
    yield "</section>"


def _losses_table(losses: Sequence[Loss]) -> str:
    names = [name for name in Phases.__struct_fields__ if any(getattr(loss.phases, name) for loss in losses)]
    has_repeated = any(loss.repeated for loss in losses)
    repeated = ("repeated steps",) if has_repeated else ()
    head = ("cause", "times", *(PHASE_NAMES[name] for name in names), *repeated, "total")
    rows = []
    for loss in losses:
        seconds = [getattr(loss.phases, name) for name in names] + [loss.repeated] * has_repeated
        cells = [duration(one) if one else "–" for one in seconds]
        rows.append([CAUSES.get(loss.cause, loss.cause), str(loss.count), *cells, duration(loss.total)])
    return _table(head, rows, numeric=set(range(1, len(head))))


# details --------------------------------------------------------------------------------------------------------------


def _html_rounds_section(report: Report) -> Iterator[str]:
    if not report.rounds:
        return
    yield f"<section><h2>Rounds <small>{count(report.summary.rounds, 'round')}</small></h2>"
    shown = report.rounds[-MAX_ROWS:]
    head = ("round", "began", "trained", "workers", "nodes", "steps", "s/step", "down before", "ended because")
    yield _table(head, map(_html_round_row, shown), numeric={0, 2, 3, 4, 5, 6, 7}, wide={8}, fixed={1})
    yield _left_out(report.summary.rounds - len(shown), "earlier rounds")
    yield "</section>"


def _html_round_row(round: RoundReport) -> list[str]:
    steps = "" if round.last_step is None else f"{round.first_step:,} – {round.last_step:,}"
    why = CAUSES.get(round.cause, round.cause)
    return [
        str(round.number),
        moment(round.formed_at, clock_only=True),
        duration(max(0.0, round.trained_until - round.running_at)),
        f"{round.world_size:,}",
        f"{round.nodes:,}",
        steps,
        f"{round.seconds_per_step:.3g}" if round.seconds_per_step else "",
        duration(round.phases.total),
        ": ".join(filter(None, (why, round.why_ended))),
    ]


def _html_nodes_section(report: Report) -> Iterator[str]:
    if not report.nodes:
        return
    yield f"<section><h2>Nodes <small>{count(report.summary.nodes, 'node')}</small></h2>"
    ordered = sorted(report.nodes, key=lambda n: (-n.root_causes, -n.is_lost, -n.unhealthy, -n.worker_failures))
    shown = ordered[:MAX_ROWS]
    head = ("node", "host", "workers", "rounds", "failures", "root causes", "health", "state")
    yield _table(head, map(_html_node_row, shown), numeric={2, 3, 4, 5}, wide={7})
    yield _left_out(report.summary.nodes - len(shown), "nodes with fewer failures")
    yield "</section>"


def _html_node_row(node: NodeReport) -> list[str]:
    health = f"✕ unhealthy {node.unhealthy}×: {'; '.join(node.problems)}" if node.unhealthy else "✓ healthy"
    health += f"; quarantined {node.quarantines}×" if node.quarantines else ""
    state = "✓ in the job" if node.gone_at is None else f"✕ {node.why_gone}" if node.is_lost else node.why_gone
    numbers = (node.slots, node.rounds, node.worker_failures, node.root_causes)
    return [node.name, node.host, *map(str, numbers), health, state]


def _html_stragglers_section(report: Report) -> Iterator[str]:
    if not report.stragglers:
        return
    yield f"<section><h2>Stragglers <small>{count(len(report.stragglers), 'straggler')}</small></h2>"
    shown = report.stragglers[-MAX_ROWS:]
    head = ("found", "until", "round", "node", "ranks", "step", "without it", "evidence")
    yield _table(head, map(_html_straggler_row, shown), numeric={2, 5, 6}, wide={7}, fixed={0, 1})
    yield _left_out(report.omitted.get("stragglers", 0) + len(report.stragglers) - len(shown), "earlier stragglers")
    yield "</section>"


def _html_straggler_row(found: StragglerReport) -> list[str]:
    until = "" if found.ended_at is None else moment(found.ended_at, clock_only=True)
    times = moment(found.at, clock_only=True), until
    steps = duration(found.step_time), duration(found.median)
    return [*times, str(found.round), found.node, ", ".join(map(str, found.ranks)), *steps, found.why]


def _html_actions_section(report: Report) -> Iterator[str]:
    if not report.actions:
        return
    shown = report.actions[-MAX_ROWS:]
    yield f"<section><h2>Other events <small>{count(len(report.actions), 'event')}</small></h2>"
    rows = ([moment(action.at, clock_only=True), action.kind, action.text] for action in shown)
    yield _table(("time", "kind", "what"), rows, wide={2}, fixed={0, 1})
    yield _left_out(report.omitted.get("actions", 0) + len(report.actions) - len(shown), "earlier events")
    yield "</section>"


def _html_configuration_section(report: Report) -> Iterator[str]:
    if not (report.programs or report.settings or report.versions):
        return
    yield "<section><h2>Configuration and versions</h2>"
    for program in report.programs:
        yield f"<pre>{safe(program)}</pre>"
    rows = [_html_setting_row(one, report.summary.nodes) for one in (*report.settings, *report.versions)]
    yield _table(("setting", "value", "nodes"), rows, wide={1})
    yield "</section>"


def _html_setting_row(setting: Setting, nodes: int) -> list[str]:
    where = "coordinator" if not setting.nodes else "all" if setting.nodes == nodes else f"{setting.nodes} of {nodes}"
    return [setting.name, setting.value, where]


def _html_footer(report: Report) -> Iterator[str]:
    yield "<footer>"
    yield from (f"<p>{safe(note)}</p>" for note in report.notes)
    yield f"<p>Made from {count(report.events, 'event')}. Times are UTC.</p>\n</footer>"


def _left_out(number: int, what: str) -> str:
    return f'<p class="soft">{number:,} {what} are left out.</p>' if number > 0 else ""


def _table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    numeric: Collection[int] = (),
    wide: Collection[int] = (),
    fixed: Collection[int] = (),
) -> str:
    """`numeric`, `wide` and `fixed` are the columns with numbers, with long texts, and with texts of one line."""

    def css(column: int) -> str:
        name = "n" if column in numeric else "w" if column in wide else "t" if column in fixed else ""
        return f' class="{name}"' if name else ""

    def cell(column: int, text: str) -> str:
        return f"<td{css(column)}>{safe(text)}</td>"

    titles = "".join(f'<th scope="col"{css(column)}>{safe(title)}</th>' for column, title in enumerate(head))
    body = "\n".join(f"<tr>{''.join(cell(*pair) for pair in enumerate(row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>\n{body}</tbody></table></div>'
