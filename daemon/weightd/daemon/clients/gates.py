"""The daemon's side of its gates: has them made, hears whom they let in, and has a dead one replaced."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weightd.daemon.gate import link
from weightd.daemon.gate.link import PeerIdentity, Said, Terms
from weightd.daemon.gate.zygote import Zygote, launch
from weightd.daemon.host import clock, spawning
from weightd.daemon.host.accepting import refuse_descriptors
from weightd.daemon.host.admission import Limits
from weightd.daemon.host.clientlog import ClientLog
from weightd.daemon.host.ends import explain
from weightd.daemon.host.listening import addresses
from weightd.daemon.host.loop import Loop
from weightd.daemon.host.membership import Members
from weightd.daemon.host.shortage import explained
from weightd.daemon.host.timers import Timer
from weightd.protocol import limits
from weightd.protocol.codec import encode
from weightd.protocol.errors import InvalidArgument
from weightd.protocol.messages.data import Error
from weightd.shared.stream import Stream

_log = logging.getLogger("weightd.frontend")

# A gate that has lived so long has not died of what the one before it has died of.
_HEALTHY_S = 10.0

# The first one that dies is replaced at once, the next ones after so long, twice as long each time, at most the second.
_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 5.0

# A zygote forks within milliseconds, and has started within a few hundred: past this it hangs.
_FORK_LIMIT_S = 5.0

_NEVER = float("inf")


# In what a gate has to log: the user, or the host, that it is about; and all numbers.
_USER = re.compile(r"\b(?:uid \d+|host [^\s:]+)")
_NUMBER = re.compile(r"\d+")


@dataclass
class Gate:
    """One gate.

    Attributes:
        name: of its listener.
        address: where its clients connect.
        pid: of its process; 0 while there is none.
        peers: how many clients are connected and have spoken.
        restarts: how many of its processes have died.
    """

    name: str
    address: str
    pid: int = 0
    peers: int = 0
    restarts: int = 0


@dataclass
class _Post:
    """A listener, and the process that is to be there.

    Attributes:
        stream: the process's link; None while there is none.
        since: when it was started.
        failures: how many have died early, one after another.
        due: when another is to be started.
    """

    gate: Gate
    listener: socket.socket
    terms: Terms
    stream: Stream | None = field(default=None)
    since: float = 0.0
    failures: int = 0
    due: float = _NEVER


class Lock(NamedTuple):
    """Who is let in at a listener: see `Terms`."""

    secret: str = ""
    keys: Sequence[str] | None = None
    max_connections: int = 0
    tenants: Sequence[Members] | None = None


class Bounds(NamedTuple):
    """What a gate may take for its clients, and the limits for the connections of one user or host to its listener."""

    max_memory_bytes: int
    user_limits: Limits


class Gates:
    """The gates of all listeners.

    Args:
        listeners: by name, each with the socket that listens, which stays the caller's, and who is let in.
        loop: calls when a gate has something to say.
        adopt: called with the name of a listener, the socket on which its gate speaks for a client that has come, and
            who that is.
        bounds: of each gate.
        log: of what clients do.
        zygote: makes the gates; None to start one. It is this object's.
    """

    def __init__(
        self,
        listeners: Mapping[str, tuple[socket.socket, Lock]],
        loop: Loop,
        adopt: Callable[[str, socket.socket, PeerIdentity], object],
        bounds: Bounds,
        log: ClientLog,
        zygote: Zygote | None = None,
    ) -> None:
        self._log = log
        self._loop = loop
        self._adopt = adopt
        self._zygote: Zygote | None = None
        self._have(zygote or _launched())
        self._numbers = itertools.count()
        self._by_number: dict[int, Gate] = {}
        # Those that were asked for and have not been made yet, and until when they have to be: the first one first.
        self._asked: dict[int, float] = {}
        self._posts = [
            _Post(Gate(name, address), listener, _terms(name, address, bounds, lock))
            for (name, (listener, lock)), address in zip(
                listeners.items(), addresses([each.fileno() for each, _ in listeners.values()]), strict=True
            )
        ]
        self._timer = Timer(self._start_due)
        self._hang_timer = Timer(self._end_hung)
        self._launch_timer = Timer(self._launch)
        for timer in (self._timer, self._hang_timer, self._launch_timer):
            loop.add_timer(timer)
        for post in self._posts:
            refuse_descriptors(post.listener)
            post.due = 0.0
        self._start_due(clock.now())

    @property
    def gates(self) -> Sequence[Gate]:
        """How the gate of each listener stands."""
        return [post.gate for post in self._posts]

    @property
    def pids(self) -> Sequence[int]:
        """Of all processes that this object has."""
        zygote = [] if self._zygote is None else [self._zygote.pid]
        return [*zygote, *(each.pid for each in self.gates if each.pid)]

    def admit(self, locks: Mapping[str, Lock]) -> None:
        """Have gates use new keys and tenants, by the names of listeners."""
        for post in self._posts:
            lock = locks[post.gate.name]
            post.terms = post.terms._replace(keys=lock.keys, tenants=lock.tenants)
            # One that is being started has the others yet; what it lets in, the daemon knows better.
            if post.stream is not None:
                with contextlib.suppress(ConnectionError):  # it has died: the next one has them
                    is_all = post.stream.send([link.admits(post.terms.keys, post.terms.tenants)])
                    self._flush_unless(is_all, post.stream)

    def close(self) -> None:
        """Have all end, once they have passed on what was said to them; wait for that some seconds."""
        for post in self._posts:
            if post.stream is not None:
                self._loop.remove(post.stream.fileno())
                post.stream.close()
        if self._zygote is not None:
            self._loop.remove(self._zygote.stream.fileno())
            self._zygote.end()

    # --- within -------------------------------------------------------------------------------------------------

    def _start(self, post: _Post, now: float) -> None:
        post.due, post.since = _NEVER, now
        zygote = self._zygote
        if zygote is None:
            post.due = now + _LONGEST_DELAY_S
            return
        try:
            ours, its = socket.socketpair()
        except OSError as error:
            _log.error("listener %s: no gate can be started: %s", post.gate.name, error.strerror)
            post.due = now + _LONGEST_DELAY_S
            return
        number = next(self._numbers)
        post.stream = Stream(ours, takes_descriptors=True)
        self._loop.add(ours.fileno(), lambda: self._hear(post))
        self._by_number[number] = post.gate
        with its:
            try:
                is_all = zygote.ask(post.terms.frames(number), [its.fileno(), post.listener.fileno()])
            except OSError as error:
                # It has just died: the end of the link is heard in a moment.
                _log.debug("the gate of listener %s cannot be asked for: %s", post.gate.name, error.strerror)
                del self._by_number[number]
            else:
                self._flush_unless(is_all, zygote.stream)
                self._asked[number] = now + _FORK_LIMIT_S
                self._hang_timer.due_by(self._asked[number])

    def _flush_unless(self, is_all: bool, stream: Stream) -> None:
        """Send what is left for a gate or the zygote as soon as it reads."""
        if not is_all:
            self._loop.watch_writes(stream.fileno(), functools.partial(self._flush, stream))

    def _flush(self, stream: Stream) -> None:
        with contextlib.suppress(OSError):  # it has died: a read tells
            if not stream.flush():
                return
        self._loop.unwatch_writes(stream.fileno())

    def _start_due(self, now: float) -> None:
        for post in self._posts:
            if post.due <= now:
                self._start(post, now)
        self._timer.set(min((post.due for post in self._posts), default=_NEVER))

    def _hear(self, post: _Post) -> None:
        """A gate says something."""
        stream = post.stream
        if stream is None:
            return
        try:
            messages = stream.receive()
        except ConnectionError:
            self._replace(post, clock.now())
            return
        for message in messages:
            said = link.of_gate(message.frames[0])
            if isinstance(said, Said):
                name, text = post.gate.name, said.text
                client, kind = _USER.search(text), f"listener {name}: {_NUMBER.sub('', text)}"
                self._log.log(_log, said.level, client[0] if client else "", "listener %s: %s", name, text, kind=kind)
                continue
            if isinstance(said, int):
                post.gate.peers = said
                continue
            post.gate.peers = said.peers
            if stream.descriptors:
                self._adopt(post.gate.name, socket.socket(fileno=stream.descriptors.popleft()), said.identity)
            else:
                # The kernel has closed it: the gate hangs the client up.
                text = "no descriptor is left for a client of listener %s"
                self._log.log(_log, logging.ERROR, "", text, post.gate.name)

    def _replace(self, post: _Post, now: float) -> None:
        """A gate has died."""
        if post.stream is not None:
            self._loop.remove(post.stream.fileno())
            post.stream.close()
        post.stream, post.gate.pid, post.gate.peers = None, 0, 0
        post.gate.restarts += 1
        if now - post.since >= _HEALTHY_S:
            post.failures = 0
        post.failures += 1
        post.due = now + delay(post.failures)
        self._start_due(now)

    def _have(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._loop.add(zygote.stream.fileno(), lambda: self._on_news(zygote))

    def _launch(self, now: float) -> None:
        """Have another zygote: there is none."""
        try:
            self._have(_launched())
        except OSError as error:
            _log.error("no gate: %s", explained(f"the zygote cannot be started: {error.strerror}"))
            self._launch_timer.set(now + _LONGEST_DELAY_S)

    def _on_news(self, zygote: Zygote) -> None:
        """The zygote says something."""
        try:
            messages = zygote.stream.receive()
        except ConnectionError:
            _log.warning("the zygote, process %d, has died, and with it all gates: it is replaced", zygote.pid)
            self._loop.remove(zygote.stream.fileno())
            zygote.end()
            self._zygote = None
            self._by_number.clear()
            self._asked.clear()
            self._launch(clock.now())
            return
        for message in messages:
            news = link.of_zygote(message.frames[0])
            self._asked.pop(news.number, None)
            gate = self._by_number[news.number]
            if news.status is None:
                gate.pid = news.pid
                _log.info("listener %s: %s, gate %d", gate.name, gate.address, news.pid)
                continue
            del self._by_number[news.number]
            how = explain(news.status) if news.pid else explained(f"cannot be started: {os.strerror(news.status)}")
            _log.warning("listener %s: gate %d %s: the connections of its clients end", gate.name, news.pid, how)

    def _end_hung(self, now: float) -> None:
        """The zygote should have made a gate by now, unless it has since, or died."""
        until = next(iter(self._asked.values()), _NEVER)
        if until > now:
            self._hang_timer.set(until)
        elif self._zygote is not None:
            _log.error(
                "the zygote, process %d, has not made a gate in %g s: it is killed", self._zygote.pid, _FORK_LIMIT_S
            )
            self._asked.clear()
            self._zygote.kill()


def _launched() -> Zygote:
    return launch(functools.partial(spawning.spawn, session=False))


def delay(failures: int) -> float:
    """Return after how many seconds a gate is replaced, the last of so many in a row that have died early."""
    return min(_FIRST_DELAY_S * 2 ** min(failures - 2, 16), _LONGEST_DELAY_S) if failures > 1 else 0.0


def _terms(name: str, address: str, bounds: Bounds, lock: Lock) -> Terms:
    max_memory_bytes, user_limits = bounds
    [error] = encode(Error("", InvalidArgument.code, ""))
    return Terms(
        name=name,
        address=address,
        max_frame_bytes=min(max_memory_bytes, limits.MAX_FRAME_BYTES),
        max_memory_bytes=max_memory_bytes,
        max_connections=lock.max_connections,
        max_user_connections=user_limits.most,
        max_user_connection_rate=user_limits.rate,
        secret=lock.secret,
        keys=lock.keys,
        tenants=lock.tenants,
        error=link.error_start(bytes(error)),
    )
