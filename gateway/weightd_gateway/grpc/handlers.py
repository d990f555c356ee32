"""Steps that all calls share: authenticate the caller, receive a message within bounds, and report errors."""

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

from weightd_common.peers import Peer
from weightd_common.rate_limits import RateLimitedLog
from weightd_gateway.auth import Authenticator, Caller, parse_bearer
from weightd_gateway.daemon_client import TRACEPARENT, valid_traceparent
from weightd_gateway.error_codes import TooLarge, status_of, to_request_error
from weightd_gateway.fairness import AdmissionControl, FairLimit, Permit
from weightd_gateway.grpc.schema import STATUS
from weightd_gateway.logs import log_failure
from weightd_protocol.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    RequestError,
    ResourceExhausted,
    Unauthenticated,
    WeightdError,
)

_log = logging.getLogger("weightd.gateway.grpc")

T = TypeVar("T")

# gRPC's classes take no parameters but in what checkers read.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Parse = Callable[[bytes], Any]

# An answer that is shorter is gone at once, and else no great loss: there are no more of them than calls.
MIN_RESERVED_BYTES = 64 * 1024

# Of HTTP: from here on it is not the caller who has erred.
_SERVER_ERROR = 500

# Between two lines of the log about errors of one code to one caller: who asks again and again fills no log.
_LOG_INTERVAL_S = 10.0

# Of what is no tensor: names, and parameters of a region. gRPC's library would take as much as of a tensor, and make
# a hundred times as much of it.
MAX_SMALL_MESSAGE_BYTES = 64 * 1024

# Who has sent no whole message by then may be sending the longest one.
RECEIVE_GRACE_S = 1.0

# A timer that runs so late shows that this process did not run.
_OVERSLEPT_S = 0.5

# Calls of whoever asks, without a token. None of them has a permit of those who have one.
MAX_PROBES = 64

# Calls beyond those under way whose answer is with gRPC's library, until it is sent.
MAX_UNSENT_CALLS = 256

PROBE_CALLER = Caller(None, "probe")
"""Who asks no more than whether there is somebody: for the gateway itself, as nobody has to say who that is."""

# Text and details go as headers, of which a client refuses more than 8 KiB at random and more than 16 KiB always. A
# byte may take three in the one, and four thirds in the other.
MAX_TEXT_BYTES = 1500

_RETRY_INFO_TYPE = "type.googleapis.com/google.rpc.RetryInfo"

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class RpcContext(NamedTuple):
    """A call of somebody who may make one.

    Attributes:
        caller: who makes it.
        permit: of the request that is made, or will be.
        traceparent: of W3C Trace Context; "" where there is none.
        time_left_s: seconds until its deadline; None where it has none.
        is_local: whether the caller is on this host.
    """

    caller: Caller
    permit: Permit
    traceparent: str = ""
    time_left_s: float | None = None
    is_local: bool = False


class Unimplemented(InvalidArgument):
    """A method whose purpose is not weightd's: gRPC has a status for that, which nothing else here has."""


# From a call and its message to the bytes of the answer.
Method = Callable[[RpcContext, Any], Awaitable[bytes]]


class RpcConnections(Protocol):
    """The connections of clients, by what gRPC's library calls them."""

    def peer_of(self, library_name: str) -> Peer:
        """Return the peer of a connection."""
        ...

    def receiving(self, called: str) -> AbstractContextManager[None]:
        """Let a connection send a long message within the block."""
        ...

    def is_full(self, called: str) -> bool:
        """Return whether a connection has sent too many bytes of messages that no call waits for."""
        ...


