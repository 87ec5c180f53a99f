"""The results of `ripstop chaos`, and how they are printed.  Pure."""

from enum import StrEnum
from statistics import median
from typing import Any

from msgspec import Struct, to_builtins

from ripstop.model.text_formatting import format_clean_text


class Outcome(StrEnum):
    """What became of a fault."""

    HEALED = "healed"
    NOT_HEALED = "not healed"
    SKIPPED = "skipped"  # not possible on this machine, or no such target
    NOT_INJECTED = "not injected"  # the job was over, or did not train


class Result(Struct, frozen=True):
    """One fault: when it was injected, in seconds after the start, and how long the job took to heal.

    `round` is the round that trained afterwards, and `restarted` whether it is another one than before.
    """

    number: int
    kind: str
    outcome: Outcome
    at: float
    node: str = ""
    rank: int = -1
    seconds: float | None = None
    round: int = 0
    restarted: bool = False
    why: str = ""


def render_chaos_result(result: Result) -> str:
    """`  8.2 s  worker-kill   rank 1 on gpu2-55-31   healed in 0.62 s, round 2`"""
    target = f"rank {result.rank} on {result.node}" if result.rank >= 0 else result.node
    text: str = result.outcome
    if result.seconds is not None:
        how, which = ("in", f"round {result.round}") if result.restarted else ("within", "without a restart")
        text = f"healed {how} {result.seconds:.2f} s, {which}"
    elif result.why:
        text += f": {result.why}"
    return format_clean_text(f"{result.at:7.1f} s  {result.kind:<15}  {target + '  ' if target else ''}{text}").replace(
        "\n", " "
    )


def render_chaos_summary(results: list[Result]) -> str:
    counts = [f"{len([r for r in results if r.outcome is outcome])} {outcome}" for outcome in Outcome]
    healed = [result.seconds for result in results if result.seconds is not None]
    times = f" (median {median(healed):.2f} s, longest {max(healed):.2f} s)" if healed else ""
    return f"{len(results)} faults: {counts[0]}{times}, {', '.join(counts[1:])}"


def chaos_summary(results: list[Result], seed: int) -> dict[str, Any]:
    return {"seed": seed, "passed": chaos_has_passed(results), "faults": to_builtins(results)}


def chaos_has_passed(results: list[Result]) -> bool:
    """Every fault was healed or skipped, and not all were skipped."""
    outcomes = {result.outcome for result in results}
    return Outcome.HEALED in outcomes and outcomes <= {Outcome.HEALED, Outcome.SKIPPED}
