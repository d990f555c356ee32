"""The daemon's side of the ZeroMQ proxies: starts and restarts them, and receives their clients' connections."""

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

from weightd_common.stream import Stream
from weightd_daemon.platform import event_loop, process_spawner
from weightd_daemon.platform.acceptor import refuse_descriptors
from weightd_daemon.platform.client_log import ClientLog
from weightd_daemon.platform.connection_limiter import UserConnectionLimits
from weightd_daemon.platform.event_loop import EventLoop, Timer
from weightd_daemon.platform.exit_cause import describe_status
from weightd_daemon.platform.listen import listen_addresses
from weightd_daemon.platform.resource_limits import with_limit_hint
from weightd_daemon.platform.tenant_lookup import TenantCredentials
from weightd_daemon.zmq_proxy import control
from weightd_daemon.zmq_proxy.control import PeerIdentity, ProxyConfig, ProxyLogLine
from weightd_daemon.zmq_proxy.zygote import Zygote, launch
from weightd_protocol import limits
from weightd_protocol.codec import encode
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.inference import Error

_log = logging.getLogger("weightd.api")

# A proxy that has run for this number of seconds is healthy: when it exits, the count of early exits starts anew.
_HEALTHY_UPTIME_S = 10.0

# Seconds from an early exit to the restart: none after the first exit, then the initial delay, doubled after each
# further exit up to the maximum.
_INITIAL_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 5.0

# Seconds after which a zygote that has not carried out a fork request is killed, because it hangs. A zygote starts
# within a few hundred milliseconds and forks within milliseconds.
_FORK_TIMEOUT_S = 5.0

_NEVER = float("inf")


# Patterns for the log lines of a proxy. The first finds the user or host, because the number of lines per client is
# limited. The second finds numbers, which are removed so that lines of the same kind become equal.
_CLIENT_PATTERN = re.compile(r"\b(?:uid \d+|host [^\s:]+)")
_NUMBER_PATTERN = re.compile(r"\d+")


@dataclass
class ProxyInfo:
    """State of one proxy.

    Attributes:
        name: the name of the proxy's listener.
        address: the address to which the proxy's clients connect.
        pid: the pid of the proxy process; 0 while no process runs.
        peers: the number of connected clients that have sent a message.
        restarts: the number of proxy processes of the listener that have exited.
    """

    name: str
    address: str
    pid: int = 0
    peers: int = 0
    restarts: int = 0


@dataclass
class _Listener:
    """A listener and the state of its proxy process.

    Attributes:
        stream: the socket to the proxy process; None while no process runs.
        started_at: when a proxy process was last started, in monotonic seconds.
        early_exits: the number of exits since a proxy process last ran for `_HEALTHY_UPTIME_S`.
        restart_at: when to start the next proxy process, in monotonic seconds.
    """

    proxy: ProxyInfo
    listener: socket.socket
    config: ProxyConfig
    stream: Stream | None = field(default=None)
    started_at: float = 0.0
    early_exits: int = 0
    restart_at: float = _NEVER


class ListenerAuth(NamedTuple):
    """The secret key, the allowed clients and the connection limit of a listener; see `ProxyConfig`."""

    secret: str = ""
    keys: Sequence[str] | None = None
    max_connections: int = 0
    tenants: Sequence[TenantCredentials] | None = None


class ProxyLimits(NamedTuple):
    """The memory limit of a proxy, and the connection limits of each user or host at its listener."""

    max_memory_bytes: int
    user_limits: UserConnectionLimits


