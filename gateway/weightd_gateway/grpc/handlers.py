"""Common steps of all gRPC calls: authenticate the caller, receive the message within limits, report errors."""

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
from weightd_gateway.auth import Authenticator, Caller, parse_bearer, token_digest
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

# gRPC's classes are generic only in the type stubs, so these types must be quoted.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Parse = Callable[[bytes], Any]

# Responses with fewer bytes need no permit: they are usually sent at once, and `MAX_UNSENT_CALLS` limits their number.
MIN_RESERVED_BYTES = 64 * 1024

# The lowest HTTP status of errors that the caller has not caused.
_SERVER_ERROR = 500

# Seconds between two log lines about errors of the same code for the same caller, so that retries do not fill the log.
_LOG_INTERVAL_S = 10.0

# Maximum bytes of a message without tensors. The limit of gRPC's library allows tensors; but the parsed fields of a
# message can take a hundred times its size.
MAX_SMALL_MESSAGE_BYTES = 64 * 1024

# Seconds within which the message of a call should arrive. After this time the call must reserve the maximum size.
RECEIVE_GRACE_S = 1.0

# A timer that fires this many seconds late indicates that the process was suspended, for example by SIGSTOP.
_OVERSLEPT_S = 0.5

# Maximum number of unauthenticated calls in progress. The limit for authenticated callers is separate.
MAX_PROBES = 64

# Maximum number of calls whose response gRPC's library has not sent completely, in addition to the requests in flight.
MAX_UNSENT_CALLS = 256

PROBE_CALLER = Caller(None, "probe")
"""The caller of health probes, which need no credentials; the gateway sends probes under its own identity."""

# Maximum bytes of an error text. Headers contain the text twice: percent-encoded, which takes up to three times the
# size, and in the details (base64). Clients may reject headers of more than 8 KiB, and always reject more than 16 KiB.
MAX_TEXT_BYTES = 1500

_RETRY_INFO_TYPE = "type.googleapis.com/google.rpc.RetryInfo"

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class RpcContext(NamedTuple):
    """An authenticated call that holds a permit.

    Attributes:
        caller: the authenticated caller.
        permit: the permit of the request.
        traceparent: the header of W3C Trace Context; "" without one.
        time_left_s: seconds until the deadline; None without a deadline.
        is_local: whether the caller is on this host.
    """

    caller: Caller
    permit: Permit
    traceparent: str = ""
    time_left_s: float | None = None
    is_local: bool = False


class Unimplemented(InvalidArgument):
    """The called method is not supported by weightd. Only gRPC has a status for this error."""


# Implements a gRPC method: takes the call and the parsed message, returns the bytes of the response.
Method = Callable[[RpcContext, Any], Awaitable[bytes]]


class RpcConnections(Protocol):
    """The connections of clients, identified by the names that gRPC's library gives them."""

    def peer_of(self, library_name: str) -> Peer:
        """Return the peer of a connection."""
        ...

    def receiving(self, called: str) -> AbstractContextManager[None]:
        """Within the block, allow the connection that gRPC's library names `called` to send long messages."""
        ...

    def is_full(self, called: str) -> bool:
        """Return whether the calls of a connection have sent too many bytes of messages without getting a response."""
        ...


