"""Durations, times and numbers as texts for people.  Pure."""

from datetime import UTC, datetime

MAX_SECONDS = 1e12  # more is no duration: a broken clock, or a number of another program


def duration(seconds: float) -> str:
    """`38 ms`, `4.2 s`, `3 min 20 s`, `1 h 12 min`, `2 d 3 h`."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 0.0005:
        return "0"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if not seconds < MAX_SECONDS:
        return f"{seconds:g} s"
    whole = round(seconds)
    for size, unit, smaller, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


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


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def percent(share: float) -> str:
    """`97.3 %`, and never `100 %` for less."""
    return f"{share:.0%}" if share in (0.0, 1.0) else f"{min(99.9, share * 100):.1f}%"