class ZmqProxies:
    """The ZeroMQ proxies of all listeners.

    Args:
        listeners: by name, the listening socket and the authentication of each listener. The caller closes the sockets.
        loop: reports messages of the proxies.
        on_client: called with the name of a listener, the socket over which its proxy relays a new client, and the
            identity of that client.
        limits: the limits of each proxy.
        log: logs the events of clients.
        zygote: the process that forks the proxies; this object takes ownership of it. None to start a zygote.
    """

    def __init__(
        self,
        listeners: Mapping[str, tuple[socket.socket, ListenerAuth]],
        loop: EventLoop,
        on_client: Callable[[str, socket.socket, PeerIdentity], object],
        limits: ProxyLimits,
        log: ClientLog,
        zygote: Zygote | None = None,
    ) -> None:
        self._log = log
        self._loop = loop
        self._on_client = on_client
        self._zygote: Zygote | None = None
        self._attach_zygote(zygote or _launch_zygote())
        self._proxy_numbers = itertools.count()
        self._proxy_by_number: dict[int, ProxyInfo] = {}
        # For the number of each proxy that the zygote has yet to fork: the deadline of the fork. The earliest comes
        # first.
        self._fork_deadlines: dict[int, float] = {}
        self._listeners = [
            _Listener(ProxyInfo(name, address), listener, _proxy_config(name, address, limits, lock))
            for (name, (listener, lock)), address in zip(
                listeners.items(), listen_addresses([each.fileno() for each, _ in listeners.values()]), strict=True
            )
        ]
        self._restart_timer = Timer(self._start_due_proxies)
        self._fork_timer = Timer(self._kill_hung_zygote)
        self._zygote_timer = Timer(self._restart_zygote)
        for timer in (self._restart_timer, self._fork_timer, self._zygote_timer):
            loop.add_timer(timer)
        for post in self._listeners:
            refuse_descriptors(post.listener)
            post.restart_at = 0.0
        self._start_due_proxies(event_loop.now())

    @property
    def proxies(self) -> Sequence[ProxyInfo]:
        """The state of the proxy of each listener."""
        return [post.proxy for post in self._listeners]

    @property
    def pids(self) -> Sequence[int]:
        """The pids of the zygote and all proxies."""
        zygote = [] if self._zygote is None else [self._zygote.pid]
        return [*zygote, *(each.pid for each in self.proxies if each.pid)]

    def update_auth(self, auth_by_listener: Mapping[str, ListenerAuth]) -> None:
        """Send new keys and tenants to the proxies. `auth_by_listener` has the names of the listeners as keys."""
        for post in self._listeners:
            lock = auth_by_listener[post.proxy.name]
            post.config = post.config._replace(allowed_keys=lock.keys, tenant_members=lock.tenants)
            # Until the proxy has read this message, it accepts clients by the old tables of keys and tenants. The
            # daemon applies the new tables to these clients, too.
            if post.stream is not None:
                with contextlib.suppress(ConnectionError):  # the proxy has exited: the next one gets the new tables
                    is_all = post.stream.send(
                        [control.encode_allowed_peers(post.config.allowed_keys, post.config.tenant_members)]
                    )
                    self._flush_if_unsent(is_all, post.stream)

    def close(self) -> None:
        """Stop all proxies after they have relayed the last replies, which may take a few seconds."""
        for post in self._listeners:
            if post.stream is not None:
                self._loop.remove(post.stream.fileno())
                post.stream.close()
        if self._zygote is not None:
            self._loop.remove(self._zygote.stream.fileno())
            self._zygote.stop()

    # --- internal -----------------------------------------------------------------------------------------------

    def _start_proxy(self, listener: _Listener, now: float) -> None:
        listener.restart_at, listener.started_at = _NEVER, now
        zygote = self._zygote
        if zygote is None:
            listener.restart_at = now + _MAX_BACKOFF_S
            return
        try:
            daemon_end, proxy_end = socket.socketpair()
        except OSError as error:
            _log.error("listener %s: no ZeroMQ proxy can be started: %s", listener.proxy.name, error.strerror)
            listener.restart_at = now + _MAX_BACKOFF_S
            return
        number = next(self._proxy_numbers)
        listener.stream = Stream(daemon_end, accepts_descriptors=True)
        self._loop.add(daemon_end.fileno(), lambda: self._on_proxy_readable(listener))
        self._proxy_by_number[number] = listener.proxy
        with proxy_end:
            try:
                is_all = zygote.request_fork(
                    listener.config.to_frames(number), [proxy_end.fileno(), listener.listener.fileno()]
                )
            except OSError as error:
                # The zygote has just exited. The event loop will report this, and then the zygote is restarted.
                _log.debug("cannot request the proxy of listener %s: %s", listener.proxy.name, error.strerror)
                del self._proxy_by_number[number]
            else:
                self._flush_if_unsent(is_all, zygote.stream)
                self._fork_deadlines[number] = now + _FORK_TIMEOUT_S
                self._fork_timer.set_no_later_than(self._fork_deadlines[number])

    def _flush_if_unsent(self, is_sent: bool, stream: Stream) -> None:
        """Flush a stream to a proxy or the zygote as soon as it is writable, unless everything was sent."""
        if not is_sent:
            self._loop.watch_writes(stream.fileno(), functools.partial(self._flush, stream))

    def _flush(self, stream: Stream) -> None:
        with contextlib.suppress(OSError):  # the proxy or zygote has exited; the next read detects this
            if not stream.flush():
                return
        self._loop.unwatch_writes(stream.fileno())

    def _start_due_proxies(self, now: float) -> None:
        for post in self._listeners:
            if post.restart_at <= now:
                self._start_proxy(post, now)
        self._restart_timer.set(min((post.restart_at for post in self._listeners), default=_NEVER))

    def _on_proxy_readable(self, listener: _Listener) -> None:
        """Handle the messages of a proxy."""
        stream = listener.stream
        if stream is None:
            return
        try:
            messages = stream.receive()
        except ConnectionError:
            self._on_proxy_exit(listener, event_loop.now())
            return
        for message in messages:
            event = control.parse_proxy_message(message.frames[0])
            if isinstance(event, ProxyLogLine):
                name, text = listener.proxy.name, event.text
                client, kind = _CLIENT_PATTERN.search(text), f"listener {name}: {_NUMBER_PATTERN.sub('', text)}"
                self._log.log(_log, event.level, client[0] if client else "", "listener %s: %s", name, text, kind=kind)
                continue
            if isinstance(event, int):
                listener.proxy.peers = event
                continue
            listener.proxy.peers = event.peer_count
            if stream.descriptors:
                self._on_client(listener.proxy.name, socket.socket(fileno=stream.descriptors.popleft()), event.identity)
            else:
                # The daemon has reached its limit of descriptors, so the kernel has closed the received one. The proxy
                # then disconnects the client.
                text = "no descriptor is left for a client of listener %s"
                self._log.log(_log, logging.ERROR, "", text, listener.proxy.name)

    def _on_proxy_exit(self, listener: _Listener, now: float) -> None:
        """Restart a proxy that has exited, after a delay if it has exited early before."""
        if listener.stream is not None:
            self._loop.remove(listener.stream.fileno())
            listener.stream.close()
        listener.stream, listener.proxy.pid, listener.proxy.peers = None, 0, 0
        listener.proxy.restarts += 1
        if now - listener.started_at >= _HEALTHY_UPTIME_S:
            listener.early_exits = 0
        listener.early_exits += 1
        listener.restart_at = now + backoff_s(listener.early_exits)
        self._start_due_proxies(now)

    def _attach_zygote(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._loop.add(zygote.stream.fileno(), lambda: self._on_zygote_readable(zygote))

    def _restart_zygote(self, now: float) -> None:
        """Start another zygote; on failure, try again later."""
        try:
            self._attach_zygote(_launch_zygote())
        except OSError as error:
            _log.error("no ZeroMQ proxy: %s", with_limit_hint(f"the zygote cannot be started: {error.strerror}"))
            self._zygote_timer.set(now + _MAX_BACKOFF_S)

    def _on_zygote_readable(self, zygote: Zygote) -> None:
        """Handle the messages of the zygote, or the exit of the zygote, which ends all proxies."""
        try:
            messages = zygote.stream.receive()
        except ConnectionError:
            _log.warning("zygote (pid %d) exited with all ZeroMQ proxies; restarting it", zygote.pid)
            self._loop.remove(zygote.stream.fileno())
            zygote.stop()
            self._zygote = None
            self._proxy_by_number.clear()
            self._fork_deadlines.clear()
            self._restart_zygote(event_loop.now())
            return
        for message in messages:
            news = control.parse_proxy_event(message.frames[0])
            self._fork_deadlines.pop(news.number, None)
            proxy = self._proxy_by_number[news.number]
            if news.status is None:
                proxy.pid = news.pid
                _log.info("listener %s: %s, proxy %d", proxy.name, proxy.address, news.pid)
                continue
            del self._proxy_by_number[news.number]
            how = (
                describe_status(news.status)
                if news.pid
                else with_limit_hint(f"cannot be started: {os.strerror(news.status)}")
            )
            _log.warning("listener %s: proxy (pid %d) %s; its client connections are closed", proxy.name, news.pid, how)

    def _kill_hung_zygote(self, now: float) -> None:
        """Kill the zygote if a fork is overdue."""
        until = next(iter(self._fork_deadlines.values()), _NEVER)
        if until > now:
            self._fork_timer.set(until)
        elif self._zygote is not None:
            _log.error(
                "zygote (pid %d) has not forked a proxy within %g s; killing it",
                self._zygote.pid,
                _FORK_TIMEOUT_S,
            )
            self._fork_deadlines.clear()
            self._zygote.kill()


def _launch_zygote() -> Zygote:
    return launch(functools.partial(process_spawner.spawn, start_new_session=False))


def backoff_s(early_exits: int) -> float:
    """Return the seconds before a proxy is restarted, after this number of consecutive early exits."""
    return min(_INITIAL_BACKOFF_S * 2 ** min(early_exits - 2, 16), _MAX_BACKOFF_S) if early_exits > 1 else 0.0


def _proxy_config(name: str, address: str, proxy_limits: ProxyLimits, auth: ListenerAuth) -> ProxyConfig:
    max_memory_bytes, user_limits = proxy_limits
    [error] = encode(Error("", InvalidArgument.code, ""))
    return ProxyConfig(
        name=name,
        address=address,
        max_frame_bytes=min(max_memory_bytes, limits.MAX_FRAME_BYTES),
        max_memory_bytes=max_memory_bytes,
        max_connections=auth.max_connections,
        max_user_connections=user_limits.max_connections,
        max_user_connection_rate=user_limits.rate,
        secret_key=auth.secret,
        allowed_keys=auth.keys,
        tenant_members=auth.tenants,
        error_prefix=control.error_prefix(bytes(error)),
    )
