"""Times as texts for people.  Pure."""

from datetime import UTC, datetime


def moment(at: float, clock_only: bool = False) -> str:
    """`2026-11-16 16:20:11 UTC`; the number itself if it is no time of this calendar."""
    try:
        found = datetime.fromtimestamp(at, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{at:g}"
    return f"{found:%H:%M:%S}" if clock_only else f"{found:%Y-%m-%d %H:%M:%S} UTC"


def moment_range(began: float, ended: float) -> str:
    """Two times, with the day once if it is the same."""
    first, last = moment(began), moment(ended)
    day, _, clock = last.partition(" ")
    return f"{first.removesuffix(' UTC')} – {clock if first.startswith(day) and clock else last}"
