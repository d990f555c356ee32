"""The life of a child: HELLO, one build, then requests until it is told to stop.

One thread, one blocking socket: while the engine works, messages wait in the socket. That the process is alive is
watched from outside, by its pidfd.
"""

from __future__ import annotations

import logging
import platform
from typing import Any, List, Sequence

import numpy as np

from weightd.protocol.errors import Internal, RequestError, WeightdError
from weightd.protocol.messages import TensorSpec
from weightd.protocol.tensors import frame_of, from_frame, spec_of, to_wire
from weightd.protocol.version import VERSION
from weightd.protocol.wire import clip, decode, encode
from weightd.protocol.worker_messages import (
    TO_CHILD,
    Attach,
    Attached,
    Broken,
    Build,
    Built,
    Failed,
    Hello,
    OrderMessage,
    Predict,
    Result,
    Settle,
    Stop,
)
from weightd.worker import canary, exits, nativelog
from weightd.worker.engines.base import Arrays, BuildError, Engine, Shared, Spoilt

_log = logging.getLogger("weightd.worker")

# Below this, copying a frame costs less than tracking it.
_ZERO_COPY_BYTES = 64 * 1024


class Session:
    """Serves one engine over one DEALER socket.

    Args:
        socket: connected to the daemon.
        engine: not built yet.
        model: path of the model's snapshot.
        store: path at which the holder may write its page store.
    """

    def __init__(self, socket: Any, engine: Engine, model: str, store: str) -> None:
        self._socket = socket
        self._engine = engine
        self._model = model
        self._store = store
        self._handle = ""

    def run(self, sha256: str) -> int:
        """Say HELLO and obey until told to stop; return the exit status."""
        self._send(self._hello(sha256))
        status = exits.OK
        while True:
            frames = self._socket.recv_multipart()
            order = decode(frames, TO_CHILD)
            if isinstance(order, Stop):
                return status
            if status == exits.OK:
                status = self._obey(order, frames[1:])
            # Else the daemon has the bad news and will say Stop: leaving before it does could lose them.

    def _hello(self, sha256: str) -> Hello:
        versions = {"weightd": VERSION, "python": platform.python_version(), "numpy": np.__version__}
        versions.update(self._engine.versions())
        return Hello(self._engine.current_pid(), sha256, versions, self._engine.traits)

    def _obey(self, order: OrderMessage, frames: Sequence[bytes]) -> int:
        if isinstance(order, Predict):
            return self._predict(order, frames)
        try:
            if isinstance(order, Build):
                self._build(order)
            elif isinstance(order, Attach):
                self._attach(order)
            elif isinstance(order, Settle) and self._handle:
                self._engine.settle(self._handle)
        except WeightdError as error:
            _log.error("%s", error)
            self._send(Broken(clip(str(error))))
            return exits.CANNOT_BUILD
        return exits.OK

    def _build(self, order: Build) -> None:
        """Build, and export only after the canary: what the first predict packs is shared too."""
        engine = self._engine
        engine.load(self._model)
        known = canary.find(engine, self._model)
        shared = engine.export(self._store, order.pids)
        self._handle = shared.handle
        if known.digest and canary.run(engine, known.sizes).digest != known.digest:
            raise BuildError("the canary's answer changed when the weights were shared")
        signature = canary.observed(engine.signature, known)
        self._send(
            Built(
                shared.handle,
                signature.inputs,
                signature.outputs,
                known.sizes,
                known.digest,
                shared.bytes,
                _notes(shared, known),
            )
        )

    def _attach(self, order: Attach) -> None:
        shared = self._engine.attach(self._model, order.handle)
        answer = canary.run(self._engine, order.canary_sizes)
        self._send(Attached(answer.digest, shared.bytes, shared.note))

    def _predict(self, order: Predict, frames: Sequence[bytes]) -> int:
        try:
            outputs = self._engine.predict(_arrays(order.inputs, frames))
        except RequestError as error:
            return self._fail(order, error, leaving=isinstance(error, Spoilt))
        except Exception as error:
            _log.exception("request %d", order.request)
            return self._fail(order, Internal(f"{type(error).__name__}: {error}"), leaving=True)
        arrays = {name: to_wire(array) for name, array in outputs.items()}
        specs = tuple(spec_of(name, array) for name, array in arrays.items())
        self._send(Result(order.request, specs), [frame_of(array) for array in arrays.values()])
        nativelog.bound()
        return exits.OK

    def _fail(self, order: Predict, error: RequestError, *, leaving: bool) -> int:
        self._send(Failed(order.request, error.code, clip(str(error)), leaving))
        return exits.SPOILT if leaving else exits.OK

    def _send(self, message: object, tensors: Sequence[Any] = ()) -> None:
        frames: List[Any] = [encode(message), *tensors]
        copy = all(len(frame) < _ZERO_COPY_BYTES for frame in frames)
        # Without a copy the frames keep the arrays alive until libzmq has written them.
        self._socket.send_multipart(frames, copy=copy)


def _arrays(specs: Sequence[TensorSpec], frames: Sequence[bytes]) -> Arrays:
    """The received tensors, aligned, native and in C order as an engine wants them."""
    return {spec.name: np.require(from_frame(spec, frame), requirements="CA") for spec, frame in zip(specs, frames)}


def _notes(shared: Shared, known: canary.Canary) -> str:
    return "; ".join(note for note in (shared.note, known.note) if note)

