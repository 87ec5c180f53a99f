"""The terminal of `ripstop top`: paints screens with curses, reads keys, and sends commands.

Without colours (`NO_COLOR`, or a terminal that has none) the same screens are painted in bold and reverse.
"""

import curses
import os
import time
from collections.abc import Callable

from msgspec import Struct

from ripstop.cli.top.job_reader import JobReader
from ripstop.cli.top.screen import (
    HELP,
    MIN_HEIGHT,
    MIN_WIDTH,
    SORTS,
    Line,
    Selection,
    Style,
    overview_screen,
    screen_characters_as_ascii,
    screen_rows,
    text_screen,
)
from ripstop.model.errors import RipstopError
from ripstop.model.text_formatting import format_clean_text, format_ranges

KEY_WAIT_MS = 200
REDRAW_S = 1.0  # durations grow
LOG_LINES = 2000
LOG_INTERVAL_S = 1.0
ESCAPE = 27


class TextView(Struct):
    """A text in front of the overview; `refresh` returns it again, for one that grows."""

    title: str
    lines: list[str]
    first: int | None = 0  # the first line on the screen; None: the end is shown
    refresh: Callable[[], list[str]] | None = None
    refreshed_at: float = 0.0


class Prompt(Struct):
    """A question on the last line; `answer` gets a yes, or the text."""

    text: str
    answer: Callable[[str], None]
    typed: str | None = None  # None: y or n


