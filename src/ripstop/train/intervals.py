"""How often to commit: `every=10` steps, or `every="30s"`.  Pure.

Ranks must commit after the same steps, but their clocks differ.  So rank 0 turns seconds into a number of steps, once
for each commit, and the other ranks read its number.
"""

import re

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
MAX_GROWTH = 4  # from one interval to the next: steps right after a start are not typical


def parse_commit_interval(every: int | str) -> tuple[int, float]:
    """(steps, 0.0) or (0, seconds)."""
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return every, 0.0
    if isinstance(every, str) and (found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h)", every.strip())):
        return 0, float(found[1]) * _UNITS_S[found[2]]
    raise ValueError(f'commit(every={every!r}): write a number of steps, as in 10, or a time, as in "30s" or "5m"')


def next_interval(seconds: float, steps: int, elapsed: float) -> int:
    """The steps until the next commit, if the last `steps` took `elapsed` seconds."""
    wanted = round(seconds * steps / elapsed) if elapsed > 0 else steps * MAX_GROWTH
    return max(1, min(wanted, steps * MAX_GROWTH))


def next_save_interval(remaining_s: float, commits: int, elapsed: float) -> tuple[int, bool]:
    """The commits until the next look at the clock, and whether that commit is to be saved to disk.

    The last `commits` took `elapsed` seconds.  If the save is due much later, the rate is measured again before.
    """
    wanted = max(1, round(remaining_s * commits / elapsed)) if elapsed > 0 else commits * MAX_GROWTH + 1
    return (wanted, True) if wanted <= commits * MAX_GROWTH else (commits * MAX_GROWTH, False)
