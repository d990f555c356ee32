"""One model of the configuration: its queue, its generation, and what passes between the two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from weightd.daemon.actions import Action, Dismiss, Enlist, Kill, Pin, Role, Send, Spawn
from weightd.daemon.config import ModelConfig
from weightd.daemon.generation import Generation, Limits
from weightd.daemon.latency import Latencies
from weightd.daemon.scheduler import Request, Scheduler
from weightd.daemon.states import ENDED, GenerationState
from weightd.daemon.validation import check_inputs
from weightd.protocol.errors import InvalidArgument, RequestError, ResourceExhausted, Unavailable, request_error
from weightd.protocol.messages import ModelMetadataResponse, TensorSignature, TensorSpec
from weightd.protocol.worker_messages import (
    Attached,
    Built,
    ChildMessage,
    Failed,
    Hello,
    OrderMessage,
    Predict,
    Result,
)


class Children(Protocol):
    """What a model wants of its children. None of these calls the model back before it has returned."""

    def pin(self, model: Model) -> None:
        """Take the snapshot; answer by `pinned` or `pin_failed`."""

    def spawn(self, model: Model, name: str, role: Role) -> None:
        """Start a child; answer by `heard` and, in the end, `exited`."""

    def kill(self, name: str) -> None:
        """Kill a child."""

    def order(self, name: str, order: OrderMessage, frames: Sequence[Any] = ()) -> None:
        """Send an order to a child."""


class Clients(Protocol):
    """What a model has to tell clients."""

    def answer(self, request: Request, outputs: Sequence[TensorSpec], frames: Sequence[Any]) -> None:
        """Send the model's answer to the client."""

    def refuse(self, request: Request, error: RequestError) -> None:
        """Send an error to the client."""

    def tell_metadata(self, client: bytes, metadata: ModelMetadataResponse) -> None:
        """Send a model's metadata to the client."""

    def tell_error(self, client: bytes, request_id: str, error: RequestError) -> None:
        """Send an error to the client."""


