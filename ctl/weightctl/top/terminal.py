"""The live screen on a terminal: reads keys and draws lines, with curses."""

from __future__ import annotations

import contextlib
import curses
import locale
import os
import queue
import select
import signal
import socket
import sys
import time
from typing import Callable, Dict, Generator, Iterable, List, Optional, Tuple

from weightctl.top.drawing import BLOCKS, Style, StyledLine, glyphs
from weightctl.top.poller import Poller, PollResult, PollThread
from weightctl.top.screen import PollStatus, ScreenSize, draw
from weightctl.top.tables import KeyAction, View, faster, slower
from weightd_common.dashboard.overview import Overview

# Maximum number of seconds between two redraws. At each redraw, the screen shows the age of the last response in
# seconds.
_TICK_S = 1.0

# Milliseconds for which curses waits after Esc for more characters of an escape sequence. If no characters follow in
# this time, the user has pressed Esc.
_ESCAPE_MS = 50

# Names of keys, by their curses code, and by the character that the terminal sends.
_KEYS: Dict[int, str] = {
    curses.KEY_UP: "up", curses.KEY_DOWN: "down", curses.KEY_PPAGE: "page up", curses.KEY_NPAGE: "page down",
    curses.KEY_HOME: "home", curses.KEY_END: "end", curses.KEY_ENTER: "enter", curses.KEY_BACKSPACE: "backspace",
}  # fmt: skip
_CHARACTERS = {"\n": "enter", "\r": "enter", "\t": "tab", "\x1b": "escape", "\b": "backspace", "\x7f": "backspace"}

_COLOURS = {
    Style.GOOD: 2, Style.WARN: 3, Style.BAD: 1, Style.COPY: 6, Style.BESIDE: 4, Style.OTHER: 5,
}  # fmt: skip


def show(poller: Poller, first: Overview, delay_s: float, max_updates: Optional[int]) -> None:
    """Show the live screen until the user quits, or until a number of updates is reached.

    Args:
        poller: polls the daemon for later overviews.
        first: the overview that is shown first.
        delay_s: seconds between two polls.
        max_updates: the number of updates after which the screen ends; None for no limit.
    """
    with contextlib.suppress(locale.Error):  # the user's locale may not exist on this host
        locale.setlocale(locale.LC_ALL, "")
    # By default, curses waits for a second after Esc before it reports the key.
    os.environ.setdefault("ESCDELAY", str(_ESCAPE_MS))
    with _wakeup_socket() as (wake, woken):
        screen = Screen(first, delay_s, max_updates)

        def found(what: PollResult) -> None:
            screen.results.put(what)
            wake()

        with PollThread(poller, delay_s, found) as asking:
            _run_curses(lambda window: screen.run(window, woken, asking.poll_now))


def _run_curses(run: Callable[[curses.window], None]) -> None:
    """Run a function with curses. Ctrl-C cannot interrupt curses while it restores the terminal."""
    before = signal.getsignal(signal.SIGINT)

    def run_and_end(window: curses.window) -> None:
        try:
            run(window)
        finally:
            signal.signal(signal.SIGINT, _ignore_signal)

    try:
        curses.wrapper(run_and_end)
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _wakeup_socket() -> Generator[Tuple[Callable[[], None], socket.socket], None, None]:
    """Within the block, provide a function and a socket for waking a thread that polls the socket.

    The socket becomes readable when the function is called, when a signal arrives, or when the terminal is resized.
    """
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    before = signal.signal(signal.SIGWINCH, _ignore_signal)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def wake() -> None:
        # The socket is full, so a wake-up is pending already; or it is closed, because the screen has ended
        with contextlib.suppress(OSError):
            writer.send(b"!")

    try:
        yield wake, reader
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGWINCH, before)
        reader.close()
        writer.close()


def _ignore_signal(number: int, frame: object) -> None:
    """Do nothing. Python writes to the wake-up socket only for signals that have a handler."""


