"""The daemon's one loop: wait, handle, reconcile. It moves bytes and processes; what to do is decided elsewhere."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from weightd.daemon import exits, processes
from weightd.daemon.actions import Role
from weightd.daemon.claim import ClaimError, claim
from weightd.daemon.config import Config
from weightd.daemon.files import GenerationFiles
from weightd.daemon.loop import Loop, signals
from weightd.daemon.model import Model
from weightd.daemon.processes import Process
from weightd.daemon.scheduler import Request
from weightd.daemon.sockets import BATCH, Received, bind, peer_pid, receive, send
from weightd.daemon.states import GenerationState
from weightd.daemon.status import Survey, report
from weightd.protocol import limits
from weightd.protocol.errors import (
    Internal,
    InvalidArgument,
    LocalProtocolError,
    NotFound,
    RemoteProtocolError,
    RequestError,
    ResourceExhausted,
    Unavailable,
)
from weightd.protocol.messages import (
    FROM_CLIENT,
    ClientMessage,
    DaemonMessage,
    Error,
    Infer,
    InferResponse,
    ModelMetadata,
    ModelMetadataResponse,
    ServerMetadata,
    ServerMetadataResponse,
    Status,
    TensorSpec,
)
from weightd.protocol.version import VERSION
from weightd.protocol.wire import clip, decode, encode
from weightd.protocol.worker_messages import FROM_CHILD, Broken, ChildMessage, Hello, OrderMessage

_log = logging.getLogger("weightd")

# A status answer costs the kernel milliseconds a process: nobody needs more of them at once.
_MAX_SURVEYS = 16

_SHA256 = re.compile(r"[0-9a-f]{64}")


class Server:
    """Runs the models of one configuration.

    Args:
        config: what to serve, and where.
        one_shot: end when a model fails instead of serving the others (`weightd run`).
    """

    def __init__(self, config: Config, *, one_shot: bool = False) -> None:
        self._config = config
        self._one_shot = one_shot
        self._loop = Loop()
        self._models: dict[str, Model] = {}
        self._files: dict[str, GenerationFiles] = {}
        self._processes: dict[str, Process] = {}
        self._owners: dict[str, Model] = {}
        self._surveys: list[Survey] = []
        # What could not be done at once is told to its model after the actions that ordered it.
        self._later: list[Callable[[float], None]] = []
        self._numbers = itertools.count(1)
        self._started = time.monotonic()
        self._stop_at: float | None = None
        self._stopping_models = False

    def run(self) -> int:
        """Serve until told to stop; return the exit status.

        Raises:
            ClaimError: a socket or a directory cannot be had.
        """
        with claim(self._config.daemon), signals([signal.SIGTERM, signal.SIGINT]) as wakeups:
            context = zmq.Context()
            try:
                self._open(context, wakeups)
                self._main_loop()
            finally:
                self._kill_all()
                context.destroy()
        return exits.MODEL_FAILED if self._any_failed() else exits.OK

    # --- the loop -----------------------------------------------------------------------------------------------

    def _open(self, context: zmq.Context[zmq.Socket[bytes]], wakeups: int) -> None:
        daemon = self._config.daemon
        self._children = bind(context, f"ipc://{daemon.children_socket}", clients=False)
        self._clients = bind(context, daemon.socket, clients=True)
        self._wakeups = wakeups
        self._loop.add(self._children, self._on_children)
        self._loop.add(self._clients, self._on_clients)
        self._loop.add(wakeups, self._on_signal)
        for name, model_config in self._config.models.items():
            self._models[name] = Model(name, model_config, 1, self)
        _log.info("weightd %s, pid %d, listens on %s", VERSION, os.getpid(), daemon.socket)
        for model in self._models.values():
            model.start()

    def _main_loop(self) -> None:
        while not self._finished():
            self._loop.wait(self._seconds_to_wait())
            self._tick(time.monotonic())

    def _finished(self) -> bool:
        return self._stopping_models and not self._processes

    def _seconds_to_wait(self) -> float:
        if self._surveys or self._later:
            return 0.0
        due = self._stop_at if self._stop_at is not None and not self._stopping_models else float("inf")
        for model in self._models.values():
            due = min(due, model.next_tick, model.scheduler.next_deadline)
        return due - time.monotonic()

    def _tick(self, now: float) -> None:
        later, self._later = self._later, []
        for tell in later:
            tell(now)
        for model in self._models.values():
            if now >= model.next_tick or now >= model.scheduler.next_deadline:
                model.tick(now)
        if self._surveys and self._surveys[0].step():
            self._answer_status(self._surveys.pop(0))
        if self._one_shot and self._any_failed():
            self._stop(now)
        if self._stop_at is not None and not self._stopping_models and (now >= self._stop_at or self._idle()):
            self._stop_models(now)

    def _any_failed(self) -> bool:
        return any(model.generation.state is GenerationState.FAILED for model in self._models.values())

    def _idle(self) -> bool:
        return all(model.scheduler.idle for model in self._models.values())

    def _on_signal(self) -> None:
        for number in os.read(self._wakeups, 64):
            _log.info("%s", signal.Signals(number).name)
            if self._stop_at is None:
                self._stop(time.monotonic())
            else:
                _log.warning("asked twice to stop: killing every process")
                # First: a model that does not stop would replace what is killed.
                self._stop_models(time.monotonic())
                self._kill_all()

    def _stop(self, now: float) -> None:
        if self._stop_at is None:
            _log.info("stopping: finishing what was accepted, for at most %g s", self._config.daemon.drain_timeout)
            self._stop_at = now + self._config.daemon.drain_timeout

    def _stop_models(self, now: float) -> None:
        self._stopping_models = True
        for model in self._models.values():
            model.drain(now)
            # Nobody waits for its snapshot any more, and copying may take long.
            self.kill(_snapshot_name(model))

    # --- clients ------------------------------------------------------------------------------------------------

    def _on_clients(self) -> None:
        now = time.monotonic()
        for received in receive(self._clients):
            request_id = ""
            try:
                message = decode(received.frames, FROM_CLIENT)
                request_id = message.id
                self._serve(received.peer, message, received.frames, now)
            except RemoteProtocolError as error:
                self.tell_error(received.peer, error.request_id, InvalidArgument(str(error)))
            except RequestError as error:
                self.tell_error(received.peer, request_id, error)

    def _serve(self, client: bytes, message: ClientMessage, frames: Sequence[Any], now: float) -> None:
        match message:
            case Infer():
                self._infer(client, message, frames, now)
            case ModelMetadata():
                self._model(message.model_name).metadata(client, message.id)
            case ServerMetadata():
                self._tell(client, ServerMetadataResponse(message.id, "weightd", VERSION, tuple(self._models)))
            case Status():
                self._survey(client, message.id)

    def _infer(self, client: bytes, message: Infer, frames: Sequence[Any], now: float) -> None:
        model = self._model(message.model_name)
        if self._stop_at is not None:
            raise Unavailable("weightd is stopping")
        timeout = message.parameters.timeout
        seconds = model.config.timeout if timeout is None else timeout / 1e6
        tensors = frames[1:]
        nbytes = sum(map(len, tensors))
        model.infer(
            Request(
                next(self._numbers), client, message.id, model.name, message.inputs, tensors, now, now + seconds, nbytes
            )
        )

    def _model(self, name: str) -> Model:
        try:
            return self._models[name]
        except KeyError:
            raise NotFound(f"no model {name!r}; there are: {', '.join(self._models)}") from None

    def _survey(self, client: bytes, request_id: str) -> None:
        if len(self._surveys) >= _MAX_SURVEYS:
            raise ResourceExhausted(f"{_MAX_SURVEYS} status requests wait already")
        pids = [os.getpid(), *(process.pid for process in self._processes.values())]
        self._surveys.append(Survey(client, request_id, pids))

    def _answer_status(self, survey: Survey) -> None:
        state = "running" if self._stop_at is None else "stopping"
        uptime = time.monotonic() - self._started
        answer = report(survey, state, uptime, self._models.values(), self._processes, self._files)
        self._tell(survey.client, answer, max_bytes=limits.MAX_STATUS_BYTES)

    def _tell(
        self,
        client: bytes,
        message: DaemonMessage,
        frames: Sequence[Any] = (),
        max_bytes: int = limits.MAX_HEADER_BYTES,
    ) -> None:
        try:
            header = encode(message, max_bytes=max_bytes)
        except LocalProtocolError as error:
            # What an engine or a path says may not fit into a header: that is an answer too.
            header, frames = encode(Error(message.id, Internal.code, clip(f"the answer cannot be sent: {error}"))), ()
        if not send(self._clients, client, [header, *frames]):
            _log.debug("client %s is gone: its answer is dropped", client.hex())

    # --- children -----------------------------------------------------------------------------------------------

    def _on_children(self) -> int:
        """Read a batch of messages from children; return how many there were."""
        now = time.monotonic()
        count = 0
        for count, received in enumerate(receive(self._children), 1):
            name = received.peer.decode("utf-8", "replace")
            model = self._owners.get(name)
            if model is None:
                continue
            try:
                message: ChildMessage = decode(received.frames, FROM_CHILD)
                if isinstance(message, Hello):
                    self._check_pid(name, received)
            except RemoteProtocolError as error:
                message = Broken(clip(f"it broke the protocol: {error}"))
            model.heard(name, message, received.frames[1:], now)
        return count

    def _check_pid(self, name: str, received: Received) -> None:
        """The kernel knows who says HELLO: it must be the process that was started under that name."""
        pid = peer_pid(received.identity)
        if pid is not None and pid != self._processes[name].pid:
            raise RemoteProtocolError(f"hello: expected from pid {self._processes[name].pid}, got it from {pid}")

    def _on_exit(self, name: str) -> None:
        # What it said before it died counts: read it first, all of it.
        while self._on_children() == BATCH:
            pass
        process = self._processes.pop(name)
        model = self._owners.pop(name)
        self._loop.remove(process.pidfd)
        how = processes.explain(processes.reap(process))
        words = processes.last_words(process)
        if "No module named 'weightd" in words:
            words += f"; install weightd there: {model.config.python} -m pip install weightd"
        model.exited(name, f"{how}: {words}" if words else how, time.monotonic())

    def _kill_all(self) -> None:
        for process in self._processes.values():
            processes.kill(process)

    # --- what models need done (Host) ---------------------------------------------------------------------------

    def pin(self, model: Model) -> None:
        """Start the process that takes the snapshot."""
        path = Path(model.config.path)
        files = self._files[model.label] = GenerationFiles(self._config.daemon.private_dir / model.label, path.name)
        argv = [sys.executable, "-m", "weightd.daemon.snapshot", str(path), str(files.snapshot_dir)]
        name = _snapshot_name(model)
        try:
            files.create()
            process = processes.start(argv, files.log(name))
        except (ClaimError, OSError) as error:
            self._later.append(functools.partial(model.pin_failed, f"cannot take a snapshot: {error}"))
            return
        self._processes[name] = process
        self._loop.add(process.pidfd, lambda: self._on_pinned(model, name))

    def _on_pinned(self, model: Model, name: str) -> None:
        process = self._processes.pop(name)
        self._loop.remove(process.pidfd)
        status = processes.reap(process)
        words = processes.last_words(process)
        sha256 = words.rpartition(" ")[2]
        if status == 0 and _SHA256.fullmatch(sha256):
            model.pinned(sha256, time.monotonic())
        else:
            model.pin_failed(words or f"the snapshot {processes.explain(status)}", time.monotonic())

    def spawn(self, model: Model, name: str, role: Role) -> None:
        """Start a holder or a worker."""
        files = self._files[model.label]
        config = model.config
        argv = [config.python, "-m", "weightd.worker"]
        argv += ["--address", f"ipc://{self._config.daemon.children_socket}"]
        argv += ["--name", name, "--parent", str(os.getpid()), "--engine", config.engine]
        argv += ["--model", str(files.snapshot), "--store", str(files.store)]
        argv += ["--threads", str(config.threads), "--device", config.device]
        try:
            process = processes.start(argv, files.log(name))
        except OSError as error:
            self._later.append(functools.partial(model.exited, name, f"cannot start {config.python}: {error.strerror}"))
            return
        self._processes[name] = process
        self._owners[name] = model
        self._loop.add(process.pidfd, lambda: self._on_exit(name))

    def kill(self, name: str) -> None:
        """Kill a child; its exit is reported as any other."""
        if name in self._processes:
            processes.kill(self._processes[name])

    def order(self, name: str, order: OrderMessage, frames: Sequence[Any] = ()) -> None:
        """Send an order to a child; one that cannot be reached is dying, and its pidfd will tell."""
        send(self._children, name.encode(), [encode(order), *frames])

    def answer(self, request: Request, outputs: Sequence[TensorSpec], frames: Sequence[Any]) -> None:
        """Send the model's answer to the client."""
        self._tell(request.client, InferResponse(request.id, request.model_name, tuple(outputs)), frames)

    def refuse(self, request: Request, error: RequestError) -> None:
        """Send an error to the client."""
        self.tell_error(request.client, request.id, error)

    def tell_metadata(self, client: bytes, metadata: ModelMetadataResponse) -> None:
        """Send a model's metadata to the client."""
        self._tell(client, metadata)

    def tell_error(self, client: bytes, request_id: str, error: RequestError) -> None:
        """Send an error to the client."""
        self._tell(client, Error(request_id, error.code, clip(str(error))))


def _snapshot_name(model: Model) -> str:
    return f"{model.label}.snapshot"
