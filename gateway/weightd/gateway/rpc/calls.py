"""What each call has in common: who makes it, one message within bounds, and an error told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError

from weightd.gateway.callers import Caller, Identities, bearer
from weightd.gateway.codes import TooLarge, status_of, told
from weightd.gateway.logs import log_failure
from weightd.gateway.rpc.errors import ending
from weightd.gateway.seats import Seat, Seats
from weightd.gateway.shares import Shares
from weightd.gateway.traces import TRACEPARENT, trace
from weightd.protocol.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    RequestError,
    ResourceExhausted,
    Unauthenticated,
    WeightdError,
)
from weightd.shared.peers import Peer
from weightd.shared.seldom import Seldom

_log = logging.getLogger("weightd.gateway.rpc")

T = TypeVar("T")

# gRPC's classes take no parameters but in what checkers read.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Parse = Callable[[bytes], Any]

# An answer that is shorter is gone at once, and else no great loss: there are no more of them than calls.
LEAST_KEPT = 64 * 1024

# Of HTTP: from here on it is not the caller who has erred.
_SERVER_ERROR = 500

# Between two lines of the log about errors of one code to one caller: who asks again and again fills no log.
_QUIET_S = 10.0

# Of what is no tensor: names, and parameters of a region. gRPC's library would take as much as of a tensor, and make
# a hundred times as much of it.
MOST_ASKED_BYTES = 64 * 1024

# Who has sent no whole message by then may be sending the longest one.
PROMPT_S = 1.0

# A timer that runs so late shows that this process did not run.
_OVERSLEPT_S = 0.5

# Calls of whoever asks, without a token. None of them has a seat of those who have one.
MOST_PROBES = 64

# Calls beyond those under way whose answer is with gRPC's library, until it is sent.
UNSENT_CALLS = 256

PROBE = Caller(None, "probe")
"""Who asks no more than whether there is somebody: for the gateway itself, as nobody has to say who that is."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Call(NamedTuple):
    """A call of somebody who may make one.

    Attributes:
        caller: who makes it.
        seat: of the request that is made, or will be.
        traceparent: of W3C Trace Context; "" where there is none.
        left: seconds until its deadline; None where it has none.
        is_local: whether the caller is on this host.
    """

    caller: Caller
    seat: Seat
    traceparent: str = ""
    left: float | None = None
    is_local: bool = False


class Unimplemented(InvalidArgument):
    """A method whose purpose is not weightd's: gRPC has a status for that, which nothing else here has."""


# From a call and its message to the bytes of the answer.
Method = Callable[[Call, Any], Awaitable[bytes]]


class Connections(Protocol):
    """The connections of clients, by what gRPC's library calls them."""

    def peer(self, called: str) -> Peer:
        """Return the peer of a connection."""
        ...

    def receiving(self, called: str) -> AbstractContextManager[None]:
        """Let a connection send a long message within the block."""
        ...

    def is_full(self, called: str) -> bool:
        """Return whether a connection has sent too many bytes of messages that no call waits for."""
        ...