class RpcHandlers:
    """Takes calls.

    What gRPC calls a handler of one message is a stream here, of which one message is read: so who calls is known, and
    has a permit, before a byte of the message is kept.

    Args:
        authenticator: who is who; asked anew at each call.
        admission: one for each request that is received or answered.
        max_bytes: of a message.
        receive_timeout_s: seconds within which a message comes that somebody has a permit for.
        connections: of the clients.
    """

    def __init__(
        self,
        authenticator: Callable[[], Authenticator],
        admission: AdmissionControl,
        max_bytes: int,
        receive_timeout_s: float,
        connections: RpcConnections,
    ) -> None:
        self._authenticator = authenticator
        self.max_bytes = max_bytes
        self._receive_timeout_s = receive_timeout_s
        self._connections = connections
        self._error_log = RateLimitedLog(_LOG_INTERVAL_S)
        self._probe_admission = AdmissionControl(MAX_PROBES, MAX_PROBES * max_bytes)
        self._unsent_probe_limit = FairLimit(MAX_PROBES)
        self._unsent_limit = FairLimit(admission.max_requests + MAX_UNSENT_CALLS)
        self.admission = admission

    def unary_handler(
        self,
        name: str,
        parse: Parse,
        method: Method,
        *,
        max_bytes: int = MAX_SMALL_MESSAGE_BYTES,
        is_unauthenticated: bool = False,
    ) -> Handler:
        """Return what answers one message, of so many bytes at most, with one; `is_unauthenticated`: whoever asks."""

        async def handle(messages: object, context: Context) -> bytes:
            begun, call = time.monotonic(), None
            try:
                with self.admit(context, is_unauthenticated=is_unauthenticated) as call:
                    if is_unauthenticated:
                        _hold_until_done(context, self._unsent_probe_limit, self.anonymous_caller(context))
                    else:
                        _hold_until_done(context, self._unsent_limit, call.caller)
                    message = await self._receive(
                        context, call.permit, max_bytes, is_unauthenticated=is_unauthenticated
                    )
                    answer = await method(call, parse_message(message, parse))
                if len(answer) >= MIN_RESERVED_BYTES:
                    _release_when_done(
                        context,
                        self.admission.reserve_response(None if is_unauthenticated else call.caller, len(answer)),
                    )
            except WeightdError as error:
                self.log_call(name, call, begun, to_request_error(error))
                raise
            self.log_call(name, call, begun)
            return answer

        return grpc.stream_unary_rpc_method_handler(report_errors(handle))

    async def receive_probe(self, context: Context, parse: Parse) -> Any:
        """Return the message of whoever asks.

        Raises:
            ResourceExhausted: there are as many who ask as there may be.
            RequestError: there is none, or it is not what it should be.
        """
        with self._probe_admission.admit(self.anonymous_caller(context)) as permit:
            return parse_message(
                await self._receive(context, permit, MAX_SMALL_MESSAGE_BYTES, is_unauthenticated=True), parse
            )

    def anonymous_caller(self, context: Context) -> Caller:
        """Return who calls without a token: strangers are told apart by user or host, so that none has all places."""
        return Caller(None, self._connections.peer_of(context.peer()).key)

    @contextmanager
    def admit(self, context: Context, *, is_unauthenticated: bool = False) -> Generator[RpcContext, None, None]:
        """Have a call of somebody who may make one, and has a permit within the block.

        `is_unauthenticated`: of whoever asks.

        Raises:
            Unauthenticated: nobody knows that one.
            ResourceExhausted: there is no permit.
        """
        token, parent = None, ""
        for key, value in context.invocation_metadata() or ():
            if key == "authorization" and not is_unauthenticated:
                if token is not None:
                    raise Unauthenticated("expected one authorization")
                token = parse_bearer(str(value))
            elif key == TRACEPARENT and (parent := valid_traceparent(str(value))):
                context.set_trailing_metadata(((TRACEPARENT, parent),))
        peer = self._connections.peer_of(context.peer())
        caller = (
            PROBE_CALLER
            if is_unauthenticated
            else self._authenticator().authenticate(token=token, common_name=peer.common_name)
        )
        with (
            self._probe_admission.admit(self.anonymous_caller(context))
            if is_unauthenticated
            else self.admission.admit(caller)
        ) as permit:
            yield RpcContext(caller, permit, parent, context.time_remaining(), peer.is_local)

    def receiving(self, context: Context) -> AbstractContextManager[None]:
        """Let the connection of a call send long messages within a block."""
        return self._connections.receiving(context.peer())

    def log_call(
        self, name: str, call: RpcContext | None, started_at: float, error: RequestError | None = None
    ) -> None:
        """Tell the log of a request that has ended: as a warning, but seldom, if it is the service that has failed."""
        caller, traceparent = ("nobody", "") if call is None else (call.caller.name, call.traceparent)
        now, more, level = time.monotonic(), "", logging.DEBUG
        if error is not None and status_of(error).http >= _SERVER_ERROR:
            suppressed_count = self._error_log.record(f"{caller} {error.code}", now)
            if suppressed_count is not None:
                level, more = (
                    logging.WARNING,
                    f", and {suppressed_count} more since the last line of this" if suppressed_count else "",
                )
        if _log.isEnabledFor(level):
            outcome = "OK" if error is None else f"{error.code}: {error}"
            what = f"{name} for {caller}: {outcome} in {1000 * (now - started_at):.1f} ms"
            _log.log(level, "%s%s%s", what, f", traceparent {traceparent}" if traceparent else "", more)

    async def _receive(self, context: Context, permit: Permit, max_bytes: int, *, is_unauthenticated: bool) -> bytes:
        """Return the message, which the permit has from then on.

        gRPC's library tells nothing of a message before it is there, and keeps what has come of it. So who is not
        prompt takes as many bytes as a message may have; of whoever asks, nobody waits for the rest. The relay passes
        on only the beginning of a long message that is sent where a short one is expected.

        Raises:
            InvalidArgument: there is none.
            TooLarge: it is longer than such a message may be.
            DeadlineExceeded: it does not come in time.
            ResourceExhausted: there is no room for it.
        """

        def on_slow() -> None:
            if self._connections.is_full(context.peer()):
                # The bytes may be those of another call, which gRPC's library does not say.
                raise TooLarge(
                    "the calls of this connection have sent too many bytes without an answer; a message of this method"
                    f" has at most {max_bytes} bytes"
                )
            if is_unauthenticated:
                _raise_deadline_exceeded(RECEIVE_GRACE_S)
            permit.reserve(self.max_bytes)

        expected = self.receiving(context) if max_bytes > MAX_SMALL_MESSAGE_BYTES else nullcontext()
        with (
            expected,
            _call_after(RECEIVE_GRACE_S, on_slow),
            receive_deadline(self._receive_timeout_s, " (receive_timeout)"),
        ):
            message = await context.read()
        if message is grpc.aio.EOF:
            raise InvalidArgument("the call has no message")
        check_length(message, max_bytes)
        permit.release()
        permit.reserve(len(message))
        return cast(bytes, message)