class Screen:
    """The live screen: its state and its event loop.

    Args:
        first: the overview that is shown first.
        delay_s: seconds between two polls.
        max_updates: the number of updates after which the screen ends; None for no limit.

    Attributes:
        results: a queue of poll results, filled by the polling thread.
    """

    def __init__(self, first: Overview, delay_s: float, max_updates: Optional[int]) -> None:
        self.results: queue.Queue[PollResult] = queue.Queue()
        self._view = View()
        self._overview, self._polled_at, self._error = first, time.monotonic(), ""
        self._delay_s = delay_s
        self._updates_left = max_updates
        self._encoding = locale.nl_langinfo(locale.CODESET)
        self._glyphs = glyphs(self._encoding)

    def run(self, window: curses.window, wakeup: socket.socket, poll_now: Callable[[float], None]) -> None:
        """Run the event loop until the screen ends. `poll_now` starts a poll and sets the seconds between polls."""
        styles = _make_styles()
        window.nodelay(True)
        window.keypad(True)
        poll = select.poll()
        for each in (sys.stdin, wakeup):
            poll.register(each, select.POLLIN)
        while True:
            self._show(window, styles)
            if any(event & ~select.POLLIN for _, event in poll.poll(1000 * _TICK_S)):
                return  # the terminal was closed
            with contextlib.suppress(BlockingIOError):
                wakeup.recv(4096)
            self._take_results()
            if self._updates_left == 0 or not self._handle_keys(_read_keys(window), poll_now):
                return

    def _take_results(self) -> None:
        """Take the poll results from the queue, and show the last overview or error."""
        while not self.results.empty():
            found = self.results.get()
            self._error = found.error
            if found.overview is not None:
                self._overview, self._polled_at = found.overview, found.polled_at
            if self._updates_left is not None:
                self._updates_left = max(0, self._updates_left - 1)

    def _handle_keys(self, keys: Iterable[str], poll_now: Callable[[float], None]) -> bool:
        """Handle the keys that were pressed. Return False if the screen must end."""
        for key in keys:
            action = self._view.on_key(key, self._overview)
            if action is KeyAction.QUIT:
                return False
            if action is KeyAction.SLOWER:
                self._delay_s = slower(self._delay_s)
            if action is KeyAction.FASTER:
                self._delay_s = faster(self._delay_s)
            if action is not None:
                poll_now(self._delay_s)
        return True

    def _show(self, window: curses.window, styles: Dict[Style, int]) -> None:
        height, width = _fit_window(window)
        poll_status = PollStatus(self._delay_s, time.monotonic() - self._polled_at, self._error)
        # Leave the last column empty: curses scrolls when it writes to the last cell of the screen.
        lines = draw(self._overview, self._view, poll_status, ScreenSize(height, width - 1), self._glyphs)
        window.erase()
        for row, line in enumerate(lines):
            _write(window, row, self._encodable(line), width - 1, styles)
        window.refresh()

    def _encodable(self, line: StyledLine) -> StyledLine:
        """Return the line with question marks for the characters that the terminal's encoding cannot represent."""
        if self._glyphs is BLOCKS:
            return line
        spans = [(text.encode(self._encoding, "replace").decode(self._encoding), style) for text, style in line.spans]
        return line._replace(spans=spans)


def _fit_window(window: curses.window) -> Tuple[int, int]:
    """Set the window of curses to the size of the terminal. Return its height and width."""
    columns, lines = os.get_terminal_size(sys.stdout.fileno())
    if window.getmaxyx() != (lines, columns) and lines > 0 and columns > 1:
        curses.resizeterm(lines, columns)
    return window.getmaxyx()


def _read_keys(window: curses.window) -> List[str]:
    """Return the keys that were pressed since the last call. Unknown keys are ignored."""
    found: List[str] = []
    while True:
        try:
            key = window.get_wch()
        except curses.error:
            return found  # no further key was pressed
        if isinstance(key, str):
            found.append(_CHARACTERS.get(key, key))
        elif key in _KEYS:
            found.append(_KEYS[key])


def _make_styles() -> Dict[Style, int]:
    """Return the curses attribute of each style. It includes a colour if the terminal has colours."""
    with contextlib.suppress(curses.error):
        curses.curs_set(0)
    styles = {
        Style.STRONG: curses.A_BOLD, Style.WEAK: curses.A_DIM, Style.HEAD: curses.A_REVERSE,
        Style.WARN: curses.A_BOLD, Style.BAD: curses.A_BOLD, Style.PLAIN: curses.A_DIM,
    }  # fmt: skip
    if not curses.has_colors() or "NO_COLOR" in os.environ:
        return styles
    curses.use_default_colors()
    for number, (style, colour) in enumerate(_COLOURS.items(), 1):
        curses.init_pair(number, colour, -1)
        styles[style] = styles.get(style, 0) | curses.color_pair(number)
    return styles


def _write(window: curses.window, row: int, line: StyledLine, width: int, styles: Dict[Style, int]) -> None:
    cursor = curses.A_REVERSE if line.is_selected else 0
    # If the terminal has just become smaller, curses rejects text outside it. The next redraw corrects the screen.
    with contextlib.suppress(curses.error):
        column = 0
        for text, style in line.spans:
            window.addstr(row, column, text, styles.get(style, 0) | cursor)
            column += len(text)
        if line.is_selected:
            window.addstr(row, column, " " * (width - column), cursor)