class Calls:
    """Takes calls.

    What gRPC calls a handler of one message is a stream here, of which one message is read: so who calls is known, and
    has a seat, before a byte of the message is kept.

    Args:
        identities: who is who; asked anew at each call.
        seats: one for each request that is received or answered.
        most_bytes: of a message.
        patience: seconds within which a message comes that somebody has a seat for.
        connections: of the clients.
    """

    def __init__(
        self,
        identities: Callable[[], Identities],
        seats: Seats,
        most_bytes: int,
        patience: float,
        connections: Connections,
    ) -> None:
        self._identities = identities
        self.most_bytes = most_bytes
        self._patience = patience
        self._connections = connections
        self._seldom = Seldom(_QUIET_S)
        self._probes = Seats(MOST_PROBES, MOST_PROBES * most_bytes)
        self._unsent_probes = Shares(MOST_PROBES)
        self._unsent = Shares(seats.most + UNSENT_CALLS)
        self.seats = seats

    def single(
        self, name: str, parse: Parse, method: Method, *, most: int = MOST_ASKED_BYTES, is_open: bool = False
    ) -> Handler:
        """Return what answers one message, of so many bytes at most, with one; `is_open`: whoever asks."""

        async def handle(messages: object, context: Context) -> bytes:
            begun, call = time.monotonic(), None
            try:
                with self.seated(context, is_open=is_open) as call:
                    if is_open:
                        _until_ended(context, self._unsent_probes, self.stranger(context))
                    else:
                        _until_ended(context, self._unsent, call.caller)
                    message = await self._received(context, call.seat, most, is_open=is_open)
                    answer = await method(call, parsed(message, parse))
                if len(answer) >= LEAST_KEPT:
                    _until_sent(context, self.seats.keep(None if is_open else call.caller, len(answer)))
            except WeightdError as error:
                self.note(name, call, begun, told(error))
                raise
            self.note(name, call, begun)
            return answer

        return grpc.stream_unary_rpc_method_handler(guarded(handle))

    async def probed(self, context: Context, parse: Parse) -> Any:
        """Return the message of whoever asks.

        Raises:
            ResourceExhausted: there are as many who ask as there may be.
            RequestError: there is none, or it is not what it should be.
        """
        with self._probes.one(self.stranger(context)) as seat:
            return parsed(await self._received(context, seat, MOST_ASKED_BYTES, is_open=True), parse)

    def stranger(self, context: Context) -> Caller:
        """Return who calls without a token: strangers are told apart by user or host, so that none has all places."""
        return Caller(None, self._connections.peer(context.peer()).key)

    @contextmanager
    def seated(self, context: Context, *, is_open: bool = False) -> Generator[Call, None, None]:
        """Have a call of somebody who may make one, and has a seat within the block; `is_open`: of whoever asks.

        Raises:
            Unauthenticated: nobody knows that one.
            ResourceExhausted: there is no seat.
        """
        token, parent = None, ""
        for key, value in context.invocation_metadata() or ():
            if key == "authorization" and not is_open:
                if token is not None:
                    raise Unauthenticated("expected one authorization")
                token = bearer(str(value))
            elif key == TRACEPARENT and (parent := trace(str(value))):
                context.set_trailing_metadata(((TRACEPARENT, parent),))
        peer = self._connections.peer(context.peer())
        caller = PROBE if is_open else self._identities().of(token=token, common_name=peer.common_name)
        with self._probes.one(self.stranger(context)) if is_open else self.seats.one(caller) as seat:
            yield Call(caller, seat, parent, context.time_remaining(), peer.is_local)

    def receiving(self, context: Context) -> AbstractContextManager[None]:
        """Let the connection of a call send long messages within a block."""
        return self._connections.receiving(context.peer())

    def note(self, name: str, call: Call | None, begun: float, error: RequestError | None = None) -> None:
        """Tell the log of a request that has ended: as a warning, but seldom, if it is the service that has failed."""
        caller, trace = ("nobody", "") if call is None else (call.caller.name, call.traceparent)
        now, more, level = time.monotonic(), "", logging.DEBUG
        if error is not None and status_of(error).http >= _SERVER_ERROR:
            untold = self._seldom.record(f"{caller} {error.code}", now)
            if untold is not None:
                level, more = logging.WARNING, f", and {untold} more since the last line of this" if untold else ""
        if _log.isEnabledFor(level):
            came_of_it = "OK" if error is None else f"{error.code}: {error}"
            what = f"{name} for {caller}: {came_of_it} in {1000 * (now - begun):.1f} ms"
            _log.log(level, "%s%s%s", what, f", traceparent {trace}" if trace else "", more)

    async def _received(self, context: Context, seat: Seat, most: int, *, is_open: bool) -> bytes:
        """Return the message, which the seat has from then on.

        gRPC's library tells nothing of a message before it is there, and keeps what has come of it. So who is not
        prompt takes as many bytes as a message may have; of whoever asks, nobody waits for the rest. The relay passes
        on only the beginning of a long message that is sent where a short one is expected.

        Raises:
            InvalidArgument: there is none.
            TooLarge: it is longer than such a message may be.
            DeadlineExceeded: it does not come in time.
            ResourceExhausted: there is no room for it.
        """

        def slow() -> None:
            if self._connections.is_full(context.peer()):
                raise TooLarge(f"expected a message of at most {most} bytes, got more")
            if is_open:
                _is_late(PROMPT_S)
            seat.take(self.most_bytes)

        expected = self.receiving(context) if most > MOST_ASKED_BYTES else nullcontext()
        with expected, _after(PROMPT_S, slow), within(self._patience, " (receive_timeout)"):
            message = await context.read()
        if message is grpc.aio.EOF:
            raise InvalidArgument("the call has no message")
        check_length(message, most)
        seat.leave()
        seat.take(len(message))
        return cast(bytes, message)


