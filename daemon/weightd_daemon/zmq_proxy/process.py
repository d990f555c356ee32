"""What a proxy does from the moment in which it was forked."""

from __future__ import annotations

import functools
import signal
import socket
import sys
from typing import TYPE_CHECKING

from weightd_daemon.platform.acceptor import refuse_descriptors
from weightd_daemon.platform.connection_limit import raise_descriptor_limit
from weightd_daemon.zmq_proxy import sandbox
from weightd_daemon.zmq_proxy.control import ProxyConfig, new_control_stream
from weightd_daemon.zmq_proxy.crypto_thread import CryptoThread
from weightd_daemon.zmq_proxy.memory import mapped_bytes, raise_oom_score
from weightd_daemon.zmq_proxy.proxy import ZmqProxy

if TYPE_CHECKING:
    from weightd_daemon.platform.fd_closer import DescriptorCloser

# Beside what it may take for clients: what the allocator sets aside for each thread, and what only looks like memory.
_ADDRESS_SPACE_MARGIN_BYTES = 256 * 1024 * 1024


def run(control_socket: socket.socket, listener: socket.socket, config: ProxyConfig) -> None:
    """Serve until the daemon's end of the link is closed."""
    sandbox.set_process_name(f"zmq-proxy {config.name}")
    raise_descriptor_limit()
    raise_oom_score()
    initial_bytes = mapped_bytes()
    listener.setblocking(False)
    crypto_thread = CryptoThread() if config.secret_key else None
    fd_closer = None if refuse_descriptors(listener) else _new_fd_closer()
    zmq_proxy = ZmqProxy(listener, new_control_stream(control_socket), config, crypto_thread, fd_closer)
    sandbox.drop_privileges()
    if crypto_thread is not None:
        crypto_thread.start()
    # What a client announces is mapped, and then found to be too much.
    sandbox.limit_growth(
        initial_bytes + 2 * config.max_memory_bytes + _ADDRESS_SPACE_MARGIN_BYTES,
        may_start_threads=fd_closer is not None,
    )
    zmq_proxy.run()
    zmq_proxy.close()


def _new_fd_closer() -> DescriptorCloser:
    """Return what closes descriptors that clients send, before Linux 6.16. It starts threads when some come."""
    from weightd_daemon.platform.fd_closer import INTERRUPT, DescriptorCloser  # noqa: PLC0415 - not every proxy needs it

    signal.signal(INTERRUPT, _ignore_signal)
    return DescriptorCloser(functools.partial(print, file=sys.stderr))


def _ignore_signal(number: int, frame: object) -> None:
    """Only end the system call that waits."""
