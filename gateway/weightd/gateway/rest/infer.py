"""POST …/infer: the path that is to be fast, so it is flat."""

from __future__ import annotations

import dataclasses
from functools import partial
from pickle import PickleBuffer
from typing import Any, cast

from weightd.gateway import arrays
from weightd.gateway.callers import Caller
from weightd.gateway.gateway import Gateway
from weightd.gateway.question import Question
from weightd.gateway.rest import answer, body, form
from weightd.gateway.rest.asking import trace_of
from weightd.gateway.rest.connection import Phase
from weightd.gateway.rest.form import Form, InputForm, OutputForm
from weightd.gateway.rest.reply import BINARY, JSON, Reply
from weightd.gateway.rest.request import Connection, Request
from weightd.gateway.seats import Seat
from weightd.protocol.errors import InvalidArgument
from weightd.protocol.schema import describe_value

HEADER_LENGTH = "Inference-Header-Content-Length"

Array = arrays.Array

HELPER_BYTES = 16 * 1024
"""JSON that is longer is parsed by a helper process: the loop would be held up for half a millisecond and more."""

HELPER_VALUES = 4 * 1024
"""An output with more values than this is rendered by a helper process, for the same reason."""

# Of a value in JSON, with its comma.
_RENDERED_BYTES = 16


class Inference:
    """Asks models.

    Args:
        gateway: what all protocols share.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._service = gateway.service
        self._regions = gateway.regions
        self._helpers = gateway.helpers
        self._most_bytes = gateway.config.max_body_bytes

    async def infer(self, request: Request, caller: Caller, model: str) -> Reply:
        """Return what a model answers.

        Raises:
            RequestError: that is what comes of it.
        """
        connection = cast(Connection, request.protocol)
        with self._service.seats.one(caller) as seat:
            length = _header_length(request)
            connection.reads(request.content)
            # Memory that the workers see is kept for the next request: only tensors are worth it.
            room = bytearray if length is None else partial(self._service.room, caller)
            content = await body.read(request, seat, self._most_bytes, room, lead=length or 0)
            connection.enter(Phase.ANSWER)
            header, tensors = _cut(content, length)
            asked = await self._read(caller, header, model, seat)
            inputs = self._inputs(caller, asked, tensors, seat)
            places = self._places(caller, asked)
            # The lists of values are many times as large as the tensors that they have become.
            asked = dataclasses.replace(asked, inputs=())
            answered = await self._service.infer(
                caller,
                Question(model, inputs, asked.wanted, asked.timeout, asked.priority, trace_of(request), asked.id),
            )
            described = answer.describe(model, asked, answered, places)
            pieces = described.content
            text = await self._rendered(caller, described)
        # Whoever does not read keeps no more than there may be of all.
        kept = self._service.seats.keep(caller, len(text) + sum(map(len, pieces)))
        if not pieces:
            return Reply([text], JSON, seat=kept)
        return Reply([text, *pieces], BINARY, headers={HEADER_LENGTH: str(len(text))}, seat=kept)

    async def _read(self, caller: Caller, header: memoryview, model: str, seat: Seat) -> Form:
        """Return what the JSON of a request says; a long one is parsed by a helper process."""
        if len(header) <= HELPER_BYTES:
            return form.read(header, model)
        # The copy on its way.
        seat.take(len(header))
        return await self._helpers.run(caller, len(header), form.read_values, PickleBuffer(header), model)

    async def _rendered(self, caller: Caller, described: answer.Description) -> bytes:
        """Return the JSON of an answer; many values are rendered by a helper process."""
        if described.values <= HELPER_VALUES:
            return answer.render(described.header)
        nbytes = described.values * _RENDERED_BYTES
        return await self._helpers.run(caller, nbytes, answer.render, described.header)

    def _inputs(self, caller: Caller, asked: Form, tensors: memoryview, seat: Seat) -> dict[str, Array]:
        cuts = form.cut(asked, tensors)
        inputs: dict[str, Array] = {}
        for each in asked.inputs:
            if each.nbytes is not None:
                inputs[each.name] = arrays.from_bytes(each.name, each.datatype, each.shape, cuts[each.name])
            elif each.region is not None:
                inputs[each.name] = self._shared(caller, each, each.region, seat)
            else:
                inputs[each.name] = form.array_of(each)
                seat.take(each.size)
        return inputs

    def _shared(self, caller: Caller, each: InputForm, parameters: Any, seat: Seat) -> Array:
        place = self._regions.place(caller, *_place(parameters))
        if place.nbytes != each.size:
            text = f"{each.name}: shared_memory_byte_size: expected {each.size}, for {each.datatype} {list(each.shape)}"
            raise InvalidArgument(f"{text}, got {place.nbytes}")
        seat.take(each.size)
        content = memoryview(self._service.room(caller, each.size) if each.size else b"")
        place.region.read(place.offset, content)
        return arrays.from_bytes(each.name, each.datatype, each.shape, content)

    def _places(self, caller: Caller, asked: Form) -> answer.Placing:
        """Return what puts outputs where they are wanted; that there is room is known before it runs."""
        places = {
            each.name: self._regions.place(caller, *_place(each.region))
            for each in asked.outputs or ()
            if each.region is not None
        }

        def put(how: OutputForm, content: memoryview) -> None:
            place = places[how.name]
            if len(content) > place.nbytes:
                text = f"output {how.name}: expected room for {len(content)} bytes in its region, got {place.nbytes}"
                raise InvalidArgument(text)
            place.region.write(place.offset, content)

        return put


def _place(parameters: Any) -> tuple[object, object, object]:
    return (
        parameters["shared_memory_region"],
        parameters.get("shared_memory_offset", 0),
        parameters.get("shared_memory_byte_size"),
    )


def _header_length(request: Request) -> int | None:
    """Return how many bytes of the body are JSON, once it is decompressed; None: all of them."""
    values = request.headers.getall(HEADER_LENGTH, None)
    if values is None:
        return None
    if len(values) > 1 or not (values[0].isascii() and values[0].isdecimal()) or len(values[0]) > 12:
        raise InvalidArgument(f"{HEADER_LENGTH}: expected one number of bytes, got {describe_value(', '.join(values))}")
    return int(values[0])


def _cut(content: memoryview, length: int | None) -> tuple[memoryview, memoryview]:
    if length is None:
        return content, content[:0]
    if length > len(content):
        raise InvalidArgument(f"{HEADER_LENGTH}: expected at most {len(content)}, the bytes of the body, got {length}")
    return content[:length], content[length:]
