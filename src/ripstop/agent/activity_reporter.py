"""Tells people at the console what this node does: in a live line at a terminal, otherwise in a log line now and then.

`activity.py` has the texts.  The live line changes every second; nothing else here polls.
"""

import asyncio
import logging
from collections.abc import Callable

from ripstop.agent.activity import Activity, ActivityKind, describe_activity, next_activity_line_after
from ripstop.system.live_line import LiveLine

log = logging.getLogger("ripstop.agent")

LIVE_INTERVAL_S = 1.0
LIVE_DELAY_S = 0.3  # an activity that is over sooner is not shown


class ActivityReporter:
    """`read` returns the activity, and whether the live line can show it now."""

    def __init__(self, read: Callable[[], tuple[Activity, bool]], live: LiveLine | None) -> None:
        self._read = read
        self._live = live
        self._loop = asyncio.get_running_loop()
        self._key: tuple[ActivityKind, int] | None = None
        self._since = self._loop.time()
        self._logged_after = 0.0  # seconds of the activity after which it was logged last
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def update(self) -> None:
        """Something has happened, or it is time for the next line."""
        if self._is_closed:
            return
        activity, is_shown = self._read()
        now = self._loop.time()
        if (key := (activity.kind, activity.round)) != self._key:
            self._key, self._since, self._logged_after = key, now, 0.0
        seconds = now - self._since
        due = next_activity_line_after(activity.kind, self._logged_after)
        if self._live is not None and is_shown:
            self._live.show(describe_activity(activity, seconds) if seconds >= LIVE_DELAY_S else "")
            due = seconds + LIVE_INTERVAL_S - seconds % LIVE_INTERVAL_S if seconds >= LIVE_DELAY_S else LIVE_DELAY_S
        else:
            if self._live is not None:
                self._live.show("")
            if seconds >= due:
                self._logged_after = seconds
                due = next_activity_line_after(activity.kind, seconds)
                if text := describe_activity(activity, seconds):
                    log.info("%s", text)
        self._set_timer(self._since + due)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._live is not None:
            self._live.show("")
        self._is_closed = True

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self.update)
