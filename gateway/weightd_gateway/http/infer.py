"""Inference over HTTP: `POST .../infer`. The code has few layers, because it is optimized for speed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pickle import PickleBuffer
from typing import Any

from weightd_gateway import tensors
from weightd_gateway.auth import Caller
from weightd_gateway.context import Gateway
from weightd_gateway.daemon_client import InferenceRequest, InferenceResult
from weightd_gateway.fairness import Permit
from weightd_gateway.http import infer_json, infer_response
from weightd_gateway.http.head import HEADER_LENGTH
from weightd_gateway.http.infer_json import InferRequestJson, InputJson, OutputJson
from weightd_gateway.http.infer_response import WriteOutput
from weightd_gateway.http.messages import BINARY, HttpReply, HttpRequest, read_body
from weightd_protocol.errors import InvalidArgument

Array = tensors.Array

PARSER_PROCESS_BYTES = 16 * 1024
"""JSON with more bytes is parsed in a parser process. It would block the event loop for half a millisecond or more."""

PARSER_PROCESS_VALUES = 4 * 1024
"""Outputs with more values in JSON are rendered in a parser process, because rendering would block the event loop."""

# Estimated bytes of an output's value in JSON, including the comma.
_RENDERED_VALUE_BYTES = 16


class HttpInference:
    """Runs inference requests.

    Args:
        gateway: the state that all frontends share.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._daemon_client = gateway.daemon_client
        self._regions = gateway.regions
        self._parsers = gateway.parsers
        self._max_bytes = gateway.config.max_body_bytes

    async def infer(self, request: HttpRequest, caller: Caller, model: str) -> HttpReply:
        """Return the response to an inference request.

        Raises:
            RequestError: the request failed.
        """
        permit = self._daemon_client.admission.admit(caller)
        try:
            length = request.head.json_length
            # `allocate` returns shared memory, from which tensors are sent to the daemon without a copy. A body that
            # consists only of JSON does not need shared memory, because JSON is not sent to the daemon.
            allocate = bytearray if length is None else partial(self._daemon_client.allocate, caller)
            content = await read_body(request, permit, self._max_bytes, allocate, header_bytes=length or 0)
            header, binary = _split_body(content, length)
            if len(header) <= PARSER_PROCESS_BYTES:
                parsed = infer_json.read(header, model)
            else:
                parsed = await self._read_long_json(caller, header, model, permit)
            inputs = self._make_inputs(caller, parsed, binary, permit)
            write_output = _no_regions if parsed.outputs is None else self._output_writer(caller, parsed.outputs)
            parsed = parsed.without_inputs
            result = await self._daemon_client.infer(
                caller,
                InferenceRequest(
                    parsed.model,
                    inputs,
                    parsed.output_names,
                    parsed.timeout,
                    parsed.priority,
                    request.head.traceparent,
                    parsed.id,
                ),
            )
            if parsed.is_binary and parsed.outputs is None:
                response = infer_response.encode_binary(parsed, result)
            else:
                response = await self._encode_response(caller, parsed, result, write_output)
        finally:
            permit.end()
        reply = HttpReply(response)
        if len(response) > 1:
            reply.content_type = BINARY
            reply.headers[HEADER_LENGTH] = f"{len(response[0])}"
        # A permit reserves the bytes of the response until the client has read them, so that slow readers are limited,
        # too.
        reply.permit = self._daemon_client.admission.reserve_response(caller, reply.body_length)
        return reply

    async def _read_long_json(self, caller: Caller, header: memoryview, model: str, permit: Permit) -> InferRequestJson:
        """Parse the JSON of a request in a parser process."""
        # The permit also covers the copy of the header that the parser process receives.
        permit.reserve(len(header))
        return await self._parsers.run(caller, len(header), infer_json.read_values, PickleBuffer(header), model)

    async def _encode_response(
        self, caller: Caller, parsed: InferRequestJson, result: InferenceResult, write_output: WriteOutput
    ) -> Sequence[bytes | memoryview]:
        """Return the JSON of a response, rendered in a parser process if it has many values, and the binary data."""
        summary = infer_response.summarize(parsed, result, write_output)
        if summary.value_count <= PARSER_PROCESS_VALUES:
            text = infer_response.render(summary.header)
        else:
            nbytes = summary.value_count * _RENDERED_VALUE_BYTES
            text = await self._parsers.run(caller, nbytes, infer_response.render, summary.header)
        return [text, *summary.content]

    def _make_inputs(
        self, caller: Caller, parsed: InferRequestJson, binary: memoryview, permit: Permit
    ) -> dict[str, Array]:
        parts = infer_json.split_binary(parsed, binary)
        inputs: dict[str, Array] = {}
        for each in parsed.inputs:
            if each.nbytes is not None:
                inputs[each.name] = tensors.from_bytes(each.name, each.datatype, each.shape, parts[each.name])
            elif each.region is not None:
                inputs[each.name] = self._read_shared(caller, each, each.region, permit)
            else:
                inputs[each.name] = infer_json.array_of(each)
                permit.reserve(each.expected_bytes)
        return inputs

    def _read_shared(self, caller: Caller, input_json: InputJson, parameters: Any, permit: Permit) -> Array:
        shm_slice = self._regions.resolve(caller, *_region_parameters(parameters))
        if shm_slice.nbytes != input_json.expected_bytes:
            text = (
                f"{input_json.name}: shared_memory_byte_size: expected {input_json.expected_bytes}, for"
                f" {input_json.datatype} {list(input_json.shape)}"
            )
            raise InvalidArgument(f"{text}, got {shm_slice.nbytes}")
        permit.reserve(input_json.expected_bytes)
        content = memoryview(
            self._daemon_client.allocate(caller, input_json.expected_bytes) if input_json.expected_bytes else b""
        )
        shm_slice.region.read(shm_slice.offset, content)
        return tensors.from_bytes(input_json.name, input_json.datatype, input_json.shape, content)

    def _output_writer(self, caller: Caller, outputs: Sequence[OutputJson]) -> WriteOutput:
        """Find the shared-memory regions of outputs before the model runs; return a function that writes to them."""
        slices = {
            each.name: self._regions.resolve(caller, *_region_parameters(each.region))
            for each in outputs
            if each.region is not None
        }

        def write(output: OutputJson, content: memoryview) -> None:
            shm_slice = slices[output.name]
            size = len(content)
            if size > shm_slice.nbytes:
                raise InvalidArgument(
                    f"output {output.name}: expected a region of at least {size} bytes, got {shm_slice.nbytes}"
                )
            shm_slice.region.write(shm_slice.offset, content)

        return write


def _no_regions(output: OutputJson, content: memoryview) -> None:
    """Write nothing: the request names no outputs, so none has a region."""


def _region_parameters(parameters: Any) -> tuple[object, object, object]:
    return (
        parameters["shared_memory_region"],
        parameters.get("shared_memory_offset", 0),
        parameters.get("shared_memory_byte_size"),
    )


def _split_body(content: memoryview, length: int | None) -> tuple[memoryview, memoryview]:
    if length is None:
        return content, content[:0]
    if length > len(content):
        raise InvalidArgument(f"{HEADER_LENGTH}: expected at most the size of the body, {len(content)}, got {length}")
    return content[:length], content[length:]
