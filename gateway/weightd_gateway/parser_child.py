"""`python -m weightd_gateway.parser_child DESCRIPTOR NICENESS`: the child process of `parser_process.ParserProcess`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import sys
import time
from typing import Any

from weightd_gateway.parser_process import COUNT, LENGTH, ParserFailure, encode_message
from weightd_protocol.errors import Internal, RequestError

# If a task and its result together have more bytes than this limit, the child then returns freed memory to the kernel.
_LARGE_BYTES = 256 * 1024


def main() -> None:
    """Run the parent's tasks until it closes the connection."""
    # Ignore the signals with which a service manager or terminal stops all processes at once: the parent still needs
    # this child for the requests in flight.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(int(sys.argv[2]))
    with socket.socket(fileno=int(sys.argv[1])) as channel, contextlib.suppress(EOFError, OSError):
        while True:
            if _run_one(channel) > _LARGE_BYTES:
                _trim()


def _run_one(channel: socket.socket) -> int:
    """Receive and run one task, and send the result; return the bytes of task and result together."""
    count: int = COUNT.unpack(_receive(channel, COUNT.size))[0]
    lengths: list[int] = [LENGTH.unpack(_receive(channel, LENGTH.size))[0] for _ in range(count + 1)]
    content, *buffers = [_receive(channel, each) for each in lengths]
    function, arguments = pickle.loads(content, buffers=buffers)  # noqa: S301 - the parent is this program
    size = 0
    started_at = time.monotonic()
    result = _call_function(function, arguments)
    for part in encode_message((time.monotonic() - started_at, result)):
        channel.sendall(part)
        size += len(part)
    return size + sum(lengths)


def _call_function(function: Any, arguments: Any) -> Any:
    try:
        return function(*arguments)
    except RequestError as error:
        return ParserFailure(error)
    except Exception as error:  # noqa: BLE001 - the parent reports it to the caller, and the child continues
        return ParserFailure(Internal(f"the gateway failed: {type(error).__name__}: {error}"))


def _receive(channel: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        count = channel.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return content


def _trim() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    main()