def check_length(message: Sized, max_bytes: int = MAX_SMALL_MESSAGE_BYTES) -> None:
    """Look at how long a message is.

    Raises:
        TooLarge: it is longer than such a message may be.
    """
    if len(message) > max_bytes:
        raise TooLarge(f"expected a message of at most {max_bytes} bytes, got {len(message)}")


def parse_message(message: bytes, parse: Parse) -> Any:
    """Return what the bytes of a message say.

    Raises:
        InvalidArgument: they are not what they should be.
    """
    try:
        return parse(message)
    except DecodeError:
        raise InvalidArgument("the message is not the protobuf that it should be") from None


def report_errors(handle: Callable[[Any, Context], Awaitable[T]]) -> Callable[[Any, Context], Awaitable[T]]:
    """Return the same handler, whose errors are told to the caller: but those that nobody has foreseen, to the log."""

    async def call(messages: Any, context: Context) -> T:
        try:
            return await handle(messages, context)
        except grpc.aio.BaseError:
            raise  # gRPC's own, about a call that has ended
        except WeightdError as error:
            await _abort(context, error)
        except Exception as error:  # noqa: BLE001 - gRPC would tell the caller all of it
            log_failure(_log, "a call failed", error)
            await _abort(context, Internal("the gateway has failed; its log tells how"))

    return call