class RpcHandlers:
    """Creates the handlers of gRPC calls.

    Each unary method is registered as a client-streaming method. So its handler can authenticate the caller and get a
    permit before gRPC's library receives the one message.

    Args:
        authenticator: returns the current authenticator, which a reload may have replaced.
        admission: limits the requests in flight and their bytes.
        max_bytes: the maximum size of a message.
        receive_timeout_s: seconds within which the message of an admitted call must arrive.
        connections: the connections of the clients.
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
        """Return a handler that receives one message of at most `max_bytes` bytes and returns one response."""

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
        """Receive and parse the message of an unauthenticated call.

        Raises:
            ResourceExhausted: too many unauthenticated calls are in progress.
            RequestError: the message is missing or invalid.
        """
        with self._probe_admission.admit(self.anonymous_caller(context)) as permit:
            return parse_message(
                await self._receive(context, permit, MAX_SMALL_MESSAGE_BYTES, is_unauthenticated=True), parse
            )

    def anonymous_caller(self, context: Context) -> Caller:
        """Return a caller for a client without credentials. Its name is the peer, so each peer has a separate share."""
        return Caller(None, self._connections.peer_of(context.peer()).key)

    @contextmanager
    def admit(self, context: Context, *, is_unauthenticated: bool = False) -> Generator[RpcContext, None, None]:
        """Authenticate the caller and hold a permit within the block.

        A call of a method without authentication gets `PROBE_CALLER`, and a permit of a separate limit.

        Raises:
            Unauthenticated: the credentials are missing or unknown.
            ResourceExhausted: the limit of requests is reached.
        """
        digest, parent = None, ""
        for key, value in context.invocation_metadata() or ():
            if key == "authorization" and not is_unauthenticated:
                if digest is not None:
                    raise Unauthenticated("expected one authorization header")
                digest = token_digest(parse_bearer(str(value)))
            elif key == TRACEPARENT and (parent := valid_traceparent(str(value))):
                context.set_trailing_metadata(((TRACEPARENT, parent),))
        peer = self._connections.peer_of(context.peer())
        caller = (
            PROBE_CALLER
            if is_unauthenticated
            else self._authenticator().authenticate(digest=digest, common_name=peer.common_name)
        )
        with (
            self._probe_admission.admit(self.anonymous_caller(context))
            if is_unauthenticated
            else self.admission.admit(caller)
        ) as permit:
            yield RpcContext(caller, permit, parent, context.time_remaining(), peer.is_local)

    def receiving(self, context: Context) -> AbstractContextManager[None]:
        """Allow the connection of a call to send long messages within the block."""
        return self._connections.receiving(context.peer())

    def log_call(
        self, name: str, call: RpcContext | None, started_at: float, error: RequestError | None = None
    ) -> None:
        """Log the result of a request: at debug level, or as a rate-limited warning if the caller is not at fault."""
        caller, traceparent = ("nobody", "") if call is None else (call.caller.name, call.traceparent)
        now, more, level = time.monotonic(), "", logging.DEBUG
        if error is not None and status_of(error).http >= _SERVER_ERROR:
            suppressed_count = self._error_log.record(f"{caller} {error.code}", now)
            if suppressed_count is not None:
                level, more = (
                    logging.WARNING,
                    f", and {suppressed_count} more since the last such line" if suppressed_count else "",
                )
        if _log.isEnabledFor(level):
            outcome = "OK" if error is None else f"{error.code}: {error}"
            what = f"{name} for {caller}: {outcome} in {1000 * (now - started_at):.1f} ms"
            _log.log(level, "%s%s%s", what, f", traceparent {traceparent}" if traceparent else "", more)

    async def _receive(self, context: Context, permit: Permit, max_bytes: int, *, is_unauthenticated: bool) -> bytes:
        """Receive the message of a call and reserve its bytes in the permit.

        gRPC's library does not report a message before it is complete, but stores the part that has arrived. After the
        grace period, an authenticated call therefore reserves the maximum size of a message, and an unauthenticated
        call fails. If the method expects a short message, the relay forwards only the beginning of a long one. Such a
        call therefore fails at the next end of a grace period.

        Raises:
            InvalidArgument: the client sent no message.
            TooLarge: the message is too long for the method.
            DeadlineExceeded: the message did not arrive in time.
            ResourceExhausted: other requests have reserved too many bytes at the moment.
        """

        def on_slow() -> None:
            if self._connections.is_full(context.peer()):
                # The bytes may be from another call of this connection: gRPC's library does not report from which call.
                raise TooLarge(
                    "the calls of this connection have sent too many bytes before a response; a message of this method"
                    f" has at most {max_bytes} bytes"
                )
            if is_unauthenticated:
                _raise_deadline_exceeded(RECEIVE_GRACE_S)
            if not permit.reserved_bytes:
                permit.reserve(self.max_bytes)

        expected = self.receiving(context) if max_bytes > MAX_SMALL_MESSAGE_BYTES else nullcontext()
        with (
            expected,
            _call_every(RECEIVE_GRACE_S, on_slow),
            receive_deadline(self._receive_timeout_s, " (receive_timeout)"),
        ):
            message = await context.read()
        if message is grpc.aio.EOF:
            raise InvalidArgument("expected a message in the call")
        check_length(message, max_bytes)
        permit.release()
        permit.reserve(len(message))
        return cast(bytes, message)


def check_length(message: Sized, max_bytes: int = MAX_SMALL_MESSAGE_BYTES) -> None:
    """Raise `TooLarge` if a message is longer than `max_bytes`."""
    if len(message) > max_bytes:
        raise TooLarge(f"expected a message of at most {max_bytes} bytes, got {len(message)}")


def parse_message(message: bytes, parse: Parse) -> Any:
    """Return the parsed message; raise `InvalidArgument` if the bytes are not a valid message."""
    try:
        return parse(message)
    except DecodeError:
        raise InvalidArgument("expected a valid protobuf message of this method") from None


def report_errors(handle: Callable[[Any, Context], Awaitable[T]]) -> Callable[[Any, Context], Awaitable[T]]:
    """Wrap a handler: send its errors to the caller as gRPC status, and log unexpected errors."""

    async def call(messages: Any, context: Context) -> T:
        try:
            return await handle(messages, context)
        except grpc.aio.BaseError:
            raise  # an error of gRPC's library: the call has already ended
        except WeightdError as error:
            await _abort(context, error)
        except Exception as error:  # noqa: BLE001 - gRPC would send its whole text to the caller
            log_failure(_log, "gRPC call failed", error)
            await _abort(context, Internal("internal error of the gateway; see its log"))

    return call


async def _abort(context: Context, error: WeightdError) -> NoReturn:
    """End a call with an error."""
    if isinstance(error, Unimplemented):
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))
    code, text, metadata = rpc_status(to_request_error(error))
    await context.abort(_CODES[code], text, (*context.trailing_metadata(), *metadata))


class RpcStatus(NamedTuple):
    """The status of a call that failed.

    Attributes:
        code: the number of the gRPC status.
        text: the error message.
        metadata: the trailing metadata.
    """

    code: int
    text: str
    metadata: tuple[tuple[str, str | bytes], ...]


def rpc_status(error: RequestError) -> RpcStatus:
    """Return the status for an error.

    If a retry may succeed, the metadata says when, in two forms: `grpc-retry-pushback-ms` for gRPC's own retries, and a
    google.rpc.RetryInfo in `grpc-status-details-bin` for applications.
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
    """Limit the time for the block, which receives a message, to `timeout_s` seconds.

    Raises:
        DeadlineExceeded: the block took longer. The error text ends with `setting`.
    """
    with _call_every(timeout_s, partial(_raise_deadline_exceeded, timeout_s, setting)):
        yield


