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
    its calls raise `WrongProcess`. Use the client as a context manager, or call `close`. If the connection is lost, all
    calls in progress fail with `Unavailable`, and the next call connects again. Every method that sends a request
    raises the errors of `infer`.

    Args:
        address: the daemon's address. /PATH uses the daemon's Unix socket, or ZeroMQ if the Unix socket cannot be used;
            unix:///PATH uses the Unix socket only; ipc:///PATH and tcp://HOST:PORT use ZeroMQ only. The default is
            $WEIGHTD_SOCKET. If this variable is not set, the client tries the address of this user's daemon and then
            the address of the system's daemon.
        timeout: the default timeout of this client's calls in seconds, at most 3600.
        tenant: the tenant on whose behalf the client sends requests; None for the tenant to which the daemon assigns
            this client. The daemon's configuration must allow other tenants (`acts_for`).
        key: the file with the client's secret key, for a tcp:// listener with CURVE. `weightctl keygen` creates it.
        server_key: the file with the public key of the daemon's tcp:// listener.
        retry: the retry policy for calls that fail with a transient error; None disables retries. `update`, `submit`
            and calls with `out` are never retried.

    Raises:
        InvalidArgument: an argument is invalid, or a key file cannot be used.
        Unauthenticated: no tenant has this key, or `server_key` is not the listener's key.
        PermissionDenied: this user may not connect to the daemon's socket.
        Unavailable: no process listens at the address.
        DeadlineExceeded: a process listens at the address but does not respond within `timeout`.
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
        """The daemon's address in the form in which the caller or the environment gave it."""
        return self._session.address.text

    @property
    def transport(self) -> str:
        """Transport of the current or last connection to the daemon: "unix" or "zmq"."""
        return self._session.connection.transport

    @property
    def timeout(self) -> float:
        """Default timeout of this client's calls in seconds."""
        return self._session.timeout

    def empty(self, shape: Union[int, Sequence[int]], dtype: Any) -> Any:
        """Return an uninitialized numpy array in memory shared with the daemon's workers.

        Over a Unix socket, the client and the workers do not copy an input or `out` array that lies in this memory to
        transmit it. The array behaves like any other numpy array and stays valid after the client is closed. After a
        fork, parent and child share the memory: each process sees what the other one writes. The array is in ordinary
        memory if shared memory is exhausted, or if the dtype is not boolean, integer or floating-point.

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
        """Return an object for one model. Calling the object runs `infer` with the arguments given here.

        This method sends nothing, so it does not check that the model exists.
        """
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
                `numpy.asarray` accepts and that has a datatype counts as an array. Arrays are not converted: datatype,
                rank and fixed dimensions must match the model's signature (see `metadata`). A scalar and an array of
                one element are interchangeable. Numbers and lists of numbers become arrays of the datatype in the
                signature; a value that does not fit the datatype is an error. For numbers, lists, and an array without
                an input name, the client requests the signature once and caches it.
            outputs: names of the outputs to return; None for all outputs of the model.
            out: numpy arrays that receive outputs, by output name. Dtype and shape of each array must match the output.
                If the call fails, a worker may still write to these arrays for some time.
            timeout: seconds until the call fails; None for the client's default. When they have passed, the daemon
                replies with an error that gives the reason. If this reply does not arrive, the client waits for another
                tenth of the timeout, at most 0.5 s.
            priority: requests with priority 1 are served first. The model's configuration sets the largest number,
                which is served last. 0 or None selects the model's default. A request that has waited for long is
                served before newer requests with smaller numbers, so every request is served eventually.

        Returns:
            The outputs by name. An output named in `out` is the array given there; the others are new read-only numpy
            arrays.

        Raises:
            RequestError: the request failed. Each error code of the protocol has a subclass, such as
                `DeadlineExceeded`. A lost connection raises `Unavailable`. In that case the model may have run the
                request, and the client sends the request again only with `retry`.
            ProtocolError: client or daemon violated the protocol, because their versions do not match.
            WrongProcess: the client was created in another process.
            ClientClosed: the client is closed.
        """
        if self._retry is not None and out is None:
            # This method calls itself once per attempt. `out={}` disables retries within each attempt.
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
        """Send a request and return without waiting for the response. Any number of requests may be in progress.

        Do not modify the input arrays until the response has arrived: the client does not copy large arrays. `infer`
        describes arguments and errors. If the inputs require the model's signature and the client has not cached it,
        this method waits for the daemon to send the signature.
        """
        prepared, deadline, answer_deadline = self._prepare_infer(model, inputs, timeout, outputs, out, priority)
        # A program may call `submit` many times before it waits for a response. Reading the responses here keeps them
        # from accumulating in the socket.
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
        """Run `model` on each of `inputs`, several at a time, and yield the outputs in the order of the inputs.

        The generator takes the next input as soon as fewer than `in_flight` requests are pending, even if the caller
        has not yet taken earlier outputs. When the generator ends, it cancels all pending requests. It ends when
        `inputs` is exhausted, when the caller closes it, or when a request or `inputs` raises an error.

        Args:
            model: the model's name.
            inputs: an iterable of inputs, each as in `infer`.
            in_flight: the maximum number of inputs that the generator has taken and whose outputs it has not yielded.
            outputs: as in `infer`.
            timeout: seconds for each request, counted from the moment the client sends it.
            priority: as in `infer`.

        Raises:
            RequestError: as `infer`. If one of these arguments is invalid, `map` itself raises `InvalidArgument`; all
                other errors are raised by the generator.
        """
        check_map_arguments(inputs, in_flight, (abc.Iterable,))
        options: Dict[str, Any] = {"outputs": outputs, "timeout": timeout, "priority": priority}
        submit = self.submit if self._retry is None else partial(self._submit_with_retries, self._retry)
        return map_ordered(partial(submit, model, **options), inputs, in_flight)

    def ready(self, model: str = "", *, timeout: Optional[float] = None) -> ReadyResponse:
        """Return whether a model can serve requests now: a worker has responded within the watchdog's period.

        The daemon replies at once; it does not wait until the model is ready.

        Args:
            model: the model's name; "" for the question whether all models are ready.
            timeout: seconds to wait for the daemon's reply.

        Raises:
            RequestError: as `infer`.
        """
        return self._query(queries.ready(model), timeout)

    def metadata(self, model: str, *, timeout: Optional[float] = None) -> ModelMetadataResponse:
        """Return the signature of a model: the names, datatypes and shapes of its inputs and outputs.

        While the model loads, this method waits.

        Raises:
            RequestError: as `infer`.
        """
        return self._query(queries.metadata(model), timeout)

    def server(self, *, timeout: Optional[float] = None) -> ServerMetadataResponse:
        """Return the daemon's version and the names of its models."""
        return self._query(queries.SERVER, timeout)

    def status(self, *, timeout: Optional[float] = None) -> StatusResponse:
        """Return the state of the daemon, its models, generations and processes, and their memory use."""
        return self._query(queries.STATUS, timeout)

    def metrics(self, *, timeout: Optional[float] = None) -> MetricsResponse:
        """Return the daemon's counters and gauges. The daemon replies at once, because it always has current values."""
        return self._query(queries.METRICS, timeout)

    def close(self) -> None:
        """Close the connection. Calls in progress fail with `ClientClosed`. Does nothing in a forked process."""
        if not (self._session.is_forked_copy or self._session.closed):
            self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- within -------------------------------------------------------------------------------------------------

    def _resolve_timeout(self, timeout: Optional[float]) -> Tuple[float, float]:
        """Return the timeout and the grace period of a call in seconds: see `ClientSession.resolve_timeout`."""
        session = self._session
        if session.closed or session.is_forked_copy:
            raise session.unusable_error()
        return session.default_timeout_and_grace if timeout is None else session.resolve_timeout(timeout)

    def _ensure_connected(self, timeout: Optional[float]) -> None:
        self._transport.connect(monotonic() + self._resolve_timeout(timeout)[0])

    def _prepare_infer(
        self, model: str, inputs: Inputs, timeout: Optional[float], *options: Any
    ) -> Tuple[PreparedCall, float, float]:
        """Create an inference request. Return it with the deadlines for sending it and for receiving its response."""
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
        """Return `inputs` as arrays of the datatypes in the model's signature, and the seconds until `deadline`.

        If the signature is not cached, request it first.
        """
        # Read first, because this detects a lost connection and then clears the cached signatures: they may be
        # outdated.
        self._transport.read_available()
        typed_inputs = self._core.typed_inputs(model, inputs)
        if typed_inputs is None:
            prepared = self._core.prepare_metadata_call(model)
            try:
                call = self._transport.send(prepared, deadline) if prepared[1] else prepared[0]
                metadata: ModelMetadataResponse = self._transport.wait(call, deadline + grace_s)
            except BaseException as error:
                self._core.abort_metadata_call(prepared, error)
                # The thread that reads from the connection may be waiting for the response to the same metadata call.
                # Wake it, so that it notices the error.
                self._transport.wake_reader()
                raise
            typed_inputs = to_typed_inputs(inputs, model, metadata.inputs)
        return typed_inputs, deadline - monotonic()

    def _submit_with_retries(
        self, retry: Retry, model: str, inputs: Inputs, *, timeout: Optional[float], **options: Any
    ) -> Pending:
        """Send a request. If it fails with a transient error, `result` of the returned object sends it again."""
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
        """Call `attempt`, and repeat it within the timeout if it fails with an error that the retry policy covers."""
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
