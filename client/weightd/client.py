"""Blocking client of a weightd daemon."""

from __future__ import annotations

from collections import abc
from functools import partial
from time import monotonic
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Generator,
    Iterable,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
    Union,
)

from weightd import queries
from weightd.address import KeyFile, read_keys
from weightd.inputs import NeedsMetadata, to_typed_inputs
from weightd.model import DEFAULT_IN_FLIGHT, Model, check_map_arguments, map_ordered
from weightd.operator_calls import OperatorCalls
from weightd.pending import Pending, Uncopied
from weightd.protocol_core import PreparedCall
from weightd.queries import Query
from weightd.retry import Attempts, Retry, check_retry
from weightd.session import DEFAULT_TIMEOUT_S, ClientSession
from weightd.threaded import ThreadedTransport
from weightd_protocol.errors import RequestError
from weightd_protocol.messages.control import (
    ModelMetadataResponse,
    ReadyResponse,
    ServerMetadataResponse,
)
from weightd_protocol.messages.metrics import MetricsResponse
from weightd_protocol.messages.status import StatusResponse

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weightd.inputs import Inputs

R = TypeVar("R")
T = TypeVar("T")


class Client(OperatorCalls, Uncopied):
    """Blocking client of a weightd daemon.

    Threads may share a client; their calls run concurrently. A client cannot be copied or pickled. In a forked process
    calls raise `WrongProcess`. Use it as a context manager, or call `close`. If the connection is lost, all calls in
    progress fail with `Unavailable`, and the next call connects again. Every method that sends a request raises the
    errors of `infer`.

    Args:
        address: the daemon's address. /PATH uses the daemon's unix socket, or ZeroMQ if the unix socket cannot be used;
            unix:///PATH uses the unix socket only; ipc:///PATH and tcp://HOST:PORT use ZeroMQ only. Default:
            $WEIGHTD_SOCKET or, if it is not set, the first default address at which a daemon listens: this user's, then
            the system's.
        timeout: the default timeout of a call in seconds, at most one hour.
        tenant: the tenant on whose behalf requests are sent, if it is not the client's own. The daemon's configuration
            must allow that (`acts_for`).
        key: the file with the client's secret key, for a tcp:// listener with CURVE. `weightctl keygen` creates it.
        server_key: the file with the public key of that listener.
        retry: the retry policy for calls that fail with a transient error; None disables retries. `update`, `submit`
            and calls with `out` are never retried.

    Raises:
        InvalidArgument: an argument is invalid, or a key file cannot be used.
        Unauthenticated: no tenant has this key, or `server_key` is not the listener's key.
        PermissionDenied: this user may not connect.
        Unavailable: no process listens at the address.
        DeadlineExceeded: a process listens at the address but does not answer within `timeout`.
    """

    def __init__(
        self,
        address: Optional[str] = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        tenant: Optional[str] = None,
        key: Optional[KeyFile] = None,
        server_key: Optional[KeyFile] = None,
        retry: Optional[Retry] = None,
    ) -> None:
        self._retry = check_retry(retry)
        self._session = ClientSession(address, timeout, tenant, read_keys(key, server_key))
        self._core = self._session.core
        self._transport = ThreadedTransport(self._session)
        self._with_retries(self._ensure_connected, None)

    @property
    def address(self) -> str:
        """The daemon's address in the form in which it was configured."""
        return self._session.address.text

    @property
    def transport(self) -> str:
        """Transport of the current or last connection: "unix" or "zmq"."""
        return self._session.connection.transport

    @property
    def timeout(self) -> float:
        """Default timeout of a call in seconds."""
        return self._session.timeout

    def empty(self, shape: Union[int, Sequence[int]], dtype: Any) -> Any:
        """Return an uninitialized numpy array in memory shared with the daemon's workers.

        Over a unix socket, an input or `out` array in this memory is not copied on its way. The array behaves like any
        other and stays valid after the client is closed. Parent and forked child share the memory: each sees what the
        other writes. If shared memory is exhausted, or the dtype is not boolean, integer or floating-point, the array
        is in ordinary memory.

        Raises:
            InvalidArgument: the shape or the dtype is invalid.
        """
        return self._core.shm_tensors.arena.empty(shape, dtype)

    def model(
        self,
        name: str,
        *,
        outputs: Optional[Sequence[str]] = None,
        timeout: Optional[float] = None,
        priority: Optional[int] = None,
    ) -> Model:
        """Return a callable for one model. Each call runs `infer` with these arguments. This method sends nothing."""
        options: Dict[str, Any] = {"outputs": outputs, "timeout": timeout, "priority": priority}
        return Model(
            name,
            partial(self.infer, name, **options),
            partial(self.submit, name, **options),
            partial(self.map, name, **options),
            partial(self.metadata, name),
        )

    def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        outputs: Optional[Sequence[str]] = None,
        out: Optional[Mapping[str, Any]] = None,
        timeout: Optional[float] = None,
        priority: Optional[int] = None,
    ) -> Dict[str, NDArray[Any]]:
        """Run `model` on `inputs` and return its outputs.

        Args:
            model: the model's name in the daemon's configuration.
            inputs: a mapping of input names to arrays, or one array if the model has a single input. Anything that
                `numpy.asarray` accepts and that has a datatype counts as an array. Datatype, rank and fixed dimensions
                must match the model's signature (see `metadata`): arrays are not converted. A scalar and an array of
                one element are interchangeable. Numbers and lists of numbers become arrays of the model's datatype; a
                value that does not fit this datatype is an error. For such inputs, and for an array without a name,
                the client requests the signature once and caches it.
            outputs: names of the outputs to return; None for all.
            out: numpy arrays to fill with outputs, by output name. Dtype and shape must match the output. If the call
                fails, a worker may still write to these arrays for some time.
            timeout: seconds to wait; None for the client's default. After that time the daemon replies with the reason.
                If the daemon does not reply, the client waits for another tenth of the timeout, at most half a second.
            priority: 1 is served first; the largest allowed number is set in the model's configuration and is served
                last. 0 or None selects the model's default. Waiting time outweighs priority: every request is served
                eventually.

        Returns:
            The outputs by name: the arrays of `out` where given, otherwise new read-only numpy arrays.

        Raises:
            RequestError: the request failed. There is one subclass for each error code of the protocol, such as
                `DeadlineExceeded`. A lost connection raises `Unavailable`; the model may have run the request in that
                case, and the client sends it again only with `retry`.
            ProtocolError: one side violated the protocol, because the versions of client and daemon do not match.
            WrongProcess: the client was created in another process.
            ClientClosed: the client is closed.
        """
        if self._retry is not None and out is None:
            # The inner call must not retry as well; giving `out`, even an empty one, disables retries.
            infer_once = partial(self.infer, model, inputs, outputs=outputs, out={}, priority=priority)
            return self._with_retries(lambda left: infer_once(timeout=left), timeout)
        prepared, deadline, answer_deadline = self._prepare_infer(model, inputs, timeout, outputs, out, priority)
        answer: Dict[str, Any] = self._transport.wait(self._transport.send(prepared, deadline), answer_deadline)
        return answer

    def submit(
        self,
        model: str,
        inputs: Inputs,
        *,
        outputs: Optional[Sequence[str]] = None,
        out: Optional[Mapping[str, Any]] = None,
        timeout: Optional[float] = None,
        priority: Optional[int] = None,
    ) -> Pending:
        """Send a request and return at once. Any number of requests may be in progress.

        Do not modify the input arrays until the response has arrived: the client does not copy large arrays. Arguments
        and errors are as for `infer`. The method waits for the model's signature if the inputs require it and it is not
        cached.
        """
        prepared, deadline, answer_deadline = self._prepare_infer(model, inputs, timeout, outputs, out, priority)
        # This method does not wait for responses, so it reads the ones that have arrived: they would accumulate.
        if self._core.calls:
            self._transport.read_available()
        call = self._transport.send(prepared, deadline)
        return Pending(
            partial(self._transport.result, call, answer_deadline),
            partial(self._transport.poll, call),
            partial(self._transport.cancel, call),
        )

    def map(
        self,
        model: str,
        inputs: Iterable[Inputs],
        *,
        in_flight: int = DEFAULT_IN_FLIGHT,
        outputs: Optional[Sequence[str]] = None,
        timeout: Optional[float] = None,
        priority: Optional[int] = None,
    ) -> Generator[Dict[str, NDArray[Any]], None, None]:
        """Run `model` on each of `inputs`, several at a time, and yield the outputs of each in order.

        The generator takes the next input as soon as fewer than `in_flight` requests are pending, before the caller
        asks for earlier outputs. When it ends (exhausted, closed, or by an error of a request or of `inputs`), it
        cancels all pending requests.

        Args:
            model: the model's name.
            inputs: an iterable of inputs, each as in `infer`.
            in_flight: the largest number of inputs taken whose outputs have not been yielded.
            outputs: as in `infer`.
            timeout: seconds for each request, counted from the moment it is sent.
            priority: as in `infer`.

        Raises:
            RequestError: as `infer`. `InvalidArgument` for one of these arguments is raised by the call itself.
        """
        check_map_arguments(inputs, in_flight, (abc.Iterable,))
        options: Dict[str, Any] = {"outputs": outputs, "timeout": timeout, "priority": priority}
        submit = self.submit if self._retry is None else partial(self._submit_with_retries, self._retry)
        return map_ordered(partial(submit, model, **options), inputs, in_flight)

    def ready(self, model: str = "", *, timeout: Optional[float] = None) -> ReadyResponse:
        """Return whether a model can serve requests: a worker has responded within the watchdog's period. Never waits.

        Args:
            model: the model's name; "" asks whether all models are ready.
            timeout: seconds to wait for the daemon's reply.

        Raises:
            RequestError: as `infer`.
        """
        return self._query(queries.ready(model), timeout)

    def metadata(self, model: str, *, timeout: Optional[float] = None) -> ModelMetadataResponse:
        """Return the signature of a model: its inputs and outputs. Waits while the model loads.

        Raises:
            RequestError: as `infer`.
        """
        return self._query(queries.metadata(model), timeout)

    def server(self, *, timeout: Optional[float] = None) -> ServerMetadataResponse:
        """Return the daemon's version and the names of its models."""
        return self._query(queries.SERVER, timeout)

    def status(self, *, timeout: Optional[float] = None) -> StatusResponse:
        """Return the daemon's state: models, generations, processes and their memory."""
        return self._query(queries.STATUS, timeout)

    def metrics(self, *, timeout: Optional[float] = None) -> MetricsResponse:
        """Return the daemon's counters and gauges. The daemon replies immediately and at little cost."""
        return self._query(queries.METRICS, timeout)

    def close(self) -> None:
        """Close the connection. Calls in progress fail with `ClientClosed`. Has no effect in a forked process."""
        if not (self._session.is_forked_copy or self._session.closed):
            self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- within -------------------------------------------------------------------------------------------------

    def _resolve_timeout(self, timeout: Optional[float]) -> Tuple[float, float]:
        """Return the timeout of a call, and the extra time in which the daemon may still report its expiry."""
        session = self._session
        if session.closed or session.is_forked_copy:
            raise session.unusable_error()
        return session.default_timeout_and_grace if timeout is None else session.resolve_timeout(timeout)

    def _ensure_connected(self, timeout: Optional[float]) -> None:
        self._transport.connect(monotonic() + self._resolve_timeout(timeout)[0])

    def _prepare_infer(
        self, model: str, inputs: Inputs, timeout: Optional[float], *options: Any
    ) -> Tuple[PreparedCall, float, float]:
        """Return a request, the deadline for sending it and the deadline for its response."""
        seconds, grace_s = self._resolve_timeout(timeout)
        deadline = monotonic() + seconds
        try:
            prepared = self._core.prepare_infer(model, inputs, seconds, *options)
        except NeedsMetadata:
            prepared = None
        if prepared is None:
            typed_inputs, seconds = self._to_typed_inputs(model, inputs, deadline, grace_s)
            prepared = self._core.prepare_infer(model, typed_inputs, seconds, *options)
        return prepared, deadline, deadline + grace_s

    def _to_typed_inputs(
        self, model: str, inputs: Inputs, deadline: float, grace_s: float
    ) -> Tuple[Dict[str, Any], float]:
        """Return `inputs` as typed arrays by name according to the signature, and the seconds that remain."""
        # The cached signature is valid only for this connection, which may be lost already.
        self._transport.read_available()
        typed_inputs = self._core.typed_inputs(model, inputs)
        if typed_inputs is None:
            prepared = self._core.prepare_metadata_call(model)
            try:
                call = self._transport.send(prepared, deadline) if prepared[1] else prepared[0]
                metadata: ModelMetadataResponse = self._transport.wait(call, deadline + grace_s)
            except BaseException as error:
                self._core.abort_metadata_call(prepared, error)
                # The reading thread may itself wait for this metadata call.
                self._transport.wake_reader()
                raise
            typed_inputs = to_typed_inputs(inputs, model, metadata.inputs)
        return typed_inputs, deadline - monotonic()

    def _submit_with_retries(
        self, retry: Retry, model: str, inputs: Inputs, *, timeout: Optional[float], **options: Any
    ) -> Pending:
        """Send a request; `Pending.result` sends it again if it fails with a transient error."""
        attempts = Attempts(retry, self._resolve_timeout(timeout)[0])
        submit = partial(self.submit, model, inputs, **options)
        first = self._run_attempts(lambda left: submit(timeout=left), attempts)
        first_attempt = [first]
        return Pending(
            lambda: self._run_attempts(
                lambda left: (first_attempt.pop() if first_attempt else submit(timeout=left)).result(), attempts
            ),
            first.done,
            first.cancel,
        )

    def _query(self, query: Query[R], timeout: Optional[float]) -> R:
        return self._with_retries(partial(self._query_once, query), timeout)

    def _query_once(self, query: Query[R], timeout: Optional[float]) -> R:
        seconds, grace_s = self._resolve_timeout(timeout)
        deadline = monotonic() + seconds
        call = self._transport.send(self._core.prepare_query(query), deadline)
        answer: R = self._transport.wait(call, deadline + grace_s)
        return answer

    def _with_retries(self, attempt: Callable[[Optional[float]], T], timeout: Optional[float]) -> T:
        """Call `attempt`, and repeat it within the timeout while the retry policy allows."""
        if self._retry is None:
            return attempt(timeout)
        return self._run_attempts(attempt, Attempts(self._retry, self._resolve_timeout(timeout)[0]))

    def _run_attempts(self, attempt: Callable[[float], T], attempts: Attempts) -> T:
        while True:
            try:
                return attempt(attempts.remaining_s())
            except RequestError as error:
                pause = attempts.pause_after(error)
                if pause is None:
                    raise
            self._transport.sleep_unless_closed(pause)