async def _abort(context: Context, error: WeightdError) -> NoReturn:
    """End a call in an error."""
    if isinstance(error, Unimplemented):
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))
    code, text, metadata = rpc_status(to_request_error(error))
    await context.abort(_CODES[code], text, (*context.trailing_metadata(), *metadata))


class RpcStatus(NamedTuple):
    """How a call ends.

    Attributes:
        code: the number of gRPC's status.
        text: for people.
        metadata: what goes with it.
    """

    code: int
    text: str
    metadata: tuple[tuple[str, str | bytes], ...]


def rpc_status(error: RequestError) -> RpcStatus:
    """Return how a call ends in this error.

    Where it helps to wait, two say so: `grpc-retry-pushback-ms`, which gRPC's own retries obey, and a
    google.rpc.RetryInfo in `grpc-status-details-bin`, which people's code reads.
    """
    code = status_of(error).grpc
    text = str(error).encode()[:MAX_TEXT_BYTES].decode(errors="ignore")
    if error.retry_after is None:
        return RpcStatus(code, text, ())
    milliseconds = max(1, round(error.retry_after * 1000))
    seconds, rest = divmod(milliseconds, 1000)
    delay = STATUS["Duration"](seconds=seconds, nanos=rest * 1_000_000)
    retry = STATUS["Any"](type_url=_RETRY_INFO_TYPE, value=STATUS["RetryInfo"](retry_delay=delay).SerializeToString())
    details = STATUS["Status"](code=code, message=text, details=[retry]).SerializeToString()
    return RpcStatus(code, text, (("grpc-retry-pushback-ms", str(milliseconds)), ("grpc-status-details-bin", details)))


@contextmanager
def receive_deadline(timeout_s: float, setting: str = "") -> Generator[None, None, None]:
    """Have a message come in so many seconds, in the block.

    Raises:
        DeadlineExceeded: it does not; `setting` says who has set the bound.
    """
    with _call_after(timeout_s, partial(_raise_deadline_exceeded, timeout_s, setting)):
        yield


@contextmanager
def _call_after(seconds: float, on_timeout: Callable[[], None]) -> Generator[None, None, None]:
    """Do something if the block takes longer; where that is an error, the block ends in it."""
    task, loop = cast("asyncio.Task[Any]", asyncio.current_task()), asyncio.get_running_loop()
    error: RequestError | None = None
    timer: asyncio.TimerHandle

    def on_timer() -> None:
        nonlocal error, timer
        if loop.time() > timer.when() + _OVERSLEPT_S:
            # This process was stopped: what has come meanwhile has not been read yet.
            timer = loop.call_later(seconds, on_timer)
            return
        try:
            on_timeout()
        except RequestError as raised:
            error = raised
            task.cancel()

    timer = loop.call_later(seconds, on_timer)
    try:
        yield
    except asyncio.CancelledError:
        if error is None:
            raise
        raise error from None
    finally:
        timer.cancel()


def _raise_deadline_exceeded(seconds: float, setting: str = "") -> None:
    raise DeadlineExceeded(f"the message did not come within {seconds:g} seconds{setting}")


def _hold_until_done(context: Any, limit: FairLimit, caller: Caller) -> None:
    """Have a place until the call has ended.

    Its handler has long before, where nobody reads the answer, which gRPC's library lets nobody take back: of such
    calls it keeps so many, whosesoever they are, and no more.

    Raises:
        ResourceExhausted: there is none for the caller; that is told without an answer that has to be read.
    """
    if not limit.take(caller):
        raise ResourceExhausted("the caller has its share of calls at this gateway whose answers are not read")

    def release(_: object) -> None:
        limit.release(caller)

    context.add_done_callback(release)


def _release_when_done(context: Any, permit: Permit) -> None:
    """Keep a permit until the call has ended, in whatever way."""

    def release(_: object) -> None:
        permit.release()

    context.add_done_callback(release)