class Terminal:
    def __init__(self, window: curses.window, reader: JobReader) -> None:
        self._window = window
        self._reader = reader
        self._chosen = Selection()
        self._view: TextView | None = None
        self._prompt: Prompt | None = None
        self._message = ""
        self._styles = _top_terminal_styles()
        self._running = True

    def run(self) -> None:
        self._window.timeout(KEY_WAIT_MS)
        self._window.keypad(True)
        painted: tuple[int, float] = (-1, 0.0)
        while self._running:
            now = time.monotonic()
            if painted[0] != self._reader.version or now - painted[1] >= REDRAW_S:
                self._paint()
                painted = (self._reader.version, now)
            key = self._window.getch()
            if key != curses.ERR:
                self._on_key(key)
                painted = (-1, 0.0)

    # painting ---------------------------------------------------------------------------------------------------------

    def _paint(self) -> None:
        columns, rows = os.get_terminal_size()
        if (rows, columns) != self._window.getmaxyx():  # resized before curses has noticed it
            curses.resizeterm(rows, columns)
        height, width = self._window.getmaxyx()
        if height < MIN_HEIGHT or width < MIN_WIDTH:
            lines: list[Line] = [[(f"at least {MIN_WIDTH}x{MIN_HEIGHT}", Style.PLAIN)]]
        elif self._view is not None:
            self._refresh(self._view)
            lines = text_screen(self._view.title, self._view.lines, self._view.first, width, height)
        else:
            lines = overview_screen(self._reader.view(), self._chosen, width, height)
        if self._prompt is not None:
            lines[-1] = [(f"{self._prompt.text} {self._prompt.typed or ''}"[: width - 1], Style.BOLD)]
        elif self._message:
            lines[-1] = [(self._message, Style.BOLD)]
        self._window.erase()
        for y, line in enumerate(lines[:height]):
            x = 0
            for raw, style in line:
                text = self._printable(raw)[: width - x - (y == height - 1)]
                try:
                    self._window.addstr(y, x, text, self._styles[style])
                except curses.error:
                    break  # a wide character at the edge
                x += len(text)
        self._window.refresh()

    def _printable(self, text: str) -> str:
        text = format_clean_text(text).replace("\n", " ").replace("\t", "    ")
        return text if self._window.encoding.lower() in ("utf-8", "utf8") else screen_characters_as_ascii(text)

    def _refresh(self, view: TextView) -> None:
        if view.refresh is not None and time.monotonic() - view.refreshed_at >= LOG_INTERVAL_S:
            view.lines, view.refreshed_at = view.refresh(), time.monotonic()

    # keys -------------------------------------------------------------------------------------------------------------

    def _on_key(self, key: int) -> None:
        self._message = ""
        if self._prompt is not None:
            self._answer(self._prompt, key)
        elif self._view is not None:
            self._on_view_key(self._view, key)
        else:
            self._on_overview_key(key)

    def _on_overview_key(self, key: int) -> None:
        moves = {curses.KEY_UP: -1, curses.KEY_DOWN: 1, curses.KEY_PPAGE: -10, curses.KEY_NPAGE: 10}
        moves |= {curses.KEY_HOME: -(10**9), curses.KEY_END: 10**9, ord("k"): -1, ord("j"): 1}
        if key in moves:
            self._move(moves[key])
            return
        actions: dict[int, Callable[[], None]] = {
            ord("q"): self._quit,
            ord("o"): self._next_sort,
            ord("/"): self._ask_filter,
            ord("l"): self._show_log,
            10: self._show_log,
            curses.KEY_ENTER: self._show_log,
            ord("s"): self._show_stack,
            ord("S"): self._show_all_stacks,
            ord("d"): self._ask_drain,
            ord("r"): self._ask_restart,
            ord("?"): lambda: self._open(TextView("keys", HELP.splitlines())),
            ESCAPE: self._clear_filter,
        }
        if action := actions.get(key):
            try:
                action()
            except RipstopError as error:
                self._message = str(error)

    def _on_view_key(self, view: TextView, key: int) -> None:
        room = max(1, self._window.getmaxyx()[0] - 2)
        last = max(0, len(view.lines) - room)
        at = last if view.first is None else min(view.first, last)
        moves = {curses.KEY_UP: -1, curses.KEY_DOWN: 1, curses.KEY_PPAGE: -room, curses.KEY_NPAGE: room}
        if key in moves:
            at = max(0, at + moves[key])
            view.first = None if at >= last and view.refresh else min(at, last)
        elif key == curses.KEY_HOME:
            view.first = 0
        elif key == curses.KEY_END:
            view.first = None
        elif key in (ESCAPE, ord("q"), curses.KEY_LEFT):
            self._view = None

    def _answer(self, prompt: Prompt, key: int) -> None:
        if prompt.typed is None:
            self._prompt = None
            if key in (ord("y"), ord("Y")):
                try:
                    prompt.answer("y")
                except RipstopError as error:
                    self._message = str(error)
        elif key == ESCAPE:
            self._prompt = None
        elif key in (10, curses.KEY_ENTER):
            self._prompt = None
            prompt.answer(prompt.typed)
        elif key in (curses.KEY_BACKSPACE, 127, 8):
            prompt.typed = prompt.typed[:-1]
        elif 32 <= key < 127:
            prompt.typed += chr(key)

    # what keys do -----------------------------------------------------------------------------------------------------

    def _quit(self) -> None:
        self._running = False

    def _move(self, by: int) -> None:
        found = screen_rows(self._reader.view(), self._chosen)
        if found:
            at = next((i for i, rank in enumerate(found) if rank.rank == self._chosen.rank), 0)
            self._chosen.rank = found[max(0, min(len(found) - 1, at + by))].rank

    def _next_sort(self) -> None:
        names = list(SORTS)
        self._chosen.sort = names[(names.index(self._chosen.sort) + 1) % len(names)]
        found = screen_rows(self._reader.view(), self._chosen)
        self._chosen.rank = found[0].rank if found else 0

    def _ask_filter(self) -> None:
        def apply(text: str) -> None:
            self._chosen.filter = text
            self._move(0)

        self._prompt = Prompt("filter:", apply, self._chosen.filter)

    def _clear_filter(self) -> None:
        self._chosen.filter = ""

    def _selected_rank(self) -> int:
        found = screen_rows(self._reader.view(), self._chosen)
        if not found:
            raise RipstopError("no rank is selected")
        return next((rank.rank for rank in found if rank.rank == self._chosen.rank), found[0].rank)

    def _show_log(self) -> None:
        rank = self._selected_rank()

        def read() -> list[str]:
            try:
                text: str = self._reader.job.get(f"/logs/{rank}", tail=LOG_LINES)["text"]
            except RipstopError as error:
                return [str(error)]
            return format_clean_text(text).splitlines()

        self._open(TextView(f"stderr of rank {rank}", [], None, read))

    def _show_stack(self) -> None:
        rank = self._selected_rank()
        stack = self._reader.job.get("/stacks", rank=rank)["stacks"][0]
        lines = [*stack["stack"].splitlines(), ""]
        lines += [f"kernel: {stack['wchan'] or '-'}  state: {stack['state'] or '-'}  by {stack['source'] or '-'}", ""]
        for group in stack.get("collectives", ()):
            pending = f", waits in {group['pending']}" if group["pending"] else ""
            name = group["label"] or group["group"]
            lines.append(f"{name}: {group['op']} {group['size']} entered {group['entered']}{pending}")
        self._open(TextView(f"stack of rank {rank}", [*lines, stack.get("recorder", "")]))

    def _show_all_stacks(self) -> None:
        reply = self._reader.job.get("/stacks")
        groups: dict[str, list[int]] = {}
        for stack in reply["stacks"]:
            frames = [line for line in stack["stack"].splitlines() if not line.startswith("thread ")]
            groups.setdefault("\n".join(frames), []).append(stack["rank"])
        lines = [f"{node['node']}: {node['why']}" for node in reply["unanswered"]]
        for text, ranks in sorted(groups.items(), key=lambda group: len(group[1])):
            lines += [f"ranks {format_ranges(sorted(ranks))}:", *text.splitlines(), ""]
        self._open(TextView(f"{len(reply['stacks'])} workers, {len(groups)} stacks, the rarest first", lines))

    def _open(self, view: TextView) -> None:
        self._view = view

    def _ask_drain(self) -> None:
        selected = self._selected_rank()
        job = self._reader.view()
        node = next(rank.node for rank in job.ranks if rank.rank == selected)
        slots = sum(rank.node == node for rank in job.ranks)

        def drain(_: str) -> None:
            self._message = str(self._reader.job.post("/drain", node=node)["done"])

        self._prompt = Prompt(f"drain {node}: its {slots} workers stop, it leaves, all others restart? y/n", drain)

    def _ask_restart(self) -> None:
        status = self._reader.view().status

        def restart(_: str) -> None:
            self._message = str(self._reader.job.post("/restart")["done"])

        text = f"restart all {status['world_size']} workers as round {status['round'] + 1}? y/n"
        self._prompt = Prompt(text, restart)