@contextmanager
def _call_every(seconds: float, on_timeout: Callable[[], None]) -> Generator[None, None, None]:
    """Call `on_timeout` every `seconds` during the block; an error of the function ends the block with this error."""
    task, loop = cast("asyncio.Task[Any]", asyncio.current_task()), asyncio.get_running_loop()
    error: RequestError | None = None
    timer: asyncio.TimerHandle

    def on_timer() -> None:
        nonlocal error, timer
        # A late timer means that the process was suspended: data that arrived meanwhile has not been read yet, so skip
        # this call of `on_timeout`.
        if loop.time() <= timer.when() + _OVERSLEPT_S:
            try:
                on_timeout()
            except RequestError as raised:
                error = raised
                task.cancel()
                return
        timer = loop.call_later(seconds, on_timer)

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
    raise DeadlineExceeded(f"the message did not arrive within {seconds:g} seconds{setting}")


def _hold_until_done(context: Any, limit: FairLimit, caller: Caller) -> None:
    """Count a call towards the caller's share of `limit` until the call has ended.

    A call ends only when the client has read the response, which may be long after the handler has returned. The
    gateway cannot withdraw the response, and gRPC's library has one limit of calls for all callers together. `limit`
    keeps a single caller from using up the library's limit.

    Raises:
        ResourceExhausted: the caller's share is used up. This error ends the call, even if the client reads nothing.
    """
    if not limit.take(caller):
        raise ResourceExhausted("the caller has reached its share of calls with unread responses at this gateway")

    def release(_: object) -> None:
        limit.release(caller)

    context.add_done_callback(release)


def _release_when_done(context: Any, permit: Permit) -> None:
    """Release a permit when the call has ended, for any reason."""

    def release(_: object) -> None:
        permit.release()

    context.add_done_callback(release)