class Model:
    """Serves one model from one generation.

    Attributes:
        latencies: from a request's arrival to its answer, in the daemon.
        by_worker: the same for each worker's answers, by the worker's name.
        failed: requests that ended in an error after they were accepted.
    """

    def __init__(self, name: str, config: ModelConfig, number: int, children: Children, clients: Clients) -> None:
        self.name = name
        self.config = config
        self.number = number
        self.label = f"{name}.{number}"
        self.generation = Generation(self.label, Limits(config.workers, config.load_timeout))
        self.scheduler = Scheduler(config.max_queue, config.max_queue_bytes)
        self.latencies = Latencies()
        self.by_worker: dict[str, Latencies] = {}
        self.failed = 0
        self.next_tick = float("inf")
        self._children = children
        self._clients = clients
        self._inputs: dict[str, TensorSignature] | None = None
        self._fitting: Sequence[TensorSpec] | None = None
        self._metadata_waiters: list[tuple[bytes, str]] = []

    # --- from clients -------------------------------------------------------------------------------------------

    def infer(self, request: Request) -> None:
        """Accept a request.

        Raises:
            RequestError: it is refused.
        """
        self._check_alive()
        # The decoder gives equal headers the same tuple: what fitted last time is not looked at again.
        if self._inputs is not None and request.inputs is not self._fitting:
            check_inputs(self._inputs, request.inputs)
            self._fitting = request.inputs
        # Else the model is loading: the request waits, and is checked once it is known what the model takes.
        self.scheduler.submit(request)
        self._dispatch()

    def metadata(self, client: bytes, request_id: str) -> None:
        """Tell the client what the model takes and gives, at once or when it is known.

        Raises:
            RequestError: it is refused.
        """
        self._check_alive()
        if len(self._metadata_waiters) >= self.config.max_queue:
            raise ResourceExhausted(f"{len(self._metadata_waiters)} requests wait for the metadata already")
        self._metadata_waiters.append((client, request_id))
        self._tell_metadata()

    # --- from children ------------------------------------------------------------------------------------------

    def heard(self, child: str, message: ChildMessage, frames: Sequence[Any], now: float) -> None:
        """A child has sent `message`."""
        if isinstance(message, Result):
            self._result(child, message, frames, now)
            return
        if isinstance(message, Failed):
            self._predict_failed(child, message, now)
        elif isinstance(message, Hello):
            self.generation.hello(child, message, now)
        elif isinstance(message, Built):
            self.generation.holder_built(child, message, now)
        elif isinstance(message, Attached):
            self.generation.attached(child, message, now)
        else:
            self.generation.broken(child, message, now)
        self._settle()

    def exited(self, child: str, how: str, now: float) -> None:
        """A child has exited."""
        for request, error in self.scheduler.lost(child):
            self._refuse(request, error)
        self.by_worker.pop(child, None)
        self.generation.exited(child, how, now)
        self._settle()

    # --- from the server ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to load."""
        self.generation.start()
        self._settle()

    def pinned(self, sha256: str, now: float) -> None:
        """The snapshot exists."""
        self.generation.pinned(sha256, now)
        self._settle()

    def pin_failed(self, cause: str, now: float) -> None:
        """There is no snapshot."""
        self.generation.failed(cause, now)
        self._settle()

    def tick(self, now: float) -> None:
        """Time has passed."""
        for request, error in self.scheduler.expire(now):
            self._refuse(request, error)
        if now >= self.generation.next_tick:
            self.generation.tick(now)
            self._settle()
        self._update_next_tick()

    def drain(self, now: float) -> None:
        """Take no new work, give up what waits, and wind down."""
        for request in self.scheduler.give_up():
            self._refuse(request, Unavailable("weightd is stopping"))
        self.generation.drain(now)
        self._settle()

    @property
    def serving(self) -> bool:
        """Whether every worker is READY."""
        return self.generation.state is GenerationState.SERVING and self.generation.progress == "serving"

    # --- within -------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        generation = self.generation
        if generation.state is GenerationState.FAILED:
            raise Unavailable(f"{self.name} failed: {generation.cause}")
        if generation.state in (GenerationState.DRAINING, GenerationState.GONE):
            raise Unavailable(f"{self.name} is being unloaded")

    def _result(self, child: str, result: Result, frames: Sequence[Any], now: float) -> None:
        request = self.scheduler.finish(child, result.request)
        if request is not None:
            self._clients.answer(request, result.outputs, frames)
            latency = now - request.arrived
            self.latencies.add(latency)
            self.by_worker[child].add(latency)
        self._dispatch()

    def _predict_failed(self, child: str, failed: Failed, now: float) -> None:
        request = self.scheduler.finish(child, failed.request)
        if request is not None:
            self._refuse(request, request_error(failed.code, failed.error))
        if failed.leaving:
            self.scheduler.release(child)
            self.generation.leaving(child, now)
        self._dispatch()

    def _settle(self) -> None:
        """After each event of the generation: do what it wants, and serve what it now allows."""
        for action in self.generation.take_actions():
            self._perform(action)
        if self._inputs is None and self.generation.built is not None:
            self._learn_signature(self.generation.built)
        if self.generation.state in ENDED:
            self._give_up()
        self._dispatch()
        self._update_next_tick()

    def _perform(self, action: Action) -> None:
        match action:
            case Pin():
                self._children.pin(self)
            case Spawn(name, role):
                self._children.spawn(self, name, role)
            case Send(name, order):
                self._children.order(name, order)
            case Kill(name):
                self._children.kill(name)
            case Enlist(name):
                self.by_worker[name] = Latencies()
                self.scheduler.enlist(name)
            case Dismiss(name):
                self.scheduler.dismiss(name)

    def _learn_signature(self, built: Built) -> None:
        self._inputs = {each.name: each for each in built.inputs}
        unfit: dict[int, InvalidArgument] = {}
        for request in self.scheduler.waiting():
            try:
                check_inputs(self._inputs, request.inputs)
            except InvalidArgument as error:
                unfit[request.number] = error
        for request in self.scheduler.withdraw(lambda each: each.number in unfit):
            self._refuse(request, unfit[request.number])
        self._tell_metadata()

    def _tell_metadata(self) -> None:
        built = self.generation.built
        if built is None:
            return
        waiters, self._metadata_waiters = self._metadata_waiters, []
        for client, request_id in waiters:
            self._clients.tell_metadata(
                client,
                ModelMetadataResponse(request_id, self.name, self.config.engine, built.inputs, built.outputs),
            )

    def _give_up(self) -> None:
        try:
            self._check_alive()
        except Unavailable as error:
            for request in self.scheduler.give_up():
                self._refuse(request, error)
            waiters, self._metadata_waiters = self._metadata_waiters, []
            for client, request_id in waiters:
                self._clients.tell_error(client, request_id, error)

    def _dispatch(self) -> None:
        for worker, request in self.scheduler.assign():
            self._children.order(worker, Predict(request.number, tuple(request.inputs)), request.frames)

    def _refuse(self, request: Request, error: RequestError) -> None:
        self.failed += 1
        self._clients.refuse(request, error)

    def _update_next_tick(self) -> None:
        self.next_tick = self.generation.next_tick
