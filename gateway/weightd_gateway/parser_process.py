"""Child processes that parse large requests and render large responses, which would block the event loop.

One child runs the small tasks and another one the large tasks, so that a small task never waits for a large one. A
child starts when it is first needed and exits after it has been idle for a while. Each child divides its time fairly
among the callers.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from weightd_gateway.auth import Caller
from weightd_gateway.fairness import FairShareQueue
from weightd_protocol.errors import RequestError, Unavailable

_log = logging.getLogger("weightd.gateway")

T = TypeVar("T")

# Seconds without a task after which a child process is ended.
IDLE_S = 30.0

PARSE_TIMEOUT_S = 10.0
"""Maximum seconds of a task. After this time, the gateway kills the child process that runs the task. The largest task
takes less than a second on an idle core."""

SMALL_BYTES = 128 * 1024
"""Maximum bytes of JSON or protobuf of a small task. The most expensive small task takes some ten milliseconds."""

# Niceness of the two child processes: both have lower priority than the event loop; large tasks have the lowest.
_NICE_SMALL, _NICE_LARGE = 5, 10

# Header of a message between parent and child: the number of buffers (`COUNT`), then the lengths of the pickle and of
# each buffer (`LENGTH`). The pickle and the buffers follow.
COUNT = struct.Struct("=I")
LENGTH = struct.Struct("=Q")


class ParserFailure(NamedTuple):
    """The result of a task that raised an error."""

    error: RequestError


class _ParseTask(NamedTuple):
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    result: asyncio.Future[Any]


class ParserPool:
    """Runs functions in two child processes: one for small tasks, one for large tasks.

    Functions are pickled by name, arguments and results by value. The content of a `pickle.PickleBuffer` among the
    arguments is sent without a copy, and arrives as an object with the buffer protocol.
    """

    def __init__(self) -> None:
        self.small = ParserProcess(_NICE_SMALL)
        self.large = ParserProcess(_NICE_LARGE)

    async def run(self, caller: Caller, nbytes: int, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in a child process and return its result.

        Args:
            caller: the caller whose share of time the task uses.
            nbytes: size of the text that the function parses or renders.
            function: a module-level function.
            arguments: the arguments of the function.

        Raises:
            RequestError: the function raised it.
            Unavailable: the child died, the task took too long, or the gateway is stopping.
        """
        helper = self.small if nbytes <= SMALL_BYTES else self.large
        return await helper.run(caller, function, *arguments)

    async def close(self) -> None:
        """Kill the children; unfinished tasks fail with `Unavailable`."""
        await asyncio.gather(self.small.close(), self.large.close())


class ParserProcess:
    """Runs functions in one child process, one at a time.

    Args:
        nice: niceness of the child.
    """

    def __init__(self, nice: int) -> None:
        self._nice = nice
        self._tasks: FairShareQueue[_ParseTask] = FairShareQueue()
        self._runner: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process id of the child; None while no child runs."""
        return None if self._process is None else self._process.pid

    async def run(self, caller: Caller, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in the child process and return its result.

        Raises:
            RequestError: the function raised it.
            Unavailable: the child died, the task took too long, or the gateway is stopping.
        """
        if self._is_closed:
            raise Unavailable("the gateway is stopping")
        loop = asyncio.get_running_loop()
        task = _ParseTask(function, arguments, loop.create_future())
        self._tasks.put(caller.tenant or caller, task)
        if self._runner is None:
            self._runner = loop.create_task(self._run_tasks())
        result = await task.result
        if isinstance(result, ParserFailure):
            try:
                raise result.error
            finally:
                # The error's traceback refers to this frame, and these variables would refer to the error. Such a cycle
                # would keep the body of the request in memory until the next garbage collection.
                del result, task
        return result  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Kill the child; unfinished tasks fail with `Unavailable`."""
        self._is_closed = True
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])
        for task in self._tasks.clear():
            if not task.result.done():
                task.result.set_result(ParserFailure(Unavailable("the gateway is stopping")))
        self._kill_child()

    async def _run_tasks(self) -> None:
        try:
            while self._tasks:
                user, task = self._tasks.get()
                if not task.result.done():
                    self._tasks.charge(user, await self._run_task(task))
        finally:
            self._runner = None
        self._idle_timer = asyncio.get_running_loop().call_later(IDLE_S, self._kill_child)

    async def _run_task(self, task: _ParseTask) -> float:
        """Run a task; return the seconds that the child spent on the task, or the seconds until the child failed."""
        started_at, timeout_s = time.monotonic(), PARSE_TIMEOUT_S
        seconds: float | None = None
        result: Any
        try:
            seconds, result = await asyncio.wait_for(self._call_child(task), timeout_s)
        except asyncio.TimeoutError:
            _log.warning("task of the parser process took longer than %g s; killing the process", timeout_s)
            self._kill_child()
            result = ParserFailure(Unavailable(f"parsing or rendering took longer than {timeout_s:g} s in the gateway"))
        except (OSError, EOFError) as error:
            _log.warning("parser process died: %s", str(error) or "connection closed")
            self._kill_child()
            result = ParserFailure(Unavailable("the gateway's parser process died during this request"))
        except asyncio.CancelledError:
            if not task.result.done():
                task.result.set_result(ParserFailure(Unavailable("the gateway is stopping")))
            raise
        if not task.result.done():
            task.result.set_result(result)
        return time.monotonic() - started_at if seconds is None else seconds

    async def _call_child(self, task: _ParseTask) -> tuple[float, Any]:
        loop = asyncio.get_running_loop()
        channel = self._ensure_started()
        for part in encode_message((task.function, task.arguments)):
            await loop.sock_sendall(channel, part)
        count = COUNT.unpack(await _receive(channel, COUNT.size))[0]
        lengths = [LENGTH.unpack(await _receive(channel, LENGTH.size))[0] for _ in range(count + 1)]
        content, *buffers = [await _receive(channel, each) for each in lengths]
        # Unpickling is safe, because this process has started the child, which runs only code of this package.
        return pickle.loads(content, buffers=buffers)  # type: ignore[no-any-return] # noqa: S301

    def _ensure_started(self) -> socket.socket:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self._channel is None:
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", "weightd_gateway.parser_child", str(theirs.fileno()), str(self._nice)]
                try:
                    self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
                except OSError:
                    ours.close()
                    raise
            ours.setblocking(False)
            self._channel = ours
        return self._channel

    def _kill_child(self) -> None:
        self._idle_timer = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def encode_message(content: object) -> Sequence[bytes | memoryview]:
    """Return the parts of a message: the header with the pickle, then the buffers."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(content, protocol=5, buffer_callback=buffers.append)
    views = [each.raw() for each in buffers]
    lengths = [LENGTH.pack(each) for each in (len(pickled), *map(len, views))]
    return [b"".join((COUNT.pack(len(views)), *lengths, pickled)), *views]


async def _receive(channel: socket.socket, size: int) -> bytearray:
    loop = asyncio.get_running_loop()
    content = bytearray(size)
    view = memoryview(content)
    while view:
        count = await loop.sock_recv_into(channel, view)
        if not count:
            raise EOFError
        view = view[count:]
    return content
