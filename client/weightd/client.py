"""The blocking client."""

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
    ReloadResponse,
    ServerMetadataResponse,
    UpdateResponse,
)
from weightd_protocol.messages.events import EventsResponse, LogsResponse
from weightd_protocol.messages.metrics import MetricsResponse
from weightd_protocol.messages.status import StatusResponse

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weightd.inputs import Inputs

R = TypeVar("R")
T = TypeVar("T")


class Client(Uncopied):
    """Asks a weightd daemon for inference.

    It may be used by several threads, which wait beside one another; not by a forked process, where it is a
    `WrongProcess` error. It cannot be copied or pickled. Use it as a context manager, or `close` it. If the connection
    is lost, whatever is under way ends at once in `Unavailable`, and the next call connects again.

    Args:
        address: where the daemon listens: /PATH, for its unix socket or, where that cannot be used, ZeroMQ;
            unix:///PATH for its unix socket only; ipc:///PATH or tcp://HOST:PORT for ZeroMQ only.
            Default: $WEIGHTD_SOCKET, or the default address of this user's daemon or of the system's, the first at
            which a daemon listens.
        timeout: seconds that a call waits unless it says otherwise; at most one hour.
        tenant: for whom it asks, where that is another than its own: the daemon knows for whom it may (`acts_for`).
        key: the file with its secret key, for a listener with CURVE: `weightctl keygen` writes it.
        server_key: the file with the public key of that listener.
        retry: how calls are made again that ended in what may pass; without it, none is. An `update` never is, nor
            what is sent by `submit` or with `out`.

    Raises:
        InvalidArgument: an argument is not what it has to be, or a key cannot be used.
        Unauthenticated: no tenant has this key, or the listener has another.
        PermissionDenied: this user may not connect.
        Unavailable: no process listens there.
        DeadlineExceeded: somebody listens there and does not answer.
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
        """Where the daemon is looked for, as it was asked for."""
        return self._session.address.text

    @property
    def transport(self) -> str:
        """How it is, or was last, connected: "unix" or "zmq"."""
        return self._session.connection.transport

    @property
    def timeout(self) -> float:
        """Seconds that a call waits unless it says otherwise."""
        return self._session.timeout

    def empty(self, shape: Union[int, Sequence[int]], dtype: Any) -> Any:
        """Return a new numpy array of any content, in memory that the daemon's workers see.

        An input or an `out` there is not copied on its way. It is an array like any other, and stays one when the
        client is closed; a process that is forked sees what is written to it later.

        Raises:
            InvalidArgument: there is no such shape or dtype.
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
        """Return a model as a function, of which each call is one of `infer` with these arguments. Asks nobody."""
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
            inputs: an array for each input by its name, or an array alone where the model has one input; anything with
                a datatype that `numpy.asarray` takes. Datatype, rank and fixed dimensions must be the model's (see
                `metadata`): no array is converted. A scalar and an array of one element are interchangeable. Numbers,
                and lists of numbers, become arrays of the model's datatype: each value as it is, or none. What the
                model takes is asked for once, if that has to be known.
            outputs: the names of those that are wanted; all where it is None.
            out: numpy arrays to be filled with outputs, by name, of their dtype and shape. If the call does not end in
                an answer, a worker may write there some time later.
            timeout: seconds to wait; the client's where it is None. The daemon gives up then and says why; a client
                that does not hear from it gives up a tenth of that time later, at most half a second.
            priority: 1 is served first, and the highest number that the model's configuration allows last; 0 or None
                is its default. What waits long goes first in the end, whatever its priority.

        Returns:
            The outputs by name: those of `out`, and new numpy arrays, read-only.

        Raises:
            RequestError: one subclass for each code of the wire, `DeadlineExceeded` among them. `Unavailable` also
                where the connection is lost; the request may have been run then, and is not sent again without `retry`.
            ProtocolError: one side broke the protocol: versions that do not fit.
            WrongProcess, ClientClosed: the client must not be used here, or no longer.
        """
        if self._retry is not None and out is None:
            # An `out`, be it an empty one, is for one attempt.
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
        """Send a request without waiting; many may be under way at once.

        The arrays must not be changed before the answer has come: large ones are not copied.
        Arguments and errors as for `infer`. What the model takes is waited for, where that has to be known.
        """
        prepared, deadline, answer_deadline = self._prepare_infer(model, inputs, timeout, outputs, out, priority)
        # Who does not wait, does not read: what has come since the last call is not left to pile up.
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
        """Run `model` on each of `inputs`, several at a time; give the outputs of each, in order.

        Inputs are taken as there is room for them, and before the outputs of earlier ones are asked for. However it
        ends, be it by an error of a request or of `inputs`, or because it is closed, what is under way is taken back.

        Args:
            model: the model's name.
            inputs: for each request what `infer` takes.
            in_flight: how many are taken at most whose outputs have not been given.
            outputs: as for `infer`.
            timeout: seconds for each request, from when it is sent.
            priority: as for `infer`.

        Raises:
            RequestError: as `infer`; `InvalidArgument` if these arguments are wrong, at once.
        """
        check_map_arguments(inputs, in_flight, (abc.Iterable,))
        options: Dict[str, Any] = {"outputs": outputs, "timeout": timeout, "priority": priority}
        submit = self.submit if self._retry is None else partial(self._submit_with_retries, self._retry)
        return map_ordered(partial(submit, model, **options), inputs, in_flight)

    def ready(self, model: str = "", *, timeout: Optional[float] = None) -> ReadyResponse:
        """Return whether a model can answer: a worker of it has done so within the watchdog's period. Never waits.

        Args:
            model: the model's name; "" for all of them together.
            timeout: seconds to wait for this answer.

        Raises:
            RequestError: as `infer`.
        """
        return self._query(queries.ready(model), timeout)

    def metadata(self, model: str, *, timeout: Optional[float] = None) -> ModelMetadataResponse:
        """Return what the model takes and gives. Waits while it loads.

        Raises:
            RequestError: as `infer`.
        """
        return self._query(queries.metadata(model), timeout)

    def server(self, *, timeout: Optional[float] = None) -> ServerMetadataResponse:
        """Return the daemon's version and the names of its models.

        Raises:
            RequestError: as `infer`.
        """
        return self._query(queries.SERVER, timeout)

    def status(self, *, timeout: Optional[float] = None) -> StatusResponse:
        """Return what the daemon is doing: models, generations, processes and their memory.

        Raises:
            RequestError: as `infer`.
        """
        return self._query(queries.STATUS, timeout)

    def metrics(self, *, timeout: Optional[float] = None) -> MetricsResponse:
        """Return what the daemon has counted, and how things stand; it is told at once, and costs little.

        Raises:
            RequestError: as `infer`.
        """
        return self._query(queries.METRICS, timeout)

    def events(self, after: int = 0, model: str = "", *, timeout: Optional[float] = None) -> EventsResponse:
        """Return what has happened after the event of this number, as much as fits: ask again after its `last`.

        Args:
            after: 0 for all that the daemon still knows.
            model: its name; "" for whatever has happened.
            timeout: seconds to wait for this answer.

        Raises:
            RequestError: as `infer`.
        """
        return self._query(queries.events(after, model), timeout)

    def logs(self, model: str, process: str = "", *, lines: int = 100, timeout: Optional[float] = None) -> LogsResponse:
        """Return the ends of what the processes of a model have written. Only who may operate is told.

        Args:
            model: the model's name.
            process: the name of one of them, as the status has it; "" for all.
            lines: the most of each.
            timeout: seconds to wait for this answer.

        Raises:
            RequestError: as `infer`.
        """
        return self._query(queries.logs(model, process, lines), timeout)

    def update(
        self,
        model: str,
        path: str = "",
        *,
        weights: str = "",
        rollback: bool = False,
        timeout: Optional[float] = None,
    ) -> UpdateResponse:
        """Have another model, or other weights, loaded beside what serves, and wait until it has taken over.

        What goes wrong leaves everything as it was. Only the daemon's own user, and root, may do this.

        Args:
            model: the model's name.
            path: of the new model file, absolute, on the daemon's host; "" keeps the present one.
            weights: of an .npz file with arrays to load over the model's weights, absolute; "" for none.
            rollback: go back to what served before the last update instead; what is given up so is not kept.
            timeout: seconds to wait; after them `DeadlineExceeded`. The update itself goes on, see `status`.

        Raises:
            RequestError: as `infer`; `Unavailable` and `FailedPrecondition` tell why the old model still serves, and
                whether the same update may succeed later.
        """
        return self._query_once(queries.update(model, path, weights, rollback=rollback), timeout)

    def reload(self, *, timeout: Optional[float] = None) -> ReloadResponse:
        """Have the daemon read its configuration file again; models that are new or changed load after the answer.

        Only the daemon's own user, and root, may do this.

        Raises:
            RequestError: as `infer`; `InvalidArgument` says what is wrong with the file, and nothing has changed.
        """
        return self._query(queries.RELOAD, timeout)

    def close(self) -> None:
        """Close the connection. What is under way ends in `ClientClosed`. In a forked process it does nothing."""
        if not (self._session.is_forked_copy or self._session.closed):
            self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- within -------------------------------------------------------------------------------------------------

    def _resolve_timeout(self, timeout: Optional[float]) -> Tuple[float, float]:
        """Return how many seconds a call may take, and how many more are left to the daemon to say that it has."""
        session = self._session
        if session.closed or session.is_forked_copy:
            raise session.unusable_error()
        return session.default_timeout_and_grace if timeout is None else session.resolve_timeout(timeout)

    def _ensure_connected(self, timeout: Optional[float]) -> None:
        self._transport.connect(monotonic() + self._resolve_timeout(timeout)[0])

    def _prepare_infer(
        self, model: str, inputs: Inputs, timeout: Optional[float], *options: Any
    ) -> Tuple[PreparedCall, float, float]:
        """Return a request, until when to send it, and until when to wait for its answer."""
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
        """Return arrays by name, made of `inputs` by what the model takes, and the seconds that are left."""
        # What is known is of this connection, which may be lost already.
        self._transport.read_available()
        typed_inputs = self._core.typed_inputs(model, inputs)
        if typed_inputs is None:
            prepared = self._core.prepare_metadata_call(model)
            try:
                call = self._transport.send(prepared, deadline) if prepared[1] else prepared[0]
                metadata: ModelMetadataResponse = self._transport.wait(call, deadline + grace_s)
            except BaseException as error:
                self._core.abort_metadata_call(prepared, error)
                # Who reads may be one of those who wait for it.
                self._transport.wake_reader()
                raise
            typed_inputs = to_typed_inputs(inputs, model, metadata.inputs)
        return typed_inputs, deadline - monotonic()

    def _submit_with_retries(
        self, retry: Retry, model: str, inputs: Inputs, *, timeout: Optional[float], **options: Any
    ) -> Pending:
        """Begin a request that is sent again when its answer is waited for."""
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
        """Return what `attempt` does within so many seconds, by further attempts where those may help."""
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