def check_length(message: Sized, most: int = MOST_ASKED_BYTES) -> None:
    """Look at how long a message is.

    Raises:
        TooLarge: it is longer than such a message may be.
    """
    if len(message) > most:
        raise TooLarge(f"expected a message of at most {most} bytes, got {len(message)}")


def parsed(message: bytes, parse: Parse) -> Any:
    """Return what the bytes of a message say.

    Raises:
        InvalidArgument: they are not what they should be.
    """
    try:
        return parse(message)
    except DecodeError:
        raise InvalidArgument("the message is not the protobuf that it should be") from None


def guarded(handle: Callable[[Any, Context], Awaitable[T]]) -> Callable[[Any, Context], Awaitable[T]]:
    """Return the same handler, whose errors are told to the caller: but those that nobody has foreseen, to the log."""

    async def call(messages: Any, context: Context) -> T:
        try:
            return await handle(messages, context)
        except grpc.aio.BaseError:
            raise  # gRPC's own, about a call that has ended
        except WeightdError as error:
            await _refuse(context, error)
        except Exception as error:  # noqa: BLE001 - gRPC would tell the caller all of it
            log_failure(_log, "a call failed", error)
            await _refuse(context, Internal("the gateway has failed; its log tells how"))

    return call


async def _refuse(context: Context, error: WeightdError) -> NoReturn:
    """End a call in an error."""
    if isinstance(error, Unimplemented):
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))
    code, text, metadata = ending(told(error))
    await context.abort(_CODES[code], text, (*context.trailing_metadata(), *metadata))


@contextmanager
def within(seconds: float, why: str = "") -> Generator[None, None, None]:
    """Have a message come in so many seconds, in the block.

    Raises:
        DeadlineExceeded: it does not; `why` says who has set the bound.
    """
    with _after(seconds, partial(_is_late, seconds, why)):
        yield


@contextmanager
def _after(seconds: float, do: Callable[[], None]) -> Generator[None, None, None]:
    """Do something if the block takes longer; where that is an error, the block ends in it."""
    task, loop = cast("asyncio.Task[Any]", asyncio.current_task()), asyncio.get_running_loop()
    error: RequestError | None = None
    timer: asyncio.TimerHandle

    def late() -> None:
        nonlocal error, timer
        if loop.time() > timer.when() + _OVERSLEPT_S:
            # This process was stopped: what has come meanwhile has not been read yet.
            timer = loop.call_later(seconds, late)
            return
        try:
            do()
        except RequestError as raised:
            error = raised
            task.cancel()

    timer = loop.call_later(seconds, late)
    try:
        yield
    except asyncio.CancelledError:
        if error is None:
            raise
        raise error from None
    finally:
        timer.cancel()


def _is_late(seconds: float, why: str = "") -> None:
    raise DeadlineExceeded(f"the message did not come within {seconds:g} seconds{why}")


def _until_ended(context: Any, shares: Shares, caller: Caller) -> None:
    """Have a place until the call has ended.

    Its handler has long before, where nobody reads the answer, which gRPC's library lets nobody take back: of such
    calls it keeps so many, whosesoever they are, and no more.

    Raises:
        ResourceExhausted: there is none for the caller; that is told without an answer that has to be read.
    """
    if not shares.take(caller):
        raise ResourceExhausted("the caller has its share of calls at this gateway whose answers are not read")

    def give(_: object) -> None:
        shares.give(caller)

    context.add_done_callback(give)


def _until_sent(context: Any, seat: Seat) -> None:
    """Keep a seat until the call has ended, in whatever way."""

    def leave(_: object) -> None:
        seat.leave()

    context.add_done_callback(leave)
