"""The blocking client."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import abc
from functools import partial
from time import monotonic
from types import TracebackType
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
    Type,
    TypeVar,
    cast,
)

from weightd.client import curve, flow
from weightd.client.connection import Connection, Gone
from weightd.client.core import Call, Question
from weightd.client.curve import KeyFile
from weightd.client.inputs import Untyped, typed
from weightd.client.model import DEFAULT_IN_FLIGHT, Model
from weightd.client.pending import Pending
from weightd.client.retry import Attempts, Retry
from weightd.client.session import BUSY_S, DEFAULT_TIMEOUT_S, LOST, Session
from weightd.client.turns import Turn, Turns
from weightd.client.waker import Waker
from weightd.protocol.errors import RequestError, Unavailable
from weightd.protocol.messages.control import (
    ModelMetadataResponse,
    ReadyResponse,
    ReloadResponse,
    ServerMetadataResponse,
    UpdateResponse,
)
from weightd.protocol.messages.journal import EventsResponse, LogsResponse
from weightd.protocol.messages.metrics import MetricsResponse
from weightd.protocol.messages.status import StatusResponse

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weightd.client.inputs import Inputs

T = TypeVar("T")


class Client:
    """Asks a weightd daemon for inference.

    It may be used by several threads, which wait beside one another; not by a forked process, where it is a
    `WrongProcess` error. Use it as a context manager, or `close` it. If the connection is lost, whatever is under way
    ends at once in `Unavailable`, and the next call connects again.

    Args:
        address: where the daemon listens: /PATH, for its unix socket or, where that cannot be used, ZeroMQ;
            unix:///PATH for its unix socket only; ipc:///PATH or tcp://HOST:PORT for ZeroMQ only.
            Default: $WEIGHTD_SOCKET, or where the daemon of this user or of the system listens by default.
        timeout: seconds that a call waits unless it says otherwise; at most one hour.
        tenant: for whom it asks, where that is another than its own: the daemon knows for whom it may (`acts_for`).
        key: the file with its secret key, for a listener with CURVE: `weightctl keygen` writes it.
        server_key: the file with the public key of that listener.
        retry: how calls are made again that ended in what may pass; without it, none is. An `update` never is, nor
            what is sent by `submit` or with `out`.

    Raises:
        InvalidArgument: `address` is none, or `timeout` is out of bounds, or a key cannot be used.
        Unauthenticated: no tenant has this key, or the listener has another.
        PermissionDenied: this user may not connect.
        Unavailable: nobody listens there.
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
        self._retry = retry
        self._session = Session(address, timeout, tenant, curve.read(key, server_key))
        self._core = self._session.core
        # A signal's handler may close the client wherever its thread is.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._turns = Turns()
        try:
            self._waker = Waker()
        except OSError as error:
            raise Unavailable(f"cannot make a pipe: {error.strerror}") from None
        self._poller = self._waker.poller(())
        self._connects = False
        self._retrying(self._open, None)

    @property
    def address(self) -> str:
        """Where the daemon is looked for, as it was asked for."""
        return self._session.address.given

    @property
    def transport(self) -> str:
        """How it is, or was last, connected: "unix" or "zmq"."""
        return self._session.connection.transport

    @property
    def timeout(self) -> float:
        """Seconds that a call waits unless it says otherwise."""
        return self._session.timeout

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return a new numpy array of any content, in memory that the daemon's workers see.

        An input or an `out` there is not copied on its way. It is an array like any other, and stays one when the
        client is closed; a process that is forked sees what is written to it later.
        """
        return self._core.sharing.arena.empty(tuple(shape), dtype)

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
                `metadata`): no array is converted. Numbers, and lists of numbers, become arrays of the model's
                datatype: each value as it is, or none. What the model takes is asked for once, if that has to be known.
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
            once = partial(self.infer, model, inputs, outputs=outputs, out={}, priority=priority)
            return self._retrying(lambda left: once(timeout=left), timeout)
        seconds, more = self._begin(timeout)
        deadline = monotonic() + seconds
        try:
            question = self._core.infer(model, inputs, seconds, outputs, out, priority)
        except Untyped:
            question = None
        if question is None:
            named, seconds = self._typed(model, inputs, deadline, more)
            question = self._core.infer(model, named, seconds, outputs, out, priority)
        answer: Dict[str, Any] = self._wait(self._send(question, deadline), deadline + more)
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
        seconds, more = self._begin(timeout)
        deadline = monotonic() + seconds
        try:
            question = self._core.infer(model, inputs, seconds, outputs, out, priority)
        except Untyped:
            question = None
        if question is None:
            named, seconds = self._typed(model, inputs, deadline, more)
            question = self._core.infer(model, named, seconds, outputs, out, priority)
        # Who does not wait, does not read: what has come since the last call is not left to pile up.
        if self._core.calls:
            self._catch_up()
        call = self._send(question, deadline)
        return Pending(
            partial(self._result, call, deadline + more),
            partial(self._poll, call),
            partial(self._cancel, call),
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
        flow.check(inputs, in_flight, (abc.Iterable,))
        options: Dict[str, Any] = {"outputs": outputs, "timeout": timeout, "priority": priority}
        begin = self.submit if self._retry is None else partial(self._submit_again, self._retry)
        return flow.answers(partial(begin, model, **options), inputs, in_flight)

    def ready(self, model: str = "", *, timeout: Optional[float] = None) -> ReadyResponse:
        """Return whether a model can answer: a worker of it has done so within the watchdog's period. Never waits.

        Args:
            model: the model's name; "" for all of them together.
            timeout: seconds to wait for this answer.

        Raises:
            RequestError: as `infer`.
        """
        answer: ReadyResponse = self._ask(partial(self._core.ready, model), timeout)
        return answer

    def metadata(self, model: str, *, timeout: Optional[float] = None) -> ModelMetadataResponse:
        """Return what the model takes and gives. Waits while it loads.

        Raises:
            RequestError: as `infer`.
        """
        answer: ModelMetadataResponse = self._ask(partial(self._core.model_metadata, model), timeout)
        return answer

    def server(self, *, timeout: Optional[float] = None) -> ServerMetadataResponse:
        """Return the daemon's version and the names of its models.

        Raises:
            RequestError: as `infer`.
        """
        answer: ServerMetadataResponse = self._ask(self._core.server_metadata, timeout)
        return answer

    def status(self, *, timeout: Optional[float] = None) -> StatusResponse:
        """Return what the daemon is doing: models, generations, processes and their memory.

        Raises:
            RequestError: as `infer`.
        """
        answer: StatusResponse = self._ask(self._core.status, timeout)
        return answer

    def metrics(self, *, timeout: Optional[float] = None) -> MetricsResponse:
        """Return what the daemon has counted, and how things stand; it is told at once, and costs little.

        Raises:
            RequestError: as `infer`.
        """
        answer: MetricsResponse = self._ask(self._core.metrics, timeout)
        return answer

    def events(self, after: int = 0, model: str = "", *, timeout: Optional[float] = None) -> EventsResponse:
        """Return what has happened after the event of this number, as much as fits: ask again after its `last`.

        Args:
            after: 0 for all that the daemon still knows.
            model: its name; "" for whatever has happened.
            timeout: seconds to wait for this answer.

        Raises:
            RequestError: as `infer`.
        """
        answer: EventsResponse = self._ask(partial(self._core.events, after, model), timeout)
        return answer

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
        answer: LogsResponse = self._ask(partial(self._core.logs, model, process, lines), timeout)
        return answer

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
        answer: UpdateResponse = self._once(
            partial(self._core.update, model, path, weights, rollback=rollback), timeout
        )
        return answer

    def reload(self, *, timeout: Optional[float] = None) -> ReloadResponse:
        """Have the daemon read its configuration file again; models that are new or changed load after the answer.

        Only the daemon's own user, and root, may do this.

        Raises:
            RequestError: as `infer`; `InvalidArgument` says what is wrong with the file, and nothing has changed.
        """
        answer: ReloadResponse = self._ask(self._core.reload, timeout)
        return answer

    def close(self) -> None:
        """Close the connection. What is under way ends in `ClientClosed`. In a forked process it does nothing."""
        session = self._session
        if session.is_foreign or session.closed:
            return
        with self._lock:
            session.end()
            # Whoever leaves from now on sees to it that the connection is closed.
            self._turns.stuck += 1
            self._changed.notify_all()
        # A signal's handler may call this in the middle of a read.
        if self._turns.take(again=False):
            if self._turns.leave():
                self._tell_the_stuck()
        else:
            self._waker.set()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    # --- within -------------------------------------------------------------------------------------------------
    #
    # Each message is sent by the thread that has it, under the lock of `_changed`, and never waits there. Whose turn it
    # is to read waits in the kernel, without that lock, for all: for what comes and, while something is unsent, until
    # it can be sent. Only who reads closes a connection. The others wait for what it tells: for an answer each in a
    # `Turn`, for all else at `_changed`. Who cannot send is stuck there until the reader leaves, who might be the last.

    def _begin(self, timeout: Optional[float]) -> Tuple[float, float]:
        """Return how many seconds a call may take, and how many more are left to the daemon to say that it has."""
        session = self._session
        if session.closed or session.is_foreign:
            raise session.ended()
        return session.patience if timeout is None else session.patience_of(timeout)

    def _open(self, timeout: Optional[float]) -> None:
        deadline = monotonic() + self._begin(timeout)[0]
        with self._lock:
            self._connect(deadline)

    def _typed(self, model: str, inputs: Inputs, deadline: float, more: float) -> Tuple[Dict[str, Any], float]:
        """Return arrays by name, made of `inputs` by what the model takes, and the seconds that are left."""
        # What is known is of this connection, which may be lost already.
        self._catch_up()
        named = self._core.typed(model, inputs)
        if named is None:
            question = self._core.asking(model)
            try:
                call = self._send(question, deadline) if question[1] else question[0]
                takes: ModelMetadataResponse = self._wait(call, deadline + more)
            except BaseException as error:
                self._core.not_asked(question, error)
                # Who reads may be one of those who wait for it.
                self._waker.set()
                raise
            named = typed(inputs, model, takes.inputs)
        return named, deadline - monotonic()

    def _submit_again(
        self, retry: Retry, model: str, inputs: Inputs, *, timeout: Optional[float], **options: Any
    ) -> Pending:
        """Begin a request that is sent again when its answer is waited for."""
        attempts = self._attempts(retry, timeout)
        ask = partial(self.submit, model, inputs, **options)
        first = self._try(lambda left: ask(timeout=left), attempts)
        sent = [first]
        return Pending(
            lambda: self._try(lambda left: (sent.pop() if sent else ask(timeout=left)).result(), attempts),
            first.done,
            first.cancel,
        )

    def _ask(self, question: Callable[[], Question], timeout: Optional[float]) -> Any:
        return self._retrying(partial(self._once, question), timeout)

    def _once(self, question: Callable[[], Question], timeout: Optional[float]) -> Any:
        seconds, more = self._begin(timeout)
        deadline = monotonic() + seconds
        return self._wait(self._send(question(), deadline), deadline + more)

    def _attempts(self, retry: Retry, timeout: Optional[float]) -> Attempts:
        return Attempts(retry, self._begin(timeout)[0])

    def _retrying(self, ask: Callable[[Optional[float]], T], timeout: Optional[float]) -> T:
        """Return what `ask` does within so many seconds, by further attempts where those may help."""
        return ask(timeout) if self._retry is None else self._try(ask, self._attempts(self._retry, timeout))

    def _try(self, ask: Callable[[float], T], attempts: Attempts) -> T:
        while True:
            try:
                return ask(attempts.left())
            except RequestError as error:
                pause = attempts.pause_after(error)
                if pause is None:
                    raise
            self._rest(pause)

    def _rest(self, seconds: float) -> None:
        """Wait for so long, if the client is not closed meanwhile."""
        end = monotonic() + seconds
        with self._lock:
            while monotonic() < end:
                self._session.check()
                self._changed.wait(end - monotonic())

    def _send(self, question: Question, deadline: float) -> Call:
        """Begin a call, over a new connection where there is none; wait until all of it has gone."""
        call, frames = question
        with self._lock:
            try:
                sent_at = self._session.send(frames, call)
            except Gone:
                self._make_ready(deadline)
                try:
                    sent_at = self._session.send(frames, call)
                except Gone as error:
                    # Hung up as soon as it was there: the daemon has said why.
                    self._until_sent(self._session.connection, math.inf, deadline)
                    raise self._session.verdict or error from None
            if sent_at or (self._turns.reader and not self._session.connection.is_plain):
                self._see_off(sent_at, deadline)
        return call

    def _see_off(self, sent_at: float, deadline: float) -> None:
        """Wait until so much has gone, and tell who reads what they could not know. The lock is ours."""
        connection = self._session.connection
        if sent_at:
            self._until_sent(connection, sent_at, deadline)
        elif self._turns.reader and not connection.is_idle():
            self._waker.set()

    def _make_ready(self, deadline: float) -> None:
        """Have a connection that takes a message now. The lock is ours; meanwhile it is free."""
        session = self._session
        while True:
            if session.closed:
                raise session.ended()
            connection = session.connection
            if connection.closed:
                self._connect(deadline)
            elif connection.is_spoilt:
                self._until_sent(connection, math.inf, deadline)
            elif connection.unsent:
                self._until_sent(connection, connection.sent + connection.unsent, deadline)
            else:
                return

    def _until_sent(self, connection: Connection, sent_at: float, deadline: float) -> None:
        """Wait until so much is sent, or the connection is closed. The lock is ours; meanwhile it is free."""
        self._turns.stuck += 1
        try:
            self._waker.set()
            while connection.sent < sent_at and not connection.closed:
                self._session.check()
                if self._turns.take():
                    with self._unlocked():
                        in_time = self._read_once(deadline)
                else:
                    in_time = self._changed.wait(deadline - monotonic())
                if not in_time:
                    raise self._session.not_read()
        finally:
            self._turns.stuck -= 1

    def _connect(self, deadline: float) -> None:
        """Connect, or wait until another thread has tried. The lock is ours; meanwhile it is free."""
        if self._connects:
            if not self._changed.wait(deadline - monotonic()):
                raise self._session.no_connection()
            return
        self._connects = True
        try:
            with self._unlocked():
                connection = self._new_connection(deadline)
        finally:
            self._connects = False
            self._changed.notify_all()
        if self._session.closed:
            connection.close()
        else:
            self._poller = self._waker.poller(connection.descriptors)
            self._session.connected(connection)

    def _new_connection(self, deadline: float) -> Connection:
        making = self._session.connecting()
        try:
            while True:
                descriptor = next(making)
                self._session.check()
                if descriptor is None:
                    self._waker.sleep(self._waker.poller(()), min(deadline, monotonic() + BUSY_S))
                    if monotonic() > deadline:
                        raise self._session.no_connection()
                elif not self._waker.sleep(self._waker.poller((descriptor,)), deadline):
                    raise self._session.no_connection()
        except StopIteration as made:
            return cast(Connection, made.value)
        finally:
            making.close()

    def _wait(self, call: Call, deadline: float) -> Any:
        """Return the call's answer; where it is our turn, read until it is there."""
        turn = self._turns.enter(call)
        if turn is None or self._follow(turn, deadline):
            try:
                while not call.done:
                    if not self._step(deadline):
                        raise self._session.no_answer()
            finally:
                if self._turns.leave():
                    self._tell_the_stuck()
        return call.result()

    def _result(self, call: Call, deadline: float) -> Any:
        self._session.check()
        return call.result() if call.done else self._wait(call, deadline)

    def _follow(self, turn: Turn, deadline: float) -> bool:
        """Wait until the call is done, or it is our turn; return whether that is so."""
        try:
            turn.sleep(deadline - monotonic())
        except BaseException:
            if self._turns.give_up(turn) and self._turns.leave():
                self._tell_the_stuck()
            raise
        if self._turns.give_up(turn):
            return True
        if not turn.call.done:
            raise self._session.no_answer()
        return False

    def _read_once(self, deadline: float) -> bool:
        """Take a step, and read no more."""
        try:
            return self._step(deadline)
        finally:
            if self._turns.leave():
                self._tell_the_stuck()

    def _step(self, deadline: float) -> bool:
        """Wait until something has happened, and take it in; return whether it has by the deadline. It is our turn."""
        connection = self._session.connection
        if connection.is_plain or connection.is_idle():
            poller = self._poller
            if connection.unsent and connection.is_plain:
                poller = self._waker.poller(connection.descriptors, to_write=True)
            if not self._waker.sleep(poller, deadline):
                return False
        try:
            for message in connection.receive():
                self._core.received(message.frames)
        except BaseException as error:
            with self._lock:
                self._session.hang_up(error)
                self._changed.notify_all()
            if not isinstance(error, LOST):
                raise
            return True
        if connection.unsent:
            with self._lock:
                connection.flush()
                self._changed.notify_all()
        return True

    def _catch_up(self) -> None:
        """Take in what has come, unless another thread does anyway."""
        if self._turns.take():
            try:
                while not self._session.connection.closed and self._step(0.0):
                    pass
            finally:
                if self._turns.leave():
                    self._tell_the_stuck()

    def _poll(self, call: Call) -> bool:
        self._session.check()
        if not call.done:
            self._catch_up()
        return call.done

    def _cancel(self, call: Call) -> None:
        self._session.check()
        if call.done:
            return
        deadline = monotonic() + self.timeout
        with self._lock:
            try:
                sent_at: float = self._session.send(self._core.cancel(call))
            except Gone:
                sent_at = math.inf  # The loss ends the call, too.
            # The collector of garbage may take back what a `map` has left, wherever this thread is: if that is in the
            # middle of a read, it is to go on as before.
            if self._turns.is_ours:
                self._waker.set()
            else:
                self._see_off(sent_at, deadline)

    def _tell_the_stuck(self) -> None:
        """Have what a user has closed closed, and those look who wait at `_changed`. We read no more."""
        if self._session.closed and self._turns.take():
            with self._lock:
                self._session.connection.close()
                if not self._connects:
                    self._waker.close()
            self._turns.leave()
        with self._lock:
            self._changed.notify_all()

    @contextlib.contextmanager
    def _unlocked(self) -> Generator[None, None, None]:
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()
