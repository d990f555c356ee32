"""A worker's requests: each is run, and answered with what comes of it."""

from __future__ import annotations

import logging
import operator
from typing import Any, Callable, List, Optional, Sequence, Tuple

from weightd.protocol.codec import clip
from weightd.protocol.errors import Internal, InvalidArgument, RequestError
from weightd.protocol.messages.children import Failed, Predict, Result
from weightd.protocol.messages.data import RequestDescription, ResponseDescription, TensorSpec
from weightd.protocol.messages.regions import MappedRegions
from weightd.protocol.tensors import describe_response, frame_of, from_frame, to_wire
from weightd.worker import exits
from weightd.worker.canary.proof import Proof
from weightd.worker.engines.engine import Arrays, Engine
from weightd.worker.engines.errors import Spoilt
from weightd.worker.regions import Regions

_log = logging.getLogger("weightd.worker")

_form = operator.attrgetter("shape", "dtype", "flags.c_contiguous")


class Predictor:
    """Runs requests on an engine that has built the model.

    Args:
        engine: the engine.
        answer: sends a message to who has asked, with tensors.

    Attributes:
        regions: the memory of clients that is mapped here.
        proof: what is known of right answers; None before that is known.
    """

    def __init__(self, engine: Engine, answer: Callable[[object, Sequence[Any]], None]) -> None:
        self.regions = Regions()
        self.proof: Optional[Proof] = None
        self._engine = engine
        self._answer = answer
        # The last answer that was sent as the engine gave it, and what it was an answer to.
        self._usual: Tuple[Any, ...] = ()
        self._usual_description: Any = None

    def predict(self, order: Predict, frames: Sequence[bytes]) -> int:
        """Run the model on what has come, and answer; return the status with which the process is to end, or OK."""
        try:
            asked, regions, placed = order.description, order.regions, None
            inputs = _inputs(asked.inputs, frames) if regions is None else self._mapped_inputs(order, regions, frames)
            outputs = self._engine.predict(inputs)
            if (asked, *outputs, *map(_form, outputs.values())) == self._usual:
                description = self._usual_description
            else:
                outputs, description = self._checked(asked, inputs, outputs)
            if regions is None:
                rest = [*map(frame_of, outputs.values())]
            else:
                placed, rest = self._placed(regions, outputs)
            self._answer(Result(order.request, description, placed), rest)
        except RequestError as error:
            return self._fail(order, error, leaving=isinstance(error, Spoilt) or not self._proves())
        except Exception as error:  # noqa: BLE001 - the request must be answered, whatever a library raises
            _log.exception("request %d", order.request)
            return self._fail(order, Internal(f"{type(error).__name__}: {error}"), leaving=True)
        return exits.OK

    def _checked(
        self, asked: RequestDescription, inputs: Arrays, outputs: Arrays
    ) -> Tuple[Arrays, ResponseDescription]:
        """What is sent of the engine's answer, and its description.

        All that it takes to find out is known of the request's description, and the names and forms of the outputs.
        Most requests are like the one before: what need not be changed is remembered.
        """
        form = (asked, *outputs, *map(_form, outputs.values()))
        if self.proof is not None:
            outputs = self.proof.checked(inputs, outputs)
        arrays = _sendable(outputs if asked.outputs is None else {name: outputs[name] for name in asked.outputs})
        description = describe_response(asked.model_name, arrays)
        if asked.outputs is None and all(arrays[name] is outputs[name] for name in outputs):
            self._usual, self._usual_description = form, description
        return arrays, description

    def _mapped_inputs(self, order: Predict, regions: MappedRegions, frames: Sequence[bytes]) -> Arrays:
        """The inputs of a request of which some are in regions."""
        specs, sizes = order.description.inputs, order.description.sizes
        inputs: Arrays = {}
        for place in regions.inputs:
            spec = specs[place.tensor]
            copy = self.regions.read(place.region, place.offset, sizes[place.tensor])
            inputs[spec.name] = from_frame(spec, copy)
        if frames:
            inputs.update(_inputs([spec for spec in specs if spec.name not in inputs], frames))
        return inputs

    def _placed(self, regions: MappedRegions, arrays: Arrays) -> Tuple[Optional[Tuple[int, ...]], List[Any]]:
        """Write outputs where there is room for them; return their positions, and the frames of the others."""
        frames = [*map(frame_of, arrays.values())]
        placed: List[int] = []
        for room in regions.outputs:
            index = room.tensor
            if index < len(frames) and self.regions.write(frames[index], room.region, room.offset, room.bytes):
                placed.append(index)
        if not placed:
            return None, frames
        if len(placed) == len(frames):
            return tuple(placed), []
        return tuple(placed), [frame for index, frame in enumerate(frames) if index not in placed]

    def _proves(self) -> bool:
        """After a refused predict: whether the model answers as before, as far as can be seen."""
        return self.proof is None or not self.proof.refuted()

    def _fail(self, order: Predict, error: RequestError, *, leaving: bool) -> int:
        self._answer(Failed(order.request, error.code, clip(str(error)), leaving), ())
        return exits.SPOILT if leaving else exits.OK


def _inputs(specs: Sequence[TensorSpec], frames: Sequence[bytes]) -> Arrays:
    """The received tensors as an engine wants them: the frames are native and in C order already."""
    inputs: Arrays = {}
    for spec, frame in zip(specs, frames):
        array = from_frame(spec, frame)
        inputs[spec.name] = array if array.flags.aligned else array.copy()
    return inputs


def _sendable(outputs: Arrays) -> Arrays:
    """What the wire cannot carry is this request's error: it chose the sizes. A frame too long costs the connection."""
    arrays: Arrays = {}
    for name, array in outputs.items():
        try:
            arrays[name] = to_wire(array)
        except InvalidArgument as error:
            raise InvalidArgument(f"output {name} of shape {list(array.shape)} cannot be sent: {error}") from None
    return arrays