def _top_terminal_styles() -> dict[Style, int]:
    styles = {
        Style.PLAIN: curses.A_NORMAL,
        Style.DIM: curses.A_DIM,
        Style.BOLD: curses.A_BOLD,
        Style.OK: curses.A_NORMAL,
        Style.WARN: curses.A_BOLD,
        Style.BAD: curses.A_BOLD | curses.A_UNDERLINE,
        Style.SELECTED: curses.A_REVERSE,
    }
    if curses.has_colors():
        curses.use_default_colors()  # else curses paints white on black
    if os.environ.get("NO_COLOR") or not curses.has_colors():
        return styles
    colors = {Style.OK: curses.COLOR_GREEN, Style.WARN: curses.COLOR_YELLOW, Style.BAD: curses.COLOR_RED}
    for number, (style, color) in enumerate(colors.items(), 1):
        curses.init_pair(number, color, -1)
        styles[style] = curses.color_pair(number) | (curses.A_BOLD if style is Style.BAD else 0)
    return styles


def run_terminal(reader: JobReader) -> None:
    """Show the job until the user quits."""
    os.environ.setdefault("ESCDELAY", "25")  # ms after which Escape is a key of its own

    def main(window: curses.window) -> None:
        curses.curs_set(0)
        Terminal(window, reader).run()

    curses.wrapper(main)
