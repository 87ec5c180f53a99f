"""The state diagram of a job in `docs/rendezvous.md`, generated from the machine's table.

`python -m tests.docs.state_diagram` updates it.
"""

from pathlib import Path

from ripstop.coordinator.phases import TRANSITIONS
from ripstop.model.status import Phase

PAGE = Path(__file__).parents[2] / "docs" / "rendezvous.md"
MARK = "<!-- states -->\n"


def diagram() -> str:
    moves = [
        f"    {before.value} --> {after.value}: {reason}\n"
        for before, reasons in TRANSITIONS.items()
        for after, reason in reasons.items()
    ]
    first, last = Phase.GATHERING.value, Phase.CLOSED.value
    return "".join(
        ["```mermaid\nstateDiagram-v2\n", f"    [*] --> {first}\n", *moves, f"    {last} --> [*]\n", "```\n"]
    )


def redrawn(page: str) -> str:
    """The page with the current diagram after its mark."""
    text, mark, _ = page.partition(MARK)
    assert mark, f"{PAGE.name} has no place for the diagram; put {MARK.strip()} at its end"
    return text + mark + diagram()


if __name__ == "__main__":
    PAGE.write_text(redrawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
